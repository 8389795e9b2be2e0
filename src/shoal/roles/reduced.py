"""Nodes in reduced mode: containers without systemd, TUN, mounts and open ports, as some providers rent out.

Such a node is found by its facts, so that a container of one's own works as well as a rented one. Its daemons run under
Shoal's own supervisor, the controller holds a tunnel to it, jobs there have one node, and shares are copied. It has a
slurm.conf of its own, with itself as the only node: what its kernel does not allow is not taken from the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.agent.document import Block, Command, Directory, Document, File, Item, Service
from shoal.agent.facts import Facts
from shoal.jobs.model import JOBS_DIRECTORY
from shoal.jobs.staging import END_PROGRAM, job_end
from shoal.network.tunnel import (
    AUTHORIZED,
    BLOCK,
    DIRECTORY,
    END,
    FIRST_SHARE_PORT,
    HOST_KEYS,
    KEY,
    LOOPBACK,
    PROGRAM,
    PUBLIC_KEY,
    RECORD,
    SSH_CONFIG,
    UNIT,
    Back,
    Tunnel,
    authorized,
    conf_file,
    end_script,
    known_hosts,
    known_hosts_file,
    needs_tunnel,
    program,
    record,
    recorded,
    service,
    ssh_conf,
    ssh_config,
    unit,
)
from shoal.roles.in_force import CGROUP_CONF, GRES_CONF, HOSTS, HOSTS_BLOCK, SLURM_CONF
from shoal.roles.part import How, Part
from shoal.roles.shares import shares, text_of
from shoal.roles.stage import Stage
from shoal.slurm.conf import SLURMCTLD_PORT, SPOOL_DIRECTORY, cgroup_conf, gres_conf, slurm_conf
from shoal.slurm.model import ClusterConf, Node, Partition
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

SSH_PORT = 22
MAKE_KEY = 'test -s "$1" || exec ssh-keygen -q -t ed25519 -N "" -C "shoal tunnels" -f "$1"'


class Reduced(Part):
    """The tunnels on the controller, and their other ends."""

    files: Mapping[str, How] = dict.fromkeys((PUBLIC_KEY, RECORD, *HOST_KEYS), "text")
    in_containers = True
    by_members = True

    def prepare_for(self, spec: Spec, member: Member, everyone: Mapping[str, Facts]) -> Document:
        """The controller's key, which the containers must know."""
        needed = any(needs_tunnel(spec.network.kind, facts) for facts in everyone.values())
        if "controller" not in member.roles or not needed or text_of(everyone.get(member.name), PUBLIC_KEY):
            return ()
        return (
            Directory("/etc/shoal"),
            Directory(DIRECTORY, mode=0o700),
            Command("make a key for tunnels", ("sh", "-c", MAKE_KEY, "sh", KEY), unless=("test", "-s", PUBLIC_KEY)),
        )

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        if "controller" in member.roles:
            return {Stage.SERVICES: tuple(_tunnels(cluster))}
        tunnel = cluster.tunnels.get(member.name)
        return {Stage.BASE: tuple(_other_end(cluster, tunnel))} if tunnel else {}

    def farewell(self) -> Document:
        return (
            Command("end the tunnels", ("sh", "-c", _FAREWELL, "sh", RECORD), unless=("test", "!", "-e", RECORD)),
            *(File(path) for path in (RECORD, UNIT, PROGRAM, KEY, PUBLIC_KEY, END, SSH_CONFIG)),
            Block(AUTHORIZED, BLOCK, ""),
        )

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        return tuple(
            Finding(
                "info",
                "is a container without TUN and open ports: its jobs have one node, and `srun` from elsewhere does not "
                "reach it; use sbatch or `shoal run`",
                f"partition {', '.join(p.name for p in cluster.conf.partitions if name in p.nodes)}",
                host=name,
            )
            for name in cluster.tunnels
        )


def tunnels(
    spec: Spec,
    nodes: Mapping[str, Facts],
    ports: Mapping[str, int],
    addresses: Mapping[str, str],
    controller: str,
    one_address: bool,
) -> dict[str, Tunnel]:
    """The tunnels to these containers. Whoever keeps a share has a port in each of them."""
    servers = dict.fromkeys(share.server for share in shares(spec) if share.server in addresses)
    # From loopback to loopback: slurmctld takes where a rented node calls from for its address.
    back = [Back(SLURMCTLD_PORT, addresses.get(controller, "") if one_address else LOOPBACK, SLURMCTLD_PORT)]
    back += [Back(FIRST_SHARE_PORT + n, addresses[name], SSH_PORT) for n, name in enumerate(servers)]
    found = {}
    for name, facts in nodes.items():
        if facts.door is not None:
            keys = tuple(" ".join(text_of(facts, path).split()[:2]) for path in HOST_KEYS if text_of(facts, path))
            found[name] = Tunnel(name, facts.door.address, facts.door.port, ports[name], tuple(back), keys)
    return found


def containers_apart(partitions: Iterable[Partition], nodes: Iterable[Node]) -> tuple[Partition, ...]:
    """Containers in partitions of their own, where a job has one node.

    A partition with nothing but containers becomes such a one. Of any other they are taken out, into one that is named
    as their nodeset is.
    """
    sets = {node.name: node.features[0] if node.features else "containers" for node in nodes if node.port}
    lines: list[Partition] = []
    moved: dict[str, tuple[Partition, list[str]]] = {}
    for line in partitions:
        alone = [name for name in line.nodes if name in sets]
        if alone and len(alone) == len(line.nodes):
            line = replace(line, max_nodes=1)
        elif alone:
            for name in alone:
                moved.setdefault(sets[name], (line, []))[1].append(name)
            line = replace(line, nodes=tuple(name for name in line.nodes if name not in sets))
        lines.append(line)
    taken = {line.name for line in lines}
    for nodeset, (model, names) in moved.items():
        placed = {name for line in lines if line.max_nodes == 1 for name in line.nodes}
        rest = tuple(name for name in dict.fromkeys(names) if name not in placed)
        if rest:
            name = nodeset if nodeset not in taken else f"{nodeset}-containers"
            lines.append(replace(model, name=name, nodes=rest, default=False, max_nodes=1))
    return tuple(lines)


def reduced_conf(conf: ClusterConf, node: Node) -> ClusterConf:
    """The cluster as the container sees it: itself, and slurmctld at the end of the tunnel."""
    return replace(
        conf,
        controller_address=LOOPBACK,
        nodes=(node,),
        partitions=tuple(
            replace(p, nodes=(node.name,), suspend_time=None) for p in conf.partitions if node.name in p.nodes
        ),
        switches=(),
        proctrack_cgroup=False,
        constrain_cores=False,
        constrain_devices=False,
        constrain_memory=False,
        cgroup_plugin="disabled",
        one_address=False,
        spanning=False,
        accounting=None,
        power=None,
        options=_options(conf),
    )


def _options(conf: ClusterConf) -> dict[str, str]:
    """The user's options without those that want more of a kernel than a container is given."""
    kept = {key: value for key, value in conf.options.items() if key.lower() not in _OF_KERNELS}
    # slurmctld has jobs' prologs run when they get their nodes where it confines them, and the node must know.
    return {**kept, "PrologFlags": "Alloc"} if conf.proctrack_cgroup else kept


_OF_KERNELS = ("proctracktype", "taskplugin", "prologflags", "jobacctgathertype")


def reduced_compute(cluster: Cluster, member: Member) -> Document:
    """slurmd with a configuration of its own: it reads files, so it needs nobody to start."""
    node = next(node for node in cluster.conf.nodes if node.name == member.name)
    if member.rented:
        node = replace(node, cloud=False)
    # A rented container has another name, and its kernel started long before Slurm asked for the node.
    rented = ("-b", "-N", member.name) if member.rented else ()
    conf = reduced_conf(cluster.conf, node)
    if member.rented:
        conf = replace(conf, options={**conf.options, "Epilog": END_PROGRAM})
    restarts = ("slurmd",)
    return (
        *(_carried_jobs(cluster.spec.cluster) if member.rented else ()),
        Directory("/etc/slurm"),
        Directory("/var/log/slurm", owner="slurm", group="slurm"),
        Directory(SPOOL_DIRECTORY),
        File(CGROUP_CONF, cgroup_conf(conf), restarts=restarts, keep=True),
        File(GRES_CONF, gres_conf(conf), restarts=restarts, keep=True),
        File(SLURM_CONF, slurm_conf(conf), restarts=restarts, keep=True),
        Service("slurmd", command=("/usr/sbin/slurmd", "-D", *rented)),
    )


def _carried_jobs(cluster: str) -> Document:
    """Where the controller brings the files of jobs, and what holds a job's end until it has fetched them."""
    root = f"{JOBS_DIRECTORY}/{cluster}"
    return (
        *(Directory(path) for path in ("/var/lib/shoal", JOBS_DIRECTORY, "/usr/local/lib/shoal")),
        Directory(root, mode=0o1777),
        File(END_PROGRAM, job_end(), mode=0o755),
    )


def reduced_names(cluster: Cluster, member: Member) -> Block:
    """The controller is at the end of the tunnel, and the node is itself."""
    fact = cluster.facts.get(cluster.controller.name)
    names = dict.fromkeys((cluster.controller.name, fact.hostname if fact else "", member.name))
    return Block(HOSTS, HOSTS_BLOCK, f"{LOOPBACK}  {' '.join(name for name in names if name)}\n")


def _other_end(cluster: Cluster, tunnel: Tunnel) -> Iterator[Item]:
    key = text_of(cluster.facts.get(cluster.controller.name), PUBLIC_KEY)
    yield Directory("/etc/shoal")
    yield File(END, end_script(), mode=0o755)
    yield Directory("/etc/ssh/ssh_config.d")
    yield File(SSH_CONFIG, ssh_config(tunnel))
    if key:
        yield Directory("/root/.ssh", mode=0o700)
        make = ("install", "-m", "0600", "/dev/null", AUTHORIZED)
        yield Command("authorized keys", make, unless=("test", "-e", AUTHORIZED))
        yield Block(AUTHORIZED, BLOCK, authorized(key, tunnel))


def _tunnels(cluster: Cluster) -> Iterator[Item]:
    """The controller's side. The tunnel to a container that does not answer just now stays as it is."""
    there = {node.name for node in cluster.conf.nodes if node.port}
    before = recorded(text_of(cluster.facts[cluster.controller.name], RECORD))
    for name in before:
        if name not in there:
            yield Service(service(name), enabled=False, running=False)
            yield File(conf_file(name))
            yield File(known_hosts_file(name))
    if there or before:
        # Before a new tunnel begins and after an old one has ended: what is not in it would be forgotten.
        yield Directory("/etc/shoal")
        yield Directory(DIRECTORY, mode=0o700)
        yield File(RECORD, record(there) if there else None)
        running = tuple(service(name) for name in sorted(cluster.tunnels))
        yield Directory("/usr/local/lib/shoal")
        yield File(PROGRAM, program() if there else None, mode=0o755, restarts=running)
        yield File(UNIT, unit() if there else None, restarts=running)
    for name, tunnel in sorted(cluster.tunnels.items()):
        restarts = (service(name),)
        yield File(conf_file(name), ssh_conf(tunnel), mode=0o600, restarts=restarts)
        yield File(known_hosts_file(name), known_hosts(tunnel), mode=0o600, restarts=restarts)
        yield Service(service(name))


_FAREWELL = r"""
while read -r node; do
    case $node in \#*) continue ;; esac
    systemctl disable --now "shoal-tunnel@$node" 2> /dev/null
    rm -f "${1%/*}/$node.conf" "${1%/*}/$node.known_hosts"
done < "$1"
"""
