"""The cluster of tests/e2e/test_tailscale.py: three hosts in a tailnet of their own (tests/e2e/tailnet.py)."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.e2e.existing_hosts import Lent, lent_hosts
from tests.e2e.tailnet import TAG, Tailnet, tailnet

from shoal.spec.member import Shape

SANDBOX, CLUSTER = "ts-tailnet", "ts-lab"
NAMES = ("desktop", "gpu01", "gpu02")
"""As on the page docs/tailscale.md."""
NODES = {name: f"{CLUSTER}-{name}" for name in NAMES}
"""Their names in the tailnet."""
SLOW_MBIT = 2
REUSABLE = ("--reusable", "--expiration", "24h", "--tags", TAG)


@dataclass
class Lab:
    """The cluster, its hosts, and the administrator's access to the tailnet."""

    cluster: Cluster
    hosts: Lent
    tailnet: Tailnet

    def srun(self, *arguments: str, status: int | None = 0) -> list[str]:
        return sorted(self.hosts.shell("desktop", f"srun {' '.join(arguments)}", status=status).split())

    def runs_on_all(self) -> bool:
        three = "timeout 60 srun -N3 hostname 2> /dev/null | sort | xargs"
        return self.hosts.shell("desktop", three, status=None).split() == list(NAMES)

    def set_key(self, *options: str) -> str:
        self.cluster.env["TS_AUTHKEY"] = self.tailnet.create_key(*options)
        return self.cluster.env["TS_AUTHKEY"]


@contextlib.contextmanager
def make_lab(directory: Path) -> Iterator[Lab]:
    """Three hosts in a tailnet, one of which gets the package from `up`."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(lent_hosts(SANDBOX, {name: Shape(memory_mb=512) for name in NAMES}, CLUSTER))
        network = stack.enter_context(tailnet(SANDBOX))
        network.publish(hosts, "desktop", "gpu01")
        reach = f"user: shoal, identity: {hosts.identity}"
        text = (
            f"cluster: {CLUSTER}\n"
            f"network: {{kind: tailscale, auth_key: env:TS_AUTHKEY, tags: [slurm], login_server: {network.url}}}\n"
            f"controller: {{host: {hosts.entry('desktop')}, compute: true, {reach}}}\n"
            f"nodesets:\n  lab: {{hosts: [{hosts.entry('gpu01')}, {hosts.entry('gpu02')}], {reach}}}\n"
        )
        lab = Lab(Cluster(directory, text), hosts, network)
        lab.set_key(*REUSABLE)
        with network.serving_packages(hosts, "gpu02"):
            assert lab.cluster.json("up", timeout=600)["whole"]
        yield lab


def slowest_answer(lab: Lab, action: Callable[[], None]) -> float:
    """The longest time for which `sinfo` on a node waited for its answer during an action. It always got one."""
    slowest, done = 0.0, threading.Event()
    problems: list[str] = []

    def ask() -> None:
        nonlocal slowest
        while not done.is_set():
            start = time.monotonic()
            answer = lab.hosts.shell("gpu01", "timeout 60 sinfo -h -o %D 2>&1 || echo failed", status=None)
            slowest = max(slowest, time.monotonic() - start)
            if "failed" in answer:
                problems.append(answer)
            time.sleep(0.2)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        action()
    finally:
        done.set()
        asking.join()
    assert problems == []
    return slowest
