"""Addresses, ports and firewalls, read from the kernel by netlink and /proc: neither `ip` nor `nft` is needed."""

from __future__ import annotations

import errno
import os
import select
import struct
import time
from _collections_abc import Iterator

from shoal.remote.agent.context import Item
from shoal.remote.agent.fast_stdlib import socket
from shoal.remote.agent.file_io import read_text


def addresses() -> list[Item]:
    """The addresses of the interfaces, asked of the kernel by netlink: no `ip` program is needed."""
    interfaces: list[Item] = []
    largest = interface_mtus()
    for message in netlink_dump(0, 22, bytes(8)):  # RTM_GETADDR
        family, prefix, _, scope, index = struct.unpack_from("=BBBBI", message)
        attributes = netlink_fields(message[8:])
        raw = attributes.get(2, attributes.get(1))  # the local end where there is one, else the address
        if raw and scope not in (253, 254) and family in (socket.AF_INET, socket.AF_INET6):  # not link, not host
            text = socket.inet_ntop(family, raw)
            name, mtu = socket.if_indextoname(index), largest.get(index, 1500)
            interfaces.append({"interface": name, "address": text, "prefix": prefix, "mtu": mtu})
    return interfaces


def interface_mtus() -> dict[int, int]:
    """The MTU of every interface, by its number."""
    sizes = {}
    for message in netlink_dump(0, 18, bytes(16)):  # RTM_GETLINK
        mtu = netlink_fields(message[16:]).get(4)
        if mtu:
            sizes[struct.unpack_from("=i", message, 4)[0]] = struct.unpack("=I", mtu)[0]
    return sizes


def neighbours(proc: str = "/proc/net") -> list[Item]:
    """The machines that answered ARP, without routers: those that the host has talked to on its own segments."""
    routers = set()
    for line in read_text(proc + "/route").splitlines()[1:]:
        words = line.split()
        if len(words) > 2 and words[2] != "00000000":
            routers.add(socket.inet_ntop(socket.AF_INET, struct.pack("=I", int(words[2], 16))))
    lines = [line.split() for line in read_text(proc + "/arp").splitlines()[1:]]
    return [
        {"interface": words[5], "address": words[0]}
        for words in lines
        if len(words) == 6 and int(words[2], 16) & 2 and words[0] not in routers  # 2: it answered
    ]


def firewall() -> str:
    """A firewall beside ours that drops by default: `ufw`, or an nftables chain by its name.

    A chain counts by its policy: `nft inet filter input`. Ours drops only Slurm's ports and does not count. firewalld
    rejects by a rule; its service is checked instead.
    """
    if "\nENABLED=yes" in "\n" + read_text("/etc/ufw/ufw.conf"):
        return "ufw"
    dropping = []
    families = {1: "inet", 2: "ip", 10: "ip6"}
    for message in netlink_dump(12, 0xA04, bytes(4)):  # nftables' GETCHAIN
        attributes = netlink_fields(message[4:])
        hook = netlink_fields(attributes.get(4, b"")).get(1)
        if hook == b"\0\0\0\1" and attributes.get(5) == bytes(4) and message[0] in families:  # input, and drop
            names = [attributes.get(number, b"").rstrip(b"\0").decode("utf-8", "replace") for number in (1, 3)]
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


def port_holder(port: int) -> str:
    """The process that listens on a TCP port; "" when there is none, or none that we can see."""
    sockets = {name for name, at in listening_sockets().items() if at == port}
    for pid in filter(str.isdigit, os.listdir("/proc")) if sockets else ():
        if sockets & open_files(pid):
            return f"{read_text(f'/proc/{pid}/comm').strip()} (pid {pid})"
    return ""


def listens(pid: str) -> bool:
    """Whether a process has a port that others can connect to."""
    return not listening_sockets().keys().isdisjoint(open_files(pid))


def listening_sockets() -> dict[str, int]:
    """The port of every socket that is listened on, by the name the socket has among a process's open files."""
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in read_text("/proc/net/" + table).splitlines()[1:]:
            field = line.split()
            if field[3] == "0A":
                ports[f"socket:[{field[9]}]"] = int(field[1].rpartition(":")[2], 16)
    return ports


def open_files(pid: str) -> set[str]:
    names = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                names.add(os.readlink(f"/proc/{pid}/fd/{name}"))
            except OSError:  # closed while we looked
                continue
    except OSError:  # the process has ended
        pass
    return names


def reach(targets: list[list[object]], seconds: float) -> list[str]:
    """Connect to all `[address, port]` at once. `open` and `refused` mean an answer, `silent` none within
    `seconds`; anything else is the kernel's error."""
    outcomes = [""] * len(targets)
    waiting = {}
    poll = select.poll()
    for index, (address, port) in enumerate(targets):
        link = socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET, socket.SOCK_STREAM)
        link.setblocking(False)
        outcomes[index] = _outcome(link.connect_ex((address, port)))
        if outcomes[index]:
            link.close()
            continue
        waiting[link.fileno()] = (index, link)
        poll.register(link, select.POLLOUT)
    deadline = time.monotonic() + seconds
    while waiting:
        left = deadline - time.monotonic()
        ready = poll.poll(max(0.0, left) * 1000)
        for fd, _ in ready:
            index, link = waiting.pop(fd)
            outcomes[index] = _outcome(link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            poll.unregister(fd)
            link.close()
        if not ready and left <= 0:  # looked once more after the time was over: a busy host comes late to its answers
            break
    for index, link in waiting.values():
        outcomes[index] = "silent"
        link.close()
    return outcomes


def _outcome(error: int) -> str:
    if error == errno.EINPROGRESS:
        return ""
    if error == 0:
        return "open"
    return "refused" if error == errno.ECONNREFUSED else os.strerror(error)
