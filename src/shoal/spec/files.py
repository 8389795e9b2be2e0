"""Files of the operator's that Shoal copies to hosts: scripts and plugins for Slurm, or any other file.

A script that an option of slurm.conf names must be on the hosts that run it before the option takes effect: a node
without its Prolog is drained by the first job.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, PrivateAttr, WithJsonSchema

from shoal.spec.checks import matching, refusal
from shoal.spec.finding import Problem, nearest, show
from shoal.spec.local_files import read_regular_file
from shoal.spec.member import Member
from shoal.spec.values import FilePath, SetName, ShortForm, text_schema

MAX_FILE_BYTES = 1024 * 1024
MAX_ALL_FILES_BYTES = 4 * MAX_FILE_BYTES
"""Every `plan` and `up` sends them to every host."""
ROLES = ("controller", "login", "compute")
SLURM_DIRECTORY = "/etc/slurm"
LUA_SCRIPTS = {"jobsubmitplugins": "job_submit.lua", "clifilterplugins": "cli_filter.lua"}
"""Options whose plugin `lua` reads a script beside slurm.conf."""
PLUGSTACK = f"{SLURM_DIRECTORY}/plugstack.conf"

_SYSTEM_DIRECTORIES = (
    *("/bin", "/boot", "/dev", "/home", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys", "/tmp"),  # nosec B108
    *("/usr/bin", "/usr/lib", "/usr/libexec", "/usr/sbin", "/usr/share", "/var/run", "/var/tmp"),  # nosec B108
    *("/etc/apt", "/etc/munge", "/etc/pam.d", "/etc/ssh", "/etc/sudoers.d", "/root/.ssh"),
    *("/var/lib/dpkg", "/var/lib/munge", "/var/lib/mysql", "/var/lib/slurm"),
)
_SYSTEM_FILES = (
    *("crypttab", "fstab", "group", "gshadow", "hostname", "hosts", "ld.so.preload", "machine-id", "nsswitch.conf"),
    *("passwd", "resolv.conf", "shadow", "subgid", "subuid", "sudoers", "default/slurmd", "default/slurmctld"),
    *("slurm/slurm.conf", "slurm/gres.conf", "slurm/cgroup.conf", "slurm/topology.conf", "slurm/slurmdbd.conf"),
    *("slurm/slurm.jwks", "slurm/slurm.key"),
    *(f"systemd/system/{daemon}.service" for daemon in ("slurmctld", "slurmdbd", "slurmd", "sackd")),
)
"""Below /etc: the system's own, and those that Shoal writes."""
_PLUGIN_DIRECTORY = re.compile(r"/usr/lib/([a-z0-9_-]+/)?slurm(-wlm)?/[^/]+\.so")

_path = matching(
    r"(/(?!\.{1,2}(/|$))[A-Za-z0-9_.+@-]+)+",  # nothing that needs quoting
    "not a path for a file",
    "give an absolute path without blanks, such as /etc/slurm/prolog.sh",
)


def _destination(value: object) -> str:
    path = _path(value)
    below = any(path == place or path.startswith(f"{place}/") for place in _SYSTEM_DIRECTORIES)
    if _PLUGIN_DIRECTORY.fullmatch(path):
        return path
    if below or path in (f"/etc/{name}" for name in _SYSTEM_FILES) or "shoal" in path:
        raise refusal("a place that Shoal or the system manages", "use /etc/slurm/NAME, /usr/local/... or /opt/...")
    return path


def _mode(value: object) -> str:
    # 0755 without quotes is a number to YAML.
    text = f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not re.fullmatch(r"0?[0-7]{3}", text) or not int(text, 8) & 0o400:
        raise refusal("not a mode of a file", 'write it as chmod does, such as "0755"')
    if int(text, 8) & 0o022:
        raise refusal("others could write to a file that root executes", 'use "0755" or "0644"')
    return f"0{text[-3:]}"


Destination = Annotated[str, BeforeValidator(_destination), text_schema("path")]
Mode = Annotated[str, BeforeValidator(_mode), WithJsonSchema({"type": ["string", "integer"], "title": "mode"})]


class ShippedFile(ShortForm):
    """A file of yours on hosts of the cluster. It belongs to root, and is removed when it leaves the file.

    In the file it is a path (`/etc/slurm/prolog.sh: scripts/prolog.sh`) or a mapping.
    """

    short_schema: ClassVar = {"type": "string", "description": "The path of the source."}
    refusal = ("not a file to copy", "write its path, or {source: scripts/prolog.sh}")

    source: FilePath
    """The file on your machine, at most 1 MiB; the path is relative to this file."""
    mode: Mode | None = None
    """Its mode on the hosts. Without it, 0755 where the source is executable, else 0644."""
    hosts: tuple[SetName, ...] = ()
    """Nodesets, and `controller`, `login` or `compute` for all hosts of a role. Without it, every host."""

    _content: bytes = PrivateAttr(default=b"")
    _executable: bool = PrivateAttr(default=False)

    @classmethod
    def from_short(cls, value: object) -> dict[str, Any] | None:
        return {"source": value} if isinstance(value, str) else None

    @property
    def content(self) -> bytes:
        """What is in the source, once it has been read."""
        return self._content

    @property
    def digest(self) -> str:
        return hashlib.sha256(self._content).hexdigest()[:16]

    @property
    def permissions(self) -> int:
        return int(self.mode, 8) if self.mode else 0o755 if self._executable else 0o644

    def with_content(self, content: bytes, executable: bool) -> Self:
        copy = self.model_copy()
        copy._content, copy._executable = content, executable
        return copy

    def is_for(self, member: Member) -> bool:
        return not self.hosts or bool({*self.hosts} & {member.nodeset, *member.roles})


Files = Mapping[str, ShippedFile | None]
"""By destination. None stands for an entry of the file that is not valid."""


@dataclass(frozen=True)
class Script:
    """A file that an option of slurm.conf makes Slurm's daemons use."""

    option: str
    path: str
    role: Literal["controller", "login", "compute"]
    """The hosts that use it."""
    program: bool = True
    """It is executed; else it is read."""


_PROGRAMS: Mapping[str, Literal["controller", "compute"]] = {
    **dict.fromkeys(("prolog", "epilog", "taskprolog", "taskepilog", "healthcheckprogram"), "compute"),
    **dict.fromkeys(("unkillablestepprogram", "rebootprogram"), "compute"),
    **dict.fromkeys(("prologslurmctld", "epilogslurmctld", "mailprog", "resvprolog", "resvepilog"), "controller"),
    **dict.fromkeys(("srunprolog", "srunepilog", "slurmctldprimaryonprog", "slurmctldprimaryoffprog"), "controller"),
}
"""Options that name a program, in lower case, with the role of the hosts that run it."""


def scripts(options: Mapping[str, str | None], files: Files) -> Iterator[Script]:
    """Every script and plugin that the options and a shipped plugstack.conf name. Patterns may match nothing."""
    for option, value in options.items():
        key, text = option.lower(), value or ""
        path = text.split(" ")[0]
        if key in _PROGRAMS and path.startswith("/") and not re.search(r"[*?\[]", path):
            yield Script(option, path, _PROGRAMS[key])
        elif key in LUA_SCRIPTS and "lua" in text.split(","):
            yield Script(option, f"{SLURM_DIRECTORY}/{LUA_SCRIPTS[key]}", "controller", program=False)
        elif key == "plugstackconfig" and path.startswith("/"):
            yield Script(option, path, "controller", program=False)
    plugstack = files.get(PLUGSTACK)
    for line in plugstack.content.decode("utf-8", "replace").splitlines() if plugstack else ():
        words = line.partition("#")[0].split()
        if len(words) > 1 and words[0] == "required" and words[1].startswith("/"):
            yield Script(PLUGSTACK, words[1], "compute", program=False)


def file_problems(
    files: Files, sets: Collection[str], shares: Collection[str], options: Mapping[str, str | None]
) -> Iterator[Problem]:
    """Every rule about files that does not hold. `sets` are the names of nodesets."""
    known = [*ROLES, *(name for name in sets if name not in ROLES)]
    lua_keys = {script: key for key, script in LUA_SCRIPTS.items()}
    for destination, entry in files.items():
        for index, name in enumerate((entry.hosts if entry is not None else None) or ()):
            if name is not None and name not in known:
                place = ("files", destination, "hosts", index)
                yield Problem(place, "unknown nodeset", show(name), nearest(name, known))
        share = next((share for share in shares if destination.startswith(f"{share}/")), None)
        if share is not None:
            what = "on a share, where every host would write it"
            yield Problem(("files", destination), what, show(share), "copy it there once, or use another place")
        name = PurePosixPath(destination).name
        reads = any(key.lower() == lua_keys.get(name) and "lua" in (options[key] or "").split(",") for key in options)
        if name in lua_keys and not reads and destination == f"{SLURM_DIRECTORY}/{name}":
            option = "JobSubmitPlugins" if name == "job_submit.lua" else "CliFilterPlugins"
            yield Problem(("files", destination), "no plugin reads it", "", f"set slurm.options.{option}: lua")


def read_sources(
    files: Files, base: Path, options: Mapping[str, str | None]
) -> tuple[dict[str, ShippedFile], list[Problem]]:
    """The files with their content, and what is wrong with it. Sources are relative to `base`."""
    whole: dict[str, ShippedFile] = {}
    problems: list[Problem] = []
    for destination, entry in files.items():
        if entry is None or entry.source is None:
            continue
        source = base / Path(entry.source).expanduser()
        try:
            content = read_regular_file(source, MAX_FILE_BYTES)
            whole[destination] = entry.with_content(content, bool(source.stat().st_mode & 0o100))
        except OSError as error:
            found = f"{entry.source}: {(error.strerror or '').removeprefix('it is ')}"
            fix = f"give the path of a file, from {base.absolute()}"
            problems.append(Problem(("files", destination), "cannot read the source", found, fix))
    if sum(len(entry.content) for entry in whole.values()) > MAX_ALL_FILES_BYTES:
        problems.append(Problem(("files",), "too large", "more than 4 MiB in all", "copy large files to a share"))
    for script in scripts(options, whole):
        file = whole.get(script.path)
        if file is not None and script.program and not file.permissions & 0o111:
            fix = 'add `mode: "0755"`, or run chmod +x on the source'
            what = f"{script.option} executes it, and it is not executable"
            problems.append(Problem(("files", script.path), what, f"mode {file.permissions:04o}", fix))
    return whole, problems


def dump_contents(files: Mapping[str, ShippedFile]) -> dict[str, dict[str, Any]]:
    """The contents as JSON, for the rental service, which has no sources."""
    return {
        path: {"base64": base64.b64encode(file.content).decode(), "executable": file._executable}
        for path, file in files.items()
    }


def load_contents(files: Mapping[str, ShippedFile], contents: Any) -> dict[str, ShippedFile]:
    """The files with the contents that `dump_contents` wrote. Other data raises KeyError, TypeError or ValueError."""
    return {
        path: file.with_content(base64.b64decode(contents[path]["base64"]), bool(contents[path]["executable"]))
        for path, file in files.items()
    }
