"""`slurm: {from: shoal}`: one release of Slurm for all hosts, beside what their distributions have.

The tree is an archive in the wheel `shoal-slurm`, which `scripts/build-slurm` makes for each kind of CPU. Hosts
download nothing: it travels once over the connection that is there. Its place has the version in it, so that a running
slurmd always starts the slurmstepd and the plugins of its own release.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from shoal.agent.document import HEADER, Command, Directory, Document, File, Item, SecretRef, Service, render_unit
from shoal.agent.facts import Facts
from shoal.errors import UsageError
from shoal.local_files import cache_dir
from shoal.network.firewall import NFT
from shoal.remote import program_text, shell_command
from shoal.roles.component import PACKAGES_PREFIX, Cluster, FileQuery
from shoal.slurm.versions import Version
from shoal.spec.member import Member
from shoal.spec.model import Spec

TREES = "/opt/shoal"
UNITS = "/etc/systemd/system"
DAEMONS = ("slurmctld", "slurmdbd", "slurmd", "sackd")
UNIT_FILES = tuple(f"{UNITS}/{name}.service" for name in DAEMONS)
"""They take precedence over the units of packages, which must not be there."""
PACKAGED_DAEMONS = tuple(f"/usr/sbin/{name}" for name in DAEMONS)
SLURM_PACKAGES = ("munge", "slurm-client", "slurmctld", "slurmd", "slurmdbd", "sackd", "libpam-slurm-adopt", "nftables")
"""What the tree takes the place of: it has nft too, so that a bare host needs no package to become a node."""
ROTATION = "/etc/logrotate.d/shoal-slurm"
SECRET = "Slurm for"
"""The name of the archive among secrets, with the kind of CPU."""
REFERENCE = "own:slurm-"
"""The reference of the archive among secrets, as that of the wheel of Shoal."""
ARCHITECTURES = ("x86_64", "aarch64")
_ARCHIVE = re.compile(r"(?:.*/)?slurm-([0-9.]+-[0-9]+)-(x86_64|aarch64)\.tar\.gz")


@dataclass(frozen=True)
class SlurmTree:
    """A tree for one kind of CPU, as this machine has it."""

    version: str
    """Slurm's version and the number of the build: `24.11.5-1`."""
    arch: str
    wheel: Path
    """The wheel, or an unpacked one's archive."""
    member: str = ""
    """The archive's name in the wheel."""

    @property
    def prefix(self) -> str:
        return f"{TREES}/slurm-{self.version}"

    @property
    def release(self) -> Version:
        return Version.parse(self.version)

    @property
    def content(self) -> bytes:
        if not self.member:
            return self.wheel.read_bytes()
        with zipfile.ZipFile(self.wheel) as wheel:
            return wheel.read(self.member)

    @property
    def sha256(self) -> str:
        return _digest(self.wheel, self.member, self.wheel.stat().st_mtime_ns)


@cache
def _digest(wheel: Path, member: str, _changed: int) -> str:
    return hashlib.sha256(SlurmTree("", "", wheel, member).content).hexdigest()


def find_trees() -> dict[str, SlurmTree]:
    """The newest tree of each kind of CPU that this machine has: an installed wheel, or those that it built."""
    trees: dict[str, SlurmTree] = {}
    for tree in (*_built_trees(), *_installed_trees()):
        if tree.arch not in trees or _order(tree) >= _order(trees[tree.arch]):
            trees[tree.arch] = tree
    newest = max(map(_order, trees.values()), default=())
    return {arch: tree for arch, tree in trees.items() if _order(tree) == newest}


def _order(tree: SlurmTree) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", tree.version))


def _installed_trees() -> Iterator[SlurmTree]:
    try:
        files = distribution("shoal-slurm").files or ()
    except PackageNotFoundError:
        return
    for file in files:
        if match := _ARCHIVE.fullmatch(file.as_posix()):
            yield SlurmTree(match[1], match[2], Path(str(file.locate())))


def _built_trees() -> Iterator[SlurmTree]:
    """The wheels that this machine built, and the archives that a controller has for rented machines."""
    for path in (cache_dir() / "slurm").glob("slurm-*.tar.gz"):
        if match := _ARCHIVE.fullmatch(path.name):
            yield SlurmTree(match[1], match[2], path)
    for path in sorted((cache_dir() / "slurm").glob("shoal_slurm-*.whl")):
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if match := _ARCHIVE.fullmatch(name):
                    yield SlurmTree(match[1], match[2], path, name)


def read_archive(arch: str) -> bytes:
    """The archive for a kind of CPU. Raises UsageError where this machine has none."""
    return require_tree(arch).content


def require_tree(arch: str = "") -> SlurmTree:
    """The tree for a kind of CPU, or any one. Raises UsageError where this machine has none."""
    trees = find_trees()
    tree = trees.get(arch) if arch else next(iter(trees.values()), None)
    if tree is None:
        has = f"; it has one for {', '.join(trees)}" if trees else ""
        raise UsageError(
            f"`slurm: {{from: shoal}}`: this machine has no Slurm for {arch or 'the hosts'}{has}",
            hint=tree_fix(arch or "them"),
        )
    return tree


def tree_fix(arch: str) -> str:
    """How this machine gets a tree for a kind of CPU."""
    return (
        f"install the wheel `shoal-slurm` for {arch}, or build it with `scripts/build-slurm` on such a machine, and "
        "put it into ~/.cache/shoal/slurm"
    )


# ---- what a host gets


def uses_tree(spec: Spec) -> bool:
    return spec.slurm.source == "shoal"


def tree_fact_files(spec: Spec) -> dict[str, FileQuery]:
    """The files that tell which Slurm a host has."""
    files: dict[str, FileQuery] = {
        **dict.fromkeys(UNIT_FILES, "text"),
        **dict.fromkeys((*PACKAGED_DAEMONS, NFT), "there"),
    }
    return files | ({_mark(require_tree().prefix): "text"} if uses_tree(spec) else {})


def tree_secrets(spec: Spec) -> dict[str, str]:
    """The archives that this machine has, among the user's secrets."""
    return {f"{SECRET} {arch}": f"{REFERENCE}{arch}" for arch in find_trees()} if uses_tree(spec) else {}


def tree_items(cluster: Cluster, member: Member) -> Document:
    """The tree on a host. The archive is in the document only while it must travel."""
    if cluster.slurm_prefix == PACKAGES_PREFIX:
        return ()
    facts = cluster.facts[member.name]
    tree = require_tree(facts.arch)
    return (
        *_unpacked_tree(tree, facts),
        # Those of a former tree stay until the daemons have moved: a command must not be newer than slurmctld.
        links_command(cluster.slurm_prefix, "add", "added"),
        Directory("/etc/slurm"),
        Directory("/var/lib/slurm", owner="slurm", group="slurm"),
        Directory("/var/log/slurm", owner="slurm", group="slurm"),
        Directory("/etc/logrotate.d"),
        File(ROTATION, log_rotation()),
    )


def links_command(prefix: str, action: str, check: str) -> Command:
    """Links to Slurm's programs: `add` those that are missing, or `link` all to this tree."""
    program, patterns = program_text("slurm_programs.sh"), ("bin/*", *(f"sbin/{name}" for name in DAEMONS))
    name = "Slurm's programs in every user's PATH" if action == "add" else "all programs from the new Slurm"
    return Command(
        name,
        shell_command(program, action, prefix, *patterns),
        unless=shell_command(program, check, prefix, *patterns),
    )


def _unpacked_tree(tree: SlurmTree, facts: Facts) -> Document:
    if facts.text(_mark(tree.prefix)).strip() == tree.sha256:
        return ()
    return (
        Directory(TREES),
        Command(
            f"unpack Slurm {tree.version}",
            shell_command(program_text("slurm_tree.sh"), tree.prefix, tree.sha256),
            unless=("grep", "-qsx", tree.sha256, _mark(tree.prefix)),
            stdin=SecretRef(f"{SECRET} {tree.arch}", tree.sha256),
        ),
    )


def archives_for_rentals(facts: Facts, directory: str) -> Iterator[Item]:
    """The archives of all kinds of CPU for machines that the controller rents; each travels once."""
    for path, tree in archive_paths(directory).items():
        if facts.digest(path) != tree.sha256:
            yield Directory(directory)
            yield File(path, SecretRef(f"{SECRET} {tree.arch}", tree.sha256), mode=0o600)
    # The service takes the newest; after a way back that would be the wrong one.
    keep = [word for path in archive_paths(directory) for word in ("!", "-path", path)]
    other = ("find", directory, "-name", "slurm-*.tar.gz", *keep)
    unless = ("sh", "-c", '! "$@" 2>/dev/null | grep -q .', "sh", *other)
    yield Command("remove other builds of Slurm", (*other, "-delete"), unless=unless)


def archive_paths(directory: str) -> dict[str, SlurmTree]:
    return {f"{directory}/slurm-{tree.version}-{arch}.tar.gz": tree for arch, tree in find_trees().items()}


def _mark(prefix: str) -> str:
    """The last file of a tree, with the digest of its archive."""
    return f"{prefix}/.complete"


def daemon(cluster: Cluster, name: str, *options: str, drop_ins: Sequence[File] = ()) -> tuple[Item, ...]:
    """One of Slurm's daemons as a service. Packages bring their units; the tree has ours, which takes precedence.

    Our unit contains what drop-ins say: for a drop-in in a new directory systemd would have to read all units again.
    """
    program = f"{cluster.slurm_prefix}/sbin/{name}"
    service = Service(name, command=(program, "-D", *options))
    if cluster.slurm_prefix == PACKAGES_PREFIX:
        directories = dict.fromkeys(Directory(one.path.rpartition("/")[0]) for one in drop_ins)
        return (*directories, *drop_ins, service)
    parts = [daemon_unit(name, program), *(str(one.content).removeprefix(HEADER) for one in drop_ins if one.content)]
    unit = File(f"{UNITS}/{name}.service", "\n".join(parts), restarts=(name,), keep=True)
    return (unit, service)


def daemon_unit(name: str, program: str) -> str:
    """The unit of a daemon, as the Slurm project writes it."""
    # slurmdbd alone cannot tell systemd that it is ready.
    start = "-D -s" if name == "slurmdbd" else "--systemd"
    is_node = name == "slurmd"
    needs = {"slurmctld": "/etc/slurm/slurm.conf", "slurmdbd": "/etc/slurm/slurmdbd.conf"}.get(name)
    # Steps outlive slurmd, in cgroups that are its own to divide.
    node = {"KillMode": "process", "LimitMEMLOCK": "infinity", "LimitSTACK": "infinity", "Delegate": "yes"}
    return render_unit(
        Unit={
            "Description": f"Slurm: {name}",
            "After": "network-online.target remote-fs.target mariadb.service sssd.service",
            "Wants": "network-online.target",
            "ConditionPathExists": needs,
        },
        Service={
            "Type": "simple" if name == "slurmdbd" else "notify",
            "EnvironmentFile": f"-/etc/default/{name}",
            "User": None if is_node else "slurm",
            "Group": None if is_node else "slurm",
            # sackd and slurmd sign for commands through a socket there.
            "RuntimeDirectory": "slurm" if name in ("slurmd", "sackd") else name,
            "RuntimeDirectoryMode": "0755",
            "ExecStart": f"{program} {start} ${name.upper()}_OPTIONS",
            "ExecReload": "/bin/kill -HUP $MAINPID",
            "LimitNOFILE": 131072,
            "TasksMax": "infinity",
            **(node if is_node else {}),
        },
        Install={"WantedBy": "multi-user.target"},
    )


def log_rotation() -> str:
    """logrotate's rule for the daemons' logs: after SIGUSR2 they open their file again."""
    reopen = "".join(f"        systemctl -q kill --kill-who=main -s SIGUSR2 {name} || true\n" for name in DAEMONS[:3])
    rule = (
        "weekly",
        "rotate 8",
        "compress",
        "delaycompress",
        "missingok",
        "notifempty",
        "sharedscripts",
        "su root root",
    )
    lines = "".join(f"    {word}\n" for word in rule)
    return f"{HEADER}/var/log/slurm/slurm*.log {{\n{lines}    postrotate\n{reopen}    endscript\n}}\n"


def tree_removal() -> Document:
    """Removes the units, the programs and the trees. A unit that is not from Shoal stays."""
    arguments = (f"{TREES}/slurm-", HEADER.strip(), *UNIT_FILES)
    remove = shell_command(program_text("slurm_programs.sh"), "remove", *arguments)
    is_absent = shell_command('! ls -d "$1"* >/dev/null 2>&1 && shift && ! grep -qsF "$@"', *arguments)
    return (File(ROTATION), Command("remove Slurm of Shoal", remove, unless=is_absent))
