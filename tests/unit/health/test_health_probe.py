"""The program that checks a host, run on this machine."""

import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases

from shoal.remote import health_probe, python_command


def ask(**request: list[str]) -> Any:
    done = subprocess.run(
        python_command("health_probe"), input=json.dumps(request), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cases(
    "state, restarts, age_s, expected",
    ("active", "0", 1, "active"),
    ("active", "7", 1, "activating"),
    ("active", "7", 60, "active"),
    ("failed", "7", 1, "failed"),
    ("inactive", "0", 0, "inactive"),
)
def test_service_that_fails_over_and_over_does_not_run(state: str, restarts: str, age_s: float, expected: str) -> None:
    begin = f"{(time.monotonic() - age_s) * 1e6:.0f}"
    times = {"ActiveEnterTimestampMonotonic": begin, "InactiveEnterTimestampMonotonic": "0"}
    assert health_probe.service_state({"ActiveState": state, "NRestarts": restarts, **times}) == expected


def test_service_that_ended_has_the_time_of_its_end() -> None:
    end = f"{(time.monotonic() - 60) * 1e6:.0f}"
    values = {"ActiveEnterTimestampMonotonic": "0", "InactiveEnterTimestampMonotonic": end, "NRestarts": "0"}
    state, _, since = health_probe.service_state({"ActiveState": "failed", **values}).partition(" since ")
    age_s = time.time() - time.mktime(time.strptime(since, "%Y-%m-%dT%H:%M:%S"))
    assert state == "failed" and 59 <= age_s < 3600


def test_directories_are_reported_with_their_room(tmp_path: Path) -> None:
    [space] = ask(directories=[str(tmp_path), str(tmp_path / "missing")])["directories"]
    assert space["path"] == str(tmp_path)
    assert os.path.ismount(space["mount"]) and space["total_mb"] >= space["free_mb"] > 0
    assert space["problem"] == "" and [*tmp_path.iterdir()] == []


def test_directory_that_cannot_be_written_is_reported() -> None:
    assert health_probe.write_problem("/proc") != ""


def test_names_and_users_that_are_missing_are_reported() -> None:
    answer = ask(names=["localhost", "no-such-host.invalid"], users=["root", "no-such-user"])
    assert answer["names"] == ["no-such-host.invalid"]
    assert answer["users"] == {"root": 0, "no-such-user": None}
    assert answer["unfinished"] == []


def test_notable_lines_of_a_log_are_reported_with_their_age(tmp_path: Path) -> None:
    log = tmp_path / "slurmd.log"
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    log.write_text(f"[{now}.123] debug: nothing\n[{now}.456] error: prolog failed: rc:256\nerror: without a time\n")
    first, second = ask(logs=[str(log), str(tmp_path / "missing")])["logs"]
    assert first["text"].endswith("rc:256") and -5 < first["age_s"] < 60
    assert second == {"age_s": None, "text": "error: without a time"}


def test_long_log_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "slurmctld.log"
    errors = "".join(f"error: {number} {'x' * 1000}\n" for number in range(200))
    log.write_text(f"old\n{errors}update_node: node n1 reason set to: fan broken\n{errors}")
    note, *lines = ask(logs=[str(log)])["logs"]
    assert note["text"] == "update_node: node n1 reason set to: fan broken"
    assert len(lines) == health_probe.MAX_LINES
    assert lines[-1]["text"].startswith("error: 199 ") and len(lines[-1]["text"]) == health_probe.MAX_LINE


def test_note_in_a_rotated_log_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "slurmctld.log"
    (tmp_path / "slurmctld.log.1").write_text("update_node: node n1 reason set to: fan broken\nerror: old\n")
    log.write_text("x" * health_probe.TAIL_BYTES + "\nupdate_node: node n1 reason set to: Kill task failed\n")
    texts = [line["text"] for line in ask(logs=[str(log)])["logs"]]
    assert [text.rpartition(": ")[2] for text in texts] == ["fan broken", "Kill task failed"]


def test_check_that_hangs_is_named_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setitem(health_probe.CHECKS, "logs", end.wait)
    monkeypatch.setattr(health_probe, "TIMEOUT_S", 0.5)
    answer = health_probe.answer({"logs": [], "users": ["root"]})
    assert answer["unfinished"] == ["logs"] and answer["users"] == {"root": 0}
    end.set()


def test_ended_jobs_are_counted_by_their_nodes(tmp_path: Path) -> None:
    def line(state: str, nodes: str, end: str, name: str = "train") -> str:
        return (
            f"JobId=3 UserId=ann(1001) GroupId=ann(1001) Name={name} JobState={state} Partition=main TimeLimit=30 "
            f"StartTime={end} EndTime={end} NodeList={nodes} NodeCnt=1 ProcCnt=1 WorkDir=/tmp\n"
        )

    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    forged = "x JobState=NODE_FAIL Partition=main TimeLimit=1 StartTime=1 EndTime=9 NodeList=n9 NodeCnt=1"
    (tmp_path / "jobcomp.log.1").write_text(line("FAILED", "n1", now) + line("FAILED", "n1", "2020-01-01T00:00:00"))
    (tmp_path / "jobcomp.log").write_text(
        line("COMPLETED", "n1", now, forged)
        + line("NODE_FAIL", "n[1-2]", now)
        + line("CANCELLED", "n1", now)
        + line("COMPLETED", "(null)", now)
    )
    answer = ask(records=[str(tmp_path / "jobcomp.log"), "7"])
    [lost], [failed] = answer["records"]["n[1-2]"][2], answer["records"]["n1"][1]
    assert abs(time.time() - lost) < 60 and failed == lost
    assert answer["records"] == {"n1": [2, [failed], []], "n[1-2]": [1, [], [lost]]}


def test_stops_of_slurmd_are_reported_with_its_next_start(tmp_path: Path) -> None:
    def line(seconds_ago: float, text: str) -> str:
        return f"[{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(time.time() - seconds_ago))}.123] {text}\n"

    stop, start = "Slurmd shutdown completing", "slurmd version 22.05.8 started"
    (tmp_path / "slurmd.log.1").write_text(line(9 * 86400, stop) + line(9000, start) + line(5000, stop))
    # It did not log an end before its third start: power was lost.
    (tmp_path / "slurmd.log").write_text(line(4900, start) + line(300, start) + line(100, stop))
    stops = ask(stops=[str(tmp_path / "slurmd.log"), "7"])["stops"]
    assert [[round((time.time() - end) / 100) * 100 for end in pair] for pair in stops] == [[5000, 4900], [100, 0]]


def test_last_result_of_the_health_program_is_reported(tmp_path: Path) -> None:
    config, result = tmp_path / "health.json", tmp_path / "result.json"
    assert ask(health=[str(config), str(result)])["health"] == {}
    config.write_text("{}")
    assert ask(health=[str(config), str(result)])["health"]["findings"] == []
    result.write_text(json.dumps({"time": time.time() - 100, "findings": [{"id": "gpu-lost"}], "memory": {}}))
    health = ask(health=[str(config), str(result)])["health"]
    assert health["findings"] == [{"id": "gpu-lost"}] and 99 < health["age_s"] < 200


def test_host_without_munge_reports_the_error() -> None:
    munge = ask(munge=[])["munge"]
    assert munge["credential"] or munge["error"]
