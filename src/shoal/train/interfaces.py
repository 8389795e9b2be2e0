"""This host's network interfaces, and the one that leads to the other nodes.

NCCL and Gloo guess an interface from names and from what the host's own name resolves to: as often as not a bridge of
containers, or 127.0.1.1. The kernel knows better: the source address of a connection to another node is on the
interface that leads there.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFCONF = 0x8912
_IFREQ_SIZE = 40


def is_loopback(host: str) -> bool:
    """Whether this name or address means "this very host" wherever it is used."""
    if host in ("localhost", "localhost.localdomain"):
        return True
    return is_address(host) and ipaddress.ip_address(plain(host)).is_loopback


def is_address(host: str) -> bool:
    """Whether this is an address rather than a name."""
    try:
        ipaddress.ip_address(plain(host))
    except ValueError:
        return False
    return True


def plain(address: str) -> str:
    """An address as people write it: an IPv4 one that came through an IPv6 socket loses its prefix."""
    return address.removeprefix("::ffff:").partition("%")[0]


def local_addresses() -> list[tuple[str, str]]:
    """Every address of this host with its interface: [("lo", "127.0.0.1"), ("eth0", "10.0.0.5")]."""
    return _ipv4_addresses() + _ipv6_addresses()


def interface_of(address: str) -> str:
    """The interface that has this address, empty when none has."""
    return next((name for name, found in local_addresses() if found == plain(address)), "")


def source_address(towards: str) -> str:
    """The address this host sends from when it talks to another. Nothing is sent. Empty when there is no route."""
    try:
        found = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return plain(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def resolve(name: str) -> list[str]:
    """The addresses of another host, those that mean "this host" left out."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = [plain(str(where[0])) for *_, where in found]
    return [address for address in dict.fromkeys(addresses) if not is_loopback(address)]


def settings_for(interface: str) -> dict[str, str]:
    """The variables that keep NCCL, Gloo and TensorPipe on this interface."""
    settings = {
        "NCCL_SOCKET_IFNAME": f"={interface}",  # "=": without it NCCL takes every name that begins so
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
    }
    # NCCL opens one socket only where it finds no PCI vendor: that is every tunnel. Four times four fill one.
    if interface != "lo" and not Path(f"/sys/class/net/{interface}/device").exists():
        settings |= {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
    return settings


def _ipv4_addresses() -> list[tuple[str, str]]:
    room = 16384
    buffer = array.array("B", b"\0" * room)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iL", room, buffer.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(sock, _SIOCGIFCONF, request))[0]
    data = buffer.tobytes()[:used]
    found = []
    for start in range(0, used, _IFREQ_SIZE):
        name = data[start : start + 16].split(b"\0", 1)[0].decode()
        found.append((name.partition(":")[0], socket.inet_ntoa(data[start + 20 : start + 24])))
    return found


def _ipv6_addresses() -> list[tuple[str, str]]:
    table = Path("/proc/net/if_inet6")
    rows = (line.split() for line in table.read_text().splitlines()) if table.exists() else ()
    return [(row[-1], str(ipaddress.IPv6Address(bytes.fromhex(row[0])))) for row in rows]
