"""Representative clusters, one for each Slurm release and mix of releases that the golden files cover."""

from shoal.slurm.conf import cgroup_conf, gres_conf, slurm_conf, topology_conf
from shoal.slurm.model import ClusterConf, Confinement, Node, NodeGpu, PartitionConf, PowerSaving, Switch
from shoal.slurm.versions import Version


def gpus(kind: str, count: int) -> tuple[NodeGpu, ...]:
    return tuple(NodeGpu(kind, f"/dev/nvidia{index}") for index in range(count))


CONTROLLER = Node("n1", "ctl", "10.77.0.1", 2, 2, 1, 1, 4000, gpus("sim", 2), ("controller",))
"""The controller computes too. A real Slurm is started on it, so it is as small as any machine."""

ALIKE = tuple(
    Node(f"gpu{i:02}", f"gpu{i:02}", f"10.77.1.{i}", 64, 2, 16, 2, 515_000, gpus("h100", 8), ("lab", "nvlink"))
    for i in range(1, 17)
)
MOTLEY = (
    Node("desktop", "Desktop-PC", "10.77.2.9", 16, 1, 8, 2, 64_000, gpus("rtx_4090", 1), ("home",), weight=5),
    Node(
        "box",
        "box",
        "fd7a:115c::42",
        8,
        1,
        8,
        1,
        32_000,
        (*gpus("a100", 2), NodeGpu("t4", "/dev/nvidia2")),
        ("home", "cheap"),
    ),
    Node("cpu7", "cpu7", "10.77.2.30", 4, 1, 4, 1, 900, (), ("home",)),
    Node("cpu8", "cpu8", "10.77.2.99", 4, 1, 4, 1, 900, (), ("home",)),
)

RENTED = (
    *(
        Node(f"cloud{i}", f"cloud{i}", f"cloud{i}", 30, 1, 30, 1, 200_000, gpus("a10", 1), ("cloud",), 10, cloud=True)
        for i in range(1, 5)
    ),
    # What is rented under one name here may be one GPU or another.
    *(Node(f"any{i}", f"any{i}", f"any{i}", 8, 1, 8, 1, 60_000, gpus("", 2), ("any",), 20, cloud=True) for i in (1, 2)),
)


NO_CGROUPS = Confinement(plugin="disabled")


def _names(nodes: tuple[Node, ...]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _cluster(*versions: str, nodes: tuple[Node, ...] = ALIKE, **more: object) -> ClusterConf:
    nodes = (CONTROLLER, *nodes)
    values: dict[str, object] = {
        "name": "reef",
        "controller": "ctl",
        "controller_address": "10.77.0.1",
        "versions": tuple(Version.parse(version) for version in versions),
        "nodes": nodes,
        "partitions": (
            PartitionConf("main", _names(nodes), default=True, max_time="1-00:00:00", default_time="60"),
            PartitionConf("one", ("n1",), max_nodes=1, priority=10),
            PartitionConf("empty", ()),
        ),
        **more,
    }
    return ClusterConf(**values)  # type: ignore[arg-type]


def _rented(version: str) -> ClusterConf:
    return _cluster(
        version,
        nodes=RENTED,
        confinement=NO_CGROUPS,
        partitions=(
            PartitionConf("main", ("n1", *_names(RENTED)), default=True, suspend_time=600),
            PartitionConf("cloud", _names(RENTED[:4]), suspend_time=60),
        ),
        power=PowerSaving("/usr/local/lib/shoal/elastic", 1800),
    )


CLUSTERS: dict[str, ClusterConf] = {
    # Hosts without cgroups.
    "22.05": _cluster("22.05.8", confinement=NO_CGROUPS),
    # Real machines with all that cgroups give, and PMIx.
    "23.11": _cluster(
        "23.11.4",
        confinement=Confinement(tracked=True, devices=True, cores=True, memory=True),
        pmix=True,
    ),
    # Two sites, no two nodes alike, the user's own settings.
    "24.11": _cluster(
        "24.11.5",
        nodes=MOTLEY,
        confinement=NO_CGROUPS,
        switches=(Switch("site-a", ("n1", "desktop")), Switch("site-b", ("box", "cpu7", "cpu8"))),
        options={"KillWait": "60", "slurmdtimeout": "120", "SlurmctldParameters": "preempt_send_user_signal"},
    ),
    "26.05": _cluster("26.05.5", nodes=(*ALIKE, *MOTLEY), confinement=NO_CGROUPS),
    "26.05+24.11": _cluster("26.05.5", "24.11.5", "24.11.5", confinement=NO_CGROUPS),
    # Some nodes come when a job needs them.
    "22.05 rented": _rented("22.05.8"),
    "26.05 rented": _rented("26.05.5"),
    "23.11+22.05": _cluster("23.11.4", "22.05.8", confinement=NO_CGROUPS, controller_hostname="ctl"),
}


def files(cluster: ClusterConf) -> dict[str, str]:
    """Every configuration file of a cluster."""
    texts = {"slurm.conf": slurm_conf(cluster), "gres.conf": gres_conf(cluster), "cgroup.conf": cgroup_conf(cluster)}
    if cluster.switches:
        texts["topology.conf"] = topology_conf(cluster)
    return texts
