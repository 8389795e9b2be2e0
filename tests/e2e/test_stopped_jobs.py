"""Jobs that Slurm stops continue where they were, on a real cluster. tests/matrix/signals has every way to stop one.

The tests share one cluster, whose jobs run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.cluster import taken_down
from tests.matrix.stopped_jobs import Cell, Matrix, Outcome, Stopped, judge

COVERS = "train/stop.py train/checkpoint slurm/preemption jobs/failure tests/matrix/stopped_jobs.py"
pytestmark = pytest.mark.sandbox

PREEMPTED = Cell("srun", "preemption", 2)
WARNED = Cell("torchrun", "USR1", 2)
ENDED = Cell("python", "TERM", 0)
# test_jobs.py has a warning and its requeue every day, and tests/unit/jobs/test_runner.py how torchrun passes it on.
CELLS = [PREEMPTED, *(pytest.param(cell, marks=pytest.mark.matrix) for cell in (WARNED, ENDED))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    made = Matrix(tmp_path_factory.mktemp("stopping"), "x-stopping", at_once=4)
    with taken_down(made):
        made.start()
        yield made


@pytest.fixture(scope="module")
def outcomes(cluster: Matrix, request: pytest.FixtureRequest) -> dict[Cell, Outcome]:
    """All stopped, and at their end."""
    matrix = any(item.get_closest_marker("matrix") for item in request.session.items)
    cells = (PREEMPTED, WARNED, ENDED) if matrix else (PREEMPTED,)
    whole, jobs = cluster.baselines(cells), list[Stopped]()
    cluster.play(cells, jobs, hurry=True)
    return {job.cell: judge(job, whole[job.cell.world_size]) for job in jobs}


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_stopped_job_loses_no_step_and_trains_bit_for_bit_equal(outcomes: dict[Cell, Outcome], cell: Cell) -> None:
    outcome = outcomes[cell]
    assert outcome.problems == ()
    assert outcome.lost == 0
    assert outcome.resumed_at == outcome.stopped_at


def test_preempted_job_gets_its_requested_signal(outcomes: dict[Cell, Outcome]) -> None:
    assert outcomes[PREEMPTED].reason == "SIGUSR1"


def test_check_reports_a_cluster_that_breaks_the_preemption_contract(cluster: Matrix) -> None:
    less = "jobs have less time to save after SIGTERM than they count on"
    lost = "a preempted job does not save its work and start again"
    assert not {less, lost} & {*_findings(cluster)}
    cluster.edit("SlurmdTimeout: 60", "SlurmdTimeout: 60, KillWait: 5, PreemptMode: CANCEL")
    cluster.json("up")
    cluster.edit(", KillWait: 5, PreemptMode: CANCEL", "")  # the file is corrected, the cluster not yet
    fixes = _findings(cluster)
    assert (fixes[less], fixes[lost]) == ("run `shoal up`, which sets 30", "run `shoal up`, which sets REQUEUE")
    cluster.json("up")
    assert not {less, lost} & {*_findings(cluster)}


def _findings(cluster: Matrix) -> dict[str, str]:
    """What `shoal check` finds, and the fix for each."""
    return {finding["what"]: finding["fix"] for finding in cluster.json("check", status=None)["findings"]}
