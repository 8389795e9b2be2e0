"""`shoal run`, `logs` and `jobs` on nodes that are rented only when a job needs them."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.unit.jobs.job_clusters import NODES, PARTITIONS, job

from shoal.errors import UsageError
from shoal.hosts.api import Result, Target
from shoal.jobs.record import OWNERS_COMMAND
from shoal.jobs.resolve import resolve
from shoal.slurm.state import NodeState
from shoal.spec.loader import load_text
from shoal.verbs.context import Context
from shoal.verbs.jobs import jobs
from shoal.verbs.logs import logs
from shoal.verbs.run import run
from shoal_simulators.fake_host import Call, FakeConnector, FakeHost, FakeProgram

RENTED = tuple(
    NodeState(name, state, cpus=8, memory_mb=30000, gres="gpu:a10:1", partitions=("main", "cloud"))
    for name, state in {
        "a10-1": ("IDLE", "CLOUD", "POWERED_DOWN"),
        "a10-2": ("DOWN", "CLOUD", "POWERED_DOWN"),  # a provider was out of it, and may have it again in ten minutes
    }.items()
)
CLOUD = (*PARTITIONS, PARTITIONS[2].__class__("cloud", "UP", nodes="a10-[1-2]"))


def test_rented_node_can_be_chosen_with_a_shared_job_directory() -> None:
    found = resolve(job(nodes=2, partition="cloud", directory="/data/jobs"), (*NODES, *RENTED), CLOUD)
    assert (found.hosts, found.rented, found.exclude) == ((), ("a10-1", "a10-2"), ())
    both = resolve(job(directory="/data/jobs"), (*NODES, *RENTED), CLOUD)
    assert (both.hosts, both.rented) == (("gpu1", "gpu2", "old1"), ("a10-1", "a10-2"))


def test_rented_nodes_are_excluded_without_a_shared_directory() -> None:
    found = resolve(job(nodes=2), (*NODES, *RENTED), CLOUD)
    assert (found.hosts, found.rented, found.exclude) == (("gpu1", "gpu2", "old1"), (), ("a10-1", "a10-2"))


def test_job_only_for_rented_nodes_is_rejected_with_the_fix() -> None:
    with pytest.raises(UsageError) as caught:
        resolve(job(partition="cloud"), (*NODES, *RENTED), CLOUD)
    assert caught.value.message == (
        "the job asks for 1 node; partition cloud has 0, and a10-[1-2] are rented only when needed"
    )
    assert caught.value.hint == "rented nodes have the code where all hosts share it: use --directory with a path there"


SPEC = """
cluster: reef
controller: {{host: {{name: c1, address: 10.0.0.1}}}}
providers: {{lambda: {{key: "env:KEY"}}}}
nodesets:
  a10: {{provider: lambda, type: gpu_1x_a10, max: 2}}
{more}
"""
LAB = "  lab: {hosts: [{name: n1, address: 10.0.0.11}]}\npartitions: {main: {nodesets: [lab, a10], default: true}}\n"
SHARE = "storage: {/data: {}}"
NODE = "NodeName={} CPUTot=4 CPUAlloc=0 RealMemory=14700 Gres=gpu:t4:1 Partitions=main State={} Version=22.05.8\n"
PARTITION = "PartitionName=main Default=YES Nodes={} State=UP MaxTime=UNLIMITED MaxNodes=UNLIMITED\n"
RECORD = "JobId=17 JobName=train UserId=root(0) JobState=RUNNING Reason=None Restarts=0 ExitCode=0:0 NodeList=a101"
RECORD += " TimeLimit=UNLIMITED BatchHost=a101 NumNodes=1 WorkDir=/data/jobs Comment=(null)\n"


class Reef:
    """A controller that rents two nodes, with or without a permanent node. `disks` has the disk of each host."""

    def __init__(self, more: str, **disks: str) -> None:
        self.there = [name for name in ("n1",) if name in disks]
        self.files: dict[str, set[str]] = {disk: set() for disk in disks.values()}
        self.scripts: list[str] = []
        self.read: list[str] = []
        hosts = [FakeHost(Target(name), self._programs(disk)) for name, disk in disks.items()]
        self.context = Context(load_text(SPEC.format(more=more), "shoal.yaml"), connector=FakeConnector(*hosts))

    def _programs(self, disk: str) -> dict[tuple[str, ...], object]:
        def scontrol(call: Call) -> bytes | Result:
            if call.argv[-1] == "node":
                rented = (NODE.format(name, "IDLE+CLOUD+POWERED_DOWN") for name in ("a101", "a102"))
                return "".join([*rented, *(NODE.format(name, "IDLE") for name in self.there)]).encode()
            if call.argv[-1] == "partition":
                return PARTITION.format(",".join(["a101,a102", *self.there])).encode()
            return RECORD.encode()

        def shell(call: Call) -> bytes:
            if "sbatch" in call.argv[2]:
                self.scripts.append(call.stdin.decode().partition("\n\n")[2])
                return b"17;reef\n"
            words = call.argv[5:]
            if ': > "$1"' in call.argv[2]:
                self.files[disk].add(call.argv[4])
            if call.stdin:
                self.files[disk].add(words[0])
                return b""
            return f"{disk}\n".encode() if len(words) == 3 else b""

        async def python(program: FakeProgram) -> int:
            self.read += program.call.argv
            if "/data/jobs/17" in program.call.argv and "progress" in program.call.argv:
                await program.print(b'{"step": 12}\n')
            return 0

        return {
            ("scontrol", "--version"): b"slurm-wlm 22.05.8\n",
            ("scontrol",): scontrol,
            OWNERS_COMMAND: b"17 0\n",
            ("systemctl",): b"active\n",
            ("sh",): shell,
            ("rm",): b"",
            ("python3",): python,
        }


async def test_bundle_reaches_the_share_through_the_controller(tree: Path) -> None:
    reef = Reef(SHARE, c1="share")
    submitted = await run(reef.context, job(nodes=2, directory="/data/jobs"), tree)
    assert submitted.shared
    assert {f"/data/jobs/code/{submitted.code}.tar", "/data/jobs/.shared"} < reef.files["share"]
    assert "--exclude" not in reef.scripts[0]


async def test_permanent_nodes_can_also_run_the_job(tree: Path) -> None:
    reef = Reef(LAB + SHARE, c1="share", n1="share")
    assert (await run(reef.context, job(nodes=3, directory="/data/jobs"), tree)).nodes == 3


async def test_directory_outside_all_shares_is_rejected_before_submission(tree: Path) -> None:
    for more, hint in (
        ("", "give the cluster a share: `storage` in the file"),
        (SHARE, "put it on one, such as /data, or name other nodes with --nodelist"),
    ):
        reef = Reef(more, c1="own")
        with pytest.raises(UsageError) as caught:
            await run(reef.context, job(directory="/scratch/jobs"), tree)
        assert caught.value.message == (
            "/scratch/jobs is on no share of the cluster, so a[101-102] would not have the job's code"
        )
        assert caught.value.hint == hint and reef.scripts == [] and reef.files == {"own": set()}


class Pods(Reef):
    """The same with two containers of RunPod in place of the machines."""

    def __init__(self, more: str = "", **disks: str) -> None:
        super().__init__(more, **disks)
        text = SPEC.format(more=more).replace("lambda", "runpod").replace("gpu_1x_a10", "NVIDIA A40")
        self.context = replace(self.context, known=load_text(text, "shoal.yaml"))


async def test_bundle_for_rented_containers_stays_on_the_controller(tree: Path) -> None:
    pods = Pods(c1="own")
    submitted = await run(pods.context, job(), tree)
    assert f"/var/lib/shoal/jobs/reef/code/{submitted.code}.tar" in pods.files["own"]
    assert "/var/lib/shoal/jobs/reef/.shared" not in pods.files["own"]
    [script] = pods.scripts
    assert "SHOAL_SENT=$SHOAL_JOB_DIR/sent" in script and "--exclude" not in script


@cases("option, value", ("directory", "/data/jobs"), ("output", "/data/out"))
async def test_paths_lost_with_a_container_are_rejected(tree: Path, option: str, value: str) -> None:
    pods = Pods(SHARE, c1="share")
    with pytest.raises(UsageError) as caught:
        await run(pods.context, job(**{option: value}), tree)
    assert caught.value.message == (
        f"a[101-102] would be rented containers, which share no directory: what --{option} {value} names goes with them"
    )
    assert caught.value.hint == (
        f"leave --{option} out: logs and checkpoints come back to /var/lib/shoal/jobs/reef on c1"
    )
    assert pods.scripts == []


async def test_share_missing_on_a_host_is_rejected(tree: Path) -> None:
    reef = Reef(LAB + SHARE, c1="share", n1="own")
    with pytest.raises(UsageError) as caught:
        await run(reef.context, job(directory="/data/jobs"), tree)
    assert caught.value.message == (
        "/data/jobs is not the same on all hosts, so a[101-102] would not have the job's code"
    )
    assert reef.scripts == []


async def test_files_of_jobs_on_rented_nodes_are_read_on_the_controller() -> None:
    reef = Reef(SHARE, c1="share")
    [view] = (await jobs(reef.context)).jobs
    assert view.progress == {"step": 12}
    await logs(reef.context, "17")
    assert "/data/jobs/17" in reef.read
