"""The sandbox cluster of the bench: two nodes with two simulated GPUs each, torch and submitit on shared storage."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT, BenchError, peer_environment, run_command
from sandbox import USER, provide_cluster, targets, write_ssh_config

from shoal.local_files import cache_dir
from shoal.sandbox.layout import Layout

HERE = Path(__file__).parent
SHOAL = Path(sys.executable).with_name("shoal")
SPEC = f"""\
cluster: bench-launch
controller: {{provider: sandbox}}
nodesets:
  fish: {{provider: sandbox, count: 2, gpus: 2, memory: 2G}}
users:
  {USER}: {{keys: ["file:KEY.pub"]}}
"""
PYTHONPATH = "/shared/env"
# Wrappers on the controller that record when a command is called, and when sbatch has returned.
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
ALLOCATED = r"""starts='\(: Allocate\|: _slurm_rpc_allocate_resources\|/backfill: _start_[a-z]*: Started\)'
sed -n "s,^\[\([^]]*\)\] sched$starts JobId=.*,\1,p" /var/log/slurm/slurmctld.log |
    tail -n 1 | xargs -I@ date -d @ +%s.%N"""
"""When slurmctld allocated the nodes of the last job, from its log."""
QUIET = """while [ -n "$(squeue -h)" ] || sinfo -h -N -o %T | grep -qvx idle; do sleep 0.2; done; sleep 0.5"""


@dataclass(frozen=True)
class Testbed:
    """The cluster while it is up."""

    directory: Path
    cluster: str
    spec: Path

    @property
    def shared(self) -> Path:
        """The directory that the hosts mount as /shared."""
        return Layout(cache_dir(), self.cluster).shared

    @property
    def tree(self) -> Path:
        """The working tree that `shoal run` sends."""
        return self.directory / "tree"

    @property
    def marks(self) -> Path:
        return self.shared / "marks"

    def ssh(self, command: str) -> list[str]:
        """The command line that runs a command in a shell on the controller."""
        return ["ssh", "-F", str(self.directory / "ssh_config"), "controller", command]

    @property
    def home(self) -> Path:
        """The home, on this machine, of the user who has joined the cluster."""
        return self.directory / "home"

    def ssh_as_user(self, command: str) -> list[str]:
        return ["ssh", "-F", str(self.home / ".ssh/config"), "controller", command]

    def on_controller(self, command: str) -> str:
        done = subprocess.run(self.ssh(command), capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise BenchError(f"{command!r} on the controller failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def marks_of(self, label: str) -> dict[str, float]:
        """The times of a run, each of the slowest rank."""
        files = {name: self.marks / name for name in ("called", "accepted")}
        times = {name: float(path.read_text()) for name, path in files.items() if path.exists()}
        ranks = [json.loads(path.read_text()) for path in (self.marks / label).glob("rank-*.json")]
        for name in {name for rank in ranks for name in rank}:
            times[name] = max(rank[name] for rank in ranks if name in rank)
        return {**times, "allocated": float(self.on_controller(ALLOCATED))}

    def prioritize(self) -> None:
        """Give the hosts priority on the CPUs, for a machine that is not idle."""
        prefix = Layout(cache_dir(), self.cluster).prefix
        for shares in Path("/sys/fs/cgroup").glob(f"cpu*/{prefix}*/cpu.shares"):
            shares.write_text("65536")
        for weight in Path("/sys/fs/cgroup").glob(f"{prefix}*/cpu.weight"):
            weight.write_text("10000")

    def settle(self) -> None:
        """Wait until the queue is empty and all nodes are idle."""
        self.on_controller(QUIET)


@contextmanager
def create_testbed(directory: Path, options: argparse.Namespace) -> Iterator[Testbed]:
    """A cluster with what is not measured installed; at the end it is removed, or is as it was."""
    with provide_cluster(directory, SPEC, options) as (cluster, spec, key):
        testbed = Testbed(directory, cluster, spec)
        testbed.tree.mkdir()
        write_ssh_config(directory, targets(cluster))
        _join(testbed, key)
        run_command(sys.executable, ROOT / "scripts/environment", cluster)
        [packages] = peer_environment("submitit", "submitit").parent.glob("lib/python3*/site-packages")
        try:
            _install(testbed, packages)
            yield testbed
        finally:
            _uninstall(testbed)


def _install(testbed: Testbed, packages: Path) -> None:
    shutil.copytree(packages, testbed.shared / "submitit", ignore=shutil.ignore_patterns("pip", "setuptools"))
    for folder in (testbed.marks, testbed.shared / "logs"):
        folder.mkdir()
        folder.chmod(0o777)  # for the user, too
    for name in ("probe.py", "submit.py"):
        shutil.copy(HERE / name, testbed.shared / name)
    for name, text in SHIMS.items():
        testbed.on_controller(f"cat > /usr/local/bin/{name} <<'END'\n{text}END\nchmod 755 /usr/local/bin/{name}")


def _uninstall(testbed: Testbed) -> None:
    testbed.on_controller(f"cd /usr/local/bin && rm -f {' '.join(SHIMS)}")
    for name in ("submitit", "marks", "logs"):
        shutil.rmtree(testbed.shared / name, ignore_errors=True)
    for name in ("probe.py", "submit.py", "job.sh"):
        (testbed.shared / name).unlink(missing_ok=True)


def _join(testbed: Testbed, key: Path) -> None:
    """Have the user join the cluster, as `shoal join` does on the user's machine."""
    (testbed.home / ".ssh").mkdir(parents=True)
    config = (testbed.directory / "ssh_config").read_text().replace("User root", f"User {USER}")
    lines = [f"  IdentityFile {key}" if "IdentityFile" in line else line for line in config.splitlines()]
    (testbed.home / ".ssh/config").write_text("\n".join(lines) + "\n")
    run_command("env", f"HOME={testbed.home}", SHOAL, "join", f"{USER}@controller")
