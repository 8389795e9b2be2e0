"""What the kernel says about the network, asked directly: neither `ip` nor `nft` has to be there."""

from __future__ import annotations

import struct

from shoal.agent.program.disk import read_text
from shoal.agent.program.fast_stdlib import socket
from shoal.agent.program.wire import Item

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Iterator


def addresses() -> list[Item]:
    """The addresses of the interfaces, asked of the kernel by netlink: no `ip` program is needed."""
    found: list[Item] = []
    largest = packet_sizes()
    for message in netlink_dump(0, 22, bytes(8)):  # RTM_GETADDR
        family, prefix, _, scope, index = struct.unpack_from("=BBBBI", message)
        parts = netlink_fields(message[8:])
        raw = parts.get(2, parts.get(1))  # the local end where there is one, else the address
        if raw and scope not in (253, 254) and family in (socket.AF_INET, socket.AF_INET6):  # not link, not host
            text = socket.inet_ntop(family, raw)
            name, mtu = socket.if_indextoname(index), largest.get(index, 1500)
            found.append({"interface": name, "address": text, "prefix": prefix, "mtu": mtu})
    return found


def packet_sizes() -> dict[int, int]:
    """The MTU of every interface, by its number."""
    sizes = {}
    for message in netlink_dump(0, 18, bytes(16)):  # RTM_GETLINK
        mtu = netlink_fields(message[16:]).get(4)
        if mtu:
            sizes[struct.unpack_from("=i", message, 4)[0]] = struct.unpack("=I", mtu)[0]
    return sizes


def firewall() -> str:
    """Who else decides what comes in, and keeps out what nobody let in: `ufw`, or an nftables chain by its name.

    A chain is told by its policy: `nft inet filter input`. Ours, which drops nothing but Slurm's ports, is not among
    them. firewalld keeps its refusal in a rule; it is told by its service.
    """
    if "\nENABLED=yes" in "\n" + read_text("/etc/ufw/ufw.conf"):
        return "ufw"
    dropping = []
    families = {1: "inet", 2: "ip", 10: "ip6"}
    for message in netlink_dump(12, 0xA04, bytes(4)):  # nftables' GETCHAIN
        parts = netlink_fields(message[4:])
        hook = netlink_fields(parts.get(4, b"")).get(1)
        if hook == b"\0\0\0\1" and parts.get(5) == bytes(4) and message[0] in families:  # input, and drop
            names = [parts.get(number, b"").rstrip(b"\0").decode("utf-8", "replace") for number in (1, 3)]
            dropping.append(" ".join(["nft", families[message[0]], *names]))
    return min(dropping, key=lambda name: name.startswith("nft ip6"), default="")


def netlink_dump(protocol: int, kind: int, body: bytes) -> Iterator[bytes]:
    """Every message by which the kernel answers a question; none where it does not answer."""
    try:
        link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    except OSError:
        return
    try:
        link.settimeout(5.0)
        link.sendto(struct.pack("=IHHII", 16 + len(body), kind, 0x301, 1, 0) + body, (0, 0))  # request and dump
        while True:
            data = link.recv(1 << 17)
            while data:
                size, kind = struct.unpack_from("=IH", data)
                if kind in (2, 3):  # an error, or the end
                    return
                yield data[16:size]
                data = data[(size + 3) & ~3 :]
    except OSError:
        return
    finally:
        link.close()


def netlink_fields(data: bytes) -> dict[int, bytes]:
    fields = {}
    while len(data) >= 4:
        length, name = struct.unpack_from("=HH", data)
        if length < 4:
            break
        fields[name & 0x3FFF], data = data[4:length], data[(length + 3) & ~3 :]
    return fields
