"""Move a controller that rents to another host: its service ends, its ledger moves, a stale service does nothing.

Run it by hand (`-m matrix`): it takes minutes.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster
from tests.e2e.existing_hosts import Lent, lent_hosts
from tests.e2e.simulated_clouds import Cloud, bill, ended, simulated, spent

from shoal.roles.elastic import SUPERSEDED
from shoal.spec.member import Shape

COVERS = "verbs/controller_move remote/rental_ledger_move.py cloud/service/ledger"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, pytest.mark.timeout(1500)]

HOSTS, NAME = "el-move", "el-moved"
CLOUD = Cloud("sandbox", "sk-e2e-0123456789abcdef")
KEPT = "/root/stale.tar"
STATE = "/etc/shoal/elastic /etc/systemd/system/shoal-elastic.service /var/lib/shoal/elastic /opt/shoal"


@dataclass
class Moving:
    """A cluster of two hosts, either of which may be its controller."""

    lent: Lent
    url: str
    cluster: Cluster

    def put(self, controller: str, other: str) -> None:
        """Name the controller in the file."""
        reach = f"user: shoal, identity: {self.lent.identity}"
        self.cluster.file.write_text(
            f"cluster: {NAME}\n"
            f"controller: {{host: {self.lent.entry(controller)}, {reach}}}\n"
            f'providers:\n  acme: {{kind: sandbox, url: "{self.url}", key: "env:SANDBOX_KEY"}}\n'
            "nodesets:\n"
            f"  lab: {{hosts: [{self.lent.entry(other)}], {reach}}}\n"
            "  burst: {provider: acme, type: cpu, max: 1, idle: 10s, cpus: 1, memory: 1G}\n"
        )

    def submit(self, controller: str, command: str) -> str:
        return self.lent.shell(controller, f"cd /tmp && sbatch --parsable -w burst1 --wrap '{command}'").strip()

    def state(self, controller: str, job: str) -> str:
        return self.lent.shell(controller, f"squeue -h -t all -j {job} -o %T", status=None).strip()


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moving]:
    directory: Path = tmp_path_factory.mktemp("moving")
    with lent_hosts(HOSTS, dict.fromkeys(("c1", "c2"), Shape()), NAME) as lent, simulated(HOSTS, CLOUD) as url:
        made = Moving(lent, url, Cluster(directory, f"cluster: {NAME}\n"))
        made.cluster.env |= {CLOUD.variable: CLOUD.key}
        made.put("c1", "c2")
        try:
            assert made.cluster.json("up")["whole"]
            yield made
        finally:
            made.cluster.shoal("down", "--force", status=None)


def test_controller_cannot_move_while_a_machine_is_rented(moving: Moving) -> None:
    job = moving.submit("c1", "sleep 3600")
    moving.cluster.wait("the job runs", lambda: moving.state("c1", job) == "RUNNING", seconds=400)
    moving.put("c2", "c1")
    refused = moving.cluster.shoal("up", status=None)
    assert refused.returncode != 0
    assert "would end the jobs on machines that c1 rented: burst1 (acme " in refused.stderr
    assert moving.state("c1", job) == "RUNNING"
    moving.put("c1", "c2")
    moving.lent.shell("c1", f"scancel {job}")
    moving.cluster.wait("its machine goes", lambda: ended(moving.url), seconds=300)
    moving.cluster.wait("its end is known", lambda: moving.cluster.json("cost")["machines"] == 0, seconds=120)


def test_old_service_stops_and_the_new_service_keeps_the_spending(moving: Moving) -> None:
    before = spent(moving.cluster, ["burst"])
    assert before > 0
    moving.lent.shell("c1", f"systemctl stop shoal-elastic; tar -cf {KEPT} {STATE}; systemctl start shoal-elastic")
    moving.put("c2", "c1")
    assert moving.cluster.json("up")["whole"]
    assert moving.lent.shell("c1", "systemctl is-active shoal-elastic", status=None).strip() == "inactive"
    moving.lent.shell("c1", "test ! -e /etc/systemd/system/shoal-elastic.service && test ! -e /etc/shoal/elastic")
    assert spent(moving.cluster, ["burst"]) == before
    job = moving.submit("c2", "sleep 3600")
    moving.cluster.wait("the new controller rents", lambda: moving.state("c2", job) == "RUNNING", seconds=400)


def test_restarted_old_service_changes_nothing(moving: Moving) -> None:
    """As one would that nobody reached during the move, with all that it had."""
    [machine] = [entry["id"] for entry in bill(moving.url)["machines"] if not entry["ended"]]
    moving.lent.shell("c1", f"tar -xf {KEPT} -C / && systemctl daemon-reload && systemctl restart shoal-elastic")

    def problem() -> str:
        report = moving.lent.shell("c1", "cat /var/lib/shoal/elastic/status.json", status=None)
        return str(json.loads(report)["problem"]) if report else ""

    moving.cluster.wait("it sees who is in charge", lambda: "a later service" in problem(), seconds=120)
    assert f"{machine} of acme was rented by a later service" in problem()
    moving.lent.shell("c1", f"systemctl restart shoal-elastic && test -s {SUPERSEDED}")
    moving.cluster.wait("it says so again", lambda: "a later service" in problem(), seconds=60)
    assert [entry["id"] for entry in bill(moving.url)["machines"] if not entry["ended"]] == [machine]
    moving.lent.shell("c1", "systemctl stop shoal-elastic")
