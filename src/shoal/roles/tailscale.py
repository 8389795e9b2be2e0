"""Tailscale: a host gets the program, joins the tailnet, and is known to the others by its address there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from shoal.agent.document import Command, Directory, Document, File, Packages, SecretRef, Service
from shoal.agent.facts import Facts
from shoal.hostlist import compress
from shoal.network.tailscale import INTERFACE, SOON, Tailnet, read_status, tailnet_name, up_flags
from shoal.roles.part import How, Kept, Part
from shoal.roles.stage import Stage
from shoal.roles.tailscale_rented import KEY_THERE, SOURCE, keyring_kept, package_source, rented_machines
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

PACKAGE = "tailscale"
DAEMON = "tailscaled"
SECRET = "network.auth_key"
KEY = "/etc/shoal/tailscale.key"
"""There only while a host joins."""
JOINED = "/etc/shoal/tailscale.joined"
"""The flags we joined with. Not there on a host that somebody else brought into the tailnet."""
FLAGS = "/etc/shoal/tailscaled.env"
DROP_IN = "/etc/systemd/system/tailscaled.service.d/shoal.conf"
USERSPACE = ("--tun=userspace-networking", "--socks5-server=localhost:1055")

NO_PACKAGE = (
    "add Tailscale's package source to the host (its download page has one for every Debian and Ubuntu release), "
    "or install tailscale there by hand"
)
NOT_LET_IN = (
    "make a new auth key, put it where `network.auth_key` says (the secret of an OAuth client also needs "
    "`network.tags`), or log the host in by hand with `tailscale up`"
)

# The secret of an OAuth client makes hosts that wait for approval, unless it says otherwise, and that vanish when they
# are off or do not, as it says. It is read from the file, which goes with this script: no argument ever has it.
JOIN = """\
umask 077
key=$1 more="?ephemeral=$2&preauthorized=true"; shift 2
trap 'rm -f "$key" "$key.new"' EXIT
case $(cat "$key") in
tskey-client-*\\?*) ;;
tskey-client-*) printf '%s%s' "$(cat "$key")" "$more" > "$key.new" && mv "$key.new" "$key" ;;
esac
tailscale up --auth-key="file:$key" "$@"
"""


class TailscalePart(Part):
    """The tailnet, where the file says `network: tailscale`."""

    files: Mapping[str, How] = {JOINED: "text", KEY_THERE: "there"}
    services = (DAEMON,)

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        return (PACKAGE,) if _wanted(spec) and (facts is None or not facts.tailscale) else ()

    def given(self, spec: Spec) -> Mapping[str, str]:
        return {SECRET: spec.network.auth_key} if spec.network.auth_key else {}

    def facts_files(self, spec: Spec) -> Mapping[str, How]:
        return {SOURCE: "text"} if _wanted(spec) and rented_machines(spec) else {}

    def kept(self, spec: Spec) -> Mapping[str, Kept]:
        return keyring_kept(spec) if _wanted(spec) else {}

    def prepare_for(self, spec: Spec, member: Member, everyone: Mapping[str, Facts]) -> Document:
        facts = everyone[member.name]
        if not _wanted(spec) or joined(spec, member, facts):
            return ()
        lacking = member.rented and not facts.tailscale and not _offered(facts)
        source = package_source(everyone.get(members_of(spec)[0].name), facts) if lacking else ()
        return (*source, *join(spec, member, facts))

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        facts = cluster.facts[member.name]
        if _wanted(cluster.spec):
            return {Stage.BASE: daemon(facts), Stage.SERVICES: _for_rented(cluster.spec, member)}
        if _joined_text(facts):
            return {Stage.NODES: leave()}
        there = facts.files.get(KEY_THERE)
        return {Stage.SERVICES: (File(KEY_THERE),)} if there and there.there else {}

    def farewell(self) -> Document:
        return leave()

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        return tuple(_findings(cluster)) if _wanted(cluster.spec) else ()


def joined(spec: Spec, member: Member, facts: Facts) -> bool:
    """Whether the host is in the tailnet as the file says, or by the hand of somebody who knows better."""
    return read_status(facts.tailscale).running and _joined_text(facts) in ("", _text(spec, member))


def join(spec: Spec, member: Member, facts: Facts, *, again: bool = False) -> Document:
    """Bring a host into the tailnet. `again`: with a new key of its own, although it is in it."""
    flags = (*up_flags(spec.network, tailnet_name(spec.cluster, member.name)), "--reset")
    if again or _joined_text(facts) not in ("", _text(spec, member)) or read_status(facts.tailscale).own.expired:
        flags += ("--force-reauth",)
    passing = "true" if member.rented else "false"
    with_key = (
        Directory("/etc/shoal"),
        File(KEY, SecretRef(SECRET), mode=0o600),
        Command("join the tailnet", ("sh", "-c", JOIN, "join", KEY, passing, *flags, "--timeout=60s"), fix=NOT_LET_IN),
        File(KEY),
    )
    # Without a key Tailscale tells an address at which a person logs the host in.
    by_hand = (Command("join the tailnet", ("tailscale", "up", *flags, "--timeout=10s"), fix=NOT_LET_IN),)
    return (
        *(() if facts.tailscale else (Packages((PACKAGE,), fix=NO_PACKAGE),)),
        *daemon(facts),
        *(with_key if spec.network.auth_key else by_hand),
        File(JOINED, _text(spec, member)),
    )


def daemon(facts: Facts) -> Document:
    """tailscaled, on a host without TUN with a network stack of its own."""
    state = ("--state=/var/lib/tailscale/tailscaled.state", "--socket=/run/tailscale/tailscaled.sock")
    flags = () if facts.tun else USERSPACE
    return (
        File(FLAGS, f"# Written by shoal: this host has no TUN.\nFLAGS={' '.join(flags)}\n" if flags else None),
        File(DROP_IN, _drop_in(facts.tun), restarts=(DAEMON,)),
        Service(DAEMON, command=("/usr/sbin/tailscaled", *state, *flags)),
    )


def _drop_in(tun: bool) -> str:
    """Slurm's daemons start at boot when the host has its address: slurmctld takes who does not answer for lost."""
    there = f"ip -o address show dev {INTERFACE} | grep -q inet"
    wait = f'test ! -e {JOINED} || timeout 60 sh -c "until {there}; do sleep 0.2; done" || true'
    own = f"ExecStartPost=/bin/sh -c '{wait}'\n" if tun else f"EnvironmentFile={FLAGS}\n"
    return (
        "# Written by shoal; changes here are lost.\n"
        "[Unit]\nBefore=slurmctld.service slurmd.service\n\n"
        f"[Service]\n{own}"
    )


def leave() -> Document:
    """Out of the tailnet, on a host that we brought into it. One that somebody else brought there stays."""
    out = "tailscale logout; systemctl disable --now tailscaled || true"
    return (
        Command("leave the tailnet", ("sh", "-c", out), unless=("test", "!", "-e", JOINED)),
        *(File(path) for path in (KEY, KEY_THERE, DROP_IN, FLAGS, JOINED)),
    )


def _for_rented(spec: Spec, member: Member) -> Document:
    """On the controller, the key by which it lets rented machines in."""
    if "controller" not in member.roles:
        return ()
    kept = spec.network.auth_key and rented_machines(spec)
    return (File(KEY_THERE, SecretRef(SECRET) if kept else None, mode=0o600),)


def _wanted(spec: Spec) -> bool:
    return spec.network.kind == "tailscale"


def _text(spec: Spec, member: Member) -> str:
    flags = up_flags(spec.network, tailnet_name(spec.cluster, member.name))
    return "# Written by shoal: how this host joined the tailnet.\n" + "".join(f"{flag}\n" for flag in flags)


def _joined_text(facts: Facts) -> str:
    fact = facts.files.get(JOINED)
    return (fact.text if fact else None) or ""


def _offered(facts: Facts) -> bool:
    package = facts.packages.get(PACKAGE)
    return bool(package and (package.installed or package.candidate))


def _findings(cluster: Cluster) -> Iterator[Finding]:
    rented = rented_machines(cluster.spec)
    if rented and not cluster.spec.network.auth_key:
        yield Finding(
            "error",
            "rented machines cannot join the tailnet: nobody is there to log them in",
            compress(rented),
            "give a key: `network: {kind: tailscale, auth_key: env:TS_AUTHKEY}`",
            path="network",
        )
    tailnets = {name: read_status(fact.tailscale) for name, fact in cluster.facts.items()}
    for name, fact in cluster.facts.items():
        yield from _of_host(name, fact, tailnets[name], name in rented)
    hub = tailnets.get(cluster.controller.name, Tailnet())
    strangers = [
        name for name, found in tailnets.items() if hub.running and found.running and not hub.at(found.address)
    ]
    if strangers:
        yield Finding(
            "error",
            "is in the tailnet and the controller does not see it there: another tailnet, or its rules forbid it",
            fix="let the rules of the tailnet connect the members, or log the host out of the other one",
            host=compress(strangers),
        )
    yield from _relayed(cluster, hub)


def _of_host(name: str, fact: Facts, tailnet: Tailnet, rented: bool) -> Iterator[Finding]:
    if not fact.tailscale and not _offered(fact):
        yield Finding("error", "apt offers no package `tailscale` there", fix=NO_PACKAGE, host=name)
    elif _joined_text(fact) and not tailnet.running:
        found = tailnet.problem or ("its key has expired" if tailnet.own.expired else tailnet.state)
        yield Finding(
            "error", "is out of the tailnet", found, f"`shoal up` lets it join again; or {NOT_LET_IN}", host=name
        )
    elif tailnet.own.expires is not None and tailnet.own.expires - fact.clock < SOON:
        days = max(0, int((tailnet.own.expires - fact.clock) / 86400))
        yield Finding(
            "warning",
            "its key in the tailnet ends soon, and the host with it",
            f"in {days} days",
            "run `shoal keys rotate tailscale`; keys of hosts with `tags` do not end",
            host=name,
        )
    if tailnet.running and not tailnet.tun:
        yield Finding(
            # What is rented can be another machine.
            "error" if rented else "warning",
            "has no TUN device: others reach it through the tailnet, it reaches them only through a proxy, and because "
            "of it Slurm listens on all addresses of all hosts, behind their firewall",
            "userspace networking",
            "give the host /dev/net/tun, if it is a container of yours; jobs over several hosts do not work there",
            host=name,
        )


def _relayed(cluster: Cluster, hub: Tailnet) -> Iterator[Finding]:
    """Members that the controller reaches through a relay: some 10 Mbit/s, shared with the world."""
    for name, address in cluster.addresses.items():
        node = hub.at(address) if name != cluster.controller.name else None
        if node is not None and node.way == "relayed":
            yield Finding(
                "warning",
                "the controller reaches it through a relay: slow, and no way for training over several hosts",
                f"relay {node.relay}",
                "let UDP port 41641 in on one of the two, or forward it on their router",
                host=name,
            )
