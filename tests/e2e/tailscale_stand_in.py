#!/usr/bin/python3
"""Stands in for Tailscale where the real programs are not at hand: `tailscale` and `tailscaled` in one file.

It answers like the documented command line of version 1.80, keeps its state on the host, and carries packets between
hosts over a real TUN device, unencrypted. The control server is a directory that all hosts see: `keys/KEY` holds what
an auth key is good for, `nodes/ID` what a host told of itself, `relayed/ID` that packets to it go through a relay.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
import uuid

CONTROL = "/shared/tailnet"
STATE = "/var/lib/tailscale/tailscaled.state"
SOCKET = "/run/tailscale/tailscaled.sock"
DEFAULTS = {"hostname": "", "accept-dns": "true", "advertise-tags": "", "login-server": ""}
OTHERS = ("auth-key", "reset", "force-reauth", "timeout")
PORT = 41641
MTU = 1280


def read(path: str) -> dict:
    try:
        with open(path) as file:
            return dict(json.load(file))
    except (OSError, ValueError):
        return {}


def write(path: str, data: dict, mode: int = 0o644) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    new = f"{path}.{os.getpid()}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        json.dump(data, file)
    os.rename(new, path)


def nodes() -> dict:
    folder = CONTROL + "/nodes"
    return {name: read(folder + "/" + name) for name in sorted(os.listdir(folder)) if "." not in name}


def fail(text: str) -> None:
    print(text, file=sys.stderr)
    sys.exit(1)


# ---- tailscale


def client(words: list) -> None:
    verb, arguments = (words[0] if words else ""), words[1:]
    if not os.path.exists(SOCKET):
        fail("failed to connect to local tailscaled; it doesn't appear to be running")
    if verb == "up":
        up(flags_of(arguments))
    elif verb == "logout":
        state = read(STATE)
        if state.get("id") and os.path.exists(CONTROL + "/nodes/" + state["id"]):
            os.unlink(CONTROL + "/nodes/" + state["id"])
        write(STATE, {}, 0o600)
    elif verb == "status" and arguments == ["--json"]:
        print(json.dumps(status(), indent=2))
    elif verb == "version":
        print("1.80.2")
    else:
        fail("tailscale: unknown subcommand or flag: " + " ".join(words))


def flags_of(arguments: list) -> dict:
    found = {}
    for word in arguments:
        name, _, value = word.lstrip("-").partition("=")
        if name not in DEFAULTS and name not in OTHERS:
            fail(f"flag provided but not defined: -{name}")
        found[name] = value or "true"
    return found


def up(flags: dict) -> None:
    state = read(STATE)
    before = state.get("prefs", {})
    forgotten = [name for name, value in before.items() if name not in flags and value != DEFAULTS[name]]
    if forgotten and "reset" not in flags:
        said = " ".join(f"--{name}={before[name]}" for name in forgotten)
        fail(
            "Error: changing settings via 'tailscale up' requires mentioning all\nnon-default flags. To proceed, "
            "either re-run your command with --reset or\nuse the command below to explicitly mention the current "
            f"value of\nall non-default settings:\n\n\ttailscale up {said}"
        )
    prefs = {name: flags.get(name, default) for name, default in DEFAULTS.items()}
    logged_in = backend_state(state) == "Running"
    if not logged_in or "force-reauth" in flags:
        login(state, prefs, flags.get("auth-key", ""))
    state["prefs"] = prefs
    node = read(CONTROL + "/nodes/" + state["id"])
    node.update(hostname=prefs["hostname"] or os.uname().nodename)
    write(CONTROL + "/nodes/" + state["id"], node)
    write(STATE, state, 0o600)
    end = time.monotonic() + float(flags.get("timeout", "60s").rstrip("s"))
    while state["tun"] and node["ip"] not in subprocess.run(["ip", "addr"], capture_output=True, text=True).stdout:
        if time.monotonic() > end:
            fail('timeout waiting for Tailscale service to enter a Running state; check health with "tailscale status"')
        time.sleep(0.1)


def login(state: dict, prefs: dict, key: str) -> None:
    """Be let in by the control server, with the address of before where there was one."""
    if key.startswith("file:"):
        with open(key[5:]) as file:
            key = file.read().strip()
    if not key:
        print("\nTo authenticate, visit:\n\n\thttps://login.invalid/a/0123456789\n", file=sys.stderr)
        fail('timeout waiting for Tailscale service to enter a Running state; check health with "tailscale status"')
    secret, _, query = key.partition("?")
    if secret.startswith("tskey-client-") and not prefs["advertise-tags"]:
        fail("backend error: oauth authkeys require --advertise-tags")
    good = read(CONTROL + "/keys/" + os.path.basename(secret))
    if not good or good.get("revoked") or (good.get("used") and not good.get("reusable")):
        fail("backend error: invalid key: unable to validate API key")
    if secret.startswith("tskey-client-") and "preauthorized=true" not in query:
        fail("backend error: the machine waits for approval")
    good["used"] = good.get("used", 0) + 1
    write(CONTROL + "/keys/" + os.path.basename(secret), good)
    state.setdefault("id", uuid.uuid4().hex)
    with open(CONTROL + "/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = nodes()
        node = known.get(state["id"], {})
        taken = {other.get("ip") for other in known.values()}
        free = (str(ip) for ip in ipaddress.ip_network("100.64.0.0/24").hosts() if str(ip) not in taken)
        tags = [tag for tag in prefs["advertise-tags"].split(",") if tag]
        # The keys of tagged machines do not end, unless the test says so.
        expires = good.get("expires") or ("" if tags else "2099-01-01T00:00:00Z")
        node.update(ip=node.get("ip") or next(free), key=uuid.uuid4().hex, tags=tags, expires=expires, expired=False)
        node["ephemeral"] = "ephemeral=true" in query
        node["endpoint"] = read(STATE).get("endpoint") or own_address()
        write(CONTROL + "/nodes/" + state["id"], node)
    state["tun"] = os.path.exists("/run/tailscale/tun")


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def backend_state(state: dict) -> str:
    node = read(CONTROL + "/nodes/" + state["id"]) if state.get("id") else {}
    return "Running" if node and not node.get("expired") else "NeedsLogin"


def status() -> dict:
    state = read(STATE)
    now = backend_state(state)
    found = {"Version": "1.80.2-stand-in", "TUN": os.path.exists("/run/tailscale/tun"), "BackendState": now}
    known = nodes() if state.get("id") else {}
    own = known.pop(state.get("id"), {})
    seen = read("/run/tailscale/seen")
    found["TailscaleIPs"] = [own["ip"]] if own else None
    found["Self"] = told(own, True, "") if own else {}
    found["Self"]["Online"] = now == "Running"
    found["Health"] = []
    found["Peer"] = {
        "nodekey:" + node["key"]: told(
            node, name in seen, "" if os.path.exists(CONTROL + "/relayed/" + name) else node["endpoint"]
        )
        for name, node in known.items()
        if now == "Running"
    }
    return found


def told(node: dict, active: bool, endpoint: str) -> dict:
    found = {
        "HostName": node.get("hostname", ""),
        "TailscaleIPs": [node["ip"]],
        "Tags": node["tags"],
        "CurAddr": f"{endpoint}:{PORT}" if active and endpoint else "",
        "Relay": "fra",
        "Online": not node["expired"],
        "Active": active,
        "Expired": node["expired"],
    }
    if node["expires"]:
        found["KeyExpiry"] = node["expires"]
    return found


# ---- tailscaled


def daemon(words: list) -> None:
    os.makedirs("/run/tailscale", exist_ok=True)
    for name in ("tun", "seen"):
        if os.path.exists("/run/tailscale/" + name):
            os.unlink("/run/tailscale/" + name)
    tun = None
    if "--tun=userspace-networking" not in words:
        tun = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH", b"tailscale0", 0x0001 | 0x1000))  # TUN, no packet information
        open("/run/tailscale/tun", "w").close()
    with open(SOCKET, "w"):
        pass
    notify("READY=1")
    try:
        carry(tun)
    finally:
        os.unlink(SOCKET)


def notify(text: str) -> None:
    where = os.environ.get("NOTIFY_SOCKET", "")
    if where:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as pipe:
            pipe.connect("\0" + where[1:] if where[0] == "@" else where)
            pipe.send(text.encode())


def carry(tun: int | None) -> None:
    """Packets from the device to the host that has their address, and back."""
    wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    wire.bind(("0.0.0.0", PORT))
    peers, names, address, looked, seen = {}, {}, "", 0.0, {}
    while True:
        if time.monotonic() - looked > 0.3:
            looked = time.monotonic()
            state = read(STATE)
            known = nodes() if backend_state(state) == "Running" else {}
            own = known.pop(state.get("id"), {}) if known else {}
            peers = {node["ip"]: node["endpoint"] for node in known.values() if "ip" in node and not node["expired"]}
            names = {node["ip"]: name for name, node in known.items() if "ip" in node}
            if own.get("ip", "") != address:
                address = own.get("ip", "")
                configure(tun, address)
            write("/run/tailscale/seen", {names[ip]: 1 for ip in seen if ip in names})
        ready, _, _ = select.select([wire, *([tun] if tun is not None else [])], [], [], 0.3)
        for source in ready:
            if source is wire:
                packet = wire.recv(65535)
                if tun is not None and address and len(packet) > 20:
                    os.write(tun, packet)
            else:
                packet = os.read(tun, 65535)
                target = socket.inet_ntoa(packet[16:20]) if packet[0] >> 4 == 4 else ""
                if target in peers:
                    seen[target] = 1
                    wire.sendto(packet, (peers[target], PORT))


def configure(tun: int | None, address: str) -> None:
    if tun is None:
        return
    lines = [["ip", "addr", "flush", "dev", "tailscale0"]]
    if address:
        lines += [
            ["ip", "link", "set", "tailscale0", "mtu", str(MTU), "up"],
            ["ip", "addr", "add", address + "/32", "dev", "tailscale0"],
            ["ip", "route", "replace", "100.64.0.0/10", "dev", "tailscale0", "src", address],
        ]
    for line in lines:
        subprocess.run(line, check=True)


if __name__ == "__main__":
    os.makedirs(CONTROL + "/nodes", exist_ok=True)
    (daemon if os.path.basename(sys.argv[0]) == "tailscaled" else client)(sys.argv[1:])
