"""The engine pyxis: the operator's enroot and plugin on all hosts, in the order that Slurm needs.

The plugin and its line in plugstack.conf travel as `files` do: on every host before slurmctld reads of them. slurmd
starts anew after both, because pyxis makes its directory then.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import HEADER, Command, Directory, Document, File
from shoal.agent.facts import Facts
from shoal.roles.component import AccountIds, Cluster, Component, FileQuery, Stage
from shoal.roles.images import namespace_problem, userns_files
from shoal.spec.containers import ENROOT, PLUGIN, elf_machine
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec

PACKAGES = (
    *("curl", "gawk", "jq", "squashfs-tools", "parallel", "bsdextrautils", "zstd", "pigz", "fuse-overlayfs"),
    *("squashfuse", "fuse3", "libcap2-bin"),
)
"""What enroot needs."""
SETTINGS = "/etc/enroot/enroot.conf.d/shoal.conf"
TMPFILES = "/etc/tmpfiles.d/shoal-enroot.conf"
HOOK, HOOK_SOURCE = "/etc/enroot/hooks.d/50-slurm-pytorch.sh", "/usr/share/enroot/hooks.d/50-slurm-pytorch.sh"
PLACES = {"runtime": "/run/enroot", "cache": "/var/cache/enroot", "data": "/var/lib/enroot"}
IS_INSTALLED = """[ "$(dpkg-query -W -f '${Version}' enroot)" = "$(dpkg-deb -f "$0" Version)" ]"""
MAKE_PLACES = "make enroot's directories"
MAKE = """\
set -e
while read -r kind path mode owner group; do
    [ "$kind" = d ] || continue
    case $path in */user-*) ;; *) install -d -m "$mode" "$path"; continue ;; esac
    [ -L "$path" ] || [ "$(stat -c %U "$path" 2> /dev/null)" != "$owner" ] || continue
    rm -rf "$path"
    mkdir -m "$mode" "$path"
    chown "$owner:$group" "$path"
done < "$0"
"""
"""As systemd-tmpfiles does at a boot. But a user's directory that somebody else has made before is removed."""


class PyxisComponent(Component):
    """The file's `containers: {engine: pyxis}`."""

    files: Mapping[str, FileQuery] = {SETTINGS: "there"}

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        return PACKAGES if uses_pyxis(spec) and "compute" in member.roles else ()

    def fact_files(self, spec: Spec) -> Mapping[str, FileQuery]:
        return userns_files() if uses_pyxis(spec) else {}

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        facts = cluster.facts_of(member.name)
        if not uses_pyxis(cluster.spec) or "compute" not in member.roles or exclusion(cluster.spec, facts):
            return {Stage.NODES: self.removal()} if facts.has_file(SETTINGS) else {}
        install = ("dpkg", "--install", "--force-confold", ENROOT)
        is_installed = ("sh", "-c", IS_INSTALLED, ENROOT)
        fix = "give a package of enroot for this host's system in containers.enroot"
        copy_hook = ("install", "-D", "-m", "0755", HOOK_SOURCE, HOOK)
        has_hook = ("sh", "-c", f"! test -e {HOOK_SOURCE} || cmp -s {HOOK_SOURCE} {HOOK}")
        return {
            Stage.SERVICES: (
                *(Directory(path) for path in ("/etc/enroot", "/etc/enroot/enroot.conf.d", "/etc/tmpfiles.d")),
                File(SETTINGS, enroot_conf()),
                File(TMPFILES, tmpfiles_conf(cluster.user_ids), reloads=(f"command {MAKE_PLACES}",)),
                Command(MAKE_PLACES, ("sh", "-c", MAKE, TMPFILES), on_change=True),
                Command("install enroot", install, unless=is_installed, fix=fix),
                Command("put enroot's PyTorch hook in place", copy_hook, unless=has_hook),
            )
        }

    def removal(self) -> Document:
        """Images that users have imported stay, and so does the package."""
        remove_hook = ("sh", "-c", f"cmp -s {HOOK_SOURCE} {HOOK} && rm {HOOK}; rm -f {SETTINGS} {TMPFILES}")
        absent = ("test", "!", "-e", SETTINGS)
        return (Command("remove enroot's settings", remove_hook, unless=absent),)

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        nodes = (member.name for member in cluster.members if "compute" in member.roles and uses_pyxis(cluster.spec))
        reasons = {name: exclusion(cluster.spec, cluster.facts[name]) for name in nodes if name in cluster.facts}
        what = "jobs in images do not run here"
        fix = "correct that, then run `shoal up`, and keep such jobs to the others with `-C pyxis`"
        return tuple(Finding("warning", what, reason, fix, host=name) for name, reason in reasons.items() if reason)


def uses_pyxis(spec: Spec) -> bool:
    return spec.containers is not None and spec.containers.engine == "pyxis"


def exclusion(spec: Spec, facts: Facts) -> str:
    """Why a host cannot run containers of enroot; empty where it can."""
    machine = elf_machine(spec.files[PLUGIN].content) if PLUGIN in spec.files else ""
    if machine and machine != facts.arch:
        return f"the plugin is for {machine}, and this host is {facts.arch}"
    return namespace_problem(facts)


def enroot_conf() -> str:
    """Without it enroot uses a directory of /run that a user cannot make, and homes, which may be on a share."""
    lines = [f"ENROOT_{name.upper()}_PATH {path}/user-$(id -u)" for name, path in PLACES.items()]
    lines += ["ENROOT_TEMP_PATH /var/tmp", "ENROOT_SQUASH_OPTIONS -comp zstd -Xcompression-level 1 -noD -exit-on-error"]
    return HEADER + "".join(f"{line}\n" for line in lines)


def tmpfiles_conf(users: Mapping[str, AccountIds]) -> str:
    """The users of the file have their directories from root, others from enroot."""
    lines = [f"d {path} 1777 root root\n" for path in PLACES.values()]
    lines += [
        f"d {path}/user-{ids.uid} 0700 {name} {name}\n" for name, ids in users.items() for path in PLACES.values()
    ]
    return HEADER + "".join(lines)
