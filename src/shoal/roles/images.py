"""Jobs in images: packages, the directory that nodes unpack images into, and which hosts cannot run them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.agent.document import Command, Directory, Document, File
from shoal.agent.facts import Facts
from shoal.containers.images import PYXIS, node_features
from shoal.remote import program_text
from shoal.remote.runner.unpacked_image import IMAGES, LIMIT_FILE, PROGRAMS, RECORD, STOPPED_STATE
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.spec.checks import size_mb
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import rented_sets
from shoal.spec.model import Spec

IMAGE_PACKAGES = ("skopeo", "umoci")
"""On hosts where users log in, and on nodes, which unpack images."""
RUNTIME_PACKAGE = "crun"
"""What `srun --container` runs."""
BUILD_PACKAGES = ("buildah", "uidmap", "fuse-overlayfs", "python3-pip-whl")
"""What `shoal image build` needs on nodes; the last is for images without pip."""
LIMIT, DEBIAN_SWITCH, APPARMOR_SWITCH = (
    "/proc/sys/user/max_user_namespaces",
    "/proc/sys/kernel/unprivileged_userns_clone",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
)
MODULES = (
    *("__init__", "build_place", "bundle", "driver_files", "image", "image_build", "image_export"),
    *("unpacked_image", "variables"),
)
"""Of `remote/runner`: what a step of `srun --container` needs."""
COMPILE = "compile the program of images"
REMOVAL_TIMEOUT_S = 1800.0
REMOVE = rf"""
rm -rf {PROGRAMS}
cd {IMAGES} || exit 0
for name in ./* ./.[!.]* ./..?*; do
    if [ -L "$name" ] || [ ! -d "$name" ]; then
        rm -f "$name"
        continue
    fi
    user=$(stat -c %u "$name") && group=$(stat -c %g "$name") && mode=$(stat -c %a "$name") || continue
    case $user:$mode in 0:700) ;; 0:*) continue ;; esac
    timeout 600 setpriv --reuid="$user" --regid="$group" --clear-groups sh -c '
        cd "$1" || exit
        find . -maxdepth 2 -type f -name "*.lock" | while IFS= read -r lock; do
            flock -n "$lock" sh -c "
                test ! -f \"\$1/{RECORD}\" || rm -f \"\$(cat \"\$1/{RECORD}\")\"
                rm -rf \"\$1\" \"\$1.lock\"" sh "${{lock%.lock}}"
        done
        [ -z "$(find . -maxdepth 2 -name "*.lock")" ]' sh "$name" && rm -rf "$name"
done
rmdir {IMAGES} 2> /dev/null || true
"""
"""Removes what no job runs in; the rest stays until the next time. As the user: root would follow a user's links.

Users choose the names here, such as `-`. Only root's own closed directory is root's: others may have moved one here.
"""


class ImagesComponent(Component):
    """The file's `containers`."""

    files: Mapping[str, FileQuery] = {IMAGES: "there"}

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        if not uses_oci(spec):
            return ()
        return (*IMAGE_PACKAGES, *((RUNTIME_PACKAGE, *BUILD_PACKAGES) if "compute" in member.roles else ()))

    def fact_files(self, spec: Spec) -> Mapping[str, FileQuery]:
        return userns_files() if uses_oci(spec) else {}

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        if uses_oci(cluster.spec) and "compute" in member.roles:
            # In place before slurmd reads of it.
            return {Stage.BASE: _programs(cluster.spec), Stage.SERVICES: (Directory(IMAGES, mode=0o1777),)}
        return {Stage.SERVICES: self.removal()} if cluster.facts_of(member.name).has_file(IMAGES) else {}

    def removal(self) -> Document:
        absent = ("test", "!", "-e", IMAGES)
        return (Command("remove unpacked images", ("sh", "-c", REMOVE), unless=absent, timeout=REMOVAL_TIMEOUT_S),)

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        if not uses_oci(cluster.spec):
            return ()
        nodes = (member.name for member in cluster.members if "compute" in member.roles)
        problems = {name: namespace_problem(cluster.facts[name]) for name in nodes if name in cluster.facts}
        what = "jobs in images do not run here: user namespaces are off"
        return (
            *(
                Finding("warning", what, problem, f"set {_fix(problem)} with sysctl, then run `shoal up`", host=name)
                for name, problem in problems.items()
                if problem
            ),
            *_rented_findings(cluster.spec),
        )


def _rented_findings(spec: Spec) -> Iterator[Finding]:
    """Rented nodesets, whose nodes lack the features that jobs in images ask for."""
    if names := ", ".join(rented_sets(spec)):
        yield Finding(
            "info",
            f"jobs in images do not run on rented machines: {names}",
            "Slurm must know a node's features before it is rented, and whether it allows user namespaces shows after",
            "use `--env` there, or `--image` on hosts of your own",
            path="containers",
        )


def _programs(spec: Spec) -> Document:
    limit = spec.containers.disk if spec.containers else None
    texts = {f"{PROGRAMS}/start.py": program_text("start"), f"{PROGRAMS}/{STOPPED_STATE}": '{"status": "stopped"}\n'}
    texts |= {f"{PROGRAMS}/runner/{name}.py": program_text(f"runner/{name}.py") for name in MODULES}
    # Users cannot write what Python compiles, and would wait for it at every start.
    compile_command = ("python3", "-m", "compileall", "-q", PROGRAMS)
    return (
        *(Directory(path) for path in (PROGRAMS.rpartition("/")[0], PROGRAMS, f"{PROGRAMS}/runner")),
        *(File(path, text, reloads=(f"command {COMPILE}",)) for path, text in texts.items()),
        Command(COMPILE, compile_command, on_change=True),
        File(LIMIT_FILE, f"{size_mb(limit) << 20}\n" if limit else None),
    )


def image_features(spec: Spec, facts: Facts) -> tuple[str, ...]:
    """Slurm's features of a node that runs jobs in images; none where it does not."""
    if spec.containers is None or namespace_problem(facts):
        return ()
    driver = facts.gpus[0].driver if facts.gpus else ""
    return node_features(facts.arch, driver) if uses_oci(spec) else (PYXIS,)


def uses_oci(spec: Spec) -> bool:
    return spec.containers is not None and spec.containers.engine == "oci"


def userns_files() -> dict[str, FileQuery]:
    """The settings that forbid user namespaces."""
    return dict.fromkeys((LIMIT, DEBIAN_SWITCH, APPARMOR_SWITCH), "text")


def namespace_problem(facts: Facts) -> str:
    """Why an ordinary user cannot make a user namespace on a host; empty where that is possible."""
    if facts.text(LIMIT).strip() in ("", "0"):
        return "user.max_user_namespaces is 0"
    if facts.text(DEBIAN_SWITCH).strip() == "0":
        return "kernel.unprivileged_userns_clone is 0"
    if facts.text(APPARMOR_SWITCH).strip() == "1":
        return "kernel.apparmor_restrict_unprivileged_userns is 1"
    return ""


def _fix(problem: str) -> str:
    name, _, value = problem.partition(" is ")
    return f"{name}={'10000' if 'max' in name else '0' if value == '1' else '1'}"
