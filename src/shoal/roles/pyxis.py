"""The engine pyxis: the operator's enroot and plugin on all hosts, in the order that Slurm needs.

The plugin and its line in plugstack.conf travel as `files` do: on every host before slurmctld reads of them. slurmd
starts anew after both, because pyxis makes its directory then.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import HEADER, Command, Directory, Document, File
from shoal.agent.facts import Facts
from shoal.remote import shell_command
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
HOOKS, HOOK_SOURCES = "/etc/enroot/hooks.d", "/usr/share/enroot/hooks.d"
SLURM_HOOKS = "50-slurm-pmi.sh 50-slurm-pytorch.sh"
PMIX_HOOK, NVIDIA_HOOK = f"{HOOKS}/51-shoal-pmix.sh", f"{HOOKS}/98-nvidia.sh"
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
COPY_HOOKS = f"""\
for name in {SLURM_HOOKS}; do
    [ ! -e {HOOK_SOURCES}/$name ] || install -D -m 0755 {HOOK_SOURCES}/$name {HOOKS}/$name || exit
done
"""
HAS_HOOKS = f"""\
for name in {SLURM_HOOKS}; do
    [ ! -e {HOOK_SOURCES}/$name ] || cmp -s {HOOK_SOURCES}/$name {HOOKS}/$name || exit
done
"""
PMIX = """\
#!/bin/sh
# Written by shoal; changes here are lost.
# PMIx of another version than the node's meets it with these. They replace lines of enroot's hook for Slurm.
[ -n "${PMIX_NAMESPACE-}" ] || exit 0
[ -n "${PMIX_MCA_gds-}" ] || echo PMIX_MCA_gds=hash >> "$ENROOT_ENVIRON"
[ -n "${PMIX_MCA_psec-}" ] || echo PMIX_MCA_psec=native >> "$ENROOT_ENVIRON"
"""
NEEDS_NVIDIA = "{ command -v nvidia-container-cli || [ -e /proc/driver/nvidia/version ]; } > /dev/null"
"""With GPUs and without NVIDIA's tools the hook stays: its error says what is missing."""
SWITCH_NVIDIA = f"if {NEEDS_NVIDIA}; then chmod a+x {NVIDIA_HOOK}; else chmod a-x {NVIDIA_HOOK}; fi"
IS_SWITCHED = f"""\
[ -e {NVIDIA_HOOK} ] || exit 0
if {NEEDS_NVIDIA}; then [ -x {NVIDIA_HOOK} ]; else [ ! -x {NVIDIA_HOOK} ]; fi
"""
"""enroot runs hooks that can be executed. NVIDIA's images ask for this one, which fails where its tool is missing."""
REMOVE = f"""\
for name in {SLURM_HOOKS}; do
    cmp -s {HOOK_SOURCES}/$name {HOOKS}/$name && rm {HOOKS}/$name
done
[ ! -e {NVIDIA_HOOK} ] || chmod a+x {NVIDIA_HOOK}
rm -f {PMIX_HOOK} {SETTINGS} {TMPFILES}
"""


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
        return {
            Stage.SERVICES: (
                *(Directory(path) for path in ("/etc/enroot", "/etc/enroot/enroot.conf.d", "/etc/tmpfiles.d")),
                File(SETTINGS, enroot_conf()),
                File(TMPFILES, tmpfiles_conf(cluster.user_ids), reloads=(f"command {MAKE_PLACES}",)),
                Command(MAKE_PLACES, ("sh", "-c", MAKE, TMPFILES), on_change=True),
                Command("install enroot", install, unless=is_installed, fix=fix),
                *_hooks(),
            )
        }

    def removal(self) -> Document:
        """Images that users have imported stay, and so does the package."""
        return (Command("remove enroot's settings", shell_command(REMOVE), unless=("test", "!", "-e", SETTINGS)),)

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        if not uses_pyxis(cluster.spec):
            return ()
        findings = []
        for member in cluster.members:
            facts = cluster.facts_of(member.name)
            if problem := plugin_problem(cluster.spec, facts):
                what = "no job starts here: Slurm requires the plugin of pyxis on all hosts"
                fix = "take this host out of the file, or give a plugin for its CPU type and take the others out"
                findings.append(Finding("error", what, problem, fix, host=member.name))
            elif "compute" in member.roles and member.name in cluster.facts and (problem := namespace_problem(facts)):
                fix = "correct that, then run `shoal up`, and keep such jobs to the others with `-C pyxis`"
                findings.append(Finding("warning", "jobs in images do not run here", problem, fix, host=member.name))
        return tuple(findings)


def _hooks() -> Document:
    copy, has_copies = shell_command(COPY_HOOKS), shell_command(HAS_HOOKS)
    switch, is_switched = shell_command(SWITCH_NVIDIA), shell_command(IS_SWITCHED)
    return (
        Directory(HOOKS),
        Command("put enroot's hooks for Slurm in place", copy, unless=has_copies),
        File(PMIX_HOOK, PMIX, mode=0o755),
        Command("switch enroot's hook for GPUs", switch, unless=is_switched),
    )


def uses_pyxis(spec: Spec) -> bool:
    return spec.containers is not None and spec.containers.engine == "pyxis"


def exclusion(spec: Spec, facts: Facts) -> str:
    """Why a host cannot run containers of enroot; empty where it can."""
    return plugin_problem(spec, facts) or namespace_problem(facts)


def plugin_problem(spec: Spec, facts: Facts) -> str:
    """Why a host cannot load the plugin; empty where it can, as far as we know."""
    machine = elf_machine(spec.files[PLUGIN].content) if PLUGIN in spec.files else ""
    differs = machine and facts.arch and machine != facts.arch
    return f"the plugin is for {machine}, and this host is {facts.arch}" if differs else ""


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
