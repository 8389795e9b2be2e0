"""The private network between the hosts, as the file says it: one word, or a mapping with what else is to be said."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from shoal.spec.closed import Closed
from shoal.spec.defaults import WIREGUARD_PORT, WIREGUARD_SUBNET
from shoal.spec.secret import SecretReference
from shoal.spec.words import Port, address, choice, host_name, refusal

KINDS = ("lan", "wireguard", "tailscale")


def _subnet(value: object) -> str:
    fix = "write a private IPv4 network of /8 to /28, such as 10.77.0.0/16"
    if not isinstance(value, str):
        raise refusal("not a subnet", fix)
    try:
        found = ipaddress.IPv4Network(value)
    except ValueError:
        raise refusal("not a subnet", fix) from None
    if not 8 <= found.prefixlen <= 28:
        raise refusal("a subnet of that size does not serve", fix)
    if not found.is_private or found.is_loopback or found.is_link_local:
        raise refusal("not a private subnet", fix)
    return str(found)


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
    except PydanticCustomError:
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


def _text(title: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "title": title})


Subnet = Annotated[str, BeforeValidator(_subnet), _text("subnet")]
Endpoint = Annotated[str, BeforeValidator(_endpoint), _text("address or address:port")]
HubName = Annotated[str, BeforeValidator(host_name), _text("host name")]
ServerUrl = Annotated[str, BeforeValidator(_url), _text("URL")]
Tag = Annotated[str, BeforeValidator(_tag), _text("tag")]


class Network(Closed):
    """How the hosts reach each other.

    In the file it is a word (`network: wireguard`) or a mapping of the fields below: `{kind: wireguard, port: 51821}`.
    """

    kind: Annotated[Literal["lan", "wireguard", "tailscale"], BeforeValidator(choice("network", KINDS))]
    """`lan`: the addresses they have. `wireguard`: an encrypted network of their own. `tailscale`: a tailnet."""
    subnet: Subnet = WIREGUARD_SUBNET
    """WireGuard: where its addresses come from. One that no host uses for anything else."""
    port: Port = WIREGUARD_PORT
    """WireGuard: the UDP port that every host listens on."""
    hub: HubName | None = None
    """WireGuard: the host through which go those that cannot reach each other. Without it, the controller."""
    auth_key: SecretReference | None = None
    """Tailscale: the auth key, or the secret of an OAuth client, that lets hosts join."""
    login_server: ServerUrl | None = None
    """Tailscale: the Headscale server to join. Without it, Tailscale's own."""
    tags: tuple[Tag, ...] = ()
    """Tailscale: the tags of the hosts."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str | dict | Network):
            raise refusal("not a network", f"choose one of {', '.join(KINDS)}, or write {{kind: wireguard}}")
        return {"kind": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        mapping = handler.resolve_ref_schema(handler(schema))
        return {"anyOf": [{"type": "string", "enum": [*KINDS]}, {**mapping}], "description": mapping["description"]}
