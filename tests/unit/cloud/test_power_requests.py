"""Requests that Slurm's resume and suspend programs leave, and how the service handles them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.cloud.service.slurm_requests import PowerRequest, RequestQueue
from shoal.remote import power_request as request

RESUME_22 = {"jobs": [{"job_id": 15, "nodes": "cl[1-2]"}], "all_nodes": "cl[1-2]"}
RESUME_23 = {
    "all_nodes_resume": "cl[1-2]",
    "jobs": [{"job_id": 15, "nodes_alloc": "cl[1-3]", "nodes_resume": "cl[1-2]", "features": "", "extra": None}],
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "requests"
    directory.mkdir()
    return directory


def ask(place: Path, verb: str, nodes: str, resume_file: Path | None = None) -> int:
    environ = {"SLURM_RESUME_FILE": str(resume_file)} if resume_file else {}
    return request.main([f"/usr/lib/shoal/{verb}", nodes], str(place), environ)


@cases("told, nodes", (RESUME_22, ("cl1", "cl2")), (RESUME_23, ("cl1", "cl2", "cl3")), ids=["22.05", "23.02"])
def test_request_names_jobs_and_their_nodes(place: Path, tmp_path: Path, told: object, nodes: tuple[str, ...]) -> None:
    file = tmp_path / "resume.json"
    file.write_text(json.dumps(told))
    assert ask(place, "resume", "cl[1-2]", file) == 0
    requests = RequestQueue(place)
    assert requests.waiting()
    assert requests.take() == [PowerRequest("resume", ("cl1", "cl2"), (("15", nodes),))]
    assert not requests.waiting()
    assert requests.take() == []


def test_requests_are_read_in_their_order(place: Path) -> None:
    for verb in ("resume", "suspend", "resume-fail"):
        ask(place, verb, "cl1")
    assert [one.verb for one in RequestQueue(place).take()] == ["resume", "suspend", "resume-fail"]


@cases("broken", "", "no json", "[]", '{"jobs": 5}', '{"jobs": [5]}')
def test_unreadable_resume_file_keeps_the_request(place: Path, tmp_path: Path, broken: str) -> None:
    file = tmp_path / "resume.json"
    file.write_text(broken)
    assert ask(place, "resume", "cl1", file) == 0
    assert RequestQueue(place).take() == [PowerRequest("resume", ("cl1",))]


def test_invalid_requests_are_dropped_and_the_rest_read(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (place / "0-a").write_text("{")
    (place / "0-b").write_text(json.dumps({"verb": "burn", "nodes": "cl1", "jobs": []}))
    (place / "0-c").write_text(json.dumps({"verb": "resume", "nodes": "cl[1", "jobs": []}))
    (place / "0-d").write_text(json.dumps({"verb": "resume", "nodes": 7, "jobs": []}))
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"verb": "resume", "nodes": "cl7", "jobs": []}))
    (place / "0-e").symlink_to(secret)
    ask(place, "suspend", "cl1")
    (place / "trap").mkdir()
    (place / ".123-4").write_text("{")  # which is not yet written
    assert RequestQueue(place).take() == [PowerRequest("suspend", ("cl1",))]
    assert caplog.text.count("ignoring request") == 5
    assert secret.exists()
    assert {path.name for path in place.iterdir()} == {"trap", ".123-4"}
    for queue in (RequestQueue(place), RequestQueue(tmp_path / "none")):
        assert not queue.waiting() and queue.take() == []


def test_program_runs_alone_and_prints_its_usage(tmp_path: Path) -> None:
    program = tmp_path / "resume"
    program.write_text(Path(request.__file__).read_text())
    # Nothing but the standard library is there, and none of the user's own.
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(program)], capture_output=True, text=True, timeout=30, env={"PATH": os.defpath}
    )
    assert done.returncode == 2
    assert done.stderr == "usage: resume|suspend|resume-fail HOSTLIST\n"
