"""The sandbox cluster of the bench: two nodes with two simulated GPUs each, torch and submitit on shared storage."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ground import BenchFailed, write_ssh_config

from shoal.providers.sandbox.layout import Layout, cache_dir
from shoal.providers.sandbox.provider import SandboxProvider

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHOAL = Path(sys.executable).with_name("shoal")
CLUSTER = "launch-bench"
SPEC = f"""\
cluster: {CLUSTER}
controller: {{provider: sandbox}}
nodesets:
  node: {{provider: sandbox, count: 2, gpus: 2, memory: 2G}}
"""
PYTHONPATH = "/shared/env"
# On the controller, for whoever calls them: note when that was, and when sbatch has the job's number.
SHIMS = {
    "sbatch": """\
#!/bin/sh
date +%s.%N > /shared/marks/called
/usr/bin/sbatch "$@"
status=$?
date +%s.%N > /shared/marks/accepted
exit $status
""",
    "srun": """\
#!/bin/sh
date +%s.%N > /shared/marks/called
exec /usr/bin/srun "$@"
""",
}
ALLOCATED = r"""sed -n 's/^\[\([^]]*\)\] sched: \(Allocate\|_slurm_rpc_allocate_resources\) JobId=.*/\1/p' \
    /var/log/slurm/slurmctld.log | tail -n 1 | xargs -I@ date -d @ +%s.%N"""
"""When slurmctld gave the last job its nodes, from its log."""
QUIET = """while [ -n "$(squeue -h)" ] || sinfo -h -N -o %T | grep -qvx idle; do sleep 0.2; done; sleep 0.5"""


@dataclass(frozen=True)
class Place:
    """The cluster while it is up."""

    directory: Path
    shared: Path
    """The directory that its hosts see as /shared."""

    @property
    def spec(self) -> Path:
        return self.directory / "shoal.yaml"

    @property
    def tree(self) -> Path:
        """The working tree that `shoal run` sends."""
        return self.directory / "tree"

    @property
    def marks(self) -> Path:
        return self.shared / "marks"

    def ssh(self, command: str) -> list[str]:
        """A command line as a person types it on his own machine, for a shell on the controller."""
        return ["ssh", "-F", str(self.directory / "ssh_config"), "controller", command]

    def on_controller(self, command: str) -> str:
        done = subprocess.run(self.ssh(command), capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise BenchFailed(f"{command!r} on the controller failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def marks_of(self, label: str) -> dict[str, float]:
        """The times of a run, each that of the last rank to get there."""
        noted = {name: self.marks / name for name in ("called", "accepted")}
        found = {name: float(path.read_text()) for name, path in noted.items() if path.exists()}
        ranks = [json.loads(path.read_text()) for path in (self.marks / label).glob("rank-*.json")]
        for name in {name for rank in ranks for name in rank}:
            found[name] = max(rank[name] for rank in ranks if name in rank)
        return {**found, "allocated": float(self.on_controller(ALLOCATED))}

    def put_first(self) -> None:
        """Give its hosts the CPUs before others: an idle machine is not always to be had."""
        for shares in Path("/sys/fs/cgroup").glob(f"cpu*/{Layout(cache_dir(), CLUSTER).prefix}*/cpu.shares"):
            shares.write_text("65536")
        for weight in Path("/sys/fs/cgroup").glob(f"{Layout(cache_dir(), CLUSTER).prefix}*/cpu.weight"):
            weight.write_text("10000")

    def settle(self) -> None:
        """Wait until Slurm has nothing left to do: the next job starts on idle nodes."""
        self.on_controller(QUIET)


@contextmanager
def cluster(directory: Path) -> Iterator[Place]:
    """The cluster, built by `shoal up`, with everything in place that is not measured. It is removed at the end."""
    place = Place(directory, Layout(cache_dir(), CLUSTER).shared)
    place.spec.write_text(SPEC)
    place.tree.mkdir()
    _shoal(place, "down", "--force")
    try:
        _shoal(place, "up")
        instances = asyncio.run(SandboxProvider().instances(CLUSTER))
        write_ssh_config(directory, [instance.target for instance in instances])
        _run(sys.executable, ROOT / "scripts/environment", CLUSTER)
        pip = (sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check")
        _run(*pip, "--target", place.shared / "submitit", "submitit")
        for made in (place.marks, place.shared / "logs"):
            made.mkdir()
        for name in ("probe.py", "submit.py"):
            shutil.copy(HERE / name, place.shared / name)
        for name, text in SHIMS.items():
            place.on_controller(f"cat > /usr/local/bin/{name} <<'END'\n{text}END\nchmod 755 /usr/local/bin/{name}")
        yield place
    finally:
        _shoal(place, "down", "--force")


def _shoal(place: Place, *words: str) -> None:
    _run(SHOAL, words[0], "--file", place.spec, *words[1:])


def _run(*words: str | Path) -> None:
    done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise BenchFailed(f"{' '.join(map(str, words))} failed:\n{done.stdout[-4000:]}")
