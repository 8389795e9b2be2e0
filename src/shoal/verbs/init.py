"""`shoal init` writes a first shoal.yaml, with comments; `shoal schema` prints the schema for editors."""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from shoal.cloud.providers import abilities
from shoal.errors import SpecError, UsageError
from shoal.hostlist import expand
from shoal.spec.docs import schema
from shoal.spec.finding import Finding, printable
from shoal.spec.hosts import parse_host
from shoal.spec.loader import load_text
from shoal.spec.members import default_spec

FORGES = ("github.com", "gitlab.com", "bitbucket.org", "codeberg.org", "git.sr.ht", "dev.azure.com", "huggingface.co")
"""Git servers, which an SSH config often names. `User git` marks others."""
HEAD = """\
# What the cluster is. `shoal check` reads it, `shoal plan` shows what would
# change, `shoal up` does it.
cluster: {cluster}

"""
CONTROLLER = """\
# The host that runs slurmctld. `compute: true` lets jobs run on it as well.
controller:
  host: {controller}
  compute: {compute}

"""
NODES = """\
# The hosts that run jobs, by kind. A host is NAME, USER@NAME:PORT, a hostlist
# such as gpu[01-16], or {{name: gpu01, address: 10.0.0.11}}.
nodesets:
  nodes:
    # user: ubuntu        # who to log in as, unless ~/.ssh/config says so
    # driver: nvidia      # install it on hosts whose GPUs have none; they reboot
    hosts:
{nodes}
"""
RENTED_NODES = """\
  rented:                 # machines that exist while jobs need them
    provider: {provider}
    type: {type}
    max: 4
    idle: 10m             # released after this time without a job
"""
PROVIDERS = """\
# Where machines are rented, and what they may cost in US dollars. Shoal reads
# the key when `shoal up` runs.
providers:
  {provider}: {account}
budget: {{per_hour: 20, per_month: 500}}

"""
ACCOUNTS = {
    "aws": "{key: file:~/.aws/credentials}",
    "digitalocean": "{key: env:DIGITALOCEAN_TOKEN}",
    "gcp": "{key: file:~/service-account.json, project: my-project}",
    "nebius": "{key: file:~/.nebius/credentials.json}",
}
"""Accounts whose key is no single word in NAME_API_KEY, as the pages on these providers show them."""
NETWORK = """\
# An encrypted network between all hosts: in a LAN, rented machines cannot reach
# a controller behind a router. Open UDP port 51820 of the controller to them.
network: wireguard

"""
ONE_SLURM = """\
# The same Slurm on all hosts. Without this line each gets that of its system,
# and releases that are far apart cannot work together: `shoal check` says so.
{line}

"""
SANDBOX = """\
# The sandbox makes real Debian hosts as light containers on this machine.
controller:
  provider: sandbox

nodesets:
  fish:                   # its hosts are fish1, fish2, ...
    provider: sandbox
    count: {count}
    gpus: {gpus}               # simulated
    # cpus: 2
    # memory: 2G
    # image: debian13     # Slurm 24.11; debian12 has 22.05, sid has 26.05

"""
PARTITIONS = """\
# The queues. Without this part there is one, `main`, over all that computes.
partitions:
  main:
    nodesets: [{nodeset}]
    default: true
    # max_time: 1-00:00:00  # the longest a job may run: one day

"""
SHARES = """\
# Directories that all hosts have. Checkpoints of jobs on many nodes need one.
# storage:
#   /shared: {kind: nfs}

"""
"""Not for the sandbox, whose hosts share a directory already."""
TAIL = """\
# Python packages for jobs: `shoal env build` brings them to the nodes,
# `shoal run --env torch` uses them.
# environments:
#   torch: {requirements: requirements.txt}

# firewall: false         # leave the hosts' firewalls alone
# health: {hung_jobs: requeue}  # trainings that hang run on without the bad node
"""
MAX_INCLUDES = 8
"""How deep SSH configs may include each other; SSH itself stops at 16."""


def init(
    path: Path,
    *,
    hosts: list[str] | None = None,
    ssh_config: Path | None = None,
    cluster: str = "shoal",
    rent: str | None = None,
) -> str:
    """Write a first spec to `path` and return its text. Never overwrites a file."""
    text = init_text(hosts, ssh_config, cluster, rent)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists already", hint="edit it, or name another file") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="choose a path that you may write to") from None
    return text


def init_text(hosts: list[str] | None, ssh_config: Path | None, cluster: str, rent: str | None = None) -> str:
    """A commented spec for these hosts, for every host of an SSH config, or, with neither, for the sandbox.

    The first host is the controller; a single host also computes. `rent` is PROVIDER:TYPE of machines to rent. Raises
    UsageError when no spec can be made.
    """
    if hosts is not None and ssh_config is not None:
        raise UsageError("both hosts and an SSH config are given", hint="give one of them")
    excluded: dict[str, str] = {}
    if ssh_config is not None:
        hosts, excluded = ssh_hosts(ssh_config)
        if not hosts:
            what = f"{ssh_config} names no host" + (" that could run jobs" if excluded else "")
            raise UsageError(what, hint="wildcards, jump hosts and git servers do not count; use --hosts")
    if hosts is None and rent is not None:
        raise UsageError("machines are rented for a cluster of hosts", hint="name its controller: --hosts desktop")
    if hosts is None:
        text = _sandbox_spec(cluster)
    elif not hosts:
        raise UsageError("no hosts are given", hint="name them: --hosts gpu01,gpu02")
    else:
        text = _hosts_spec(hosts, cluster, excluded, rent)
    try:
        load_text(text, "shoal.yaml")
    except SpecError as error:
        findings = [finding for finding in error.findings if isinstance(finding, Finding)]
        finding_texts = ((finding.what, finding.found, finding.fix) for finding in findings)
        problems = "; ".join(", ".join(filter(None, texts)) for texts in finding_texts)
        raise UsageError(f"cannot make a spec of this: {problems}", hint="change these names") from None
    return text


def schema_text() -> str:
    """The JSON Schema of shoal.yaml, ready to be saved beside the file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


@dataclass
class _Block:
    """The settings of an SSH config from one `Host` or `Match` line to the next."""

    aliases: list[str]
    settings: dict[str, list[str]] = field(default_factory=dict)


def ssh_hosts(config: Path) -> tuple[list[str], dict[str, str]]:
    """Every host that an SSH config and its includes name literally: no wildcards, no negations, each once.

    Also returns the hosts to leave out, each with its purpose.
    """
    blocks = _blocks(config, config.parent, MAX_INCLUDES)
    names = list(dict.fromkeys(alias for block in blocks for alias in block.aliases))
    jump_hosts = {host for block in blocks for host in _jump_hosts(block)}
    purposes = {alias: "git" for block in blocks for alias in block.aliases if _is_forge(alias, block)}
    purposes |= {name: "a jump host" for name in names if name in jump_hosts}
    excluded = {name: purposes[name] for name in names if name in purposes}
    return [name for name in names if name not in excluded], excluded


def _jump_hosts(block: _Block) -> set[str]:
    """The hosts through which this block's hosts are reached."""
    proxy_jumps = ",".join(block.settings.get("proxyjump", ())).split(",")
    command = block.settings.get("proxycommand", [])
    candidates = [*proxy_jumps, *(command if command[:1] == ["ssh"] else [])]
    return {parse_host(candidate.removeprefix("ssh://"))["name"] for candidate in candidates if candidate}


def _is_forge(alias: str, block: _Block) -> bool:
    """Whether the host is a git server without logins."""
    names = {alias.lower(), *(name.lower() for name in block.settings.get("hostname", ()))}
    return block.settings.get("user") == ["git"] or any(
        name == forge or name.endswith(f".{forge}") for name in names for forge in FORGES
    )


def _blocks(config: Path, base: Path, depth: int) -> list[_Block]:
    try:
        text = config.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {config}: {error.strerror}", hint="name an SSH config file") from None
    blocks = [_Block([])]
    for line in text.splitlines():
        match = re.fullmatch(r"\s*([A-Za-z]+)(?:\s*=\s*|\s+)(.*?)\s*", line)
        if match is None:
            continue
        keyword, arguments = match[1].lower(), _split_arguments(match[2])
        if keyword in ("host", "match"):
            aliases = [argument for argument in arguments if not re.search(r"[*?!]", argument)]
            blocks.append(_Block(aliases if keyword == "host" else []))
        elif keyword == "include" and depth > 0:
            current = blocks[-1]
            for file in _find_included(arguments, base):
                blocks += _blocks(file, base, depth - 1)
            blocks.append(current)  # what follows belongs to the block around the include
        else:
            blocks[-1].settings.setdefault(keyword, arguments)  # as in SSH, the first value counts
    return blocks


def _split_arguments(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # an open quote: SSH rejects the line too
        return []


def _find_included(patterns: Sequence[str], base: Path) -> list[Path]:
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser() if pattern.startswith("~/") else Path(pattern)
        root, glob = (Path("/"), path.relative_to("/")) if path.is_absolute() else (base, path)
        if str(glob) != ".":
            files += sorted(file for file in root.glob(str(glob)) if file.is_file())
    return files


def _hosts_spec(hosts: list[str], cluster: str, excluded: Mapping[str, str], rent: str | None) -> str:
    controller, *nodes = _entries(hosts)
    notes = [f"# Left out of the SSH config: {printable(name)} ({purpose}).\n" for name, purpose in excluded.items()]
    sections = [HEAD.format(cluster=_quote(cluster)), *notes, "\n" if notes else ""]
    sections.append(NETWORK if rent and not _rents_containers(rent) else "")
    sections.append(CONTROLLER.format(controller=controller, compute="false" if nodes else "true"))
    if nodes:
        sections.append(NODES.format(nodes="\n".join(f"      - {node}" for node in nodes)))
    sections.append(_rented_nodes(rent, first=not nodes) if rent else "")
    sections.append("\n" if nodes or rent else "")
    nodesets = [*(["nodes"] if nodes else ["controller"]), *(["rented"] if rent else [])]
    sections.append(PARTITIONS.format(nodeset=", ".join(nodesets)))
    sections.append(_account(rent) if rent else "")
    # What a provider's image has is not known beforehand, and hosts are not asked here.
    line = "slurm: {from: shoal}"
    sections.append(ONE_SLURM.format(line=line if rent else f"# {line}") if nodes or rent else "")
    return "".join([*sections, SHARES if nodes else "", TAIL])


def _rented_nodes(rent: str, *, first: bool) -> str:
    provider, _, machine = rent.partition(":")
    if not provider or not machine:
        raise UsageError(f"{rent!r} names no machine to rent", hint="write PROVIDER:TYPE, as lambda:gpu_1x_a10")
    return ("nodesets:\n" if first else "") + RENTED_NODES.format(provider=_quote(provider), type=_quote(machine))


def _rents_containers(rent: str) -> bool:
    """Whether the machines are containers, to which the controller opens a tunnel from any network."""
    try:
        return abilities(rent.partition(":")[0]).container
    except (LookupError, ImportError):
        return False


def _account(rent: str) -> str:
    provider = rent.partition(":")[0]
    key = re.sub(r"\W", "_", provider).upper()
    account = ACCOUNTS.get(provider, f"{{key: env:{key}_API_KEY}}")
    return PROVIDERS.format(provider=_quote(provider), account=account)


def _sandbox_spec(cluster: str) -> str:
    fish = default_spec().nodesets["fish"]
    sandbox = SANDBOX.format(count=fish.count, gpus=fish.gpus)
    return "".join([HEAD.format(cluster=_quote(cluster)), sandbox, PARTITIONS.format(nodeset="fish"), TAIL])


def _entries(hosts: list[str]) -> list[str]:
    """The hosts as entries of the file. A host without a name, only an address, is named after its position."""
    names_by_host = [() if _is_address(host) else _names(host) for host in hosts]
    used_names = {name for names in names_by_host for name in names}
    entries, place = [], 0
    for host, names in zip(hosts, names_by_host, strict=True):
        if names:
            place += len(names)
            entries.append(_quote(host))
            continue
        place += 1
        name = next(name for number in count(place) if (name := f"node{number}") not in used_names)
        used_names.add(name)
        entries.append(_format_entry(host, name))
    return entries


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(parse_host(host)["name"].strip("[]"))
    except ValueError:
        return False
    return True


def _names(host: str) -> tuple[str, ...]:
    try:
        return tuple(expand(parse_host(host)["name"])) or (host,)
    except ValueError:  # not a hostlist: loading the spec reports why
        return (host,)


def _format_entry(host: str, name: str) -> str:
    fields = parse_host(host)
    address = fields.pop("name").strip("[]")
    login_text = "".join(f", {key}: {_quote(str(value))}" for key, value in fields.items() if key == "user")
    login_text += f", port: {fields['port']}" if "port" in fields else ""
    return f"{{name: {name}, address: {_quote(address)}{login_text}}}"


def _quote(text: str) -> str:
    """The text as YAML: plain where it is a plain word, else in quotes."""
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9._@\[\]-]*(:[0-9]+)?", text) and text.lower() not in ("true", "false", "null"):
        return text
    return "'" + text.replace("'", "''") + "'"
