"""What hosts need for Python environments: a way to packages, and where they are built the means to make a venv."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import Document, File
from shoal.agent.facts import Facts
from shoal.roles.part import How, Part
from shoal.spec.environments import SHARED_DIRECTORY, Environment, Proxy
from shoal.spec.member import Member
from shoal.spec.members import members
from shoal.spec.model import Spec
from shoal.spec.storage import SharedDirectory
from shoal.storage.ways import server_of

APT_PROXY = "/etc/apt/apt.conf.d/80shoal-proxy"


class Environments(Part):
    """Environments themselves are made by `shoal env build`, which takes longer than anybody waits for `shoal up`."""

    in_containers = True
    files: Mapping[str, How] = {APT_PROXY: "text"}

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        builders = {builder_of(spec, entry) for entry in spec.environments.values()}
        return ("python3-venv",) if member.name in builders else ()

    def prepare(self, spec: Spec, member: Member, facts: Facts) -> Document:
        """apt's proxy, before any package is asked for. Nothing where the host has it, or needs none."""
        wanted = apt_proxy(spec.proxy) if spec.proxy else None
        found = facts.files.get(APT_PROXY)
        return (File(APT_PROXY, wanted),) if (found.text if found else None) != wanted else ()

    def farewell(self) -> Document:
        return (File(APT_PROXY),)


def directory_of(spec: Spec, entry: Environment) -> str:
    """Where an environment is kept."""
    fit = [path for path, share in spec.storage.items() if share.kind != "stage" and not is_home(path, share)]
    return entry.directory or (f"{fit[0]}/environments" if fit else SHARED_DIRECTORY)


def builder_of(spec: Spec, entry: Environment) -> str:
    """The member that builds it: who keeps the share it is in, as root of any other may not write there."""
    place, controller = directory_of(spec, entry), members(spec)[0].name
    inside = [path for path in spec.storage if place == path or place.startswith(f"{path}/")]
    return server_of(spec.storage[max(inside, key=len)], controller) if inside else controller


def is_home(path: str, share: SharedDirectory) -> bool:
    return share.homes or path == "/home"


def apt_proxy(proxy: Proxy) -> str:
    """The proxies in apt's words. apt has no list of hosts without one: each is named."""
    names = proxy.variables
    lines = ["# Written by shoal; changes here are lost."]
    for scheme in ("http", "https"):
        if f"{scheme}_proxy" in names:
            lines.append(f'Acquire::{scheme}::Proxy "{names[f"{scheme}_proxy"]}";')
            direct = [
                host for host in names.get("no_proxy", "").split(",") if host and "/" not in host and "*" not in host
            ]
            lines += [f'Acquire::{scheme}::Proxy::{host.lstrip(".")} "DIRECT";' for host in direct]
    return "\n".join(lines) + "\n"
