"""Containers as nodes: hosts without systemd, TUN, mounts and open ports, as some providers rent out.

Facts decide which host is one, so that your own container works as well as a rented one. Its daemons run under
Shoal's supervisor, the controller keeps a tunnel to it, its jobs have one node, and shares are copied. It has its own
slurm.conf, with itself as the only node, so that the limits of its kernel do not apply to other nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from shoal.agent.document import Block, Command, Directory, Document, File, Item, Service
from shoal.agent.facts import NO_FACTS, Facts
from shoal.jobs.record import JOBS_DIRECTORY
from shoal.jobs.staging import END_PROGRAM, job_end
from shoal.network import tunnel as text
from shoal.network.tunnel import LOOPBACK, ReverseForward, Tunnel, needs_tunnel
from shoal.remote import program_text, shell_command
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.roles.current_conf import CGROUP_CONF, GRES_CONF, HOSTS, HOSTS_BLOCK, SLURM_CONF
from shoal.roles.shares import shares
from shoal.roles.slurm_tree import daemon
from shoal.slurm.conf import SLURMCTLD_PORT, SPOOL_DIRECTORY, cgroup_conf, gres_conf, slurm_conf
from shoal.slurm.model import ClusterConf, Confinement, Node, PartitionConf
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec

SSH_PORT = 22
MAKE_KEY = 'test -s "$1" || exec ssh-keygen -q -t ed25519 -N "" -C "shoal tunnels" -f "$1"'


class ContainersComponent(Component):
    """The tunnels: their ends on the controller and in the containers."""

    files: Mapping[str, FileQuery] = dict.fromkeys((text.PUBLIC_KEY, text.RECORD, *text.HOST_KEYS), "text")
    in_containers = True
    changes_with_members = True

    def prepare_among(self, spec: Spec, member: Member, everyone: Mapping[str, Facts]) -> Document:
        """The controller's key, which the containers must authorize."""
        needed = any(needs_tunnel(spec.network.kind, facts) for facts in everyone.values())
        public_key = everyone.get(member.name, NO_FACTS).text(text.PUBLIC_KEY)
        if "controller" not in member.roles or not needed or public_key:
            return ()
        return (
            Directory("/etc/shoal"),
            Directory(text.DIRECTORY, mode=0o700),
            Command(
                "make a key for tunnels",
                shell_command(MAKE_KEY, text.KEY),
                unless=("test", "-s", text.PUBLIC_KEY),
            ),
        )

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        if "controller" in member.roles:
            return {Stage.SERVICES: tuple(_controller_end(cluster))}
        tunnel = cluster.tunnels.get(member.name)
        return {Stage.BASE: tuple(_container_end(cluster, tunnel))} if tunnel else {}

    def removal(self) -> Document:
        return (
            Command(
                "end the tunnels",
                shell_command(program_text("tunnel_removal.sh"), text.RECORD),
                unless=("test", "!", "-e", text.RECORD),
            ),
            *(File(path) for path in (text.RECORD, text.UNIT, text.PROGRAM, text.KEY, text.PUBLIC_KEY)),
            *(File(path) for path in (text.END, text.SSH_CONFIG)),
            Block(text.AUTHORIZED, text.BLOCK, ""),
        )

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        what = (
            "is a container without TUN and open ports: its jobs have one node, and `srun` from elsewhere does not "
            "reach it; use sbatch or `shoal run`"
        )
        partitions = {
            name: ", ".join(partition.name for partition in cluster.conf.partitions if name in partition.nodes)
            for name in cluster.tunnels
        }
        return tuple(Finding("info", what, f"partition {names}", host=name) for name, names in partitions.items())


def tunnels(
    spec: Spec,
    nodes: Mapping[str, Facts],
    ports: Mapping[str, int],
    addresses: Mapping[str, str],
    controller: str,
    one_address: bool,
) -> dict[str, Tunnel]:
    """The tunnels to these containers. Every server of a share has a port in each of them."""
    servers = dict.fromkeys(share.server for share in shares(spec) if share.server in addresses)
    # From loopback to loopback: slurmctld uses the source of a rented node's connection as its address.
    back = [ReverseForward(SLURMCTLD_PORT, addresses.get(controller, "") if one_address else LOOPBACK, SLURMCTLD_PORT)]
    back += [ReverseForward(text.FIRST_SHARE_PORT + n, addresses[name], SSH_PORT) for n, name in enumerate(servers)]
    by_name = {}
    for name, facts in nodes.items():
        if facts.connected_at is not None:
            keys = tuple(" ".join(line.split()[:2]) for line in map(facts.text, text.HOST_KEYS) if line)
            ssh = facts.connected_at
            by_name[name] = Tunnel(name, ssh.address, ssh.port, ports[name], tuple(back), keys)
    return by_name


def separate_containers(partitions: Iterable[PartitionConf], nodes: Iterable[Node]) -> tuple[PartitionConf, ...]:
    """Move containers to their own partitions, where a job has one node.

    A partition of containers only gets this limit. From any other partition they move to one with the name of their
    nodeset.
    """
    sets = {node.name: node.features[0] if node.features else "containers" for node in nodes if node.port}
    lines: list[PartitionConf] = []
    moved: dict[str, tuple[PartitionConf, list[str]]] = {}
    for line in partitions:
        containers = [name for name in line.nodes if name in sets]
        if containers and len(containers) == len(line.nodes):
            line = replace(line, max_nodes=1)
        elif containers:
            for name in containers:
                moved.setdefault(sets[name], (line, []))[1].append(name)
            line = replace(line, nodes=tuple(name for name in line.nodes if name not in sets))
        lines.append(line)
    line_names = {line.name for line in lines}
    for nodeset, (model, names) in moved.items():
        placed = {name for line in lines if line.max_nodes == 1 for name in line.nodes}
        unplaced = tuple(name for name in dict.fromkeys(names) if name not in placed)
        if unplaced:
            name = nodeset if nodeset not in line_names else f"{nodeset}-containers"
            lines.append(replace(model, name=name, nodes=unplaced, default=False, max_nodes=1))
    return tuple(lines)


def container_conf(conf: ClusterConf, node: Node) -> ClusterConf:
    """The configuration of a container: itself, and slurmctld behind the tunnel."""
    return replace(
        conf,
        controller_address=LOOPBACK,
        nodes=(node,),
        partitions=tuple(
            replace(p, nodes=(node.name,), suspend_time=None) for p in conf.partitions if node.name in p.nodes
        ),
        switches=(),
        confinement=Confinement(plugin="disabled"),
        one_address=False,
        spanning=False,
        accounting=None,
        power=None,
        options=_options(conf),
    )


def _options(conf: ClusterConf) -> dict[str, str]:
    """The user's options without those that a container's kernel does not support."""
    options = {key: value for key, value in conf.options.items() if key.lower() not in _KERNEL_OPTIONS}
    # With cgroups slurmctld runs prologs at allocation, and the node must agree.
    return {**options, "PrologFlags": "Alloc"} if conf.confinement.tracked else options


_KERNEL_OPTIONS = ("proctracktype", "taskplugin", "prologflags", "jobacctgathertype")


def container_compute(cluster: Cluster, member: Member) -> Document:
    """slurmd with a local configuration: it starts without a connection to the controller."""
    node = next(node for node in cluster.conf.nodes if node.name == member.name)
    conf = container_conf(cluster.conf, replace(node, cloud=False))
    if member.rented:
        conf = replace(conf, options={**conf.options, "Epilog": END_PROGRAM})
    # A rented container has another host name, and its kernel booted before Slurm requested the node.
    rented = ("-b", "-N", member.name) if member.rented else ()
    restarts = ("slurmd",)
    return (
        *(_job_directories(cluster.spec.cluster) if member.rented else ()),
        Directory("/etc/slurm"),
        Directory("/var/log/slurm", owner="slurm", group="slurm"),
        Directory(SPOOL_DIRECTORY),
        File(CGROUP_CONF, cgroup_conf(conf), restarts=restarts, keep=True),
        File(GRES_CONF, gres_conf(conf), restarts=restarts, keep=True),
        File(SLURM_CONF, slurm_conf(conf), restarts=restarts, keep=True),
        daemon(cluster, "slurmd", *rented)[-1],  # a container has no systemd, and so no units
    )


def _job_directories(cluster: str) -> Document:
    """Directories for jobs' files, and the epilog that holds a job's end until the controller has fetched them."""
    root = f"{JOBS_DIRECTORY}/{cluster}"
    return (
        *(Directory(path) for path in ("/var/lib/shoal", JOBS_DIRECTORY, "/usr/local/lib/shoal")),
        Directory(root, mode=0o1777),
        File(END_PROGRAM, job_end(), mode=0o755),
    )


def container_names(cluster: Cluster, member: Member) -> Block:
    """Both the controller and the container itself are at the loopback address."""
    fact = cluster.facts.get(cluster.controller.name)
    names = dict.fromkeys((cluster.controller.name, fact.hostname if fact else "", member.name))
    return Block(HOSTS, HOSTS_BLOCK, f"{LOOPBACK}  {' '.join(name for name in names if name)}\n")


def _container_end(cluster: Cluster, tunnel: Tunnel) -> Iterator[Item]:
    key = cluster.controller_facts.text(text.PUBLIC_KEY)
    yield Directory("/etc/shoal")
    yield File(text.END, text.end_script(), mode=0o755)
    yield Directory("/etc/ssh/ssh_config.d")
    yield File(text.SSH_CONFIG, text.ssh_config(tunnel))
    if key:
        yield Directory("/root/.ssh", mode=0o700)
        make = ("install", "-m", "0600", "/dev/null", text.AUTHORIZED)
        yield Command("authorized keys", make, unless=("test", "-e", text.AUTHORIZED))
        yield Block(text.AUTHORIZED, text.BLOCK, text.authorized(key, tunnel))


def _controller_end(cluster: Cluster) -> Iterator[Item]:
    """The controller's side. The tunnel to a container that does not answer stays."""
    containers = {node.name for node in cluster.conf.nodes if node.port}
    before = text.recorded(cluster.controller_facts.text(text.RECORD))
    for name in before:
        if name not in containers:
            yield Service(text.service(name), enabled=False, running=False)
            yield File(text.conf_file(name))
            yield File(text.known_hosts_file(name))
    if containers or before:
        # Written before new tunnels start and after old ones stop: a tunnel that is not in it is never removed.
        yield Directory("/etc/shoal")
        yield Directory(text.DIRECTORY, mode=0o700)
        yield File(text.RECORD, text.record(containers) if containers else None)
        services = tuple(text.service(name) for name in sorted(cluster.tunnels))
        yield Directory("/usr/local/lib/shoal")
        yield File(text.PROGRAM, text.program() if containers else None, mode=0o755, restarts=services)
        yield File(text.UNIT, text.unit() if containers else None, restarts=services)
    for name, tunnel in sorted(cluster.tunnels.items()):
        restarts = (text.service(name),)
        yield File(text.conf_file(name), text.ssh_conf(tunnel), mode=0o600, restarts=restarts)
        yield File(text.known_hosts_file(name), text.known_hosts(tunnel), mode=0o600, restarts=restarts)
        yield Service(text.service(name))
