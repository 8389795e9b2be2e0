"""The private network between the hosts, as in the file: one word or a mapping."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from shoal.spec.checks import InvalidValue, address, choice, refusal
from shoal.spec.finding import Problem, nearest, show
from shoal.spec.member import WIREGUARD_PORT, WIREGUARD_SUBNET
from shoal.spec.values import MemberName, Port, SecretReference, ShortForm, text_schema

KINDS = ("lan", "wireguard", "tailscale")
_OWN_FIELDS = {"wireguard": ("subnet", "port", "hub"), "tailscale": ("auth_key", "login_server", "tags")}
"""The fields that only one kind of network has."""


def _subnet(value: object) -> str:
    fix = "write a private IPv4 network of /8 to /28, such as 10.77.0.0/16"
    if not isinstance(value, str):
        raise refusal("not a subnet", fix)
    try:
        subnet = ipaddress.IPv4Network(value)
    except ValueError:
        raise refusal("not a subnet", fix) from None
    if not 8 <= subnet.prefixlen <= 28:
        raise refusal("not a usable size of subnet", fix)
    if not subnet.is_private or subnet.is_loopback or subnet.is_link_local:
        raise refusal("not a private subnet", fix)
    return str(subnet)


def _endpoint(value: object) -> str:
    """`address`, `address:port` or `[address]:port`."""
    fix = "write an address, or one with a port: lab.example.org:51820"
    if not isinstance(value, str):
        raise refusal("not an endpoint", fix)
    name, colon, port = value.rpartition(":") if value.count(":") == 1 or "]:" in value else (value, "", "")
    if colon and not (port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise refusal("not a port", fix)
    try:
        address(name)
    except InvalidValue:
        raise refusal("not an endpoint", fix) from None
    return value


def _url(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or " " in value or len(value) > 256:
        raise refusal("not the address of a server", "write it like https://headscale.example.org")
    if not value.startswith(("https://", "http://")):
        raise refusal("not the address of a server", "begin it with https://")
    return value


def _tag(value: object) -> str:
    bare = value.removeprefix("tag:") if isinstance(value, str) else ""
    if not bare.replace("-", "").isalnum() or not bare.isascii() or not bare[0].isalpha() or len(bare) > 50:
        raise refusal("not a tag", "use a letter, then letters, digits and `-`: tag:slurm")
    return f"tag:{bare}"


Subnet = Annotated[str, BeforeValidator(_subnet), text_schema("subnet")]
Endpoint = Annotated[str, BeforeValidator(_endpoint), text_schema("address or address:port")]
ServerUrl = Annotated[str, BeforeValidator(_url), text_schema("URL")]
Tag = Annotated[str, BeforeValidator(_tag), text_schema("tag")]


class Network(ShortForm):
    """How the hosts reach each other.

    In the file it is a word (`network: wireguard`) or a mapping of the fields below: `{kind: wireguard, port: 51821}`.
    """

    short_schema: ClassVar = {"type": "string", "enum": [*KINDS]}
    refusal = ("not a network", f"choose one of {', '.join(KINDS)}, or write {{kind: wireguard}}")

    kind: Annotated[Literal["lan", "wireguard", "tailscale"], BeforeValidator(choice("network", KINDS))]
    """`lan`: the addresses they have. `wireguard`: an encrypted network of their own. `tailscale`: a tailnet."""
    subnet: Subnet = WIREGUARD_SUBNET
    """WireGuard: the range of its addresses. No host may use it for anything else."""
    port: Port = WIREGUARD_PORT
    """WireGuard: the UDP port that every host listens on."""
    hub: MemberName | None = None
    """WireGuard: the host that relays for hosts without a direct path. Without it, the controller."""
    auth_key: SecretReference | None = None
    """Tailscale: the auth key, or the secret of an OAuth client, that lets hosts join."""
    login_server: ServerUrl | None = None
    """Tailscale: the Headscale server to join. Without it, Tailscale's own."""
    tags: tuple[Tag, ...] = ()
    """Tailscale: the tags of the hosts."""


def network_problems(network: Network, hosts: Sequence[str], *, rentals: int = 0) -> Iterator[Problem]:
    """Every rule about the network that does not hold.

    `hosts` are the names of all members; `rentals` is how many nodes may be rented beside them.
    """
    for kind, fields in _OWN_FIELDS.items():
        for field in network.set_among(fields) if kind != network.kind else ():
            yield Problem(("network", field), f"`{field}` applies only to {kind}", "", f"delete it, or use {kind}")
    hub = network.hub
    if hub is not None and hub not in hosts:
        yield Problem(("network", "hub"), "the hub is not a host of the cluster", show(hub), nearest(hub, list(hosts)))
    addresses, count = ipaddress.IPv4Network(network.subnet).num_addresses - 2, len(hosts) + rentals
    if network.kind == "wireguard" and count > addresses:
        evidence = f"{count} hosts, and room for {addresses}"
        yield Problem(("network", "subnet"), "more hosts than the subnet has addresses", evidence, "give a larger one")
