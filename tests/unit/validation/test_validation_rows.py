"""Every row of `shoal validate` passes, fails and is left out for the right reason."""

import json
from dataclasses import replace
from typing import Any

from tests.support.cases import cases

from shoal.remote.validation.place import PREFIX, size_row
from shoal.validation.rows import ROW_NAMES, read_environments, read_mpiruns, read_rows, size_text
from shoal.validation.types import JobOutcome, ValidationJob, ValidationRow

NODES = ("fish1", "fish2")
SIZES = [size_row(size, size / 1e9, 2, 0) for size in (1024, 1 << 20)]


def each_node(test: str, **values: Any) -> list[dict[str, Any]]:
    return [{"test": test, "node": node, "rank": rank, **values} for rank, node in enumerate(NODES)]


def first_node(test: str, **values: Any) -> dict[str, Any]:
    return {"test": test, "node": "fish1", "rank": 0, **values}


VALUES: dict[str, list[dict[str, Any]]] = {
    "cpu": each_node(
        "cpu",
        **{"cpus": 4, "world": 2, "vendor": "QEMU", "environment": {"PATH": "/bin"}},
        **{"python": "3.11", "memlock": "unlimited"},
    ),
    "mpirun": each_node(
        "mpirun",
        **{"path": "/usr/bin/mpirun", "kind": "openmpi", "others": []},
        **{"version": "mpirun (Open MPI) 4.1.4", "pmix": "ext3x"},
    ),
    "gpu": each_node("gpu", gpus=["NVIDIA H200"], expected=1, tflops=600.0, wrong=0, h2d=50.0, d2d=300.0),
    "torch": [first_node("torch", backend="gloo", version="torch 2.13", sizes=SIZES, ranks=2, nodes=[*NODES])],
    "mpi": [
        first_node("mpi", sizes=SIZES, ranks=2, nodes=[*NODES]),
        first_node("mpi-pair", pair=[*NODES], latency_us=40.0, speed=0.9),
    ],
    "links": [
        first_node("link-pair", pair=["fish1", "fish2"], speed=1.2, rtt_ms=0.1),
        {"test": "link-pair", "node": "fish2", "rank": 1, "pair": ["fish2", "fish1"], "speed": 1.1, "rtt_ms": 0.1},
    ],
    "hpcc": each_node("hpcc", gflops=40.0, triad=20.0, wrong=0, size=1024, cpus=2, version="hpcc 1.5.0"),
    "fio": each_node("fio", directory="/data", write=0.5, read=0.8, version="fio-3.33"),
}


def outcome(test: str, values: list[dict[str, Any]] | None = None, **more: Any) -> JobOutcome:
    values = VALUES[test] if values is None else values
    lines = ["some line of the launcher", *(PREFIX + json.dumps(value) for value in values)]
    return JobOutcome(ValidationJob("srun", "srun", (test,), NODES, cpus=2), "17", lines=tuple(lines), **more)


def rows(test: str, values: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, ValidationRow]:
    return {row.test: row for row in read_rows(outcome(test, values, **more))}


def changed(test: str, place: int = 0, **more: Any) -> list[dict[str, Any]]:
    """The results of a test, one of them changed."""
    return [{**value, **more} if number == place else value for number, value in enumerate(VALUES[test])]


@cases("test", *VALUES)
def test_good_results_pass(test: str) -> None:
    assert {(row.status, row.job, row.nodes) for row in rows(test).values()} == {("passed", "17", "fish[1-2]")}


@cases("test", *VALUES)
def test_test_without_a_result_has_failed_with_the_reason_of_its_job(test: str) -> None:
    result = rows(test, [], failed=True, reason="the job reached its time limit", fix="give it more with --time")
    assert tuple(result) == ROW_NAMES[test]
    assert {(row.status, row.detail) for row in result.values()} == {("failed", "the job reached its time limit")}
    ended_well = {(row.status, row.detail, row.fix) for row in rows(test, []).values()}
    assert ended_well == {("failed", "it left no result", "look at `shoal logs 17`")}


@cases("test", *VALUES)
def test_rank_with_a_problem_is_named(test: str) -> None:
    problem = {"test": test, "node": "fish2", "rank": 1, "problem": "RuntimeError: no route to host"}
    for row in rows(test, [*VALUES[test], problem]).values():
        assert (row.status, row.detail) == ("failed", "rank 1 on fish2: RuntimeError: no route to host")


@cases("test, package", ("mpirun", "openmpi-bin"), ("torch", "torch"), ("hpcc", "hpcc"), ("fio", "fio"))
def test_missing_tool_is_not_run_and_names_the_package(test: str, package: str) -> None:
    missing = {"test": test, "node": "fish2", "rank": 1, "problem": "it is not installed", "missing": package}
    for row in rows(test, [*VALUES[test][:1], missing]).values():
        assert (row.status, row.package) == ("not run", package)
        assert row.detail == "it is not installed on fish2" and row.fix


def test_missing_tool_of_an_image_is_to_be_installed_there() -> None:
    made = outcome("torch", [{"test": "torch", "node": "fish2", "rank": 1, "problem": "no", "missing": "torch"}])
    [row] = read_rows(replace(made, job=replace(made.job, image="mini")))
    assert row.fix == "install torch in image mini"


@cases(
    "lines, package",
    (["shoal: no mpirun of Open MPI on fish1,fish2"], "openmpi-bin"),
    (["/usr/bin/python3: Error while finding module: No module named 'torch'"], "torch"),
)
def test_missing_launcher_leaves_all_its_tests_out(lines: list[str], package: str) -> None:
    job = ValidationJob("mpirun", "mpirun", ("cpu", "mpi"), NODES)
    result = read_rows(JobOutcome(job, "17", True, "the batch script failed", lines=tuple(lines)))
    assert [row.test for row in result] == ["cpu", "mpi all-reduce", "mpi ping-pong"]
    assert {(row.status, row.package) for row in result} == {("not run", package)}


WRONG_SUM = [*SIZES[:1], {**SIZES[1], "wrong": 7}]
IN_NODES = each_node("torch-node", speed=9.0, sizes=SIZES[:1], ranks=8, wrong=0)
BROKEN_LINK = first_node("link-pair", pair=[*NODES], problem="to fish2: refused")
BROKEN_DISK = {"test": "fio", "node": "fish2", "rank": 1, "directory": "scratch", "problem": "fio: Input/output error"}


@cases(
    "test, values, name, detail",
    ("cpu", changed("cpu", 1, node="fish1"), "cpu", "fish1 has 2 ranks instead of 1"),
    ("cpu", changed("cpu", 1, cpus=1), "cpu", "rank 1 on fish2 may use 1 of 2 CPUs"),
    ("mpirun", changed("mpirun", kind="other"), "mpirun", "/usr/bin/mpirun on fish1 is not Open MPI"),
    ("mpirun", changed("mpirun", 1, version="5.0.7"), "mpirun", "nodes have different releases: fish1: mpirun"),
    ("mpirun", changed("mpirun", 1, pmix=""), "mpirun", "/usr/bin/mpirun on fish2 was built without PMIx"),
    ("gpu", changed("gpu", 1, gpus=[]), "gpu", "rank 1 on fish2 opens 0 of 1 GPUs"),
    ("gpu", changed("gpu", 1, wrong=3), "gpu", "fish2: a matrix product has 3 wrong values"),
    ("torch", changed("torch", sizes=WRONG_SUM), "all-reduce gloo", "7 of 262144 values of 1048576 bytes are wrong"),
    ("torch", [*VALUES["torch"], IN_NODES[0]], "all-reduce gloo in a node", "fish2 left no result"),
    (
        "torch",
        [*VALUES["torch"], IN_NODES[0], {**IN_NODES[1], "wrong": 5}],
        "all-reduce gloo in a node",
        "5 values are wrong on fish2",
    ),
    ("mpi", changed("mpi", sizes=WRONG_SUM), "mpi all-reduce", "7 of 262144 values of 1048576 bytes are wrong"),
    ("links", [{**link, "pair": ["fish1", "fish3"]} for link in VALUES["links"]], "links", "fish2 was not measured"),
    ("links", [BROKEN_LINK], "links", "rank 0 on fish1: to fish2: refused"),
    ("hpcc", changed("hpcc", 1, wrong=1), "hpl", "HPL's result is wrong on fish2"),
    ("hpcc", VALUES["hpcc"][:1], "stream", "fish2 left no result"),
    ("fio", VALUES["fio"][:1], "fio /data", "fish2 left no result"),
    ("fio", [*VALUES["fio"], BROKEN_DISK], "fio scratch", "fish2: fio: Input/output error"),
)
def test_wrong_result_fails_its_row(test: str, values: list[dict[str, Any]], name: str, detail: str) -> None:
    row = rows(test, values)[name]
    assert row.status == "failed" and row.detail.startswith(detail)
    assert row.fix or test != "mpirun"
    assert ("OMPI_MCA_hwloc_base_binding_policy" in row.fix) == ("may use" in detail)


def test_lost_rank_fails_the_cpu_row() -> None:
    row = rows("cpu", VALUES["cpu"][:1], failed=True, reason="node fish2 failed")["cpu"]
    assert (row.status, row.detail) == ("failed", "1 of 2 ranks did not start: 1; node fish2 failed")


def test_rows_beside_a_wrong_result_pass() -> None:
    assert rows("torch", VALUES["torch"] + IN_NODES)["all-reduce gloo in a node"].status == "passed"
    assert rows("hpcc", changed("hpcc", 1, wrong=1))["stream"].status == "passed"
    assert rows("fio", [*VALUES["fio"], BROKEN_DISK])["fio /data"].status == "passed"
    closed = {**BROKEN_DISK, "problem": "alice cannot write to /models"}
    assert rows("fio", [closed])["fio scratch"].status == "not run"


def test_pair_without_a_result_fails_the_ping_pong_row() -> None:
    result = rows("mpi", VALUES["mpi"][:1], failed=True, reason="the job was cancelled")
    assert result["mpi all-reduce"].status == "passed"
    assert (result["mpi ping-pong"].status, result["mpi ping-pong"].detail) == ("failed", "the job was cancelled")
    result = rows("mpi", VALUES["mpi"][1:])
    assert (result["mpi all-reduce"].status, result["mpi ping-pong"].status) == ("failed", "passed")


def test_start_failure_of_mpi_has_its_cause() -> None:
    job = outcome("mpi", []).job
    result = read_rows(JobOutcome(job, "17", True, "rank 0 failed", lines=("orte_ess_init failed",)))
    assert all("PMIx" in row.fix for row in result)


def test_unfinished_line_is_no_result() -> None:
    good = outcome("cpu")
    cut = JobOutcome(good.job, "17", lines=(*good.lines[:-1], good.lines[-1][:-9], PREFIX + "[]", PREFIX + "{}"))
    assert read_rows(cut)[0].detail.startswith("1 of 2 ranks did not start")


def test_mpiruns_and_environments_are_read() -> None:
    [program, _] = read_mpiruns([outcome("mpirun"), outcome("cpu")])
    assert (program.node, program.path, program.pmix) == ("fish1", "/usr/bin/mpirun", "ext3x")
    [environment] = read_environments([outcome("cpu")])
    assert (environment.launcher, environment.node, environment.variables) == ("srun", "fish1", {"PATH": "/bin"})


def test_sizes_are_readable() -> None:
    assert [size_text(size) for size in (1000, 1 << 16, 1 << 22, 4 << 30)] == ["1000 B", "64 KiB", "4 MiB", "4 GiB"]
