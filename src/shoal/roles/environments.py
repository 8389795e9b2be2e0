"""What hosts need for Python environments: access to packages, and where they are built the means to make a venv."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import HEADER, Document, File
from shoal.agent.facts import Facts
from shoal.roles.component import Component, FileQuery
from shoal.spec.environments import SHARED_DIRECTORY, Environment, Proxy
from shoal.spec.member import Member
from shoal.spec.members import members
from shoal.spec.model import Spec
from shoal.spec.storage import SharedDirectory

APT_PROXY = "/etc/apt/apt.conf.d/80shoal-proxy"


class EnvironmentsComponent(Component):
    """Packages and proxy only: `shoal env build` builds the environments, which takes longer than `shoal up` should."""

    in_containers = True
    files: Mapping[str, FileQuery] = {APT_PROXY: "text"}

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        builders = {builder_of(spec, entry) for entry in spec.environments.values()}
        return ("python3-venv",) if member.name in builders else ()

    def prepare(self, spec: Spec, member: Member, facts: Facts) -> Document:
        """apt's proxy, before any package is installed."""
        text = apt_proxy(spec.proxy) if spec.proxy else None
        return (File(APT_PROXY, text),) if facts.text(APT_PROXY) != (text or "") else ()

    def removal(self) -> Document:
        return (File(APT_PROXY),)


def directory_of(spec: Spec, entry: Environment) -> str:
    """The directory of an environment."""
    shared = [path for path, share in spec.storage.items() if share.kind != "stage" and not is_home(path, share)]
    return entry.directory or (f"{shared[0]}/environments" if shared else SHARED_DIRECTORY)


def builder_of(spec: Spec, entry: Environment) -> str:
    """The member that builds it: the server of its share, as root of other hosts may not write there."""
    place, controller = directory_of(spec, entry), members(spec)[0].name
    inside = [path for path in spec.storage if place == path or place.startswith(f"{path}/")]
    return spec.storage[max(inside, key=len)].server(controller) if inside else controller


def is_home(path: str, share: SharedDirectory) -> bool:
    return share.homes or path == "/home"


def apt_proxy(proxy: Proxy) -> str:
    """apt's configuration of the proxies. apt has no list of direct hosts, so each has a line."""
    names = proxy.variables
    lines = [HEADER.rstrip()]
    for scheme in ("http", "https"):
        if f"{scheme}_proxy" in names:
            lines.append(f'Acquire::{scheme}::Proxy "{names[f"{scheme}_proxy"]}";')
            direct = [
                host for host in names.get("no_proxy", "").split(",") if host and "/" not in host and "*" not in host
            ]
            lines += [f'Acquire::{scheme}::Proxy::{host.lstrip(".")} "DIRECT";' for host in direct]
    return "\n".join(lines) + "\n"
