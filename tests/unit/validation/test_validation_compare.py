"""Findings of `shoal validate`: slow launchers, slow nodes, regressions, published limits, a hidden mpirun."""

from dataclasses import asdict, replace
from typing import Any

import pytest
from tests.support.cases import cases

from shoal.spec.finding import Finding
from shoal.validation.compare import (
    compare_rows,
    environment_differences,
    launcher_findings,
    mpirun_findings,
    regression_findings,
    slow_node_findings,
    slow_nodes_of_pairs,
)
from shoal.validation.limits import LIMITS, find_limit, limit_findings
from shoal.validation.types import (
    MpirunProgram,
    PairSpeed,
    SizeSpeed,
    StepEnvironment,
    ValidationResult,
    ValidationRow,
    read_result,
)

LARGE = (SizeSpeed(1 << 30, 1 << 28, 1.0, 1.0, 1.0, 0),)


def row(launcher: str = "srun", value: float = 10.0, **more: Any) -> ValidationRow:
    values: dict[str, Any] = {"test": "all-reduce gloo", "nodes": "n[1-4]", "status": "passed", "unit": "GB/s"}
    return ValidationRow(launcher, **{**values, "sizes": LARGE, "ranks": 4, **more}, value=value)


def result(*rows: ValidationRow, **more: Any) -> ValidationResult:
    return ValidationResult("reef", 1000.0, more.pop("quick", False), ("n1", "n2"), rows, **more)


def test_far_slower_launcher_is_found() -> None:
    [finding] = launcher_findings([row("mpirun"), row("srun, image", 4.9), row("torchrun", 6.0)])
    assert finding.what == "srun, image is far slower than mpirun: all-reduce gloo"
    assert finding.found == "4.9 GB/s and 10"
    assert launcher_findings([row("mpirun"), row("srun", 4.9, nodes="n[5-8]")]) == []
    assert launcher_findings([row("mpirun"), row("srun", 0.1, status="failed")]) == []


def pairs(slow: str, speed: float) -> tuple[PairSpeed, ...]:
    names = ("n1", "n2", "n3", "n4")
    return tuple(
        PairSpeed(a, b, speed if slow in (a, b) else 10.0) for i, a in enumerate(names) for b in names[i + 1 :]
    )


def test_slow_node_is_isolated_by_its_pairs() -> None:
    assert slow_nodes_of_pairs(pairs("n3", 2.0)) == {"n3": 0.2}
    assert slow_nodes_of_pairs(pairs("n3", 8.0)) == {}
    assert slow_nodes_of_pairs([PairSpeed("n1", "n2", 1.0)]) == {}, "one pair does not tell which node is slow"
    one_bad_link = [*pairs("", 0.0)[1:], PairSpeed("n1", "n2", 1.0)]
    assert slow_nodes_of_pairs(one_bad_link) == {}, "a slow link between two good nodes blames neither"
    sends_slowly = [PairSpeed("n3", other, 2.0) for other in ("n1", "n2", "n4")]
    assert slow_nodes_of_pairs([*pairs("", 0.0), *sends_slowly]) == {"n3": 0.2}, "the slower way counts"
    [finding] = slow_node_findings([row(pairs=pairs("n3", 2.0))])
    assert (finding.host, finding.found) == ("n3", "all its pairs reach 20% of the median of the other pairs")
    [finding] = slow_node_findings([row(test="hpl", by_node={"n1": 40.0, "n2": 41.0, "n3": 12.0})])
    assert (finding.host, finding.what) == ("n3", "slower than its peers: srun hpl"), "slow by itself"
    assert slow_node_findings([row(test="hpl", by_node={"n1": 40.0, "n2": 4.0})]) == []


def test_node_is_compared_with_its_last_good_run() -> None:
    good = row(test="stream", by_node={"n1": 100.0, "n2": 100.0})
    now = result(row(test="stream", by_node={"n1": 98.0, "n2": 70.0}))
    [finding] = regression_findings(now, [result(good)])
    assert (finding.host, finding.found) == ("n2", "70 GB/s, 70% of 100")
    assert regression_findings(now, []) == []
    assert regression_findings(replace(now, quick=True), [result(good)]) == [], "a quick run is another measure"
    slow = replace(now, findings=(finding,))
    assert len(regression_findings(now, [result(good), slow])) == 1, "a slow run does not become the measure"
    failed = result(replace(good, status="failed", by_node={"n1": 1.0, "n2": 1.0}))
    assert len(regression_findings(now, [result(good), failed])) == 1
    assert regression_findings(now, [result(replace(good, ranks=8))]) == []
    launchers = result(row("mpirun"), row("srun", 1.0), *now.rows)
    assert [finding.what.split(":")[0] for finding in compare_rows(launchers, [result(good)])] == [
        "srun is far slower than mpirun",
        "slower than at its last good run",
    ]


@cases(
    "gpu, ranks, vendor, limit",
    ("NVIDIA H100 80GB HBM3", 8, "Microsoft Corporation", 460),
    ("NVIDIA H100 80GB HBM3", 8, "Supermicro", 440),
    ("NVIDIA H200", 8, "OracleCloud.com", 440),
    ("NVIDIA H200", 8, "", 431),
    ("NVIDIA H200", 4, "", None),
    ("NVIDIA H100 NVL", 2, "", 208),
    ("NVIDIA A100-SXM4-80GB", 8, "", 185),
    ("NVIDIA B300 SXM6", 8, "", 800),
    ("NVIDIA GeForce RTX 4090", 8, "", None),
)
def test_published_limit_of_a_machine(gpu: str, ranks: int, vendor: str, limit: float | None) -> None:
    found = find_limit(row(test="all-reduce nccl in a node", gpu=gpu, ranks=ranks, vendor=vendor, by_node={"n1": 1.0}))
    assert (found.limit if found else None) == limit


def test_node_below_a_published_limit_is_an_error() -> None:
    values = {"n1": 470.0, "n2": 300.0}
    inside = row("torchrun", 300.0, test="all-reduce nccl in a node", gpu="NVIDIA H200", ranks=8, by_node=values)
    [finding] = limit_findings([inside])
    assert (finding.level, finding.host) == ("error", "n2")
    assert finding.found == "300 GB/s; Azure's node health checks ask for 431"
    small = replace(inside, sizes=(replace(LARGE[0], size=1 << 22),))
    assert limit_findings([small]) == [], "a quick run says nothing about large messages"
    copies = row(value=20.0, test="gpu copy from host", gpu="NVIDIA A100-SXM4-80GB", by_node={"n1": 20.0}, ranks=8)
    assert [finding.host for finding in limit_findings([copies])] == ["n1"]
    two = row(value=100.0, test="all-reduce nccl", nodes="n[1-2]", gpu="NVIDIA H200", ranks=16, vendor="Google")
    assert [finding.path for finding in limit_findings([two])] == ["n[1-2]"]
    assert limit_findings([replace(two, vendor="Dell Inc.")]) == [], "it holds for the network of its vendor only"


def test_every_published_limit_can_be_reached() -> None:
    names = {"H100(?! NVL)": "H100", "H100(?! NVL)|H200|B200": "B200", "H200|(?<!G)B200": "H200"}
    for limit in LIMITS:
        gpu = names.get(limit.gpu, limit.gpu.split("|")[0])
        test = {"in a node": "all-reduce nccl in a node", "two nodes": "all-reduce nccl"}.get(limit.test)
        gpus = limit.gpus or 8
        slow = row(
            value=1.0,
            test=test or f"gpu copy {limit.test}",
            gpu=f"NVIDIA {gpu}",
            vendor=f"{limit.vendor} Corporation",
            nodes="n[1-2]" if limit.test == "two nodes" else "n1",
            ranks=2 * gpus if limit.test == "two nodes" else gpus,
            by_node={} if limit.test == "two nodes" else {"n1": 1.0},
        )
        assert find_limit(slow) == limit
        assert len(limit_findings([slow])) == 1


def test_conda_mpirun_before_the_system_one_is_found() -> None:
    conda = MpirunProgram("n1", "/opt/conda/bin/mpirun", "mpirun (Open MPI) 5", "built in", ("/usr/bin/mpirun",))
    [finding, other] = mpirun_findings([conda, replace(conda, node="n2"), replace(conda, node="n3", others=())])
    assert (finding.host, finding.what) == ("n1", "/opt/conda/bin/mpirun comes before /usr/bin/mpirun")
    assert other.host == "n2"


def test_variables_that_differ_between_launchers_are_shown() -> None:
    def environment(launcher: str, **variables: str) -> StepEnvironment:
        return StepEnvironment(launcher, "n1", 4, "3.11", "unlimited", variables)

    srun = environment("srun", NCCL_NET="Socket", PATH="/bin", RANK="0")
    mpirun = environment("mpirun", PATH="/bin", RANK="1")
    assert environment_differences([srun, mpirun]) == {"NCCL_NET": {"srun": "Socket", "mpirun": ""}}


def test_result_passes_only_without_failures_and_findings() -> None:
    assert result(row()).passed and result(row()).complete
    assert not result(row(status="failed")).passed
    assert not result(row(), findings=(Finding("warning", "slow"),)).passed
    missing = result(row(), row(status="not run"))
    assert missing.passed and not missing.complete


def test_kept_result_is_read_again() -> None:
    whole = result(
        row(pairs=pairs("n1", 1.0), by_node={"n1": 2.0}),
        findings=(Finding("warning", "slow", host="n1"),),
        mpiruns=(MpirunProgram("n1", "/usr/bin/mpirun", "4"),),
        environments=(StepEnvironment("srun", "n1", 1, "3.11", "0", {"PATH": "/bin"}),),
    )
    kept = asdict(whole)
    assert read_result({**kept, "of_a_later_release": 1}) == replace(
        whole, mpiruns=(replace(whole.mpiruns[0], others=()),)
    )
    with pytest.raises(ValueError):
        read_result({"cluster": "reef"})
