"""Containers behind a tunnel: how they are recognized, and their documents and those of other hosts."""

from dataclasses import replace
from typing import Any

from tests.goldens import assert_golden
from tests.support.cases import cases
from tests.support.fake_world import gpus, host_facts, spec_of
from tests.support.item_text import folded_text
from tests.support.specs import ONE_NODE
from tests.unit.roles.test_role_documents import document_of, roles

from shoal.agent.document import Directory, File, Service
from shoal.agent.facts import Address, Cgroup, ConnectedAddress, Facts, FileFact
from shoal.jobs.staging import END_PROGRAM, job_end
from shoal.network.tunnel import HOST_KEYS, PUBLIC_KEY, RECORD, choose_ports, needs_tunnel, record, recorded
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Stage
from shoal.roles.containers import container_conf, separate_containers
from shoal.roles.current_conf import HOSTS, CurrentConf
from shoal.roles.documents import documents, membership
from shoal.roles.registry import component_findings, component_packages, preparation
from shoal.roles.rented import WATCHDOG, watchdog
from shoal.slurm.conf import slurm_conf
from shoal.slurm.model import Confinement, Node, PartitionConf
from shoal.slurm.parsed_conf import nodes_in_conf

SPEC = (
    ONE_NODE
    + """\
  pods: {hosts: [{name: p1, address: 203.0.113.5, port: 10341}, {name: p2, address: 203.0.113.6, port: 22}]}
storage:
  /data: {host: controller}
"""
)
CGROUPS = Cgroup(2, ("cpuset", "memory", "devices"))
KEY = "ssh-ed25519 AAAATUNNEL shoal tunnels\n"


def container(name: str, connected_at: ConnectedAddress | None, **more: Any) -> Facts:
    keys = {HOST_KEYS[0]: FileFact(text=f"ssh-ed25519 AAAA{name.upper()} root@{name}\n")}
    facts = host_facts(name, "172.17.0.2", arch="x86_64", files=keys, **more)
    return replace(facts, init="none", tun=False, connected_at=connected_at)


def world(
    spec: str = SPEC, before: CurrentConf | None = None, leaving: tuple[str, ...] = (), **ctl: FileFact
) -> Cluster:
    facts = {
        "c1": host_facts(
            "c1", "10.0.0.1", arch="x86_64", cgroup=CGROUPS, files={PUBLIC_KEY: FileFact(text=KEY), **ctl}
        ),
        "n1": host_facts("n1", "10.0.0.11", arch="x86_64", cgroup=CGROUPS),
        "p1": container("p1", ConnectedAddress("203.0.113.5", 10341), gpus=gpus(2)),
        "p2": container("p2", ConnectedAddress("203.0.113.6")),
    }
    reached = {name: fact.connected_at.address for name, fact in facts.items() if fact.connected_at}
    names = {member for member in ("c1", "n1", "p1", "p2") if f"name: {member}," in spec}
    return assemble(spec_of(spec), {name: facts[name] for name in facts if name in names}, reached, before, leaving)


@cases(
    "network, change, needed",
    ("lan", {}, True),
    ("wireguard", {}, True),
    ("lan", {"init": "systemd"}, False),
    ("lan", {"tun": True}, False),
    ("lan", {"connected_at": None}, False),
    ("lan", {"connected_at": ConnectedAddress("172.17.0.2")}, False),
    ("wireguard", {"connected_at": ConnectedAddress("172.17.0.2")}, True),
)
def test_container_is_detected_by_init_and_address(network: str, change: dict[str, Any], needed: bool) -> None:
    facts = Facts(
        init="none", addresses=(Address("eth0", "172.17.0.2", 16),), connected_at=ConnectedAddress("203.0.113.5", 10341)
    )
    assert needs_tunnel(network, replace(facts, **change)) is needed


def test_existing_ports_stay_and_are_unique() -> None:
    assert choose_ports(["a", "b", "c"], {"b": 29001, "gone": 29002}) == {"a": 29003, "b": 29001, "c": 29004}


def test_container_document_matches_its_golden() -> None:
    assert_golden("roles/container.txt", folded_text(document_of(world(), "p1"), compute=roles()["compute"]))


def test_controller_tunnels_match_their_golden() -> None:
    cluster = world()
    stages = documents(cluster, cluster.controller)
    items = [item for item in stages[Stage.SERVICES] if "tunnel" in item.key]
    assert_golden("roles/tunnels.txt", folded_text({Stage.SERVICES: tuple(items)}))


def test_other_nodes_keep_confinement_and_containers_have_no_member_address() -> None:
    cluster = world()
    assert cluster.conf.confinement.tracked and set(cluster.addresses) == {"c1", "n1"}
    conf = slurm_conf(cluster.conf)
    assert "ProctrackType=proctrack/cgroup\n" in conf and "TreeWidth=65533\n" in conf
    hosts = next(i for i in documents(cluster, cluster.controller)[Stage.BASE] if i.key == f"block members in {HOSTS}")
    assert "p1" not in hosts.content  # type: ignore[attr-defined]


def test_nodes_are_parsed_with_their_ports() -> None:
    conf = slurm_conf(world().conf)
    found = nodes_in_conf(conf, "")
    assert {name: (node.address, node.port) for name, node in found.items()} == {
        "n1": ("10.0.0.11", None),
        "p1": ("127.0.0.1", 29001),
        "p2": ("127.0.0.1", 29002),
    }


def test_silent_container_keeps_its_partition_port_and_tunnel() -> None:
    before = CurrentConf(
        nodes=nodes_in_conf(slurm_conf(world().conf), ""), partitions={"p1": ("pods",), "p2": ("pods",)}
    )
    silent = spec_of(SPEC)
    facts = {
        "c1": host_facts("c1", "10.0.0.1", cgroup=CGROUPS, files={RECORD: FileFact(text=record(["p1", "p2"]))}),
        "n1": host_facts("n1", "10.0.0.11", cgroup=CGROUPS),
    }
    cluster = assemble(silent, facts, {}, before)
    assert {node.name: node.port for node in cluster.conf.nodes} == {"n1": None, "p1": 29001, "p2": 29002}
    assert cluster.conf.confinement.tracked
    services = documents(cluster, cluster.controller)[Stage.SERVICES]
    assert not [item for item in services if isinstance(item, Service) and "tunnel" in item.name]
    kept = next(item for item in services if item.key == f"file {RECORD}")
    assert recorded(kept.content) == ("p1", "p2")  # type: ignore[attr-defined]


def test_leaving_container_keeps_its_partition_and_tunnel_until_empty() -> None:
    text = SPEC.replace("{name: p1, address: 203.0.113.5, port: 10341}, ", "")
    known = nodes_in_conf(slurm_conf(world().conf), "")
    before = CurrentConf(nodes=known, partitions={"n1": ("main",), "p1": ("pods",), "p2": ("pods",)})
    made = {RECORD: FileFact(text=record(["p1", "p2"]))}
    now = world(text, before, ("p1",), **made)
    assert next(p for p in now.conf.partitions if p.name == "pods").nodes == ("p2", "p1")
    keys = [item.key for item in documents(now, now.controller)[Stage.SERVICES]]
    assert "service shoal-tunnel@p1" not in keys
    later = world(text, before, **made)
    gone = [i for i in documents(later, later.controller)[Stage.SERVICES] if i.key == "service shoal-tunnel@p1"]
    assert gone == [Service("shoal-tunnel@p1", enabled=False, running=False)]


def nodes(**ports: int | None) -> list[Node]:
    return [Node(name, name, name, features=(name.rstrip("0123456789"),), port=port) for name, port in ports.items()]


def test_partition_of_only_containers_has_single_node_jobs() -> None:
    [line] = separate_containers([PartitionConf("gpu", ("p1", "p2"), default=True)], nodes(p1=29001, p2=29002))
    assert (line.name, line.nodes, line.max_nodes, line.default) == ("gpu", ("p1", "p2"), 1, True)


def test_containers_are_moved_to_their_own_partition() -> None:
    whole = PartitionConf("main", ("n1", "p1"), default=True, priority=3)
    first, second = separate_containers([whole], nodes(n1=None, p1=29001))
    assert (first.name, first.nodes, first.max_nodes) == ("main", ("n1",), None)
    assert (second.name, second.nodes, second.max_nodes, second.default) == ("p", ("p1",), 1, False)
    assert second.priority == 3


def test_existing_container_partition_is_reused() -> None:
    lines = separate_containers(
        [PartitionConf("all", ("n1", "p1")), PartitionConf("p", ("p1",))], nodes(n1=None, p1=29001)
    )
    assert [(line.name, line.nodes, line.max_nodes) for line in lines] == [("all", ("n1",), None), ("p", ("p1",), 1)]


def test_partition_name_in_use_is_not_reused() -> None:
    lines = separate_containers([PartitionConf("p", ("n1", "p1"))], nodes(n1=None, p1=29001))
    assert [(line.name, line.nodes) for line in lines] == [("p", ("n1",)), ("p-containers", ("p1",))]


def test_cluster_without_containers_keeps_its_partitions() -> None:
    lines = [PartitionConf("main", ("n1", "n2"), default=True)]
    assert separate_containers(lines, nodes(n1=None, n2=None)) == tuple(lines)


def test_controller_generates_a_tunnel_key_only_with_containers() -> None:
    cluster = world()
    spec, facts = cluster.spec, dict(cluster.facts)
    facts["c1"] = host_facts("c1", "10.0.0.1", files={})
    keys = [item.key for item in preparation(spec, cluster.controller, facts["c1"], facts)]
    assert "command make a key for tunnels" in keys
    without = {name: fact for name, fact in facts.items() if name in ("c1", "n1")}
    assert "tunnels" not in repr(preparation(spec, cluster.controller, facts["c1"], without))


def test_container_needs_no_wireguard() -> None:
    spec = spec_of(SPEC.replace("cluster: reef", "cluster: reef\nnetwork: wireguard"))
    member = world().members[2]
    facts = container("p1", ConnectedAddress("203.0.113.5", 10341))
    assert "wireguard-tools" not in component_packages(spec, member, facts)
    assert "wireguard" not in repr(preparation(spec, member, facts))


def test_limits_of_containers_are_reported() -> None:
    told = [finding for finding in component_findings(world()) if finding.host == "p1"]
    assert [(finding.level, finding.found) for finding in told] == [("info", "partition pods")]
    assert "its jobs have one node, and `srun` from elsewhere does not reach it" in told[0].what


RENTED = """
cluster: reef
network: wireguard
controller: {host: {name: c1, address: 10.0.0.1}}
providers: {runpod: {key: env:RUNPOD_KEY}, lambda: {key: env:LAMBDA_KEY}}
nodesets:
  pods: {provider: runpod, type: NVIDIA A40, max: 2, cpus: 2, memory: 8G, gpus: 1}
  vms: {provider: lambda, type: gpu_1x_a10, max: 1}
"""


def rented(text: str = RENTED, **facts: Facts) -> Cluster:
    ctl = host_facts("c1", "10.0.0.1", arch="x86_64", modules=("wireguard",), files={PUBLIC_KEY: FileFact(text=KEY)})
    return assemble(spec_of(text), {"c1": ctl, **facts}, {"c1": "10.0.0.1"})


def test_rented_containers_have_ports_before_they_exist() -> None:
    cluster = rented()
    assert {node.name: (node.address, node.port) for node in cluster.conf.nodes} == {
        "pods1": ("127.0.0.1", 29001),
        "pods2": ("127.0.0.1", 29002),
        "vms1": ("vms1", None),
    }
    assert set(cluster.addresses) == {"c1", "vms1"}, "a container has no address on the network"
    assert [(line.name, line.nodes, line.max_nodes) for line in cluster.conf.partitions] == [
        ("main", ("vms1",), None),
        ("pods", ("pods1", "pods2"), 1),
    ]
    assert cluster.tunnels == {}
    assert not cluster.conf.one_address, "a rented node's address is where it calls from, which must be the loopback"
    assert (
        "nodesets.pods: nodeset `pods`: because of it Slurm listens on all addresses of all hosts, not only on the "
        "network's, found rented containers, which connect to slurmctld through a tunnel"
    ) in [str(finding) for finding in cluster.findings]


def test_running_rented_container_gets_its_tunnel_and_node_name() -> None:
    pod = replace(container("x7f3", ConnectedAddress("203.0.113.9", 10400)), hostname="x7f3")
    cluster = rented(pods2=pod)
    assert list(cluster.tunnels) == ["pods2"]
    tunnel = cluster.tunnels["pods2"]
    assert (tunnel.slurmd, tunnel.host, tunnel.port) == (29002, "203.0.113.9", 10400)
    assert tunnel.back[0].address == "127.0.0.1"
    member = next(member for member in cluster.members if member.name == "pods2")
    stages = documents(cluster, member)
    assert Service("slurmd", command=("/usr/sbin/slurmd", "-D", "-b", "-N", "pods2")) in stages[Stage.NODES]
    conf = next(item.content for item in stages[Stage.NODES] if item.key == "file /etc/slurm/slurm.conf")  # type: ignore[attr-defined]
    assert "State=CLOUD" not in conf and "ResumeProgram" not in conf
    assert "NodeName=pods2 NodeAddr=127.0.0.1 " in conf and "pods1" not in conf


@cases("network", "wireguard", "lan")
def test_membership_change_leaves_a_rented_container_alone(network: str) -> None:
    pod = replace(container("x7f3", ConnectedAddress("203.0.113.9", 10400)), hostname="x7f3")
    cluster = rented(RENTED.replace("wireguard", network), pods1=pod)
    member = next(member for member in cluster.members if member.name == "pods1")
    assert membership(cluster, member) == (), "it knows the controller only, at the end of its tunnel"


def test_epilog_in_a_rented_container_waits_for_the_fetch() -> None:
    cluster = rented(pods1=replace(container("x7f3", ConnectedAddress("203.0.113.9", 10400)), hostname="x7f3"))
    items = documents(cluster, next(member for member in cluster.members if member.name == "pods1"))[Stage.NODES]
    by_path = {item.path: item for item in items if isinstance(item, File | Directory)}
    assert f"\nEpilog={END_PROGRAM}\n" in by_path["/etc/slurm/slurm.conf"].content  # type: ignore[union-attr]
    assert by_path[END_PROGRAM] == File(END_PROGRAM, job_end(), mode=0o755)
    assert by_path["/var/lib/shoal/jobs/reef"] == Directory("/var/lib/shoal/jobs/reef", mode=0o1777)
    assert "Epilog" not in slurm_conf(cluster.conf), "elsewhere nothing waits"


def test_nodeset_with_containers_and_machines_is_rejected_with_the_fix() -> None:
    offers = "offers: [{provider: runpod, type: NVIDIA A40}, {provider: lambda, type: gpu_1x_a10}], max: 2"
    text = RENTED.replace("provider: runpod, type: NVIDIA A40, max: 2", offers)
    [found] = [one for one in rented(text).findings if "some of its offers are containers" in one.what]
    assert (found.level, found.fix) == ("error", "give each kind a nodeset of its own")


def test_watchdog_of_a_container_runs_under_the_supervisor_and_kills_pid_1() -> None:
    items = watchdog("pods1", 0, systemd=False)
    assert items[-1] == Service("shoal-watchdog", command=("/bin/sh", "-c", f"while :; do sleep 60; {WATCHDOG}; done"))
    assert "systemd/system" not in " ".join(item.key for item in items)
    text = next(item.content for item in items if item.key == f"file {WATCHDOG}")  # type: ignore[attr-defined]
    assert "kill -TERM 1\n" in text and "poweroff" not in text


def test_kernel_dependent_options_are_omitted_in_a_container() -> None:
    conf = replace(
        world().conf,
        options={"TaskPlugin": "task/cgroup", "MaxArraySize": "5000"},
        confinement=Confinement(tracked=True),
    )
    inside = container_conf(conf, conf.nodes[1])
    assert inside.options == {"MaxArraySize": "5000", "PrologFlags": "Alloc"}
