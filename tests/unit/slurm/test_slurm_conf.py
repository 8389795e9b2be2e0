"""Rules of rendering that whole-file goldens do not show: rejected input, order, costs, memory, GPU names."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_clusters import ALIKE, CLUSTERS, CONTROLLER, MOTLEY, files
from tests.support.cases import cases

from shoal.hostlist import expand
from shoal.slurm.conf import (
    cgroup_conf,
    gpu_type,
    gres_conf,
    slurm_conf,
    topology_conf,
)
from shoal.slurm.conf_lines import real_memory
from shoal.slurm.model import ClusterConf, Confinement, Node, NodeGpu, PartitionConf, Switch
from shoal.slurm.parsed_conf import change_cost, loses_jobs, nodes_in_conf, parse_conf, switches_of_nodes

BASE = CLUSTERS["22.05"]
INJECTIONS = ["a\nNodeName=evil", "a b", "a\tb", "a#b", 'a"b', "a\\b", "", "a\r", "a=b", "é", "a\x00"]


def _with_node(**values: object) -> ClusterConf:
    return replace(BASE, nodes=(replace(CONTROLLER, **values),), partitions=())  # type: ignore[arg-type]


@cases("text", *INJECTIONS)
@cases(
    "build",
    lambda text: _with_node(name=text),
    lambda text: _with_node(features=(text,)),
    lambda text: _with_node(gpus=(NodeGpu(text or "a b", "/dev/nvidia0"),)),
    lambda text: _with_node(gpus=(NodeGpu("h100", text),)),
    lambda text: replace(BASE, partitions=(PartitionConf(text, ()),)),
    lambda text: replace(BASE, partitions=(PartitionConf("p", (), max_time=text or "a b"),)),
    lambda text: replace(BASE, partitions=(PartitionConf("p", (), default_time=text),)),
    lambda text: replace(BASE, partitions=(PartitionConf("p", ("n1", text)),)),
    lambda text: replace(BASE, switches=(Switch(text, ("n1",)),)),
    lambda text: replace(BASE, switches=(Switch("s", (text,)),)),
    lambda text: replace(BASE, options={text: "1"}),
)
def test_text_cannot_start_a_line_a_key_or_a_comment(build: object, text: str) -> None:
    with pytest.raises(ValueError):
        files(build(text))  # type: ignore[operator]


@cases("text", *[text for text in INJECTIONS if text != "a=b"])
@cases("field", "name", "slurm_user", "controller")
def test_settings_reject_blanks_and_comments(field: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"slurm\.conf takes no blanks"):
        slurm_conf(replace(BASE, controller_address=None, **{field: text}))  # type: ignore[arg-type]


@cases("text", *[text for text in INJECTIONS if text])
@cases("field", "hostname", "address")
def test_host_names_and_addresses_are_validated(field: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"the {'host name' if field == 'hostname' else field} of a node may not be"):
        slurm_conf(_with_node(**{field: text}))


@cases("key", "NodeName", "partitionname", "Include", "Kill Wait", "X\nY", "")
def test_invalid_option_name_is_rejected(key: str) -> None:
    with pytest.raises(ValueError, match=r"is not a setting of slurm\.conf"):
        slurm_conf(replace(BASE, options={key: "x"}))


def test_option_overrides_the_default_in_any_case() -> None:
    text = slurm_conf(replace(BASE, options={"RETURNTOSERVICE": "1"}))
    assert "ReturnToService=1\n" in text
    assert "RETURNTOSERVICE" not in text


def test_list_option_is_appended_to_the_default() -> None:
    options = {"SlurmctldParameters": "reboot_from_controller", "CommunicationParameters": "keepalivetime=30"}
    text = slurm_conf(replace(BASE, options=options))
    ours = "enable_configless,idle_on_node_suspend,preempt_send_user_signal,cloud_reg_addrs"
    assert f"SlurmctldParameters={ours},reboot_from_controller\n" in text
    assert "CommunicationParameters=block_null_hash,keepaliveinterval=15,keepaliveprobes=4,keepalivetime=30\n" in text


def test_partition_has_its_own_grace_and_can_be_exempt_from_preemption() -> None:
    partitions = (PartitionConf("long", ("n1",), grace=300), PartitionConf("calm", ("n1",), preemptable=False))
    lines = slurm_conf(replace(BASE, partitions=partitions)).splitlines()[-2:]
    assert [line.partition("MaxTime=UNLIMITED ")[2] for line in lines] == [
        "GraceTime=300 State=UP",
        "GraceTime=60 PreemptMode=OFF State=UP",
    ]


def test_partition_with_unknown_nodes_is_rejected() -> None:
    broken = replace(BASE, partitions=(PartitionConf("p", ("n1", "x1", "x2")),))
    with pytest.raises(ValueError, match=r"partition p names x\[1-2\], which the cluster does not have"):
        slurm_conf(broken)


def test_equal_nodes_share_a_line_only_with_consecutive_names() -> None:
    nodes = list(ALIKE[:6])
    nodes[2] = replace(nodes[2], address="10.77.9.3")
    nodes[4] = replace(nodes[4], hostname="other")
    text = slurm_conf(replace(BASE, nodes=tuple(nodes), partitions=()))
    assert [line.split()[0] for line in text.splitlines() if line.startswith("NodeName")] == [
        "NodeName=gpu[01-02]",
        "NodeName=gpu03",
        "NodeName=gpu04",
        "NodeName=gpu05",
        "NodeName=gpu06",
    ]


NODES = st.lists(
    st.builds(
        Node,
        name=st.from_regex(r"[a-c]{1,2}[0-9]{1,2}", fullmatch=True),
        hostname=st.from_regex(r"[ab][0-9]{1,2}", fullmatch=True),
        address=st.from_regex(r"10\.0\.0\.[1-9][0-9]?", fullmatch=True),
        cpus=st.integers(1, 2),
        memory_mb=st.sampled_from([1000, 2000]),
        gpus=st.sampled_from([(), (NodeGpu("a", "/dev/nvidia0"),)]),
        features=st.sampled_from([(), ("x",)]),
    ),
    unique_by=lambda node: node.name,
    max_size=12,
)


@given(NODES)
def test_node_lines_round_trip(nodes: list[Node]) -> None:
    cluster = replace(BASE, nodes=tuple(nodes), partitions=())
    back = nodes_in_conf(slurm_conf(cluster), gres_conf(cluster))
    expected = {n.name: replace(n, memory_mb=0, real_memory=real_memory(n.memory_mb)) for n in nodes}
    assert back == expected


@given(NODES, st.randoms(use_true_random=False))
def test_text_does_not_depend_on_the_order_of_the_nodes(nodes: list[Node], dice: object) -> None:
    shuffled = list(nodes)
    dice.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = (replace(BASE, nodes=tuple(order), partitions=()) for order in (nodes, shuffled))
    assert slurm_conf(one) == slurm_conf(other)
    assert gres_conf(one) == gres_conf(other)


@given(st.integers(1, 4_000_000))
def test_configured_memory_is_always_below_the_host_memory(memory: int) -> None:
    assert 1 <= real_memory(memory) <= max(1, memory * 95 // 100)


def test_parsed_node_keeps_its_memory() -> None:
    assert "RealMemory=777 " in slurm_conf(_with_node(real_memory=777))


@cases(
    "name, kind",
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H100 PCIe", "h100"),
    ("NVIDIA A100-SXM4-80GB", "a100"),
    ("Tesla V100-SXM2-16GB", "v100"),
    ("NVIDIA GeForce RTX 4090", "rtx_4090"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx_4070_ti_super"),
    ("NVIDIA RTX 6000 Ada Generation", "rtx_6000_ada"),
    ("NVIDIA L40S", "l40s"),
    ("NVIDIA GH200 480GB", "gh200"),
    ("AMD Instinct MI300X", "mi300x"),
    ("Simulated GPU", "sim"),
    ("4090", "gpu_4090"),
    ("", "unknown"),
    ("NVIDIA", "unknown"),
)
def test_gpu_names_become_short_types(name: str, kind: str) -> None:
    assert gpu_type(name) == kind


@given(st.text())
def test_any_gpu_name_gives_a_valid_type(name: str) -> None:
    kind = gpu_type(name)
    assert kind[0].isalpha() and kind.isascii() and kind == kind.lower()
    assert kind.replace("_", "a").isalnum()


def test_gres_lines_contain_every_device_of_every_node() -> None:
    text = gres_conf(replace(BASE, nodes=(*ALIKE, *MOTLEY)))
    lines = [dict(part.split("=") for part in line.split()) for line in text.splitlines()[2:]]
    found = {(n, v["Type"], f) for v in lines for n in expand(v["NodeName"]) for f in expand(v["File"])}
    assert found == {(n.name, gpu.type, gpu.device) for n in (*ALIKE, *MOTLEY) for gpu in n.gpus}


def test_disabled_cgroups_are_valid_for_the_oldest_member() -> None:
    assert "CgroupPlugin=disabled\n" in cgroup_conf(CLUSTERS["26.05+24.11"])
    assert "CgroupPlugin=cgroup/v1\n" in cgroup_conf(CLUSTERS["23.11+22.05"])


def test_nothing_is_constrained_without_cgroups() -> None:
    text = cgroup_conf(replace(BASE, confinement=Confinement(devices=True, cores=True, memory=True)))
    assert text.count("=no\n") == 3


def test_controller_without_an_address_is_resolved_by_name() -> None:
    assert "SlurmctldHost=ctl\n" in slurm_conf(replace(BASE, controller_address=None))
    assert "SlurmctldHost=box(10.77.0.1)\n" in slurm_conf(replace(BASE, controller_hostname="box"))


def test_max_node_count_covers_all_nodes() -> None:
    nodes = tuple(replace(CONTROLLER, name=f"x{i}") for i in range(1025))
    assert "MaxNodeCount=2048\n" in slurm_conf(replace(BASE, nodes=nodes, partitions=()))


# ---- what a change costs

TEXT = slurm_conf(BASE)


def test_equal_text_costs_nothing() -> None:
    assert change_cost(TEXT, TEXT) == "none"
    assert change_cost(TEXT, "# a remark\n\n" + TEXT) == "none"


def test_changed_partition_costs_a_reconfigure() -> None:
    partitions = (replace(BASE.partitions[0], max_time="60"), *BASE.partitions[1:])
    assert change_cost(TEXT, slurm_conf(replace(BASE, partitions=partitions))) == "reconfigure"
    assert change_cost(TEXT, slurm_conf(replace(BASE, partitions=BASE.partitions[:1]))) == "reconfigure"


@cases(
    "new",
    replace(BASE, nodes=(*BASE.nodes, MOTLEY[0])),
    replace(BASE, nodes=(replace(CONTROLLER, cpus=1), *BASE.nodes[1:])),
    replace(BASE, options={"KillWait": "10"}),
    replace(BASE, confinement=Confinement(tracked=True)),
    CLUSTERS["23.11+22.05"],
)
def test_changed_nodes_or_settings_cost_a_restart_and_no_job(new: ClusterConf) -> None:
    assert change_cost(TEXT, slurm_conf(new)) == "restart"
    assert not loses_jobs(TEXT, slurm_conf(new))


@cases(
    "new",
    replace(BASE, nodes=BASE.nodes[:-1], partitions=()),
    replace(BASE, name="other"),
    replace(BASE, options={"SelectType": "select/linear"}),
    replace(BASE, options={"StateSaveLocation": "/tmp"}),
)
def test_removed_node_or_lost_state_costs_jobs(new: ClusterConf) -> None:
    assert loses_jobs(TEXT, slurm_conf(new))


def test_regrouped_lines_cost_no_job() -> None:
    nodes = [replace(node, weight=2) if node.name == "gpu05" else node for node in BASE.nodes]
    assert not loses_jobs(TEXT, slurm_conf(replace(BASE, nodes=tuple(nodes))))


def test_handwritten_slurm_conf_is_not_parsed() -> None:
    by_hand = "ClusterName=old\nNodeName=DEFAULT CPUs=x\nNodeName=gone[1-\nPartitionName=all Nodes=ALL\n"
    assert nodes_in_conf(by_hand, "NodeName=gone[1- Name=gpu File=/dev/nvidia0\n") == {}
    assert change_cost(by_hand, TEXT) == "restart"
    assert loses_jobs(by_hand, TEXT), "the jobs of whatever cluster that was"


def test_switch_of_every_node_is_parsed_only_from_a_generated_file() -> None:
    text = topology_conf(CLUSTERS["24.11"])
    assert switches_of_nodes(text) == {
        "n1": "site-a",
        "desktop": "site-a",
        "box": "site-b",
        "cpu7": "site-b",
        "cpu8": "site-b",
    }
    assert switches_of_nodes(text.partition("\n")[2]) == {}
    assert switches_of_nodes("") == {}


def test_partitions_of_a_node_are_parsed_in_file_order() -> None:
    inside = parse_conf(slurm_conf(CLUSTERS["22.05"])).partitions_of_nodes()
    assert inside["n1"] == ("main", "one")
    assert inside["gpu16"] == ("main",)
    assert parse_conf("").partitions_of_nodes() == {}
