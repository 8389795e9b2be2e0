"""The sandbox's network: a bridge and subnet for each site, a cable to each host, NAT to the world.

    world ── machine ──┬── bridge of site a ── hosts          reachable from the cluster's other sites
                       └── bridge of site b ── hosts          behind NAT: opens connections, takes none

The machine itself reaches every host. Containers are on a site of their own, kept apart from each other as well: into
each leads one port of the machine's, which goes to its SSH server. Each host has a network namespace made here, so its
address outlives a reboot.
"""

# Files here are small and local: reading one takes less time than a thread would.
# ruff: noqa: ASYNC240
from __future__ import annotations

import hashlib
import ipaddress
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from shoal.errors import ProviderError
from shoal.local_files import locked, write_atomic
from shoal.sandbox.layout import CONTAINERS, HostRecord, Layout, Site, other_subnets, site_of
from shoal.sandbox.programs import call
from shoal.spec.member import WIREGUARD_SUBNET, Shape

POOL = ipaddress.IPv4Network("10.64.0.0/10")
PROC = Path("/proc/sys")
KERNEL_SETTINGS = {
    "net/ipv4/ip_forward": 1,
    # Every host's systemd counts against root's share of these; 128, a usual default, is enough for twenty hosts.
    "fs/inotify/max_user_instances": 4096,
    "fs/inotify/max_user_watches": 262144,
}
SAVED_SETTINGS = Path("/run/shoal-kernel-settings")
"""The values before the first cluster."""
MACHINE_LOCK = Path("/run")
"""Locked while something that all clusters share is changed; a directory, so no lock file stays behind."""


async def ensure_sites(layout: Layout, names: Iterable[str]) -> dict[str, Site]:
    """Give every named site a subnet and a bridge, and the cluster its firewall table."""
    async with locked(MACHINE_LOCK):
        sites = await choose_sites(layout, names)
        for site in sites.values():
            await _ensure_bridge(layout, site)
        raise_settings()
        await open_ports(layout, sites)
    return sites


async def open_ports(layout: Layout, sites: dict[str, Site]) -> None:
    """Write the firewall table: every container is reached by the port that is its own."""
    await call("nft", "-f", "-", stdin=render_table(layout, sites.values(), layout.hosts().values()))


def outer_address(layout: Layout) -> str:
    """Where containers are reached: the machine's address on the open site, where there is one."""
    sites = sorted(layout.sites().values(), key=lambda site: site.behind_nat)
    return gateway(sites[0])


def choose_subnet(seed: str, taken: Iterable[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """A /24 of our pool that overlaps with none of `taken`; the same seed begins its search at the same place."""
    # The private network that a cluster on these hosts has by itself is no place for the hosts' own.
    used = [*taken, ipaddress.IPv4Network(WIREGUARD_SUBNET)]
    count = 1 << (24 - POOL.prefixlen)
    start = int(hashlib.sha256(seed.encode()).hexdigest(), 16) % count
    for step in range(count):
        base = int(POOL.network_address) + ((start + step) % count << 8)
        subnet = ipaddress.IPv4Network((base, 24))
        if not any(subnet.overlaps(other) for other in used):
            return subnet
    raise ProviderError(f"no free subnet is left in {POOL}", hint="take other sandbox clusters down")


def gateway(site: Site) -> str:
    """The machine's address on the site."""
    return str(ipaddress.IPv4Network(site.subnet)[1])


def free_address(site: Site, taken: Iterable[str]) -> str:
    """The first address of the site that no host has."""
    used = {*taken, gateway(site)}
    for address in ipaddress.IPv4Network(site.subnet).hosts():
        if str(address) not in used:
            return str(address)
    raise ProviderError(f"site {site.name} is full: 253 hosts", hint="put further hosts on another site")


def new_host(
    name: str, shape: Shape, image: Path, sites: Mapping[str, Site], hosts: Collection[HostRecord], renter: str = ""
) -> HostRecord:
    """The record of a new host beside `hosts`, with the first index and address that none of them has."""
    indexes, addresses = {host.index for host in hosts}, [host.address for host in hosts]
    return HostRecord(
        name=name,
        index=next(n for n in range(len(indexes) + 1) if n not in indexes),
        address=free_address(sites[site_of(shape)], addresses),
        image=str(image),
        host_key="",
        shape=shape,
        renter=renter,
    )


def render_table(layout: Layout, sites: Iterable[Site], hosts: Iterable[HostRecord] = ()) -> str:
    """The cluster's nftables rules, as text that replaces those that were there."""
    ordered = sorted(sites, key=lambda site: site.index)
    open_bridges = ", ".join(f'"{layout.bridge(site)}"' for site in ordered if site.name != CONTAINERS)
    forward, nat = [], []
    for site in ordered:
        bridge = layout.bridge(site)
        allowed = f'"{bridge}"' if site.behind_nat else f"{{ {open_bridges} }}"
        forward.append(f'        oifname "{bridge}" iifname != {allowed} drop comment "site {site.name}"')
        nat.append(f'        ip saddr {site.subnet} oifname != "{bridge}" masquerade comment "site {site.name}"')
    gateways = ", ".join(gateway(site) for site in ordered)
    inward = [
        f"        ip daddr {{ {gateways} }} tcp dport {host.outer_port} "
        f'dnat ip to {host.address}:22 comment "{host.name}"'
        for host in hosts
        if host.shape.container
    ]
    passing = ["        ct status dnat accept"] if inward else []
    bridges = ", ".join(f'"{layout.bridge(site)}"' for site in ordered)
    return "\n".join(
        [
            f"table inet {layout.table} {{}}",
            f"delete table inet {layout.table}",
            f"table inet {layout.table} {{",
            "    chain forward {",
            "        type filter hook forward priority filter; policy accept;",
            # The metadata service of a cloud gives out this machine's keys; hosts must not get them.
            f"        iifname {{ {bridges} }} ip daddr 169.254.0.0/16 drop",
            "        ct state established,related accept",
            *passing,
            *forward,
            "    }",
            *(_inward_chains(inward) if inward else ()),
            "    chain postrouting {",
            "        type nat hook postrouting priority srcnat; policy accept;",
            *nat,
            "    }",
            "}",
            "",
        ]
    )


def _inward_chains(rules: list[str]) -> Iterator[str]:
    """For packets of other hosts, and for those of the machine itself."""
    for name, hook in (("prerouting", "prerouting priority dstnat"), ("output", "output priority -100")):
        yield f"    chain {name} {{"
        yield f"        type nat hook {hook}; policy accept;"
        yield from rules
        yield "    }"


async def plug_in(layout: Layout, host: HostRecord, site: Site) -> None:
    """Make the host's network namespace and its cable to the bridge. Finishes what was half made.

    The cable of a virtual machine is a tap device; the namespace is its kernel's.
    """
    if host.shape.vm:
        await _plug_in_tap(layout.link(host), layout.bridge(site))
        return
    space, link = layout.namespace(host.name), layout.link(host)
    if not Path("/run/netns", space).exists():
        await call("ip", "netns", "add", space)
    if not Path("/sys/class/net", link).exists():
        await call("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
    await call("ip", "link", "set", link, "master", layout.bridge(site), "up")
    if host.shape.container:
        await call("ip", "link", "set", link, "type", "bridge_slave", "isolated", "on")
    commands = [
        "link set lo up",
        # Derived from the IP address: a new host with an old address then needs no ARP update.
        f"link set eth0 address {hardware_address(layout, host.address)} up",
        f"addr replace {host.address}/{ipaddress.IPv4Network(site.subnet).prefixlen} dev eth0",
        f"route replace default via {gateway(site)}",
    ]
    await call("ip", "-n", space, "-batch", "-", stdin="\n".join(commands) + "\n")


async def _plug_in_tap(link: str, bridge: str) -> None:
    if not Path("/sys/class/net", link).exists():
        await call("ip", "tuntap", "add", "dev", link, "mode", "tap")
    await call("ip", "link", "set", link, "master", bridge, "up")


def hardware_address(layout: Layout, name: str) -> str:
    """A fixed address for the network card of a host or bridge, so that neighbours remember the right one."""
    digest = hashlib.sha256(f"{layout.id}/{name}".encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (0x02, *digest[:5]))


async def set_cable(layout: Layout, host: HostRecord, connected: bool) -> None:
    """Connect or disconnect the host's cable."""
    await call("ip", "link", "set", layout.link(host), "up" if connected else "down")


async def unplug(layout: Layout, host: HostRecord) -> None:
    """Remove the host's cable and namespace."""
    await _remove("link", layout.link(host))
    await _remove("netns", layout.namespace(host.name))


async def remove_all(layout: Layout) -> None:
    """Remove every link, namespace and rule of the cluster, found by their names."""
    async with locked(MACHINE_LOCK):
        for path in sorted(Path("/sys/class/net").iterdir()):
            if path.name.startswith((layout.link_prefix, layout.bridge_prefix)):
                await _remove("link", path.name)
        for path in sorted(Path("/run/netns").glob(f"{layout.prefix}*")):
            await _remove("netns", path.name)
        tables = await call("nft", "list", "tables")
        for family in ("inet", "ip"):  # a simulated cloud has the other one
            if f"table {family} {layout.table}\n" in tables:
                await call("nft", "delete", "table", family, layout.table)
        others = [line for line in tables.splitlines() if line.startswith("table inet shoal_")]
        if others in ([], [f"table inet {layout.table}"]):
            restore_settings()


async def choose_sites(layout: Layout, names: Iterable[str]) -> dict[str, Site]:
    """The cluster's sites, each with a subnet that this machine does not use yet."""
    sites = layout.sites()
    missing = sorted(set(names) - set(sites))
    if not missing:
        return sites
    taken = [ipaddress.IPv4Network(subnet) for subnet in other_subnets(layout.cache)]
    if shutil.which("ip"):  # systems without it have hosts in a virtual machine of the container engine
        taken += _networks(await call("ip", "-j", "-4", "addr"), await call("ip", "-j", "-4", "route"))
    for name in missing:
        subnet = choose_subnet(f"{layout.id}/{name}", taken)
        index = 1 + max((site.index for site in sites.values()), default=-1)
        sites[name] = Site(name, index, str(subnet))
        taken.append(subnet)
    layout.save_sites(sites)
    return sites


def _networks(addresses: str, routes: str) -> list[ipaddress.IPv4Network]:
    """The networks in the output of `ip -j addr` and `ip -j route`."""
    texts = [f"{a['local']}/{a['prefixlen']}" for link in json.loads(addresses) for a in link.get("addr_info", ())]
    texts += [route["dst"] for route in json.loads(routes) if route.get("dst", "default") != "default"]
    return [ipaddress.IPv4Network(text, strict=False) for text in texts]


async def _ensure_bridge(layout: Layout, site: Site) -> None:
    bridge = layout.bridge(site)
    if not Path("/sys/class/net", bridge).exists():
        # Without an address of its own a bridge has that of one of its cables, and another when that cable goes: then
        # its hosts lose their gateway until they ask for it again.
        address = hardware_address(layout, f"bridge {site.name}")
        await call("ip", "link", "add", bridge, "address", address, "type", "bridge", "forward_delay", "0")
    await call("ip", "addr", "replace", f"{gateway(site)}/24", "dev", bridge)
    await call("ip", "link", "set", bridge, "up")


async def _remove(kind: str, name: str) -> None:
    """Remove a `link` or a namespace (`netns`)."""
    if Path("/sys/class/net" if kind == "link" else "/run/netns", name).exists():
        await call("ip", kind, "del", name)


def raise_settings(proc: Path = PROC, saved: Path = SAVED_SETTINGS) -> None:
    """Raise the settings that are too low, and save their values. The caller holds MACHINE_LOCK."""
    current = {name: int((proc / name).read_text()) for name in KERNEL_SETTINGS}
    if not saved.exists():
        write_atomic(saved, json.dumps(current))
    for name, value in KERNEL_SETTINGS.items():
        if current[name] < value:
            (proc / name).write_text(f"{value}\n")


def restore_settings(proc: Path = PROC, saved: Path = SAVED_SETTINGS) -> None:
    """Restore the saved values. A setting that something else has changed meanwhile stays."""
    if not saved.exists():
        return
    for name, value in json.loads(saved.read_text()).items():
        if name in KERNEL_SETTINGS and value < KERNEL_SETTINGS[name] == int((proc / name).read_text()):
            (proc / name).write_text(f"{value}\n")
    saved.unlink()
