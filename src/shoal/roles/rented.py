"""Rented nodes: in slurm.conf before any is rented, with minimum shape and idle time; and their watchdog. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher

from shoal.agent.document import Directory, Document, File, Service, render_unit
from shoal.agent.facts import Facts
from shoal.cloud.providers import abilities
from shoal.cloud.providers.api import Abilities, api_address
from shoal.cloud.providers.prices import InstanceShape, known_types, shape_of
from shoal.containers.images import node_features
from shoal.remote import program_text
from shoal.remote.runner.unpacked_image import ARCHITECTURES
from shoal.roles.current_conf import CurrentConf
from shoal.roles.images import uses_oci
from shoal.slurm.conf import PORTS, gpu_type
from shoal.slurm.model import Node, NodeGpu, PowerSaving
from shoal.spec.finding import Finding, Level, closest
from shoal.spec.member import Member
from shoal.spec.members import partitions, provider_accounts, rented_members, rented_sets
from shoal.spec.model import Spec
from shoal.spec.rental import RentedSet

PROGRAMS = "/usr/local/lib/shoal/elastic"
"""The programs that slurmctld starts to resume and suspend nodes."""
SMALLEST_SHAPE = InstanceShape(cpus=1, memory_mb=1024)
"""The shape of a machine of which nothing is known."""
UNKNOWN_BOOT_S = 1800
SIMILARITY = 0.75
"""Above this ratio two words count as a misspelling of each other: `edgegpu` and `megagpu` do not."""
WATCHDOG = "/usr/local/lib/shoal/watchdog"
TIMER = "shoal-watchdog.timer"
END = "/usr/local/lib/shoal/end-machine"
NOTICE, NOTICE_UNIT = "/usr/local/lib/shoal/preemption-notice", "shoal-notice.service"
JOB_UNITS = (
    *("slurmd.service", "slurmstepd.scope", "munge.service", "sssd.service"),
    *("shoal-wireguard.service", "tailscaled.service", "network-online.target", "remote-fs.target"),
)
"""What jobs need to save their work and to leave: at a shutdown it stops after NOTICE_UNIT."""
NOTICE_REASON = "the provider takes this machine away"
"""The reason of a node that its machine drained: the service warns its jobs."""
UNITS = "/etc/systemd/system"
CONTROLLER_TIMEOUT_S = 3600
"""After this silence of the controller the machine shuts down."""
RELEASE_TIMEOUT_S = 900
"""The same for a node that Slurm has suspended, or does not know any more."""
POWEROFF = "systemctl poweroff"
CONTAINER_POWEROFF = "kill -TERM 1"
"""A container without systemd stops with its first process."""


def rented_nodes(spec: Spec) -> tuple[Node, ...]:
    """Every node that may be rented; the same whether or not it exists, so that slurmctld's configuration stays."""
    nodes = []
    for nodeset in rented_sets(spec).values():
        shape = minimum_shape(spec, nodeset)
        gpus = tuple(NodeGpu(shape.gpu, f"/dev/nvidia{number}") for number in range(shape.gpus))
        image_features = rented_image_features(spec, nodeset)
        nodes += [
            Node(
                name,
                name,
                name,
                cpus=shape.cpus,
                cores_per_socket=shape.cpus,
                memory_mb=shape.memory_mb,
                gpus=gpus,
                shards=nodeset.shards * len(gpus),
                mps=nodeset.mps * len(gpus),
                features=(nodeset.name, *nodeset.features, *image_features),
                weight=nodeset.weight,
                cloud=True,
            )
            for name in nodeset.nodes
        ]
    return tuple(nodes)


def minimum_shape(spec: Spec, nodeset: RentedSet) -> InstanceShape:
    """What every machine of a rented nodeset has at least. The spec's values override what is known of types.

    The GPU is Slurm's type; empty where the offers differ.
    """
    shapes = (_shape(spec, offer.provider, offer.type) for offer in nodeset.offers)
    known_shapes = list(filter(None, shapes)) or [SMALLEST_SHAPE]
    kinds = {gpu_type(shape.gpu) if shape.gpu else "" for shape in known_shapes}
    return InstanceShape(
        cpus=nodeset.cpus or min(shape.cpus for shape in known_shapes),
        memory_mb=nodeset.memory_mb or min(shape.memory_mb for shape in known_shapes),
        gpus=min(shape.gpus for shape in known_shapes) if nodeset.gpus is None else nodeset.gpus,
        gpu=kinds.pop() if len(kinds) == 1 else "",
    )


def rented_image_features(spec: Spec, nodeset: RentedSet) -> tuple[str, ...]:
    """Slurm's features of nodes that run jobs in images, before they are rented; containers run none.

    Where a CPU type is not known the nodes have those of all types, until a machine joins and shows its own.
    """
    if not uses_oci(spec) or _kinds_of(spec, nodeset) == {True}:
        return ()
    types = cpu_types(spec, nodeset) or ARCHITECTURES
    return tuple(dict.fromkeys(feature for machine in types for feature in node_features(machine)))


def cpu_types(spec: Spec, nodeset: RentedSet) -> tuple[str, ...]:
    """The CPU types that machines of a nodeset may have, in the kernel's words; none where one is not known."""
    shapes = [_shape(spec, offer.provider, offer.type) for offer in nodeset.offers]
    types = ["aarch64" if shape.arch == "arm64" else shape.arch for shape in shapes if shape]
    return tuple(dict.fromkeys(types)) if len(types) == len(shapes) else ()


def power_saving(spec: Spec) -> PowerSaving | None:
    """Slurm's power saving; None without rented nodesets."""
    sets = rented_sets(spec)
    if not sets:
        return None
    kinds = {provider_accounts(spec)[name].kind or name for nodeset in sets.values() for name in nodeset.accounts}
    boots = [kind_abilities.boot_s if (kind_abilities := _abilities(kind)) else UNKNOWN_BOOT_S for kind in kinds]
    return PowerSaving(PROGRAMS, max(boots))


def rented_ports(spec: Spec) -> tuple[str, ...]:
    """What a provider's firewall must admit to rented nodes: SSH, and the network's port or Slurm's."""
    kind = spec.network.kind
    if kind == "wireguard":
        return "tcp:22", f"udp:{spec.network.port}"
    return ("tcp:22", *(f"tcp:{port}" for port in PORTS)) if kind == "lan" else ("tcp:22",)


def suspend_time(spec: Spec, partition: str) -> int | None:
    """When idle nodes of a partition are released: the longest `idle` of its nodesets, as Slurm has one value only."""
    sets, inside = rented_sets(spec), partitions(spec)[partition].nodesets
    return max((sets[name].idle for name in inside if name in sets), default=None)


def present_rentals(spec: Spec, facts: Mapping[str, Facts]) -> tuple[Member, ...]:
    """The rented nodes that exist: those with facts."""
    return tuple(member for member in rented_members(spec) if member.name in facts)


def addressed_rentals(spec: Spec, facts: Mapping[str, Facts], before: CurrentConf) -> tuple[str, ...]:
    """Rented nodes without facts that have an address.

    With WireGuard each node has a permanent address, so that members know it before it is rented.
    """
    assigns_addresses = spec.network.kind == "wireguard"
    without_facts = [member.name for member in rented_members(spec) if member.name not in facts]
    return tuple(name for name in without_facts if assigns_addresses or name in before.addresses)


def rented_containers(spec: Spec) -> tuple[str, ...]:
    """Rented nodes that are containers: reached through a tunnel, at a port in slurm.conf."""
    sets = [nodeset for nodeset in rented_sets(spec).values() if _kinds_of(spec, nodeset) == {True}]
    return tuple(name for nodeset in sets for name in nodeset.nodes)


def _kinds_of(spec: Spec, nodeset: RentedSet) -> set[bool]:
    """Whether the machines of a nodeset are containers; both values where its offers differ."""
    kinds = (_abilities(provider_accounts(spec)[name].kind or name) for name in nodeset.accounts)
    return {bool(kind and kind.container) for kind in kinds}


def rented_findings(spec: Spec) -> Iterator[Finding]:
    """Problems of rented nodesets, before anything is rented."""
    sets = rented_sets(spec)
    for nodeset in sets.values():
        for level, what, evidence, fix in _nodeset_problems(spec, nodeset):
            name = nodeset.name
            yield Finding(level, f"nodeset `{name}`: {what}", evidence, fix, path=f"nodesets.{name}")
    for name, partition in partitions(spec).items():
        times = {inside: sets[inside].idle for inside in partition.nodesets if inside in sets}
        if len(set(times.values())) > 1:
            longest = max(times, key=lambda inside: times[inside])
            what = f"Slurm has one idle time for a partition, so all nodes wait as long as {longest}"
            evidence = ", ".join(f"{inside} {seconds} s" for inside, seconds in times.items())
            fix = "give them the same `idle`, or a partition each"
            yield Finding("warning", f"partition `{name}`: {what}", evidence, fix, path=f"partitions.{name}")


def _nodeset_problems(spec: Spec, nodeset: RentedSet) -> Iterator[tuple[Level, str, str, str]]:
    """The level, the problem, what was found, and the fix."""
    kinds = _kinds_of(spec, nodeset)
    if len(kinds) > 1:
        what = "some of its offers are containers and some are machines, and Slurm must know beforehand which"
        yield "error", what, ", ".join(nodeset.accounts), "give each kind a nodeset of its own"
    elif kinds == {True}:
        what = "because of it Slurm listens on all addresses of all hosts, not only on the network's"
        yield "info", what, "rented containers, which connect to slurmctld through a tunnel", ""
    unknown = [f"{o.type} of {o.provider}" for o in nodeset.offers if _shape(spec, o.provider, o.type) is None]
    if uses_oci(spec) and kinds == {True}:
        what = "jobs in images do not run there"
        yield "info", what, "rented containers", "use `--env` there, or rent virtual machines for them"
    elif uses_oci(spec) and unknown:
        what = "the CPU type of its machines is not known, so jobs in images of any type may rent them"
        yield "info", what, ", ".join(unknown), ""
    if unknown and not (nodeset.cpus and nodeset.memory_mb):
        what = "the shape of this machine is not known, so Slurm counts on very little"
        yield "warning", what, ", ".join(unknown), "set its minimum: `cpus: 8`, `memory: 60G`, `gpus: 1`"
    for account, type in dict.fromkeys((offer.provider, offer.type) for offer in nodeset.offers if offer.type):
        if like := _likely_type(_base_type(type), known_types(provider_accounts(spec)[account].kind or account)):
            what = "Shoal does not know this machine type; with a wrong name every order fails"
            fix = f"did you mean `{like}`? `shoal offers --provider {account}` lists the types"
            yield "warning", what, f"{type} of {account}", fix


def _base_type(type: str) -> str:
    """A type without its count (`8x NVIDIA H200`) and without added GPUs (`n1-standard-8+nvidia-t4:2`)."""
    return re.sub(r"^[0-9]+x ", "", type).partition("+")[0]


def _likely_type(type: str, candidates: frozenset[str]) -> str | None:
    """The known type that the user has probably misspelt.

    Providers have more types than we know. Types differ by a number or by whole words; a misspelt one has the numbers
    of the right one and similar words.
    """
    pieces = _split_type(type)
    split = {other: _split_type(other) for other in candidates}
    similar = [
        other
        for other, other_pieces in split.items()
        if len(other_pieces) == len(pieces) and all(map(_similar, pieces, other_pieces))
    ]
    return None if type in candidates else closest(type, sorted(similar))


def _split_type(type: str) -> list[str]:
    """Words and numbers: `H20O-sxm5` is h 200 sxm 5, as an O after digits is read as a zero."""
    plain = re.sub(r"(?<=[0-9])o+", lambda match: "0" * len(match[0]), type.lower())
    return re.findall(r"[a-z]+|[0-9]+", plain)


def _similar(word: str, other: str) -> bool:
    return word == other or (not word.isdigit() and SequenceMatcher(None, word, other).ratio() > SIMILARITY)


def _shape(spec: Spec, account: str, type: str | None) -> InstanceShape | None:
    return shape_of(provider_accounts(spec)[account].kind or account, type) if type else None


def _abilities(kind: str) -> Abilities | None:
    """What a provider can do; None for a third-party one that is not installed here."""
    try:
        return abilities(kind)
    except (LookupError, ImportError):
        return None


def spot_notice(spec: Spec, account: str, node: str) -> Document:
    """How a spot machine of an account learns that it is taken away: where it reads that, or by its shutdown."""
    login = provider_accounts(spec).get(account)
    kind = _abilities(login.kind or account) if login else None
    if kind is None or not kind.notice_s:
        return ()
    return notice_watcher(node, kind.notice_url) if kind.notice_url else shutdown_watcher(node, kind.notice_s)


def notice_watcher(node: str, url: str) -> Document:
    """Drains the node of a spot machine when its provider takes it away: lists of machines show that too late."""
    unit = render_unit(
        Unit={"Description": "Waits for the provider's notice that it takes this machine away"},
        Service={
            "ExecStart": f"/usr/bin/python3 -I -B {NOTICE} {url} {node} '{NOTICE_REASON}'",
            "Restart": "on-failure",
            "RestartSec": 5,
        },
        Install={"WantedBy": "multi-user.target"},
    )
    return _notice_service("preemption_notice", unit)


def shutdown_watcher(node: str, seconds: int) -> Document:
    """Drains the node of a spot machine that is told to shut down, and holds that until its jobs have left."""
    unit = render_unit(
        Unit={
            "Description": "Lets jobs save their work before this machine shuts down",
            "After": " ".join(JOB_UNITS),
        },
        Service={
            "Type": "oneshot",
            "RemainAfterExit": "yes",
            "ExecStart": "/bin/true",
            "ExecStop": f"/usr/bin/python3 -I -B {NOTICE} {node} '{NOTICE_REASON}' {seconds}",
            "TimeoutStopSec": seconds + 30,
        },
        Install={"WantedBy": "multi-user.target"},
    )
    return _notice_service("shutdown_notice", unit)


def _notice_service(program: str, unit: str) -> Document:
    return (
        Directory("/usr/local/lib/shoal"),
        File(NOTICE, program_text(program), mode=0o755, restarts=(NOTICE_UNIT,)),
        File(f"{UNITS}/{NOTICE_UNIT}", unit, restarts=(NOTICE_UNIT,)),
        Service(NOTICE_UNIT),
    )


def end_program(spec: Spec, account: str) -> tuple[str, ...]:
    """The program that ends the bill of an account's machines from inside; empty where there is none."""
    login = provider_accounts(spec).get(account)
    kind = _abilities(login.kind or account) if login else None
    if login is None or kind is None or not kind.end_program:
        return ()
    program, address, *arguments = kind.end_program
    return program, api_address(login.url or "", address), *arguments


def watchdog(node: str, until: int, *, systemd: bool = True, end: tuple[str, ...] = ()) -> Document:
    """Shuts a machine down when the controller is gone, Slurm has released the node, or its time is over.

    `until` is when its time is over, as a Unix time; 0 is never. Some providers still bill a machine that is shut down;
    `end` is the program that ends the bill, and its arguments. Where it may not, the machine is shut down all the same.
    """
    off = POWEROFF if systemd else CONTAINER_POWEROFF
    if end:
        off = f"python3 -I -B {END} {' '.join(end[1:])} || {off}"
    program: Document = (Directory("/usr/local/lib/shoal"), File(WATCHDOG, script(node, until, off), mode=0o755))
    program += (File(END, program_text(end[0]), mode=0o755),) if end else ()
    if not systemd:
        loop = f"while :; do sleep 60; {WATCHDOG}; done"
        return (*program, Service("shoal-watchdog", command=("/bin/sh", "-c", loop)))
    service = render_unit(
        Unit={"Description": "Looks whether this rented machine is still wanted"},
        Service={"Type": "oneshot", "ExecStart": WATCHDOG},
    )
    timer = render_unit(
        Unit={"Description": "Looks every minute whether this rented machine is still wanted"},
        Timer={"OnActiveSec": 60, "OnUnitActiveSec": 60, "AccuracySec": 5},
        Install={"WantedBy": "timers.target"},
    )
    units = (File(f"{UNITS}/shoal-watchdog.service", service), File(f"{UNITS}/{TIMER}", timer, restarts=(TIMER,)))
    return (*program, *units, Service(TIMER))


def script(node: str, until: int, off: str = POWEROFF, marks: str = "/run/shoal-watchdog") -> str:
    """Checks once whether the machine is still needed, and shuts it down with the command `off` when it is not."""
    timeouts = {"CONTROLLER_TIMEOUT_S": CONTROLLER_TIMEOUT_S, "RELEASE_TIMEOUT_S": RELEASE_TIMEOUT_S}
    return program_text("watchdog.sh", NODE=node, UNTIL=until, POWEROFF=off, MARKS=marks, **timeouts)
