"""SSH tunnels into containers that have neither TUN nor open ports: two loopbacks joined over one SSH port.

    controller                                     container
    127.0.0.1:29001 ───────────────────────────▶  127.0.0.1:29001   slurmd
    slurmctld:6817  ◀───────────────────────────  127.0.0.1:6817
    share server:22 ◀───────────────────────────  127.0.0.1:6901    copies of shares

The controller opens the connection and keeps it open. For Slurm the node is at 127.0.0.1 and its own port, on both
sides. All functions are pure and return text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.agent.document import HEADER, daemon_unit
from shoal.agent.facts import Facts
from shoal.remote import program_text

LOOPBACK = "127.0.0.1"
FIRST_PORT = 29001
"""Of slurmd in containers, one each: on the controller they all listen on the same address."""
FIRST_SHARE_PORT = 6901
DIRECTORY = "/etc/shoal/tunnels"
KEY = f"{DIRECTORY}/id_ed25519"
PUBLIC_KEY = f"{KEY}.pub"
RECORD = f"{DIRECTORY}/nodes"
"""The containers with a tunnel, so that a later run removes those that are gone."""
UNIT = "/etc/systemd/system/shoal-tunnel@.service"
PROGRAM = "/usr/local/lib/shoal/tunnel"
END = "/etc/shoal/tunnel-end"
"""In the container: the only program that the controller's key may start."""
SSH_CONFIG = "/etc/ssh/ssh_config.d/50-shoal-tunnel.conf"
HOST_KEYS = tuple(f"/etc/ssh/ssh_host_{kind}_key.pub" for kind in ("ed25519", "ecdsa", "rsa"))
AUTHORIZED = "/root/.ssh/authorized_keys"
BLOCK = "tunnel"


@dataclass(frozen=True)
class ReverseForward:
    """A port of the container's loopback that is forwarded to a host on the controller's side."""

    port: int
    address: str
    there: int


@dataclass(frozen=True)
class Tunnel:
    """The tunnel to one container."""

    node: str
    host: str
    port: int
    """Where its SSH server answers."""
    slurmd: int
    """The port of its slurmd, the same on both sides."""
    back: tuple[ReverseForward, ...]
    host_keys: tuple[str, ...] = ()


def needs_tunnel(network: str, facts: Facts) -> bool:
    """Whether a host is a container that only a tunnel can reach.

    On a plain network, one that we reached at its own address needs none.
    """
    if facts.init == "systemd" or facts.tun or facts.connected_at is None:
        return False
    return network != "lan" or all(address.address != facts.connected_at.address for address in facts.addresses)


def choose_ports(names: Iterable[str], known: Mapping[str, int]) -> dict[str, int]:
    """A port for the slurmd of each container; those in `known` stay."""
    ports: dict[str, int] = {}
    used_ports = {*known.values()}
    for name in names:
        ports[name] = known.get(name) or next(n for n in range(FIRST_PORT, 32000) if n not in used_ports)
        used_ports.add(ports[name])
    return ports


def conf_file(node: str) -> str:
    return f"{DIRECTORY}/{node}.conf"


def known_hosts_file(node: str) -> str:
    return f"{DIRECTORY}/{node}.known_hosts"


def service(node: str) -> str:
    return f"shoal-tunnel@{node}"


def ssh_conf(tunnel: Tunnel) -> str:
    """The ssh configuration of one tunnel. Both ends detect a lost connection within seconds."""
    back = "".join(f"RemoteForward {LOOPBACK}:{b.port} {bracketed(b.address)}:{b.there}\n" for b in tunnel.back)
    return (
        f"{HEADER}Host tunnel\n"
        f"HostName {tunnel.host}\n"
        f"Port {tunnel.port}\n"
        "User root\n"
        f"IdentityFile {KEY}\n"
        "IdentitiesOnly yes\n"
        f"UserKnownHostsFile {known_hosts_file(tunnel.node)}\n"
        "GlobalKnownHostsFile /dev/null\n"
        "StrictHostKeyChecking yes\n"
        "BatchMode yes\n"
        "ServerAliveInterval 5\n"
        "ServerAliveCountMax 3\n"
        "ExitOnForwardFailure yes\n"
        f"LocalForward {LOOPBACK}:{tunnel.slurmd} {LOOPBACK}:{tunnel.slurmd}\n"
        f"{back}"
    )


def known_hosts(tunnel: Tunnel) -> str:
    """The container's host keys, read over the connection that set it up."""
    address = tunnel.host if tunnel.port == 22 else f"[{tunnel.host}]:{tunnel.port}"
    return HEADER + "".join(f"{address} {key}\n" for key in tunnel.host_keys)


def program() -> str:
    """A program that keeps one tunnel open, also while its container does not accept us yet, or is gone.

    It first ends an earlier connection, which would keep the ports. It does not connect to a released container: its
    address may belong to another machine. It checks every 30 s whether Slurm starts the node again, which then has a
    minute to register.
    """
    return program_text("tunnel.sh", DIRECTORY=DIRECTORY)


def unit() -> str:
    """The service of one tunnel."""
    order = {"After": "network.target", "Before": "slurmctld.service"}
    return daemon_unit("The way to Slurm in container %i", f"{PROGRAM} %i", 1, order)


def end_script() -> str:
    """What the key starts in the container: `hold` records the sshd process that has the ports, `clear` ends it."""
    return program_text("tunnel_end.sh")


def authorized(public_key: str, tunnel: Tunnel) -> str:
    """The authorized_keys line of the controller: for its ports and that script only."""
    listen = "".join(f',permitlisten="{LOOPBACK}:{back.port}"' for back in tunnel.back)
    opens = f'permitopen="{LOOPBACK}:{tunnel.slurmd}"'
    return f'restrict,port-forwarding{listen},{opens},command="/bin/sh {END}" {" ".join(public_key.split()[:2])}\n'


def ssh_config(tunnel: Tunnel) -> str | None:
    """In the container: SSH to a share's server goes through the tunnel. None without shares."""
    ways = [
        f"Host {back.address}\n    HostName {LOOPBACK}\n    Port {back.port}\n    HostKeyAlias {back.address}\n"
        for back in tunnel.back
        if back.there == 22
    ]
    return HEADER + "".join(ways) if ways else None


def record(nodes: Iterable[str]) -> str:
    return HEADER + "".join(f"{node}\n" for node in sorted(nodes))


def recorded(text: str) -> tuple[str, ...]:
    return tuple(line for line in text.splitlines() if line and not line.startswith("#"))


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
