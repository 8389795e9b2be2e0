"""ParallelCluster's clustermgtd over a fleet in the desired state, with Slurm commands and an EC2 that are fakes.

The Slurm commands are shell scripts that print a file; the EC2 is that of answers.py, set by boto3's variable.
`scontrol update` and every call that would change instances fail, and so does the bench: clustermgtd would otherwise do
more than the comparison that is timed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from answers import ec2, ec2_pages
from harness import BenchError

VERSION = "3.16.1"
REQUIREMENT = f"aws-parallelcluster-node=={VERSION}"
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
echo "$@" >> {directory}/changes; exit 1
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
   BootTime={start} SlurmdStartTime={start}
   LastBusyTime={start} ResumeAfterTime=None
   CfgTRES=cpu=4,mem=15564M,billing=4
   AllocTRES=
   CurrentWatts=0 AveWatts=0
   InstanceId={id} InstanceType=g5.xlarge
"""


@dataclass
class Clustermgtd:
    """A process that does one pass for each line on its stdin."""

    process: subprocess.Popen[str]
    directory: Path

    def run_pass(self) -> tuple[float, float]:
        """Wall-clock seconds and CPU seconds of one pass, without the sleep in it."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        changes = self.directory / "changes"
        if not line or changes.exists():
            what = changes.read_text() if changes.exists() else "see above"
            raise BenchError(f"clustermgtd tried to change the fleet: {what}")
        result = json.loads(line)
        if result["slept"] != [5]:
            raise BenchError(f"clustermgtd slept {result['slept']} s, not 5 s: its pass has changed")
        return result["wall"], result["cpu"]


@contextmanager
def run_clustermgtd(python: Path, directory: Path, count: int) -> Iterator[Clustermgtd]:
    """clustermgtd with `count` nodes, each with its instance."""
    start = datetime.now(UTC) - timedelta(hours=1)
    nodes = [
        {
            "name": f"burst-dy-gpu-{number}",
            "id": f"i-{number:017x}",
            "ip": f"10.{1 + number // 65536}.{number // 256 % 256}.{number % 256}",
            "launched": start.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
        }
        for number in range(1, count + 1)
    ]
    _write(directory, nodes, start.strftime("%Y-%m-%dT%H:%M:%S"))
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


def _write(directory: Path, nodes: list[dict[str, str]], start: str) -> None:
    records = [NODE.format(**node, dashed=node["ip"].replace(".", "-"), start=start) for node in nodes]
    names = f"burst-dy-gpu-[1-{len(nodes)}]"
    partition = f"PartitionName=burst\n   Nodes={names}\n   State=UP TotalNodes={len(nodes)}\n"
    texts = {
        "clustermgtd.conf": CONF.format(directory=directory),
        "fleet.json": "{}",
        "nodes": "\n".join(records),
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
