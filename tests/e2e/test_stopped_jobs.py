"""Jobs that Slurm stops continue where they were, on a real cluster. tests/matrix/signals has every way to stop one.

The jobs of the tests run at the same time.
"""

from collections.abc import Iterator

import pytest
from tests.e2e.standing import Standing
from tests.matrix.stopped_jobs import Cell, Matrix, Outcome, Stopped, judge

COVERS = "train/stop.py train/checkpoint slurm/preemption jobs/failure tests/matrix/stopped_jobs.py"
GROUP = "reef"
pytestmark = pytest.mark.sandbox

PREEMPTED = Cell("srun", "preemption", 2)
WARNED = Cell("torchrun", "USR1", 2)
ENDED = Cell("python", "TERM", 0)
# test_jobs.py has a warning and its requeue every day, and tests/unit/jobs/test_runner.py how torchrun passes it on.
CELLS = [PREEMPTED, *(pytest.param(cell, marks=pytest.mark.matrix) for cell in (WARNED, ENDED))]


@pytest.fixture(scope="module")
def cluster(standing: Standing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    made = standing.view(Matrix)
    made.nodes = 2
    made.prepare(tmp_path_factory.mktemp("stopping"), at_once=4)
    made.share_nodes()
    yield made
    made.on("controller", "scontrol", "update", "PartitionName=main", "OverSubscribe=NO")


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
    change = "s/^KillWait=.*/KillWait=5/; s/^PreemptMode=.*/PreemptMode=CANCEL/"
    cluster.on("controller", "sh", "-c", f"sed -i '{change}' /etc/slurm/slurm.conf && scontrol reconfigure")
    fixes = _findings(cluster)
    assert (fixes[less], fixes[lost]) == ("run `shoal up`, which sets 30", "run `shoal up`, which sets REQUEUE")
    cluster.json("up")
    assert not {less, lost} & {*_findings(cluster)}


def _findings(cluster: Matrix) -> dict[str, str]:
    """What `shoal check` finds, and the fix for each."""
    return {finding["what"]: finding["fix"] for finding in cluster.json("check", status=None)["findings"]}
