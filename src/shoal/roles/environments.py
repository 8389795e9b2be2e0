"""What hosts need for Python environments: access to packages, and where they are built the means to make a venv."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import HEADER, Command, Document, File
from shoal.agent.facts import Facts
from shoal.remote import program_text, shell_command
from shoal.roles.component import Component, FileQuery
from shoal.spec.environments import SHARED_DIRECTORY, Environment, Proxy
from shoal.spec.member import Member
from shoal.spec.members import members
from shoal.spec.model import Spec

APT_PROXY = "/etc/apt/apt.conf.d/80shoal-proxy"


class EnvironmentsComponent(Component):
    """Packages and proxy only: `shoal env build` builds the environments, which takes longer than `shoal up` should."""

    in_containers = True
    files: Mapping[str, FileQuery] = {APT_PROXY: "text"}

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        """What builds environments: those of the file, and where users log in, their own."""
        entries = [entry for entry in spec.environments.values() if builder_of(spec, entry) == member.name]
        serves_users = bool(spec.users) and bool({"controller", "login"} & member.roles)
        venv = ("python3-venv",) if entries or serves_users else ()
        return (*venv, *(("git",) if any(entry.needs_git for entry in entries) else ()))

    def prepare(self, spec: Spec, member: Member, facts: Facts) -> Document:
        """apt's proxy, before any package is installed."""
        text = apt_proxy(spec.proxy) if spec.proxy else None
        return (File(APT_PROXY, text),) if facts.text(APT_PROXY) != (text or "") else ()

    def removal(self) -> Document:
        return (File(APT_PROXY),)


def directory_of(spec: Spec, entry: Environment) -> str:
    """The directory of an environment."""
    shared = [
        path for path, share in spec.storage.items() if share.kind != "stage" and not share.homes and path != "/home"
    ]
    return entry.directory or (f"{shared[0]}/environments" if shared else SHARED_DIRECTORY)


def builder_of(spec: Spec, entry: Environment) -> str:
    """The member that builds it: the server of its share, as root of other hosts may not write there."""
    place, controller = directory_of(spec, entry), members(spec)[0].name
    inside = [path for path in spec.storage if place == path or place.startswith(f"{path}/")]
    return spec.storage[max(inside, key=len)].server(controller) if inside else controller


def install_venv(name: str, spec: Spec, prefix: str, *packages: str, restarts: tuple[str, ...] = ()) -> Command:
    """Installs packages for a service of Shoal's own. A venv without its mark is incomplete, and is created again."""
    proxies = spec.proxy.variables if spec.proxy else {}
    environment = ("env", *(f"{key}={value}" for key, value in proxies.items())) if proxies else ()
    return Command(
        name,
        (*environment, *shell_command(program_text("service_venv.sh"), prefix, *packages)),
        unless=("test", "-e", f"{prefix}/.complete"),
        timeout=3600.0,
        restarts=restarts,
        fix="give the host access to a package index, or set `proxy`",
    )


def apt_proxy(proxy: Proxy) -> str:
    """apt's configuration of the proxies. apt has no list of direct hosts, so each has a line."""
    names = proxy.variables
    hosts = names.get("no_proxy", "").split(",")
    direct = [host for host in hosts if host and "/" not in host and "*" not in host]
    lines = [HEADER.rstrip()]
    for scheme in ("http", "https"):
        if f"{scheme}_proxy" in names:
            lines.append(f'Acquire::{scheme}::Proxy "{names[f"{scheme}_proxy"]}";')
            lines += [f'Acquire::{scheme}::Proxy::{host.lstrip(".")} "DIRECT";' for host in direct]
    return "\n".join(lines) + "\n"
