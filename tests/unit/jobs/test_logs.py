"""Lines of many ranks on many nodes, merged; and the program that reads them."""

import json
import subprocess
import sys
from pathlib import Path

from shoal.jobs.logs import BATCH, LogReader, RankEnd, merge
from shoal.remote import log_reader as reader

END = {"rank": 1, "node": "n1", "restart": 0, "start": 1.0, "end": 2.0, "status": 1, "signals": ["SIGTERM"]}


def taken(*lines: tuple[str, str]) -> LogReader:
    found = LogReader()
    for node, text in lines:
        found.take(node, text.encode())
    return found


def test_lines_of_all_ranks_are_in_time_order() -> None:
    found = taken(
        ("n1", "rank-0.0.log\t1.0 a"),
        ("n1", "rank-0.0.log\t3.0 c"),
        ("n2", "rank-1.0.log\t2.0 b"),
        ("n1", "rank-0.1.log\t9.0 again"),
        ("n1", "output@a1\t4.0 srun: error"),
    )
    lines = found.result().lines
    assert [(line.rank, line.restart, line.text) for line in lines] == [
        *((0, 0, "a"), (1, 0, "b"), (0, 0, "c")),
        *((BATCH, 0, "srun: error"), (0, 1, "again")),
    ]


def test_clock_set_back_does_not_reorder_the_lines_of_a_rank() -> None:
    found = taken(("n1", "rank-0.0.log\t5.0 first"), ("n1", "rank-0.0.log\t1.0 second"))
    assert [line.text for line in merge(found.lines)] == ["first", "second"]


def test_file_on_shared_storage_counts_once() -> None:
    assert len(taken(("n1", "rank-0.0.log\t1.0 a"), ("n2", "rank-0.0.log\t1.0 a")).result().lines) == 1


def test_both_runs_of_a_moved_job_count() -> None:
    found = taken(("n2", "output@b2\t9.0 second turn"), ("n1", "output@a1\t4.0 first turn"))
    assert [line.text for line in found.result().lines] == ["first turn", "second turn"]
    shared = taken(("n1", "output@a1\t4.0 once"), ("n2", "output@a1\t4.0 once"))
    assert [line.text for line in shared.result().lines] == ["once"]


def test_line_belongs_to_the_node_that_wrote_the_line() -> None:
    found = LogReader(batch_host="n2")
    for text in (
        "rank-1.0.node\tn3",
        "output@a1\t1.0 srun",
        "rank-1.0.log\t2.0 a",
        "rank-2.0.log\t3.0 of an older job",
    ):
        found.take("n1", text.encode())
    assert [(line.rank, line.node) for line in found.result().lines] == [(BATCH, "n2"), (1, "n3"), (2, "n1")]


def test_rank_lines_echoed_into_the_batch_output_count_once() -> None:
    found = LogReader(echo=True)
    for text in ("output@a1\t4.0 0: hello", "output@a1\t4.0 1: torchrun: no", "output@a1\t4.0 srun: error"):
        found.take("n1", text.encode())
    found.take("n1", b"rank-0.0.log\t1.0 hello")
    assert [line.text for line in found.others()] == ["torchrun: no"]
    assert [line.text for line in found.result().lines] == ["hello", "srun: error", "torchrun: no"]


def test_follower_of_days_keeps_the_last_lines_alone() -> None:
    found = LogReader(echo=True, limit=3)
    for number in range(9):
        found.take("n1", f"rank-0.0.log\t{number}.0 step {number}".encode())
        found.take("n1", f"output@a1\t{number}.5 0: step {number}".encode())
    assert [line.text for line in found.result().lines] == ["step 6", "step 7", "step 8"]


def test_rank_ends_are_parsed_and_invalid_lines_ignored() -> None:
    found = taken(
        ("n1", f"rank-1.0.end\t{json.dumps(END)}"),
        ("n1", "rank-2.0.end\t{broken"),
        ("n1", "rank-3.0.end\t{}"),
        ("n1", "no tab"),
        ("n1", "rank-x.log\t1.0 a"),
    )
    result = found.result()
    assert result.ends == (RankEnd(1, "n1", 0, 1.0, 2.0, 1, False, ("SIGTERM",)),) and result.lines == ()


def read(directory: Path, *more: str, error: str = ".out") -> list[str]:
    line = [sys.executable, "-I", "-S", reader.__file__, "logs", "", str(directory), str(directory) + ".out"]
    line += [str(directory) + error, *(more or ("0",))]
    return subprocess.run(line, capture_output=True, text=True, check=True, input="").stdout.splitlines()


def test_reader_prints_every_file_of_a_job(tmp_path: Path) -> None:
    job = tmp_path / "17"
    job.mkdir()
    (job / "rank-0.0.log").write_text("1.0 a\n2.0 b\n3.0 unfinished")
    (job / "rank-0.0.end").write_text(json.dumps(END) + "\n")
    (job / "rank-0.0.node").write_text("n1\n")
    (job / "tree.lock").write_text("not a log\n")
    (tmp_path / "17.out").write_text("srun: error\n")
    (tmp_path / ".id").write_text("a1\n")
    node, output, *lines = read(job)
    assert node == "rank-0.0.node\tn1", "before what was printed there"
    assert output.startswith("output@a1\t") and output.endswith(" srun: error")
    assert lines == [
        f"rank-0.0.end\t{json.dumps(END)}",
        "rank-0.0.log\t1.0 a",
        "rank-0.0.log\t2.0 b",
        "rank-0.0.log\t3.0 unfinished",
    ]


def test_reader_prints_a_separate_batch_error_file(tmp_path: Path) -> None:
    (tmp_path / "17.out").write_text("a\n")
    (tmp_path / "17.err").write_text("b\n")
    (tmp_path / ".id").write_text("a1\n")
    lines = read(tmp_path / "17", error=".err")
    assert [(line.partition("\t")[0], line[-1]) for line in lines] == [("error@a1", "b"), ("output@a1", "a")]


def test_batch_output_elsewhere_is_identified_by_its_inode(tmp_path: Path) -> None:
    output = tmp_path / "mine.out"
    output.write_text("a\n")
    line = [sys.executable, "-I", "-S", reader.__file__, "logs", "", "/no/jobs/17", str(output), str(output), "0"]
    said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"output@inode-{output.stat().st_ino}\t")


def test_reader_of_a_missing_job_prints_nothing(tmp_path: Path) -> None:
    assert read(tmp_path / "99") == []


def test_tail_starts_with_a_whole_line(tmp_path: Path) -> None:
    (tmp_path / "rank-0.0.log").write_text("".join(f"{n}.0 line {n}\n" for n in range(100)))
    lines = read(tmp_path, "40")
    assert lines[-1] == "rank-0.0.log\t99.0 line 99"
    assert all(line.split("\t")[1].split()[1] == "line" for line in lines) and 1 < len(lines) < 5


def test_follow_prints_later_lines_and_ends_on_request(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.0.log"
    log.write_text("1.0 a\n2.0 half")
    line = [sys.executable, "-I", "-S", reader.__file__, "logs", "", str(tmp_path), "/nope", "/nope", "0", "follow"]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "rank-0.0.log\t1.0 a\n"
    with log.open("a") as file:
        file.write(" done\n")
    assert process.stdout.readline() == "rank-0.0.log\t2.0 half done\n"
    with log.open("a") as file:
        file.write("3.0 last")
    rest, _ = process.communicate("\n", timeout=60)
    assert rest == "rank-0.0.log\t3.0 last\n"
