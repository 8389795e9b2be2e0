"""A person without machines: controller, login host and nodes all rented from one file, as in the Google guide.

The clouds are simulated; their machines are sandbox hosts, behind translated addresses as in a real cloud. This machine
is the operator's. The kill at every request is in tests/unit/verbs/test_rented_hosts.py.

    python -m pytest -q -s tests/e2e/test_rented_controller.py > bench/results/rented-controller.txt
"""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.documents import ROOT
from tests.e2e.cluster import LIMIT, Cluster, login_keys
from tests.e2e.leftovers import noted
from tests.e2e.simulated_clouds import GOOGLE_IMAGE, LATE_S, Cloud, bill, simulated

COVERS = (
    "verbs/rented_hosts verbs/rented_accounts verbs/rented_record verbs/rented_choices verbs/rented_costs verbs/reap "
    "verbs/provider_accounts cloud/providers"
)
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.matrix,  # minutes for each cloud
    pytest.mark.timeout(2400),
]


@dataclass(frozen=True)
class Market:
    """A cloud, and what is rented there."""

    cloud: Cloud
    place: str
    host: str
    usd_hour: float
    """The price of a host in the file, which is the cloud's: the table of prices has no machines without GPUs."""
    node: str
    account: str = ""

    @property
    def kind(self) -> str:
        return self.cloud.kind


MARKETS = {
    market.kind: market
    for market in (
        Market(
            Cloud("gcp", "key"),
            f"zone: us-central1-a, image: {GOOGLE_IMAGE}",
            "e2-standard-2",
            0.067,
            "a2-highgpu-1g",
            ", project: p",
        ),
        Market(
            Cloud("aws", "AKIDEXAMPLE:key"),
            "region: us-east-1, zone: us-east-1a, image: ami-0123456789abcdef0",
            "c7i.large",
            0.0893,
            "g4dn.xlarge",
        ),
    )
}
UNSEEN_S = 180.0
"""So much of a host's bill the ledger may have wrong: the minute before a stop that its service did not see, twice the
time of booting, which some clouds do not bill, and the end of `down`."""


@contextmanager
def rented(directory: Path, kind: str) -> Iterator[tuple[Cluster, str, Path]]:
    market = MARKETS[kind]
    name, place = f"ee-guide-{kind}", market.place
    with noted(name), login_keys("operator", "anna") as keys, simulated(name, market.cloud) as url:
        shared = f"provider: {kind}, type: {market.host}, {place}, disk: 50G, usd_hour: {market.usd_hour}"
        shared += f", identity: {keys}/operator"
        spec = f"""\
cluster: {name}
network: wireguard
providers: {{{kind}: {{url: "{url}", key: "env:{market.cloud.variable}"{market.account}}}}}
controller: {{{shared}}}
login: {{{shared}}}
nodesets:
  gpu: {{provider: {kind}, type: {market.node}, {place}, max: 2, cpus: 1, memory: 1G, gpus: 1, idle: 10s}}
storage: {{/data: {{kind: nfs}}}}
users: {{anna: {{keys: ["file:{keys}/anna.pub"]}}}}
time: none
"""
        cluster = Cluster(directory, spec)
        cluster.env[market.cloud.variable] = market.cloud.key
        yield cluster, url, keys


@pytest.mark.parametrize("kind", sorted(MARKETS))
def test_cluster_from_one_file_without_machines(tmp_path: Path, kind: str) -> None:
    begun, price = time.monotonic(), MARKETS[kind].usd_hour

    def step(what: str) -> None:
        print(f"{kind:5} {time.monotonic() - begun:6.0f} s  {what}")

    with rented(tmp_path, kind) as (cluster, url, keys):
        try:
            findings = cluster.json("check")["findings"]
            assert [one for one in findings if one["level"] == "error"] == [], findings
            plan = cluster.json("plan")
            rents = [change for change in plan["changes"] if change["action"].startswith("rent from")]
            assert [change["host"] for change in rents] == ["controller", "login1"]
            assert all(f"${price} an hour" in change["action"] for change in rents), rents
            assert bill(url)["machines"] == []
            refused = cluster.shoal("up", status=2)
            assert f"together ${2 * price:.4g} an hour" in refused.stderr and "--yes" in refused.stderr, refused.stderr
            assert bill(url)["machines"] == []
            step("check, plan and a refused up: nothing rented")

            killed = cluster.background("up", "--yes")
            until = time.monotonic() + LIMIT
            while not bill(url)["machines"] and time.monotonic() < until:
                time.sleep(0.05)
            killed.kill()
            killed.communicate(timeout=LIMIT)
            step("up killed after its first order")

            result = cluster.json("up", "--yes")
            assert result["whole"], result
            hosts = bill(url)["machines"]
            assert len(hosts) == 2, hosts
            step("up: controller and login host are a cluster, rented once each")

            before = addresses(cluster)
            cluster.wait(
                "the ledger has both hosts", lambda: {*cluster.json("cost")["hosts"]} == {"controller", "login1"}
            )
            shown_hosts = {one["name"]: one["usd_hour"] for one in cluster.json("status")["rented"]["hosts"]}
            assert shown_hosts == {"controller": price, "login1": price}
            step("their cost is in the ledger, `shoal cost` and `shoal status` show it")
            assert run_as_user(before["login1"], keys / "anna", "srun -N2 hostname").split() == ["gpu1", "gpu2"]
            step("a user's job on two rented nodes, through the login host")
            cluster.on("controller", "sh", "-c", "echo kept > /root/mark")

            [id] = [one["id"] for one in hosts if "controller" in one["name"]]
            with urllib.request.urlopen(f"{url}/_simulator/stop/{id}", b"", timeout=30):
                pass
            assert cluster.json("up")["whole"]
            assert addresses(cluster) == before
            assert cluster.on("controller", "cat", "/root/mark").strip() == "kept"
            assert len([one for one in bill(url)["machines"] if "controller" in one["name"]]) == 1
            step("the stopped controller started again: same disk, same address")

            wait_for_node = "srun -N1 hostname"
            assert run_as_user(before["login1"], keys / "anna", wait_for_node).startswith("gpu")
            step("a job after the restart: the rental service left its own controller alone")
        finally:
            end = cluster.json("down", "--force", "--yes")
        machines = bill(url)["machines"]
        assert all(machine["ended"] for machine in machines), machines
        assert not (Path(cluster.env["XDG_STATE_HOME"]) / "shoal" / cluster.name).exists()
        step(f"down: {len(machines)} machines, all given back")
        step(compare_with_bill(end["cost"], machines))


CHANGES = (
    ("key: file:~/service-account.json, project: my-project", 'key: "env:GCP_KEY", project: p, url: "{url}"'),
    ("cluster: slurm-job", "cluster: {name}"),
    ("disk: 50G}", "disk: 50G, identity: {keys}/operator}"),
    ("max: 10", "max: 2"),
    ("cpus: 16\n    memory: 57G", "cpus: 1\n    memory: 1G"),
    ("file:~/.ssh/id_ed25519.pub", "file:{keys}/anna.pub"),
)
"""What the test changes in the example: the account and its keys, and machines as small as this one's."""
GUIDE = """\
#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=1 --gres=gpu:1
srun sh -c 'echo "$(hostname) $SLURM_PROCID $(cat /apps/version) $(/home/anna/opt/hello)"'
"""
"""A batch script as in the guide: two nodes with a GPU each, and programs below /apps and /home."""


def test_example_is_the_cluster_of_the_guide(tmp_path: Path) -> None:
    name, cloud = "ee-example", MARKETS["gcp"].cloud
    with noted(name), login_keys("operator", "anna") as keys, simulated(name, cloud) as url:
        spec = (ROOT / "examples/rented-cluster/shoal.yaml").read_text()
        for old, new in CHANGES:
            assert old in spec
            spec = spec.replace(old, new.replace("{url}", url).replace("{name}", name).replace("{keys}", str(keys)))
        cluster = Cluster(tmp_path, spec)
        cluster.env[cloud.variable] = cloud.key
        try:
            errors = [one for one in cluster.json("check")["findings"] if one["level"] == "error"]
            assert errors == []
            assert cluster.json("up", "--yes")["whole"]
            login = addresses(cluster)["login1"]
            cluster.on("controller", "sh", "-c", "echo 3.8 > /apps/version")
            install = "mkdir -p opt; printf '#!/bin/sh\\necho hello\\n' > opt/hello; chmod 755 opt/hello"
            run_as_user(login, keys / "anna", f"{install}; cat > job.sh << 'END'\n{GUIDE}END")
            job = run_as_user(login, keys / "anna", "sbatch --parsable --wait --output=job.out job.sh || cat job.out")
            lines = run_as_user(login, keys / "anna", "sort job.out | tr ' ' _").split()
            assert lines == ["gpu1_0_3.8_hello", "gpu2_1_3.8_hello"], (job, lines)
            spot = [one for one in bill(url)["machines"] if "gpu" in one["name"]]
            assert len(spot) == 2 and {one["market"] for one in spot} == {"spot"}, spot
            print("example: a user's sbatch on two spot nodes, with /home and /apps, through the login host")
        finally:
            cluster.shoal("down", "--force", "--yes")
        machines = bill(url)["machines"]
        assert len(machines) == 4 and all(machine["ended"] for machine in machines), machines


def compare_with_bill(cost: dict[str, Any], machines: Sequence[dict[str, Any]]) -> str:
    """What `down` says that was rented, beside the cloud's own bill."""
    hosts = [machine for machine in machines if "controller" in machine["name"] or "login1" in machine["name"]]
    nodes = [machine for machine in machines if machine not in hosts]
    texts = []
    for name, billed, slack in (("hosts", hosts, UNSEEN_S), ("nodes", nodes, LATE_S)):
        theirs = sum(machine["usd"] for machine in billed)
        most = sum(machine["usd_hour"] * slack / 3600 for machine in billed)
        assert billed and abs(cost[name] - theirs) <= most, (cost, machines)
        texts.append(f"{name} ${cost[name]:.4f}, billed ${theirs:.4f}")
    assert cost["unpriced"] == [] and cost["total"] == pytest.approx(cost["hosts"] + cost["nodes"]), cost
    return f"the cost that down prints: {'; '.join(texts)}"


def addresses(cluster: Cluster) -> dict[str, str]:
    record = Path(cluster.env["XDG_STATE_HOME"]) / "shoal" / cluster.name / "rented-hosts.json"
    return {name: host["address"] for name, host in json.loads(record.read_text()).items()}


def run_as_user(address: str, key: Path, command: str) -> str:
    """The output of a command as an ordinary user of the login host."""
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-i", str(key)]
    line = ["ssh", "-q", *options, f"anna@{address}", command]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done
    return "\n".join(sorted(done.stdout.split()))
