"""Every provider end to end: a job starts two nodes and ends, they are released, and the ledger equals the bill.

The providers' clouds are simulated beside one cluster, which rents from all of them at once; their machines are sandbox
hosts. Those of the sandbox itself and of RunPod are in test_rented_nodes.py.

    python -m tests.e2e.test_provider_rentals > bench/results/elastic-e2e.txt    how long it took with each, and cost
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster
from tests.e2e.simulated_clouds import (
    GOOGLE_IMAGE,
    LATE_S,
    UNFINISHED,
    Cloud,
    apart,
    bill,
    ended,
    printed,
    renting,
    shown,
    spent,
    submit,
)

COVERS = "cloud src/shoal_simulators"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]  # two minutes for one of them, and not much more for all

NAME = "ee-clouds"


@dataclass(frozen=True)
class Case:
    """A provider, and what is rented there."""

    kind: str
    offer: str
    gpus: int = 0
    settings: str = ""
    container: bool = False
    """Its machines are containers: without a share for the output of jobs, and a job has one of them."""
    slack: float = LATE_S
    """So many seconds of each machine the ledger may be wrong."""

    @property
    def nodes(self) -> str:
        return f"{self.kind}1" if self.container else f"{self.kind}[1-2]"


CASES = (
    # Lambda bills started minutes and does not tell when the first began: one more or less, and it is below a cent.
    Case("lambda", "type: cpu_4x_general, region: us-west-1, image: debian-12", slack=60.0),
    Case(
        "gcp",
        f"type: a2-highgpu-1g, zone: us-central1-a, image: {GOOGLE_IMAGE}",
        gpus=1,
        settings=", project: p",
    ),
    Case("aws", "type: g4dn.xlarge, region: us-east-1, zone: us-east-1a, image: ami-0123456789abcdef0", gpus=1),
    Case("digitalocean", "type: gpu-l40sx1-48gb, region: tor1, image: '12345678'", gpus=1),
    Case(
        "nebius",
        "type: gpu-l40s-a 1gpu-8vcpu-32gb, region: eu-north1, image: computeimage-e00debian12",
        gpus=1,
    ),
    Case("vast", "type: RTX 4090, region: DE", gpus=1, container=True),
    # Started hours: to the last millionth. A template that is named is not known to be too old.
    Case("paperspace", "type: A4000, region: NY2", gpus=1, slack=0.0, settings=", settings: {template: twnlo3zj}"),
)
BY_KIND = {case.kind: case for case in CASES}


def spec_of(cases: Sequence[Case], name: str = NAME, more: str = "") -> str:
    """A spec that rents from these providers, with more lines."""
    accounts = [
        f'  {case.kind}: {{url: "URL-OF-{case.kind}", key: "env:{case.kind.upper()}_KEY"{case.settings}}}'
        for case in cases
    ]
    shape = "max: 2, cpus: 1, memory: 1G, idle: 10s"
    sets = [f"  {case.kind}: {{provider: {case.kind}, {case.offer}, {shape}, gpus: {case.gpus}}}" for case in cases]
    head = [f"cluster: {name}", "controller: {provider: sandbox, memory: 1G}", "budget: {per_hour: 20}"]
    return "\n".join([*head, "providers:", *accounts, "nodesets:", *sets, more]) + "\n"


@dataclass
class Rental:
    """The way of one job and its two machines. Times are seconds since 1970."""

    case: Case
    job: str
    submitted: float

    def row(self, cluster: Cluster, url: str) -> tuple[str, ...]:
        """Provider, seconds until machines were ordered, until the job ran, until they were released, and money."""
        machines, output = bill(url)["machines"], shown(cluster, self.job)
        began, over = (datetime.fromisoformat(f"{output[name]}+00:00").timestamp() for name in ("StartTime", "EndTime"))
        ordered = max(machine["ordered"] for machine in machines) - self.submitted
        gone = max(machine["ended"] for machine in machines) - over
        ours = spent(cluster, [self.case.kind])
        seconds = (f"{value:.0f}" for value in (ordered, began - self.submitted, gone))
        return (self.case.kind, *seconds, f"{ours:.6f}", f"{bill(url)['usd']:.6f}")


class Clouds:
    """A cluster that rents from several clouds, and one job for each, queued at once."""

    def __init__(self, cluster: Cluster, urls: dict[str, str]) -> None:
        self.cluster, self.urls = cluster, urls
        self.rentals = {kind: self._wake(BY_KIND[kind]) for kind in urls}

    def _wake(self, case: Case) -> Rental:
        more = [f"--gpus-per-node={case.gpus}"] if case.gpus else []
        more += ["--output=/dev/null", f"--partition={case.kind}"] if case.container else []
        command = "srun sh -c 'hostname; echo gpu $CUDA_VISIBLE_DEVICES'"
        return Rental(case, submit(self.cluster, case.nodes, command, *more), time.time())

    def finish(self, kind: str) -> Rental:
        """Wait until the job has ended and its machines are gone, and the ledger knows."""
        rental = self.rentals[kind]
        wait = self.cluster.wait
        wait("the job ends", lambda: shown(self.cluster, rental.job)["JobState"] not in UNFINISHED)
        wait("its machines go", lambda: ended(self.urls[kind]))
        wait("their end is known", lambda: self._rented(kind) == 0)
        return rental

    def _rented(self, kind: str) -> int:
        return sum(node["account"] == kind for node in self.cluster.json("status")["rented"]["nodes"])


@contextmanager
def clouds(directory: Path, cases: Sequence[Case], spec: str = "") -> Iterator[Clouds]:
    """A cluster that rents from these providers. Each job asks for the nodes of its case."""
    made = [Cloud(case.kind, f"id:key-of-{case.kind}-0123456789") for case in cases]
    with renting(directory, spec or spec_of(cases), *made) as (cluster, urls):
        yield Clouds(cluster, urls)


@pytest.fixture(scope="module")
def rented(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Clouds]:
    asked = {item.callspec.params["kind"] for item in request.session.items if item.path == request.path}
    with clouds(tmp_path_factory.mktemp("clouds"), [case for case in CASES if case.kind in asked]) as made:
        yield made


@pytest.mark.parametrize("kind", BY_KIND)
def test_rented_nodes_run_a_job_and_the_ledger_matches_the_bill(rented: Clouds, kind: str) -> None:
    case, cluster, url = BY_KIND[kind], rented.cluster, rented.urls[kind]
    rental = rented.finish(kind)
    assert shown(cluster, rental.job)["JobState"] == "COMPLETED", shown(cluster, rental.job)
    if not case.container:
        gpus = ["gpu", "0", "gpu", "0"] if case.gpus else ["gpu", "gpu"]
        assert sorted(printed(cluster, rental.job)) == sorted([f"{kind}1", f"{kind}2", *gpus])
    assert len(bill(url)["machines"]) == (1 if case.container else 2)
    assert apart(cluster, url, kind, slack=case.slack) == ""


HEAD = ("provider", "ordered s", "job s", "released s", "ledger USD", "bill USD")


EXPLAINED = """\
Two nodes of each provider, resumed at once by one job each: seconds from its submission until the second machine was
ordered and until the job ran; from its end until both were released, 10 s of them idle as the file says. Lambda takes
an order every 12 s. All machines are sandbox hosts on one computer, which boot side by side.
"""


def main() -> int:
    """Print the table."""
    with tempfile.TemporaryDirectory() as directory, clouds(Path(directory), CASES) as made:
        rows, wrong = [HEAD], list[str]()
        for case in CASES:
            rental, url = made.finish(case.kind), made.urls[case.kind]
            rows.append(rental.row(made.cluster, url))
            if problem := apart(made.cluster, url, case.kind, slack=case.slack):
                wrong.append(f"{case.kind}: {problem}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(EXPLAINED)
    for row in rows:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
    print("\n" + ("\n".join(wrong) or "every ledger is the bill, to the cent"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
