"""The programs of `shoal validate` on the nodes: what they read from real tools, and how they fail."""

import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases

from shoal.remote.validation import links, main, node_tests, place
from shoal.remote.validation.place import PREFIX, MissingTool, Rank
from shoal.validation.rows import read_records
from shoal.verbs.validate import PROGRAMS, QUICK_OPTIONS, SCRIPT, write_tree

RANK = Rank(0, 0, 1, "fish1")
HPCC = """\
Finished tests with the following results:
             1 tests completed and passed residual checks,
             0 tests completed and failed residual checks,
########################################################################
Begin of Summary section.
VersionMajor=1
VersionMinor=5
VersionMicro=0
LANG=C
Success=1
CommWorldProcs=2
HPL_Tflops=0.0125
HPL_N=1024
StarSTREAM_Triad=6.25
SingleSTREAM_Triad=9.5
End of Summary section.
########################################################################
"""
FIO = {
    "fio version": "fio-3.33",
    "jobs": [{"error": 0, "write": {"bw_bytes": 500_000_000, "iops": 476.8}, "read": {"bw_bytes": 0, "iops": 0}}],
}
OMPI_INFO_4 = """\
package:Debian OpenMPI
ompi:version:full:4.1.4
mca:pmix:isolated:version:"mca:2.1.0"
mca:pmix:ext3x:version:"mca:2.1.0"
mca:pmix:ext3x:version:"api:2.0.0"
mca:pmix:flux:version:"mca:2.1.0"
"""
MPI_LIST_22 = (
    "MPI plugin types are...\n\tcray_shasta\n\tpmi2\n\tnone\n\tpmix\nspecific pmix plugin versions available: pmix_v4\n"
)


def test_hpcc_summary_is_read() -> None:
    values = {"gflops": 12.5, "triad": 12.5, "single_triad": 9.5, "wrong": 0, "version": "hpcc 1.5.0"}
    assert node_tests.parse_hpcc(HPCC) == values
    failed = HPCC.replace("0 tests completed and failed", "1 tests completed and failed")
    assert node_tests.parse_hpcc(failed) == {**values, "wrong": 1}


@cases("text", "", HPCC.replace("Success=1", "Success=0"), HPCC.partition("HPL_Tflops")[0])
def test_unfinished_hpcc_is_a_failure(text: str) -> None:
    with pytest.raises(RuntimeError, match="hpcc did not finish"):
        node_tests.parse_hpcc(text)


def test_hpcc_uses_all_processes_in_a_rectangle() -> None:
    assert [node_tests.grid(count) for count in (1, 2, 6, 7, 16)] == [(1, 1), (1, 2), (2, 3), (1, 7), (4, 4)]
    text = node_tests.input_text(1024, 6)
    lines = [line.split() for line in text.splitlines()]
    assert ["1024", "Ns"] in lines and ["2", "Ps"] in lines and ["3", "Qs"] in lines
    assert len(text.splitlines()) == 36 and text.splitlines()[31].startswith("##### This line (no. 32)")
    assert node_tests.problem_size(64 << 30, 0.3, 0, 64) == 50688
    assert node_tests.problem_size(1024 << 30, 0.3, 0, 64) == 65920  # of all that memory it would take hours
    assert [node_tests.problem_size(64 << 30, 0.0, 725, cpus) for cpus in (1, 2, 128)] == [640, 1024, 8192]
    assert node_tests.memory_bytes() > 0
    shown = [node_tests.usable_memory(64 << 30, memory_mb) for memory_mb in (0, 1930, 65536)]
    assert shown == [64 << 30, 1930 << 20, 64 << 30]


@cases(
    "text, errors, cause",
    ("", "fio: pid=7, err=30/file:filesetup.c, Read-only file system\n", "Read-only file system"),
    ("", "", "no output"),
    (json.dumps({"jobs": [{**FIO["jobs"][0], "error": 5}]}), "", "Input/output error"),  # type: ignore[index]
)
def test_fio_report_is_read_and_a_failed_fio_is_a_failure(text: str, errors: str, cause: str) -> None:
    assert node_tests.parse_fio("note: both\n" + json.dumps(FIO), "write")["bw_bytes"] == 500_000_000
    with pytest.raises(RuntimeError, match=cause):
        node_tests.parse_fio(text, "write", errors)


def test_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"cannot write to {tmp_path}/missing"):
        node_tests.make_directory(f"{tmp_path}/missing")


def test_pmix_support_of_open_mpi_and_plugins_of_slurm() -> None:
    assert place.pmix_support(OMPI_INFO_4.splitlines()) == "ext3x"
    assert place.pmix_support(["ompi:version:full:5.0.7"]) == "built in"
    assert place.pmix_support(["mca:pmix:isolated:version:x", "ompi:version:full:4.1.4"]) == ""
    assert place.slurm_plugins(MPI_LIST_22.splitlines()) == ["cray_shasta", "pmi2", "none", "pmix"]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two directories in PATH, and nothing else."""
    for name in ("conda", "usr"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/conda{os.pathsep}{tmp_path}/usr")
    yield tmp_path


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def reports(capsys: pytest.CaptureFixture[str]) -> list[Any]:
    return list(read_records(capsys.readouterr().out.splitlines()))


def test_first_mpirun_is_reported_with_those_behind_it(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program(programs / "usr/mpirun", "printf 'HYDRA build details:\\n    Version:       4.1\\n'")
    place.report_mpirun(RANK, {})
    [record] = reports(capsys)
    assert (record["kind"], record["version"]) == ("other", "Version:       4.1")
    write_program(programs / "conda/mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    write_program(programs / "conda/ompi_info", f"printf '%s' '{OMPI_INFO_4}'")
    place.report_mpirun(RANK, {})
    [record] = reports(capsys)
    assert (record["path"], record["others"]) == (f"{programs}/conda/mpirun", [f"{programs}/usr/mpirun"])
    assert (record["version"], record["pmix"]) == ("mpirun (Open MPI) 4.1.4", "ext3x")


@cases("test, package", ("mpirun", "openmpi-bin"), ("hpcc", "hpcc"), ("fio", "fio"))
def test_missing_program_is_reported_with_its_package(
    programs: Path, capsys: pytest.CaptureFixture[str], test: str, package: str
) -> None:
    main.run_test(test, RANK, {"shares": []})
    [record] = reports(capsys)
    assert (record["test"], record["missing"]) == (test, package)


def test_missing_library_of_mpi_and_torch_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.remote.validation.mpi.LIBRARIES", ("libshoal-nothing.so",))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    main.run_test("mpi", RANK, {})
    main.run_test("torch", RANK, {"gpus": 0})
    assert [record["missing"] for record in reports(capsys)] == ["openmpi-bin", "torch"]


def test_gpu_without_a_driver_is_a_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.remote.validation.gpus.DRIVER", "libshoal-nothing.so")
    main.run_test("gpu", RANK, {"gpus": 1})
    [record] = reports(capsys)
    assert "the NVIDIA driver is not usable here" in record["problem"] and "missing" not in record


def test_last_line_of_an_error_is_reported_as_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(rank: object, options: object) -> None:
        raise RuntimeError("NCCL error in: NCCLUtils.cpp:93\nLast error:\nDuplicate GPU detected : rank 0 and rank 1")

    monkeypatch.setattr(main, "TESTS", {"torch": fail})
    main.run_test("torch", RANK, {})
    [record] = reports(capsys)
    said = "RuntimeError: NCCL error in: NCCLUtils.cpp:93; Duplicate GPU detected : rank 0 and rank 1"
    assert record["problem"] == said


def test_failing_test_does_not_stop_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    main.main(["links,cpu", json.dumps({})])
    captured = capsys.readouterr()
    first, second = read_records(captured.out.splitlines())
    assert (first["test"], second["test"]) == ("links", "cpu") and first["problem"].startswith("KeyError")
    assert "Traceback" in captured.err


def test_secrets_are_not_reported() -> None:
    environ = {"PATH": "/bin", "NCCL_NET": "Socket", "SLURM_JWT_TOKEN": "x", "TORCH_API_KEY": "x", "HOME": "/root"}
    assert place.shown_environment(environ) == {"NCCL_NET": "Socket", "PATH": "/bin"}


@cases("count", 2, 3, 4, 7, 16, 17, 64)
def test_every_two_nodes_meet_once_and_those_of_a_large_cluster_their_neighbours(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    schedule = place.rounds(names)
    met = {frozenset(pair) for pairs in schedule for pair in pairs}
    assert len(met) == count * (count - 1) // 2 if count <= 16 else frozenset().union(*met) == {*names}
    assert all(len({name for pair in pairs for name in pair}) == 2 * len(pairs) for pairs in schedule)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert place.bus_bandwidth(1_000_000_000, 1.0, 8) == (1.0, 1.75)
    line = place.size_row(4096, 0.001, 2, 0)
    assert (line["count"], line["us"], line["wrong"]) == (1024, 1000.0, 0)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def test_ranks_exchange_values_and_strangers_are_not_let_in() -> None:
    port, answers = free_port(), {}

    def take_part(number: int) -> None:
        meeting = links.Meeting(Rank(number, 0, 3, f"n{number}"), "127.0.0.1", port, "token")
        answers[number] = [meeting.exchange(number * 10), meeting.exchange(None)]
        meeting.close()

    threads = [threading.Thread(target=take_part, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    stranger = links.Meeting._connect("127.0.0.1", port)
    stranger.write(b'["guess", 2]\n')
    stranger.flush()
    take_part(2)
    for thread in threads:
        thread.join(timeout=60)
    stranger.close()
    assert answers == {number: [[0, 10, 20], [None] * 3] for number in range(3)}


def test_sent_tree_runs_and_measures_the_links_of_two_nodes(tmp_path: Path) -> None:
    write_tree(tmp_path)
    assert {path.stem for path in (tmp_path / "programs/validation").glob("*.py")} == {*PROGRAMS, "__init__"}
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"PATH": os.environ["PATH"], "SHOAL_NODE_ADDRS": "n0=127.0.0.1,n1=127.0.0.1", "SHOAL_SUBMISSION": "abcd"}
    options = json.dumps({**QUICK_OPTIONS, "seconds": 0.1, "ports": [free_port() - 1, 65535]})
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, "cpu,links", options],
            cwd=tmp_path,
            env={**common, "RANK": str(number), "SLURMD_NODENAME": f"n{number}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    lines = [line for rank in ranks for line in rank.communicate(timeout=120)[0].splitlines()]
    records = read_records(lines)
    assert sorted(record["node"] for record in records if record["test"] == "cpu") == ["n0", "n1"]
    pairs = [record for record in records if record["test"] == "link-pair"]
    assert {tuple(record["pair"]) for record in pairs} == {("n0", "n1"), ("n1", "n0")}
    assert all(record["speed"] > 0 for record in pairs)


def test_error_of_a_missing_tool_is_plain() -> None:
    assert str(MissingTool("hpcc", "hpcc")) == "hpcc is not installed"
    assert PREFIX.endswith(" ")
