"""Rented machines in the tailnet: the controller lets them in, with a key that `shoal up` left there for it.

They come from images without Tailscale, and get it from where the controller has it: Tailscale's own package source,
which its download page has one add to a host, is the same for every release but for the release's name.
"""

from __future__ import annotations

from shoal.agent.document import Document, File, SecretRef
from shoal.agent.facts import Facts
from shoal.roles.elastic import SETTINGS
from shoal.roles.part import Kept
from shoal.roles.rented import rented_containers
from shoal.roles.shares import text_of
from shoal.spec.members import members, rented_members
from shoal.spec.model import Spec

KEY_THERE = f"{SETTINGS}/tailscale.key"
"""On the controller: lets rented machines in. Root alone reads it, as it does the keys of accounts."""
SOURCE = "/etc/apt/sources.list.d/tailscale.list"
KEYRING = "/usr/share/keyrings/tailscale-archive-keyring.gpg"
"""Both as Tailscale's download page names them."""
KEYRING_COPY = "the keyring of Tailscale's packages"
LOGOUT = ("tailscale", "logout")


def rented_machines(spec: Spec) -> tuple[str, ...]:
    """The rented nodes that join a network as any host does. Containers are reached through a tunnel instead."""
    inside = rented_containers(spec)
    return tuple(member.name for member in rented_members(spec) if member.name not in inside)


def on_controller(spec: Spec) -> Spec:
    """The spec as the controller carries it out: the key to the tailnet is in a file there."""
    if spec.network.kind != "tailscale":
        return spec
    return spec.model_copy(update={"network": spec.network.model_copy(update={"auth_key": f"file:{KEY_THERE}"})})


def keyring_kept(spec: Spec) -> dict[str, Kept]:
    """Where copies of the keyring come from. Nobody makes one."""
    return {KEYRING_COPY: Kept(members(spec)[0].name, KEYRING, 0, text=False)} if rented_machines(spec) else {}


def package_source(controller: Facts | None, machine: Facts) -> Document:
    """The controller's source of the package, for a machine whose own have none; nothing where it has none, either."""
    text = text_of(controller, SOURCE)
    if controller is None or not text:
        return ()
    ours, its = (f"/{facts.os_id} {facts.os_codename} " for facts in (controller, machine))
    keyring = (File(KEYRING, SecretRef(KEYRING_COPY)),) if KEYRING in text else ()
    return (*keyring, File(SOURCE, text.replace(ours, its)))
