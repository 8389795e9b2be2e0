"""ParallelCluster's clustermgtd over a fleet that is as it should be: a conf, a Slurm of shell scripts, an EC2.

It is installed by pip into an environment of its own. Its Slurm commands print what lies ready; its EC2 is the one of
answers.py, found by the variable that boto3 has for it. `scontrol update` and every call that would change instances
fail, and so the bench: then the fleet was not as clustermgtd wants it, and something else was timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from answers import ec2, ec2_pages
from ground import BenchFailed

VERSION = "3.16.1"
CLUSTER = "reef"
CONF = """\
[clustermgtd]
cluster_name = reef
region = us-east-1
dynamodb_table = reef
head_node_private_ip = 10.0.0.1
head_node_hostname = ip-10-0-0-1
heartbeat_file_path = {directory}/heartbeat
fleet_config_file = {directory}/fleet.json
compute_console_logging_enabled = false
"""
SCONTROL = """\
#!/bin/sh
case "$1 $2" in
  "show nodes") exec cat {directory}/nodes ;;
  "show partitions") exec cat {directory}/partitions ;;
  "show reservations") echo "No reservations in the system"; exit 0 ;;
esac
echo "$@" >> {directory}/refused; exit 1
"""
NODE = """\
NodeName={name} Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=0.01
   AvailableFeatures=dynamic,g5.xlarge,gpu
   ActiveFeatures=dynamic,g5.xlarge,gpu
   Gres=gpu:a10g:1
   NodeAddr={ip} NodeHostName=ip-{dashed} Version=24.05.8
   OS=Linux 6.1.0 #1 SMP
   RealMemory=15564 AllocMem=0 FreeMem=14000 Sockets=4 Boards=1
   State=IDLE+CLOUD ThreadsPerCore=1 TmpDisk=0 Weight=1000 Owner=N/A MCS_label=N/A
   Partitions=burst
   BootTime={begun} SlurmdStartTime={begun}
   LastBusyTime={begun} ResumeAfterTime=None
   CfgTRES=cpu=4,mem=15564M,billing=4
   AllocTRES=
   CurrentWatts=0 AveWatts=0
   InstanceId={id} InstanceType=g5.xlarge
"""


@dataclass
class Clustermgtd:
    """The process that does a pass when it is told to."""

    process: subprocess.Popen[str]
    directory: Path

    def once(self) -> tuple[float, float]:
        """Seconds on the wall and of CPUs for one pass, without the sleep in it."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        told = self.process.stdout.readline()
        refused = self.directory / "refused"
        if not told or refused.exists():
            what = refused.read_text() if refused.exists() else "see above"
            raise BenchFailed(f"clustermgtd did not find the fleet as it should be: {what}")
        found = json.loads(told)
        if found["slept"] != [5]:
            raise BenchFailed(f"clustermgtd slept {found['slept']} s: this is not the pass that is known here")
        return found["wall"], found["cpu"]


def installed(where: Path) -> Path:
    """The Python that has ParallelCluster; made where it is missing."""
    python = where / "bin/python"
    if not python.exists():
        venv.create(where, with_pip=True)
    there = f"import importlib.metadata as found; assert found.version('aws-parallelcluster-node') == '{VERSION}'"
    if subprocess.run([python, "-c", there], capture_output=True).returncode:
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        if subprocess.run([*pip, f"aws-parallelcluster-node=={VERSION}"]).returncode:
            raise BenchFailed("ParallelCluster could not be installed")
    return python


@contextmanager
def running(python: Path, directory: Path, count: int) -> Iterator[Clustermgtd]:
    """clustermgtd over so many nodes, each with its instance."""
    begun = datetime.now(UTC) - timedelta(hours=1)
    nodes = [
        {
            "name": f"burst-dy-gpu-{number}",
            "id": f"i-{number:017x}",
            "ip": f"10.{1 + number // 65536}.{number // 256 % 256}.{number % 256}",
            "launched": begun.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
        }
        for number in range(1, count + 1)
    ]
    _write(directory, nodes, begun.strftime("%Y-%m-%dT%H:%M:%S"))
    with ec2(ec2_pages(nodes, CLUSTER)) as url:
        env = {
            **os.environ,
            "PATH": f"{directory}/bin:{os.environ['PATH']}",
            "SLURM_BINARIES_DIR": f"{directory}/bin",
            "AWS_ENDPOINT_URL_EC2": url,
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "TZ": "UTC",
        }
        line = [python, str(Path(__file__).with_name("clustermgtd_loop.py")), str(directory / "clustermgtd.conf")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(line, env=env, text=True, **pipes) as process:
            try:
                yield Clustermgtd(process, directory)
            finally:
                process.kill()


def _write(directory: Path, nodes: list[dict[str, str]], begun: str) -> None:
    shown = [NODE.format(**one, dashed=one["ip"].replace(".", "-"), begun=begun) for one in nodes]
    names = f"burst-dy-gpu-[1-{len(nodes)}]"
    partition = f"PartitionName=burst\n   Nodes={names}\n   State=UP TotalNodes={len(nodes)}\n"
    texts = {
        "clustermgtd.conf": CONF.format(directory=directory),
        "fleet.json": "{}",
        "nodes": "\n".join(shown),
        "partitions": partition,
        "etc/pcluster/parallelcluster_partition_nodelist_mapping.json": json.dumps({"burst": names}),
    }
    commands = {
        "scontrol": SCONTROL.format(directory=directory),
        "sinfo": f"#!/bin/sh\necho '{names}'\n",
        "sudo": '#!/bin/sh\nexec "$@"\n',
        "get-compute-fleet-status.sh": """#!/bin/sh\necho '{"status": "RUNNING"}'\n""",
    }
    for name, text in (texts | {f"bin/{name}": text for name, text in commands.items()}).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
