"""Tailscale: hosts get the package, join the tailnet, and use their addresses there.

A host whose package sources lack Tailscale gets Tailscale's own, as its installer adds it. Rented machines join with a
key that `shoal up` left on the controller, and get the controller's package source: it may be a mirror.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.agent.document import Command, Directory, Document, File, Packages, SecretRef, Service, render_unit
from shoal.agent.facts import Facts
from shoal.hostlist import compress
from shoal.network.tailscale import EXPIRES_SOON_S, INTERFACE, Tailnet, read_status, tailnet_name, up_flags
from shoal.remote import python_command
from shoal.remote.tailnet_join import LOGIN_FIX, SOURCE_OPTION
from shoal.roles.component import Cluster, Component, FileQuery, SharedSecret, Stage
from shoal.roles.elastic import SETTINGS
from shoal.roles.rented import rented_containers
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members, rented_members
from shoal.spec.model import Spec

PACKAGE = "tailscale"
DAEMON = "tailscaled"
CONTROL_SERVER = "https://controlplane.tailscale.com"
SECRET = "network.auth_key"
KEY = "/etc/shoal/tailscale.key"
"""Exists only while a host joins."""
JOINED = "/etc/shoal/tailscale.joined"
"""The flags with which Shoal joined. Does not exist on a host that an administrator joined."""
FLAGS = "/etc/shoal/tailscaled.env"
DROP_IN = "/etc/systemd/system/tailscaled.service.d/shoal.conf"
USERSPACE = ("--tun=userspace-networking", "--socks5-server=localhost:1055")

PACKAGE_FIX = "add Tailscale's package source to the host (see its download page), or install tailscale there by hand"
SOURCE_ADDRESS = "https://pkgs.tailscale.com/stable/{system}/{codename}"
"""Of the key and the list for a release; see `remote/tailnet_join.py`."""
SOURCE_SYSTEMS = ("debian", "ubuntu", "raspbian")
CONTROLLER_KEY = f"{SETTINGS}/tailscale.key"
"""On the controller: the auth key for rented machines. Only root can read it."""
SOURCE = "/etc/apt/sources.list.d/tailscale.list"
KEYRING = "/usr/share/keyrings/tailscale-archive-keyring.gpg"
"""Both as Tailscale's download page names them."""
KEYRING_COPY = "the keyring of Tailscale's packages"
LOGOUT = ("tailscale", "logout")
SURE_LOGOUT = "timeout 10 tailscale logout || { systemctl restart tailscaled; timeout 30 tailscale logout; }"
"""A logout takes a second. It has been seen to hang for minutes, until tailscaled was started again."""


class TailscaleComponent(Component):
    """The tailnet, with `network: tailscale`."""

    files: Mapping[str, FileQuery] = {JOINED: "text", CONTROLLER_KEY: "there"}
    services = (DAEMON,)

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        return (PACKAGE,) if _is_used(spec) and (facts is None or not facts.tailscale) else ()

    def user_secrets(self, spec: Spec) -> Mapping[str, str]:
        return {SECRET: spec.network.auth_key} if spec.network.auth_key else {}

    def fact_files(self, spec: Spec) -> Mapping[str, FileQuery]:
        return {SOURCE: "text"} if _is_used(spec) and rented_machines(spec) else {}

    def shared_secrets(self, spec: Spec) -> Mapping[str, SharedSecret]:
        """The controller's keyring; it is never generated."""
        if not _is_used(spec) or not rented_machines(spec):
            return {}
        return {KEYRING_COPY: SharedSecret(members(spec)[0].name, KEYRING, 0, text=False)}

    def prepare_among(self, spec: Spec, member: Member, everyone: Mapping[str, Facts]) -> Document:
        facts = everyone[member.name]
        if not _is_used(spec):
            return ()
        if is_joined(spec, member, facts):
            # tailscaled does not notice that it was deleted on the server.
            return join(spec, member, facts, again=True) if _is_lost(member, everyone) else ()
        needs_source = not facts.tailscale and not _has_package(facts)
        copied = package_source(everyone.get(members(spec)[0].name), facts) if needs_source and member.rented else ()
        repository = copied or (original_source(facts) if needs_source else ())
        return (*repository, *join(spec, member, facts))

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        facts = cluster.facts[member.name]
        if _is_used(cluster.spec):
            return {Stage.BASE: daemon(facts), Stage.SERVICES: _for_rented(cluster.spec, member)}
        if facts.text(JOINED):
            return {Stage.NODES: self.removal()}
        return {Stage.SERVICES: (File(CONTROLLER_KEY),)} if facts.has_file(CONTROLLER_KEY) else {}

    def removal(self) -> Document:
        """Leaves the tailnet, unless an administrator joined the host."""
        out = f"{SURE_LOGOUT}; systemctl disable --now tailscaled || true"
        return (
            Command("leave the tailnet", ("sh", "-c", out), unless=("test", "!", "-e", JOINED)),
            *map(File, (KEY, CONTROLLER_KEY, DROP_IN, FLAGS, JOINED)),
        )

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        return tuple(_findings(cluster)) if _is_used(cluster.spec) else ()


def is_joined(spec: Spec, member: Member, facts: Facts) -> bool:
    """Whether the host is in the tailnet with the spec's flags, or an administrator joined it."""
    return read_status(facts.tailscale).running and facts.text(JOINED) in ("", _join_record(spec, member))


def join(spec: Spec, member: Member, facts: Facts, *, again: bool = False) -> Document:
    """Join the tailnet. `again`: with a new node key, although the host is in it."""
    flags = (*up_flags(spec.network, tailnet_name(spec.cluster, member.name)), "--reset")
    other_flags = facts.text(JOINED) not in ("", _join_record(spec, member))
    if again or other_flags or read_status(facts.tailscale).own.expired:
        flags += ("--force-reauth",)
    key = KEY if spec.network.auth_key else "-"
    options = (spec.network.login_server or CONTROL_SERVER, key, "true" if member.rented else "false")
    command = Command("join the tailnet", python_command("tailnet_join", *options, *flags))
    key_file = (Directory("/etc/shoal"), File(KEY, SecretRef(SECRET), mode=0o600)) if spec.network.auth_key else ()
    return (
        *(() if facts.tailscale else (Packages((PACKAGE,), fix=PACKAGE_FIX),)),
        *daemon(facts),
        *key_file,
        command,
        *((File(KEY),) if key_file else ()),
        File(JOINED, _join_record(spec, member)),
    )


def daemon(facts: Facts) -> Document:
    """tailscaled, with userspace networking on a host without TUN."""
    state = ("--state=/var/lib/tailscale/tailscaled.state", "--socket=/run/tailscale/tailscaled.sock")
    flags = () if facts.tun else USERSPACE
    return (
        File(FLAGS, f"# Written by shoal: this host has no TUN.\nFLAGS={' '.join(flags)}\n" if flags else None),
        File(DROP_IN, _drop_in(facts.tun), restarts=(DAEMON,)),
        Service(DAEMON, command=("/usr/sbin/tailscaled", *state, *flags)),
    )


def _drop_in(tun: bool) -> str:
    """Slurm's daemons wait for the address at boot: slurmctld would mark a silent node DOWN."""
    has_address = f"ip -o address show dev {INTERFACE} | grep -q inet"
    wait = f'test ! -e {JOINED} || timeout 60 sh -c "until {has_address}; do sleep 0.2; done" || true'
    return render_unit(
        Unit={"Before": "slurmctld.service slurmd.service"},
        Service={"ExecStartPost": f"/bin/sh -c '{wait}'"} if tun else {"EnvironmentFile": FLAGS},
    )


def _for_rented(spec: Spec, member: Member) -> Document:
    """On the controller, the auth key for rented machines."""
    if "controller" not in member.roles:
        return ()
    needed = spec.network.auth_key and rented_machines(spec)
    return (File(CONTROLLER_KEY, SecretRef(SECRET) if needed else None, mode=0o600),)


def _is_used(spec: Spec) -> bool:
    return spec.network.kind == "tailscale"


def _join_record(spec: Spec, member: Member) -> str:
    flags = up_flags(spec.network, tailnet_name(spec.cluster, member.name))
    return "# Written by shoal: how this host joined the tailnet.\n" + "".join(f"{flag}\n" for flag in flags)


def _is_lost(member: Member, everyone: Mapping[str, Facts]) -> bool:
    """Whether the host is in a tailnet where no other host sees it: the server may have deleted it."""
    tailnets = {name: read_status(facts.tailscale) for name, facts in everyone.items()}
    own_tailnet = tailnets.pop(member.name)
    others = [tailnet for tailnet in tailnets.values() if tailnet.running]
    has_joined = bool(everyone[member.name].text(JOINED)) and not member.rented  # a rented one may have joined just now
    return has_joined and bool(others) and not any(tailnet.at(own_tailnet.address) for tailnet in others)


def _has_package(facts: Facts) -> bool:
    package = facts.packages.get(PACKAGE)
    return bool(package and (package.installed or package.candidate))


def _findings(cluster: Cluster) -> Iterator[Finding]:
    rented = rented_machines(cluster.spec)
    if rented and not cluster.spec.network.auth_key:
        what = "rented machines cannot join the tailnet without an auth key"
        fix = "set a key: `network: {kind: tailscale, auth_key: env:TS_AUTHKEY}`"
        yield Finding("error", what, compress(rented), fix, path="network")
    tailnets = {name: read_status(fact.tailscale) for name, fact in cluster.facts.items()}
    for name, fact in cluster.facts.items():
        yield from _host_findings(name, fact, tailnets[name], name in rented)
    hub = tailnets.get(cluster.controller.name, Tailnet())
    running_hosts = [name for name, tailnet in tailnets.items() if hub.running and tailnet.running]
    unseen = [name for name in running_hosts if not hub.at(tailnets[name].address)]
    if unseen:
        what = "is in a tailnet, and the controller does not see it there: another tailnet, or its rules forbid it"
        fix = "allow connections between members in the tailnet's rules, or log the host out of the other tailnet"
        yield Finding("error", what, fix=fix, host=compress(unseen))
    yield from _relay_findings(cluster, hub)
    yield from _tag_findings(cluster, tailnets)


def _host_findings(name: str, fact: Facts, tailnet: Tailnet, rented: bool) -> Iterator[Finding]:
    if not fact.tailscale and not _has_package(fact):
        added = bool(original_source(fact))
        fix = "`shoal up` adds Tailscale's package source" if added else PACKAGE_FIX
        yield Finding("info" if added else "error", "apt has no package `tailscale`", fix=fix, host=name)
    elif fact.text(JOINED) and not tailnet.running:
        cause = tailnet.problem or ("its key has expired" if tailnet.own.expired else tailnet.state)
        yield Finding("error", "is not in the tailnet", cause, f"`shoal up` joins it again; or {LOGIN_FIX}", host=name)
    elif tailnet.own.expires is not None and tailnet.own.expires - fact.clock < EXPIRES_SOON_S:
        days = max(0, int((tailnet.own.expires - fact.clock) / 86400))
        what = "its key in the tailnet expires soon, and then the host is not reachable"
        fix = "run `shoal keys rotate tailscale`; keys of hosts with `tags` do not expire"
        yield Finding("warning", what, f"in {days} days", fix, host=name)
    if tailnet.running and not tailnet.tun:
        what = (
            "has no TUN device: others reach it through the tailnet, it reaches them only through a proxy, and because "
            "of it Slurm listens on all addresses of all hosts, behind their firewall"
        )
        fix = "give the host /dev/net/tun, if it is a container of yours; jobs over several hosts do not work there"
        # A rented machine can be replaced by another type.
        yield Finding("error" if rented else "warning", what, "userspace networking", fix, host=name)


def _relay_findings(cluster: Cluster, hub: Tailnet) -> Iterator[Finding]:
    """Members that the controller reaches through a relay: about 10 Mbit/s, shared with other tailnets."""
    for name, address in cluster.addresses.items():
        node = hub.at(address) if name != cluster.controller.name else None
        if node is not None and node.way == "relayed":
            what = "the controller reaches it through a relay, too slow for training over several hosts"
            fix = "open UDP port 41641 on one of the two, or forward it on their router"
            yield Finding("warning", what, f"relay {node.relay}", fix, host=name)


def _tag_findings(cluster: Cluster, tailnets: Mapping[str, Tailnet]) -> Iterator[Finding]:
    """Hosts without the tags of the file: on Headscale they get those of the auth key."""
    tags = set(cluster.spec.network.tags)
    joined_hosts = [name for name, tailnet in tailnets.items() if tailnet.running and cluster.facts[name].text(JOINED)]
    if untagged := [name for name in joined_hosts if not tags <= {*tailnets[name].own.tags}]:
        other_tags = sorted({tag for name in untagged for tag in tailnets[name].own.tags})
        what = f"lacks tags of `network.tags`: {', '.join(sorted(tags))}"
        fix = "create an auth key with these tags, then run `shoal keys rotate tailscale`"
        yield Finding("warning", what, f"it has {', '.join(other_tags) or 'none'}", fix, host=compress(untagged))


def rented_machines(spec: Spec) -> tuple[str, ...]:
    """The rented nodes that join a network as hosts do. Containers are behind a tunnel instead."""
    inside = rented_containers(spec)
    return tuple(member.name for member in rented_members(spec) if member.name not in inside)


def controller_spec(spec: Spec) -> Spec:
    """The spec with the controller's own file as the auth key, for the rental service."""
    if spec.network.kind != "tailscale":
        return spec
    return spec.model_copy(update={"network": spec.network.model_copy(update={"auth_key": f"file:{CONTROLLER_KEY}"})})


def original_source(facts: Facts) -> Document:
    """Tailscale's own package source for the host's release: signed key and list. Empty where it has none."""
    if facts.os_id not in SOURCE_SYSTEMS or not facts.os_codename:
        return ()
    address = SOURCE_ADDRESS.format(system=facts.os_id, codename=facts.os_codename)
    add = python_command("tailnet_join", SOURCE_OPTION, address, KEYRING, SOURCE)
    certificates = Packages(("ca-certificates",))
    return (certificates, Command("add Tailscale's package source", add, unless=("test", "-s", SOURCE)))


def package_source(controller: Facts | None, machine: Facts) -> Document:
    """The controller's package source, for a machine without one; empty where the controller has none either."""
    if controller is None or not (text := controller.text(SOURCE)):
        return ()
    old, new = (f"/{facts.os_id} {facts.os_codename} " for facts in (controller, machine))
    keyring = (File(KEYRING, SecretRef(KEYRING_COPY)),) if KEYRING in text else ()
    return (*keyring, File(SOURCE, text.replace(old, new)))
