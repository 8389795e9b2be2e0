"""This host's network interfaces, and the one towards the other nodes.

NCCL and Gloo guess an interface from its name and from what the host's own name resolves to: often a container bridge,
or 127.0.1.1. The kernel knows the route: the source address of a connection to another node is on the right interface.
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
    """Whether this name or address means the local host on every host."""
    if host in ("localhost", "localhost.localdomain"):
        return True
    return is_address(host) and ipaddress.ip_address(plain_address(host)).is_loopback


def is_address(host: str) -> bool:
    """Whether this is an address rather than a name."""
    try:
        ipaddress.ip_address(plain_address(host))
    except ValueError:
        return False
    return True


def plain_address(address: str) -> str:
    """An address without the prefix that IPv6 sockets give to IPv4 addresses, and without its scope."""
    return address.removeprefix("::ffff:").partition("%")[0]


def local_addresses() -> list[tuple[str, str]]:
    """Every address of this host with its interface: [("lo", "127.0.0.1"), ("eth0", "10.0.0.5")]."""
    return _ipv4_addresses() + _ipv6_addresses()


def interface_of(address: str) -> str:
    """The interface that has this address; empty if none has."""
    return next((name for name, entries in local_addresses() if entries == plain_address(address)), "")


def source_address(host: str) -> str:
    """The address from which this host connects to another; empty without a route. Sends nothing."""
    try:
        entries = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, sockaddr in entries:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(sockaddr)
                return plain_address(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def resolve(name: str) -> list[str]:
    """The addresses of another host, without loopback addresses."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = [plain_address(str(sockaddr[0])) for *_, sockaddr in entries]
    return [address for address in dict.fromkeys(addresses) if not is_loopback(address)]


def nccl_gloo_variables(interface: str) -> dict[str, str]:
    """The variables that keep NCCL, Gloo and TensorPipe on this interface."""
    settings = {
        "NCCL_SOCKET_IFNAME": f"={interface}",  # "=": without it NCCL takes every name with this prefix
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
    }
    # NCCL opens a single socket on interfaces without a PCI device, such as tunnels; 4 x 4 sockets use their bandwidth.
    if interface != "lo" and not Path(f"/sys/class/net/{interface}/device").exists():
        settings |= {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
    return settings


def _ipv4_addresses() -> list[tuple[str, str]]:
    size = 16384
    buffer = array.array("B", b"\0" * size)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iL", size, buffer.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(sock, _SIOCGIFCONF, request))[0]
    data = buffer.tobytes()[:used]
    entries = []
    for start in range(0, used, _IFREQ_SIZE):
        name = data[start : start + 16].split(b"\0", 1)[0].decode()
        entries.append((name.partition(":")[0], socket.inet_ntoa(data[start + 20 : start + 24])))
    return entries


def _ipv6_addresses() -> list[tuple[str, str]]:
    table = Path("/proc/net/if_inet6")
    rows = (line.split() for line in table.read_text().splitlines()) if table.exists() else ()
    return [(row[-1], str(ipaddress.IPv6Address(bytes.fromhex(row[0])))) for row in rows]
