"""podman inside jobs, which is `docker` there, too: its settings, and the programs that Slurm runs."""

from __future__ import annotations

import json
from collections.abc import Mapping

from shoal.agent.document import HEADER, Command, Directory, Document, File, Service
from shoal.agent.facts import Facts
from shoal.remote import program_text
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.slurm.conf import EPILOG, TASK_PROLOG
from shoal.spec.environments import Proxy
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec

DIRECTORY = "/usr/local/lib/shoal"
DOCKER = f"{DIRECTORY}/docker"
"""First in the PATH of jobs that have Docker: a host may have Docker's own package, too."""
HELPERS = f"{DIRECTORY}/podman"
"""Where podman looks for its programs first."""
STORE = "/var/lib/shoal/podman"
PODMAN = "/etc/shoal/podman"
JOBS = "/run/shoal-jobs"
TMPFILES = "/etc/tmpfiles.d/shoal-jobs.conf"
PLACES = "make the places of jobs"
PACKAGES = ("podman", "crun", "uidmap", "slirp4netns", "fuse-overlayfs", "netavark", "aardvark-dns", "iptables")
COMPOSE = "docker-compose"
PROFILE = "/etc/profile.d/shoal-docker.sh"
LOGIN_SHELLS = f"""\
{HEADER}# A login shell in a job begins with a PATH of its own.
case ${{DOCKER_HOST:-}} in unix://{JOBS}/*) PATH={DOCKER}:$PATH ;; esac
"""
REMOVAL_TIMEOUT_S = 600.0


class JobEnginesComponent(Component):
    """The file's `containers: {docker: true, podman: true}`."""

    files: Mapping[str, FileQuery] = {f"{PODMAN}/containers.conf": "there", EPILOG: "there"}
    services = ("docker", "docker.socket")
    in_containers = True  # Slurm's programs must be on all nodes

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        if not has_engines(spec, member):
            return ()
        return (*PACKAGES, *((COMPOSE,) if spec.containers and spec.containers.docker else ()))

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        spec, facts = cluster.spec, cluster.facts_of(member.name)
        if "compute" not in member.roles or not uses_hooks(spec):
            # After slurmctld's restart, when no slurmd runs the programs any more.
            return {Stage.NODES: self.removal()} if facts.has_file(EPILOG) else {}
        assert spec.containers is not None
        # In place before slurmd reads of them.
        items: Document = _programs(spec)
        if has_engines(spec, member) and member.name not in cluster.tunnels:
            items += (*_places(spec), *_podman(spec.proxy), *_docker(spec.containers.docker))
        elif facts.has_file(f"{PODMAN}/containers.conf"):
            items += _podman_removal()
        if spec.containers.docker:
            items += _own_daemon_off()
        return {Stage.BASE: items}

    def removal(self) -> Document:
        return (
            *_podman_removal(),
            *(File(path) for path in (EPILOG, TASK_PROLOG, TMPFILES, PROFILE)),
            Command("remove the places of jobs", ("rm", "-rf", JOBS), unless=("test", "!", "-e", JOBS)),
        )

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        containers = cluster.spec.containers
        names = [name for name, user in cluster.spec.users.items() if user.docker]
        if not names or (containers is not None and containers.docker):
            return ()
        what, cause = f"{', '.join(names)} cannot use Docker", "the file has no containers: {docker: true}"
        path = f"users.{names[0]}.docker"
        return (Finding("warning", what, cause, "add it: docker in jobs is podman then; or delete this", path=path),)


def uses_hooks(spec: Spec) -> bool:
    """Whether Slurm runs our Epilog and TaskProlog."""
    return spec.containers is not None and (spec.containers.docker or spec.containers.podman)


def has_engines(spec: Spec, member: Member) -> bool:
    """Whether jobs on a host may use Docker or podman: on permanent nodes."""
    return uses_hooks(spec) and "compute" in member.roles and not member.rented


def _programs(spec: Spec) -> Document:
    """Ours end with the operator's own."""
    own = {key.lower(): value for key, value in spec.slurm.options.items()}
    has_docker = spec.containers is not None and spec.containers.docker
    users = " ".join(name for name, user in spec.users.items() if user.docker and has_docker)
    epilog = program_text("job_epilog.sh", JOBS=JOBS, PROGRAM=own.get("epilog") or "")
    words = {"JOBS": JOBS, "STORE": STORE, "PODMAN": PODMAN, "DOCKER": DOCKER, "USERS": users}
    prolog = program_text("task_prolog.sh", **words, PROGRAM=own.get("taskprolog") or "")
    return (Directory(DIRECTORY), File(EPILOG, epilog, mode=0o755), File(TASK_PROLOG, prolog, mode=0o755))


def _places(spec: Spec) -> Document:
    """Directories of each user, made by root: nobody else can have made them first."""
    # Without the last podman 4 covers all of /var/lib, its own store too, where containers have a network.
    lines = [f"d {path} 0755 root root\n" for path in (JOBS, STORE, "/var/lib/cni")]
    lines += [f"d {path}/{name} 0700 {name} {name}\n" for name in spec.users for path in (JOBS, STORE)]
    return (
        Directory("/etc/tmpfiles.d"),
        Directory("/var/lib/shoal"),
        File(TMPFILES, HEADER + "".join(lines), reloads=(f"command {PLACES}",)),
        Command(PLACES, ("systemd-tmpfiles", "--create", TMPFILES), on_change=True),
    )


def _podman(proxy: Proxy | None) -> Document:
    return (
        *(Directory(path) for path in ("/etc/shoal", PODMAN, HELPERS)),
        File(f"{HELPERS}/netavark", program_text("netavark.sh"), mode=0o755),
        File(f"{PODMAN}/containers.conf", containers_conf(proxy)),
        File(f"{PODMAN}/storage.conf", storage_conf()),
    )


def _docker(wanted: bool) -> Document:
    program, registries = f"{DOCKER}/docker", f"{PODMAN}/registries.conf"
    if not wanted:
        return (File(program), File(registries), File(PROFILE))
    # An image without a registry in its name is one of Docker's.
    search = f'{HEADER}unqualified-search-registries = ["docker.io"]\n'
    return (
        Directory(DOCKER),
        File(program, program_text("docker_command"), mode=0o755),
        File(registries, search),
        File(PROFILE, LOGIN_SHELLS),
    )


def containers_conf(proxy: Proxy | None = None) -> str:
    """Containers stay in the job's cgroup: podman makes no group, and asks no systemd for one.

    podman takes variables of the proxy from here where the job has none, and gives them to containers and builds.
    """
    variables = [f"{name}={value}" for name, value in proxy.variables.items()] if proxy else []
    return (
        f'{HEADER}[containers]\ncgroups = "disabled"\nkeyring = false\n'
        '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "crun"\nlock_type = "file"\n'
        f'helper_binaries_dir = ["{HELPERS}", "/usr/lib/podman", "/usr/libexec/podman"]\n'
        + (f"env = {json.dumps(variables)}\n" if variables else "")
        # podman 5 would look for pasta, which Debian 12 has not.
        + '[network]\nnetwork_backend = "netavark"\ndefault_rootless_network_cmd = "slirp4netns"\n'
    )


def storage_conf() -> str:
    """On the node's own disk: homes may be on a share, where overlays do not work. TaskProlog makes a job's place."""
    return (
        f'{HEADER}[storage]\ndriver = "overlay"\nrootless_storage_path = "$SHOAL_PODMAN"\n'
        '[storage.options.overlay]\nmount_program = "/usr/bin/fuse-overlayfs"\n'
    )


def _podman_removal() -> Document:
    places = (PODMAN, STORE, HELPERS, DOCKER)
    absent = ("sh", "-c", " && ".join(f"! test -e {place}" for place in places))
    remove = ("rm", "-rf", *places)
    return (Command("remove podman's settings and images", remove, unless=absent, timeout=REMOVAL_TIMEOUT_S),)


def _own_daemon_off() -> Document:
    """Docker as its package or a provider's image starts it: whoever may use its socket is root."""
    return tuple(Service(name, enabled=False, running=False) for name in ("docker.socket", "docker"))
