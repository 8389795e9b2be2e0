"""Docker and podman inside jobs: the guard before Docker, podman's settings, and the programs that Slurm runs."""

from __future__ import annotations

import json
from collections.abc import Mapping

from shoal.agent.document import HEADER, Command, Directory, Document, File, Service, daemon_unit, render_unit
from shoal.agent.facts import Facts
from shoal.remote import program_text
from shoal.remote.docker_guard import CONFIG, DAEMONS, SOCKET
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.roles.current_conf import confinement
from shoal.roles.slurm_tree import uses_tree
from shoal.roles.users import USERS_GROUP
from shoal.slurm.conf import EPILOG, TASK_PROLOG
from shoal.spec.environments import Proxy
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec
from shoal.spec.storage import SANDBOX_SHARED

DIRECTORY = "/usr/local/lib/shoal"
PACKAGE = f"{DIRECTORY}/docker_guard"
MODULES = ("__init__", "caller", "job_limits", "rules", "main")
DAEMON = f"{DIRECTORY}/docker-daemon"
RUNTIME = f"{DIRECTORY}/docker-runtime"
ACCOUNT = "shoal-docker-"
"""How the names of accounts begin whose ids containers have; the id of their user follows."""
SERVICE = "shoal-docker-guard"
CONTAINERD = "containerd.service"
UNITS = "/etc/systemd/system"
DAEMON_UNIT = f"{UNITS}/shoal-docker@.service"
UNIT = f"{UNITS}/{SERVICE}.service"
STORE, PODMAN_STORE = "/var/lib/shoal/docker", "/var/lib/shoal/podman"
PODMAN = "/etc/shoal/podman"
JOBS = "/run/shoal-jobs"
TMPFILES = "/etc/tmpfiles.d/shoal-jobs.conf"
NETWORK = "172.30"
"""The first half of the addresses of Docker's containers."""
PLACES = "make the places of jobs"
START = f"import sys; sys.path.insert(0, '{DIRECTORY}'); from docker_guard.main import main; main(sys.argv[1:])"
COMMAND = f'/usr/bin/python3 -I -S -B -c "{START}"'
DOCKER_PACKAGES = ("docker.io", "apparmor", "iproute2", "nftables", "uidmap", "fuse-overlayfs")
PODMAN_PACKAGES = ("podman", "crun", "uidmap", "slirp4netns", "fuse-overlayfs")
REMOVE_BRIDGES = f"""\
ip -4 -o address show type bridge | while read -r _ name _ address _; do
    case $name:$address in docker[1-9]*:{NETWORK}.* | br-*:{NETWORK}.*) ip link delete "$name" ;; esac
done
"""
"""Of users' daemons and networks: the host may have others, with addresses like these."""
STOP = f"""
systemctl stop 'shoal-docker@*'
nft delete table ip shoal-docker 2> /dev/null
{REMOVE_BRIDGES.rstrip()}
! grep -qsx 0 {DAEMONS}/ip_forward || echo 0 > /proc/sys/net/ipv4/ip_forward
while umount {STORE} 2> /dev/null; do :; done
for account in $(grep -o '^{ACCOUNT}[0-9]*' /etc/passwd); do userdel "$account"; done
rm -rf {STORE} {DAEMONS} {PACKAGE} {SOCKET}
"""
REMOVAL_TIMEOUT_S = 600.0


class JobEnginesComponent(Component):
    """The file's `containers: {docker: true, podman: true}`."""

    files: Mapping[str, FileQuery] = {UNIT: "there", f"{PODMAN}/containers.conf": "there", EPILOG: "there"}
    services = (SERVICE, "docker", "docker.socket")
    in_containers = True  # Slurm's programs must be on all nodes

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        if not has_engines(spec, member):
            return ()
        assert spec.containers is not None
        # From Debian 13 on the client is a package of its own.
        client = ("docker-cli",) if facts and facts.os_id == "debian" and facts.os_version not in ("11", "12") else ()
        # Without cgroups there is no guard, and nobody may use Docker.
        has_cgroups = facts is None or confinement((facts,), ()).tracked
        return (
            *((*DOCKER_PACKAGES, *client) if spec.containers.docker and has_cgroups else ()),
            *(PODMAN_PACKAGES if spec.containers.podman else ()),
        )

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        spec, facts = cluster.spec, cluster.facts_of(member.name)
        if "compute" not in member.roles or not uses_hooks(spec):
            # After slurmctld's restart, when no slurmd runs the programs any more.
            return {Stage.NODES: self.removal()} if facts.has_file(EPILOG) else {}
        assert spec.containers is not None
        # In place before slurmd reads of them.
        items: Document = _programs(spec)
        has_engines_here = has_engines(spec, member) and member.name not in cluster.tunnels
        if has_engines_here:
            items += _places(spec)
        if has_engines_here and spec.containers.podman:
            items += _podman(spec.proxy)
        elif facts.has_file(f"{PODMAN}/containers.conf"):
            items += _podman_removal()
        if has_engines_here and spec.containers.docker and spec.users and cluster.conf.confinement.tracked:
            return {Stage.BASE: (*items, *_own_daemon_off(), *_docker(cluster, member))}
        if facts.has_file(UNIT):
            items += _docker_removal()
        if spec.containers.docker:
            items += _own_daemon_off()
        return {Stage.BASE: items}

    def removal(self) -> Document:
        return (
            *_docker_removal(),
            *_podman_removal(),
            *(File(path) for path in (EPILOG, TASK_PROLOG, TMPFILES)),
            Command("remove the places of jobs", ("rm", "-rf", JOBS), unless=("test", "!", "-e", JOBS)),
        )

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        containers = cluster.spec.containers
        if containers is None or not containers.docker:
            return ()
        path = "containers.docker"
        if not cluster.conf.confinement.tracked:
            cause = "not all nodes let Slurm use cgroups, by which it is known whose job a process is"
            return (Finding("warning", "Docker does not work in jobs", cause, "use podman: true", path=path),)
        cause = "its daemon runs as root; Shoal's guard stands before it, and Docker's own daemon is stopped on nodes"
        fix = "use podman: true where that is enough"
        return (Finding("warning", "Docker in jobs is a risk that podman is not", cause, fix, path=path),)


def uses_hooks(spec: Spec) -> bool:
    """Whether Slurm runs our Epilog and TaskProlog."""
    return spec.containers is not None and (spec.containers.docker or spec.containers.podman)


def has_engines(spec: Spec, member: Member) -> bool:
    """Whether jobs on a host may use Docker or podman: on permanent nodes."""
    return uses_hooks(spec) and "compute" in member.roles and not member.rented


def _programs(spec: Spec) -> Document:
    """Ours end with the operator's own."""
    own = {key.lower(): value for key, value in spec.slurm.options.items()}
    words = {"GUARD": UNIT, "JOBS": JOBS}
    epilog = program_text("job_epilog.sh", END=COMMAND, PROGRAM=own.get("epilog") or "", **words)
    prolog = program_text("task_prolog.sh", PODMAN=PODMAN, PROGRAM=own.get("taskprolog") or "", **words)
    return (Directory(DIRECTORY), File(EPILOG, epilog, mode=0o755), File(TASK_PROLOG, prolog, mode=0o755))


def _places(spec: Spec) -> Document:
    """Directories of each user, made by root: nobody else can have made them first."""
    lines = [f"d {path} 0755 root root\n" for path in (JOBS, PODMAN_STORE)]
    lines += [f"d {path}/{name} 0700 {name} {name}\n" for name in spec.users for path in (JOBS, PODMAN_STORE)]
    return (
        Directory("/etc/tmpfiles.d"),
        Directory("/var/lib/shoal"),
        File(TMPFILES, HEADER + "".join(lines), reloads=(f"command {PLACES}",)),
        Command(PLACES, ("systemd-tmpfiles", "--create", TMPFILES), on_change=True),
    )


def _podman(proxy: Proxy | None) -> Document:
    return (
        Directory("/etc/shoal"),
        Directory(PODMAN),
        File(f"{PODMAN}/containers.conf", containers_conf(proxy)),
        File(f"{PODMAN}/storage.conf", storage_conf()),
    )


def containers_conf(proxy: Proxy | None = None) -> str:
    """Containers stay in the job's cgroup: podman makes no group, and asks no systemd for one.

    podman takes variables of the proxy from here where the job has none, and gives them to containers and builds.
    """
    variables = [f"{name}={value}" for name, value in proxy.variables.items()] if proxy else []
    return (
        f'{HEADER}[containers]\ncgroups = "disabled"\nkeyring = false\n'
        '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "crun"\n'
        + (f"env = {json.dumps(variables)}\n" if variables else "")
    )


def storage_conf() -> str:
    """On the node's own disk: homes may be on a share, where overlays do not work."""
    return (
        f'{HEADER}[storage]\ndriver = "overlay"\nrootless_storage_path = "{PODMAN_STORE}/$USER"\n'
        '[storage.options.overlay]\nmount_program = "/usr/bin/fuse-overlayfs"\n'
    )


def _podman_removal() -> Document:
    remove = ("rm", "-rf", PODMAN, PODMAN_STORE)
    absent = ("sh", "-c", f"! test -e {PODMAN} && ! test -e {PODMAN_STORE}")
    return (Command("remove podman's settings and images", remove, unless=absent, timeout=REMOVAL_TIMEOUT_S),)


def _own_daemon_off() -> Document:
    """Docker as its package or a provider's image starts it: whoever may use its socket is root."""
    return tuple(Service(name, enabled=False, running=False) for name in ("docker.socket", "docker"))


def _docker(cluster: Cluster, member: Member) -> Document:
    facts = cluster.facts_of(member.name)
    shares = [*cluster.spec.storage, *([SANDBOX_SHARED] if member.provider == "sandbox" else [])]
    users = sorted(cluster.user_ids[name].uid for name, user in cluster.spec.users.items() if user.docker)
    gpus = [gpu.device for gpu in facts.gpus]
    # Read anew at each request: a restart would cut the terminals of containers.
    config = {"node": member.name, "gpus": gpus, "shares": shares, "users": users, "group": USERS_GROUP}
    words = {"DAEMONS": DAEMONS, "STORE": STORE, "NETWORK": NETWORK, "ACCOUNT": ACCOUNT, "RUNTIME": RUNTIME}
    restarts = (SERVICE,)
    return (
        Directory("/etc/shoal"),
        *(Directory(path) for path in (DIRECTORY, PACKAGE)),
        Directory(STORE, mode=0o711),
        *(File(f"{PACKAGE}/{n}.py", program_text(f"docker_guard/{n}.py"), restarts=restarts) for n in MODULES),
        File(DAEMON, program_text("docker_daemon.sh", **words), mode=0o755),
        File(RUNTIME, program_text("docker_runtime"), mode=0o755),
        File(CONFIG, json.dumps(config) + "\n"),
        File(DAEMON_UNIT, daemon_service(cluster.spec.proxy)),
        File(UNIT, guard_service(path=f"{cluster.slurm_prefix}/bin:" if uses_tree(cluster.spec) else ""),
             restarts=restarts),
        Service(SERVICE),
    )  # fmt: skip


def guard_service(path: str = "") -> str:
    what = "Stands before Docker: takes requests of Slurm's jobs, and confines their containers"
    environment = f"PATH={path}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return daemon_unit(what, COMMAND, 1, {"After": CONTAINERD}, {"Environment": environment, "LimitNOFILE": 65536})


def daemon_service(proxy: Proxy | None = None) -> str:
    variables = proxy.variables if proxy else {}
    quoted = {name: value.replace("\\", "\\\\").replace("%", "%%") for name, value in variables.items()}
    return render_unit(
        Unit={
            "Description": "Docker for the jobs of %i",
            "Requires": "containerd.service",
            "After": "containerd.service",
        },
        Service={
            "Type": "notify",
            "Environment": tuple(f'"{name}={value}"' for name, value in quoted.items()),
            "ExecStart": f"{DAEMON} %i",
            "KillMode": "process",
            "Delegate": "yes",
            "LimitNOFILE": 1048576,
            "TasksMax": "infinity",
            "TimeoutStopSec": 30,
        },
    )


def _docker_removal() -> Document:
    """The containers and images of jobs go; Docker itself stays as its package installed it, stopped."""
    return (
        Service(SERVICE, enabled=False, running=False),
        Command(
            "remove Docker of jobs", ("sh", "-c", STOP), unless=("test", "!", "-e", UNIT), timeout=REMOVAL_TIMEOUT_S
        ),
        *(File(path) for path in (UNIT, DAEMON_UNIT, DAEMON, RUNTIME, CONFIG)),
    )
