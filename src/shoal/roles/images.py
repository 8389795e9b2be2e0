"""Jobs in images: packages, the directory that nodes unpack images into, and which hosts cannot run them."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import Command, Directory, Document, File, Service, render_unit
from shoal.agent.facts import Facts
from shoal.containers.images import PYXIS, node_features
from shoal.remote import program_text, shell_command
from shoal.remote.runner.unpacked_image import IMAGES, LIMIT_FILE, PROGRAMS, RECORD, STOPPED_STATE
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.spec.checks import size_mb
from shoal.spec.finding import Finding
from shoal.spec.member import Member
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
SWITCHES = {LIMIT: ("0", "10000"), DEBIAN_SWITCH: ("0", "1"), APPARMOR_SWITCH: ("1", "0")}
"""The settings of user namespaces: the value that forbids them, and one that does not."""
SYSCTL = "/etc/sysctl.d/60-shoal-images.conf"
MODULES = (
    *("__init__", "build_place", "bundle", "driver_files", "image", "image_build", "image_export"),
    *("image_space", "unpacked_image", "variables"),
)
"""Of `remote/runner`: what a step of `srun --container` needs."""
NAME, UNITS = "shoal-images", "/etc/systemd/system"
TIMER = f"{NAME}.timer"
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
    services = (TIMER,)

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        if not uses_oci(spec):
            return ()
        return (*IMAGE_PACKAGES, *((RUNTIME_PACKAGE, *BUILD_PACKAGES) if "compute" in member.roles else ()))

    def fact_files(self, spec: Spec) -> Mapping[str, FileQuery]:
        return userns_files() if uses_oci(spec) else {}

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        if uses_oci(cluster.spec) and "compute" in member.roles:
            # In place before slurmd reads of it.
            switches = _switches(cluster.facts_of(member.name)) if member.rented else ()
            base = (*_programs(cluster.spec), *switches)
            timer = _timer() if cluster.facts_of(member.name).init != "none" else ()
            return {Stage.BASE: base, Stage.SERVICES: (Directory(IMAGES, mode=0o1777), *timer)}
        return {Stage.SERVICES: self.removal()} if cluster.facts_of(member.name).has_file(IMAGES) else {}

    def removal(self) -> Document:
        absent = ("test", "!", "-e", IMAGES)
        return (
            Service(TIMER, enabled=False, running=False),
            *(File(f"{UNITS}/{name}") for name in (TIMER, f"{NAME}.service")),
            Command("remove unpacked images", ("sh", "-c", REMOVE), unless=absent, timeout=REMOVAL_TIMEOUT_S),
        )

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        if not uses_oci(cluster.spec):
            return ()
        nodes = (member.name for member in cluster.members if "compute" in member.roles)
        problems = {name: namespace_problem(cluster.facts[name]) for name in nodes if name in cluster.facts}
        what = "jobs in images do not run here: user namespaces are off"
        return tuple(
            Finding("warning", what, problem, f"set {_fix(problem)} with sysctl, then run `shoal up`", host=name)
            for name, problem in problems.items()
            if problem
        )


def _switches(facts: Facts) -> Document:
    """Allows user namespaces on a rented machine, which is the cluster's own. Where that fails, the join sees it."""
    wrong = {path: good for path, (bad, good) in SWITCHES.items() if facts.text(path).strip() == bad}
    if not wrong:
        return ()
    write, is_written = 'echo "$2" > "$1" || true', '[ "$(cat "$1")" = "$2" ]'
    return (
        Directory("/etc/sysctl.d"),
        File(SYSCTL, "".join(f"{_sysctl_name(path)} = {good}\n" for path, good in wrong.items())),
        *(
            Command(f"set {_sysctl_name(path)}", shell_command(write, path, good),
                    unless=shell_command(is_written, path, good))
            for path, good in wrong.items()
        ),
    )  # fmt: skip


def _sysctl_name(path: str) -> str:
    return path.removeprefix("/proc/sys/").replace("/", ".")


def _timer() -> Document:
    """Daily: images that no job has used for long go without another job of their user."""
    service = render_unit(
        Unit={"Description": "Removes images that no job has used for long"},
        Service={
            "Type": "oneshot",
            "ExecStart": f"/usr/bin/env python3 -I -S {PROGRAMS}/start.py evict --",
            "Nice": 19,
            "IOSchedulingClass": "idle",
            "TimeoutStartSec": "6h",
        },
    )
    timer = render_unit(
        Unit={"Description": "Removes images that no job has used for long, every day"},
        Timer={"OnCalendar": "daily", "RandomizedDelaySec": "2h", "Persistent": "true"},
        Install={"WantedBy": "timers.target"},
    )
    return (
        File(f"{UNITS}/{NAME}.service", service),
        File(f"{UNITS}/{TIMER}", timer, restarts=(TIMER,)),
        Service(TIMER),
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
    """The settings of user namespaces."""
    return dict.fromkeys(SWITCHES, "text")


def namespace_problem(facts: Facts) -> str:
    """Why an ordinary user cannot make a user namespace on a host; empty where that is possible."""
    if not facts.text(LIMIT).strip():
        return "user.max_user_namespaces is 0"
    wrong = (path for path, (bad, _) in SWITCHES.items() if facts.text(path).strip() == bad)
    return next((f"{_sysctl_name(path)} is {SWITCHES[path][0]}" for path in wrong), "")


def _fix(problem: str) -> str:
    name = problem.partition(" is ")[0]
    return f"{name}={next(good for path, (_, good) in SWITCHES.items() if _sysctl_name(path) == name)}"
