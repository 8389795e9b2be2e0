"""`shoal init`: writes a first shoal.yaml, with comments, that loads as it is."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import SpecError, UsageError
from shoal.spec.load import load_text
from shoal.spec.members import default_spec
from shoal.spec.model import parse_host

MAX_INCLUDES = 8
"""How deep SSH configs may include each other; SSH itself stops at 16."""


def init(path: Path, *, hosts: list[str] | None = None, ssh_config: Path | None = None, cluster: str = "shoal") -> str:
    """Write a first spec to `path` and return its text. Never overwrites a file."""
    text = init_text(hosts, ssh_config, cluster)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} is there already", hint="edit it, or name another file") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="name a place you may write to") from None
    return text


def init_text(hosts: list[str] | None, ssh_config: Path | None, cluster: str) -> str:
    """A commented spec for these hosts, for every host of an SSH config, or, with neither, for the sandbox.

    The first host is the controller; one that is alone also computes. Raises UsageError when no spec can be made.
    """
    if hosts is not None and ssh_config is not None:
        raise UsageError("both hosts and an SSH config are given", hint="give one of them")
    if ssh_config is not None:
        hosts = ssh_hosts(ssh_config)
        if not hosts:
            raise UsageError(
                f"{ssh_config} names no host", hint="`Host` lines with wildcards do not count; use --hosts"
            )
    if hosts is None:
        text = _sandbox(cluster)
    elif not hosts:
        raise UsageError("no hosts are given", hint="name them: --hosts gpu01,gpu02")
    else:
        text = _given(hosts, cluster)
    try:
        load_text(text, "shoal.yaml")
    except SpecError as error:
        said = "; ".join(_short(finding) for finding in error.findings)
        raise UsageError(f"no spec can be made of this: {said}", hint="change these names") from None
    return text


def ssh_hosts(config: Path) -> list[str]:
    """Every host that an SSH config and its includes name outright: no wildcards, no negations, each once."""
    return list(dict.fromkeys(_aliases(config, config.parent, MAX_INCLUDES)))


def _aliases(config: Path, base: Path, depth: int) -> list[str]:
    try:
        text = config.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {config}: {error.strerror}", hint="name an SSH config file") from None
    found: list[str] = []
    for line in text.splitlines():
        match = re.fullmatch(r"\s*([A-Za-z]+)(?:\s*=\s*|\s+)(.*?)\s*", line)
        if match is None:
            continue
        keyword, words = match[1].lower(), _words(match[2])
        if keyword == "host":
            found += [word for word in words if not re.search(r"[*?!]", word)]
        elif keyword == "include" and depth > 0:
            for included in _included(words, base):
                found += _aliases(included, base, depth - 1)
    return found


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # an open quote: SSH refuses the line as well
        return []


def _included(patterns: Sequence[str], base: Path) -> list[Path]:
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser() if pattern.startswith("~/") else Path(pattern)
        root, parts = (Path("/"), path.relative_to("/")) if path.is_absolute() else (base, path)
        if str(parts) != ".":
            files += sorted(file for file in root.glob(str(parts)) if file.is_file())
    return files


def _given(hosts: list[str], cluster: str) -> str:
    controller, *nodes = [_entry(host, number) for number, host in enumerate(hosts, start=1)]
    lines = [
        *_head(cluster),
        "# The host that runs slurmctld. `compute: true` lets jobs run on it as well.",
        "controller:",
        f"  host: {controller}",
        f"  compute: {'false' if nodes else 'true'}",
        "",
    ]
    if nodes:
        lines += [
            "# The hosts that run jobs, by kind. A host is NAME, a hostlist such as gpu[01-16], USER@NAME:PORT,",
            "# or {name: gpu01, address: 10.0.0.11}.",
            "nodesets:",
            "  nodes:",
            "    # user: ubuntu        # who to log in as, unless ~/.ssh/config says so",
            "    hosts:",
            *(f"      - {node}" for node in nodes),
            "",
        ]
    sets = "nodes" if nodes else "controller"
    return "\n".join([*lines, *_tail(sets)])


def _sandbox(cluster: str) -> str:
    fish = default_spec().nodesets["fish"]
    lines = [
        *_head(cluster),
        "# The sandbox makes real Debian hosts as light containers on this machine.",
        "controller:",
        "  provider: sandbox",
        "",
        "nodesets:",
        "  fish:                   # its hosts are fish1, fish2, ...",
        "    provider: sandbox",
        f"    count: {fish.count}",
        f"    gpus: {fish.gpus}               # simulated",
        "    # cpus: 2",
        "    # memory: 2G",
        "    # image: debian13     # Slurm 24.11; debian12 has 22.05, sid has 26.05",
        "",
    ]
    return "\n".join([*lines, *_tail("fish")])


def _head(cluster: str) -> list[str]:
    return [
        "# What the cluster is. `shoal check` reads it, `shoal plan` shows what would change, `shoal up` does it.",
        f"cluster: {_quoted(cluster)}",
        "",
    ]


def _tail(nodeset: str) -> list[str]:
    return [
        "# The queues. Without this part there is one, `main`, over everything that computes.",
        "partitions:",
        "  main:",
        f"    nodesets: [{nodeset}]",
        "    default: true",
        "    # max_time: 1-00:00:00  # the longest a job may run: one day",
        "",
        "# firewall: false         # leave the hosts' firewalls alone",
        "",
    ]


def _entry(host: str, number: int) -> str:
    """A host as it stands in the file. One that is given as an address needs a name that Slurm can use."""
    parts = parse_host(host)
    try:
        ipaddress.ip_address(parts["name"].strip("[]"))
    except ValueError:
        return _quoted(host)
    name, address = f"node{number}", parts.pop("name").strip("[]")
    rest = "".join(f", {key}: {_quoted(str(value))}" for key, value in parts.items() if key == "user")
    rest += f", port: {parts['port']}" if "port" in parts else ""
    return f"{{name: {name}, address: {_quoted(address)}{rest}}}"


def _quoted(text: str) -> str:
    """The text as YAML reads it back: plain where it is a plain word, else in quotes."""
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9._@\[\]-]*(:[0-9]+)?", text) and text.lower() not in ("true", "false", "null"):
        return text
    return "'" + text.replace("'", "''") + "'"


def _short(finding: object) -> str:
    what, found = getattr(finding, "what", ""), getattr(finding, "found", "")
    fix = getattr(finding, "fix", "")
    return ", ".join(part for part in (what, found, fix) if part)
