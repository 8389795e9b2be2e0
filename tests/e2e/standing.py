"""Clusters that stand for several test files, each with many parts switched on. A file names its cluster in `GROUP`.

The files of a group run one after the other in one process (`scripts/test`, xdist's groups), and their cluster is built
by the first of them and removed when the process ends. A file that runs alone builds it, too. What a test needs of a
cluster that it breaks, reboots or whose file it changes, belongs on a cluster of its own.

After each file a check compares the hosts with what they were before it, and fails the file for what it left behind:
left_behind.py says what is looked at, and what may grow. Then the next file has the cluster built again.
"""

import copy
import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests import installed_images
from tests.e2e.cluster import Cluster, login_keys, taken_down
from tests.e2e.leftovers import noted
from tests.e2e.simulated_clouds import Cloud, simulated
from tests.e2e.test_lab import Client
from tests.e2e.torch_env import give_torch
from tests.e2e.tracking_checks import put_stand_in

Snapshot = dict[str, dict[str, list[str]]]
"""What each host has, by kind; and `plan`, which is the cluster's."""
ClusterType = TypeVar("ClusterType", bound=Cluster)

REEF = """\
cluster: st-reef
controller: {provider: sandbox, memory: 1G}
nodesets:
  fish: {provider: sandbox, count: 2, gpus: 2, memory: 4G, cgroups: true}
partitions:
  main: {nodesets: [fish], default: true}
  urgent: {nodesets: [fish], priority: 10}
accounting: true
users:
  alice: {keys: ["file:KEYS/alice.pub"]}
  bob: {keys: ["file:KEYS/bob.pub"]}
  ada: {keys: ["file:KEYS/ada.pub"]}
environments:
  torch: {requirements: torch.txt}
  bowl: {requirements: bowl.txt, place: local}
  sea: {requirements: sea.txt}
"""
"""A LAN with GPUs, cgroups, accounting, environments and a tracking server: where jobs train."""
TRACKING = "tracking: mlflow\n"
"""Added once there is a controller, which gets a small program in place of MLflow."""
INDEX = "--no-index\n--find-links /shared/index\n"
REQUIREMENTS = {
    "torch.txt": f"{INDEX}herring==1.0\n",
    "bowl.txt": f"{INDEX}herring==1.0\n",
    "sea.txt": f"{INDEX}torch\n",
}
"""Of the environments. The packages are those that test_environments.py puts on the share."""
LAGOON = """\
cluster: st-lagoon
network: wireguard
controller: {provider: sandbox, memory: 1G, compute: true, cgroups: true}
providers:
  acme: {kind: sandbox, url: "URL-OF-sandbox", key: "env:SANDBOX_KEY"}
budget: {per_hour: 1}
nodesets:
  fish: {provider: sandbox, count: 2, gpus: 2, memory: 2G, cgroups: true}
  burst: {provider: acme, type: cpu, max: 1, cpus: 1, memory: 1G}
partitions:
  main: {nodesets: [fish], default: true}
  urgent: {nodesets: [fish], priority: 10}
  desk: {nodesets: [controller]}
  cloud: {nodesets: [burst]}
storage:
  /data: {kind: nfs, path: /shared/data}
environments:
  torch: {requirements: torch.txt}
accounting: true
containers: {engine: oci, registry: true}
users:
  ann: {uid: 2001, keys: ["file:KEYS/ann.pub"]}
  bob: {uid: 2002, keys: ["file:KEYS/bob.pub"]}
  mallory: {uid: 2003}
  alice: {uid: 2004, keys: ["file:KEYS/alice.pub"]}
  ada: {uid: 2005, keys: ["file:KEYS/ada.pub"]}
"""
"""WireGuard, a share, a cloud, accounting, images with a registry: where several users have jobs."""
PROVIDER_KEY = "sk-lagoon-0123456789abcdef"
LOGINS = ("alice", "ann", "bob", "ada")
"""Users with a key of their own, who may join from this machine."""


@dataclass
class Standing:
    """A cluster that is up."""

    cluster: Cluster
    keys: Path
    """The private keys of its users, by name."""
    before: Snapshot = field(default_factory=dict)
    """What it was when it was ready."""

    def view(self, kind: type[ClusterType]) -> ClusterType:
        """The same cluster with the methods of another class, and an environment of its own for `shoal`."""
        same = copy.copy(self.cluster)
        same.__class__ = kind
        same.env = {**self.cluster.env}
        return same  # type: ignore[return-value]

    def client(self, user: str, file: str) -> Client:
        """A user at their own machine, in a home for this file alone."""
        return Client(self.cluster, self.keys / file, user, self.keys / user)

    def snapshot(self) -> Snapshot:
        with ThreadPoolExecutor() as pool:
            plan = pool.submit(self.cluster.shoal, "plan", "--json")
            first = self._look("controller")  # it waits until Slurm has ended what was cancelled
            others = sorted(self.cluster.instances().keys() - {"controller"})
            hosts = dict(zip(others, pool.map(self._look, others), strict=True))
            changes = _changes(json.loads(plan.result().stdout))
        return {"controller": first, **hosts, "the cluster": {"plan": changes}}

    def _look(self, host: str) -> dict[str, list[str]]:
        line = ["python3", "-c", LOOK, *(["controller"] if host == "controller" else [])]
        done = self.cluster.ssh(host, shlex.join(line))
        assert done.returncode == 0, f"{host}: {done.stderr}"
        found: dict[str, list[str]] = json.loads(done.stdout)
        return found


LOOK = Path(__file__).with_name("left_behind.py").read_text()


def _changes(plan: dict[str, Any]) -> list[str]:
    """What `plan` would change on each host, and whatever else it has to say."""
    changes = [f"{host['name']}: {json.dumps(change)}" for host in plan["hosts"] for change in host["changes"]]
    others = {key: value for key, value in plan.items() if key not in ("hosts", "cost") and value}
    return changes + [f"{key}: {json.dumps(value)}" for key, value in others.items()]


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """What has come and what has gone, one line each."""
    found = []
    for host in sorted(before.keys() | after.keys()):
        old, new = before.get(host, {}), after.get(host, {})
        for kind in sorted(old.keys() | new.keys()):
            was, now = {*old.get(kind, [])}, {*new.get(kind, [])}
            found += [f"{host}: {kind} that was not there: {line}" for line in _highest(now - was)]
            found += [f"{host}: {kind} that is gone: {line}" for line in _highest(was - now)]
    return found


def _highest(lines: set[str]) -> list[str]:
    """Without the files in directories that are named themselves."""
    paths = {line.split()[0] for line in lines}
    return sorted(line for line in lines if not paths & {str(path) for path in Path(line.split()[0]).parents})


class StandingClusters:
    """Those of this process."""

    def __init__(self) -> None:
        self._up: dict[str, tuple[Standing, ExitStack]] = {}

    def get(self, group: str) -> Standing:
        if group not in self._up:
            with ExitStack() as stack:
                made = GROUPS[group](stack)
                self._up[group] = made, stack.pop_all()
        return self._up[group][0]

    def take_down(self, group: str) -> None:
        if group in self._up:
            self._up.pop(group)[1].close()


def build_reef(stack: ExitStack) -> Standing:
    made = _place(REEF, stack, REQUIREMENTS)
    stack.enter_context(taken_down(made.cluster))
    assert made.cluster.json("up")["whole"]
    put_stand_in(made.cluster, "controller")
    made.cluster.file.write_text(made.cluster.file.read_text() + TRACKING)
    return _ready(made)


def build_lagoon(stack: ExitStack, network: str = "wireguard") -> Standing:
    cloud, name = Cloud("sandbox", PROVIDER_KEY), "st-lagoon" if network == "wireguard" else f"st-{network}"
    spec = LAGOON.replace("st-lagoon", name).replace("network: wireguard", f"network: {network}")
    stack.enter_context(noted(name))
    url = stack.enter_context(simulated(name, cloud))
    made = _place(spec.replace("URL-OF-sandbox", url), stack, {"torch.txt": "--no-index\nherring\n"})
    made.cluster.env[cloud.variable] = cloud.key
    stack.callback(made.cluster.down)
    return _ready(made)


GROUPS = {"reef": build_reef, "lagoon": build_lagoon}


def _place(spec: str, stack: ExitStack, files: Mapping[str, str]) -> Standing:
    """A cluster that has no hosts yet."""
    keys = stack.enter_context(login_keys(*LOGINS))
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-standing-")))
    for name, text in files.items():
        (directory / name).write_text(text)
    return Standing(Cluster(directory, spec.replace("KEYS", str(keys))), keys)


def _ready(made: Standing) -> Standing:
    """With torch, and a record of what it is."""
    assert made.cluster.json("up")["whole"]
    give_torch(made.cluster.name, made.cluster.env)
    made.before = made.snapshot()
    return made


CHOICES = ("SHOAL_TEST_KIND", "SHOAL_TEST_IMAGE", "SHOAL_TEST_SLURM")
"""With one of these in the environment, hosts are others."""


def use_installed_packages(patch: pytest.MonkeyPatch, *, parts: bool) -> None:
    """Have hosts made from an image with Slurm's packages, or those of all parts."""
    if not any(os.environ.get(name) for name in CHOICES):
        patch.setenv("SHOAL_CACHE", str(installed_images.prepare_containers(parts=parts)))


@pytest.fixture(scope="session")
def standing_clusters() -> Iterator[StandingClusters]:
    clusters = StandingClusters()
    yield clusters
    for group in GROUPS:
        clusters.take_down(group)


@pytest.fixture(scope="module")
def standing(request: pytest.FixtureRequest, standing_clusters: StandingClusters) -> Iterator[Standing]:
    """The cluster of this file's group. It has to be afterwards what it was before."""
    group = request.module.GROUP
    made = standing_clusters.get(group)
    yield made
    try:
        left = differences(made.before, made.snapshot())
    except BaseException:
        standing_clusters.take_down(group)
        raise
    if left:
        standing_clusters.take_down(group)
        pytest.fail(f"{request.path.name} left behind:\n" + "\n".join(left), pytrace=False)
