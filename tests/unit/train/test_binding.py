"""Layouts of ranks and GPUs as tables: valid ones pass, invalid ones are rejected with the flags that fix them."""

import json
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed
from tests.support.cases import cases

from shoal.train.env import Env, read_env
from shoal.train.errors import BindingError
from shoal.train.gpu_binding import (
    Binding,
    GpuDevice,
    RankGpu,
    check_binding,
    choose_gpu,
    device_file_gpus,
    device_numbers,
    prove_binding,
    usable_minors,
    uuid_minors,
)

ENV = read_env(
    {
        **{"SLURM_JOB_ID": "5", "SLURM_NTASKS": "4", "SLURM_NODELIST": "gpu[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"},
        **dict.fromkeys(("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0"),
    }
)


def rank_gpu(
    rank: int, uuid: str, minor: int | None = None, *, visible: int = 2, allocated: Sequence[int] = ()
) -> RankGpu:
    local = rank % 2
    return RankGpu(
        rank, f"gpu{rank // 2 + 1}", local, 0 if visible == 1 else local, visible, uuid, minor, tuple(allocated)
    )


GOOD = {
    "each its own": [
        rank_gpu(0, "GPU-a", 0),
        rank_gpu(1, "GPU-b", 1),
        rank_gpu(2, "GPU-c", 0),
        rank_gpu(3, "GPU-d", 1),
    ],
    "one visible each, as --gpus-per-task gives": [
        rank_gpu(0, "GPU-a", 0, visible=1),
        rank_gpu(1, "GPU-b", 1, visible=1),
    ],
    "the same number on two nodes, no UUID": [rank_gpu(1, "", 1), rank_gpu(3, "", 1)],
    "the upper half of a node": [rank_gpu(0, "GPU-e", 4, allocated=(4, 5)), rank_gpu(1, "GPU-f", 5, allocated=(4, 5))],
    "no GPUs at all": [rank_gpu(0, "", visible=0), rank_gpu(1, "", visible=0)],
}


@cases("case", *GOOD)
def test_good_layout_passes(case: str) -> None:
    assert check_binding(GOOD[case], ENV) is None


HEAD = "rank  node  local rank  GPU\n         "
BAD = {
    "two ranks on one UUID": (
        [rank_gpu(0, "GPU-a", 0, visible=1), rank_gpu(1, "GPU-a", 0, visible=1)],
        "ranks 0 and 1 are on the same GPU of gpu1: GPU-a (/dev/nvidia0)\n"
        f"  found: {HEAD}0     gpu1  0           GPU-a (/dev/nvidia0)\n"
        "         1     gpu1  1           GPU-a (/dev/nvidia0)\n"
        "  fix: #SBATCH --gpus-per-node=2 --ntasks-per-node=2",
    ),
    "two ranks on one device without a UUID": (
        [rank_gpu(0, "", 3, visible=1), rank_gpu(1, "", 3, visible=1)],
        "ranks 0 and 1 are on the same GPU of gpu1: gpu1:/dev/nvidia3\n"
        f"  found: {HEAD}0     gpu1  0           gpu1:/dev/nvidia3\n"
        "         1     gpu1  1           gpu1:/dev/nvidia3\n"
        "  fix: #SBATCH --gpus-per-node=2 --ntasks-per-node=2",
    ),
    "another job's GPU": (
        [rank_gpu(0, "GPU-a", 0, allocated=(1,))],
        "rank 0 is on /dev/nvidia0 of gpu1, which Slurm did not allocate to this job\n"
        "  found: Slurm allocated /dev/nvidia1\n"
        f"         {HEAD}0     gpu1  0           GPU-a (/dev/nvidia0)\n"
        "  fix: remove the line that sets CUDA_VISIBLE_DEVICES: Slurm sets it.\n"
        "       #SBATCH --gpus-per-node=1 --ntasks-per-node=1",
    ),
    "all GPUs of a node in sight of a job that has one, as --gpu-bind=none does on Slurm 22.05": (
        [replace(rank_gpu(0, "GPU-a", 0, visible=4), granted=1)],
        "rank 0 sees 4 GPUs on gpu1, and Slurm allocated 1, without naming them\n"
        "  found: SLURM_GPUS_ON_NODE=1, no SLURM_STEP_GPUS and no CUDA_VISIBLE_DEVICES\n"
        f"         {HEAD}0     gpu1  0           GPU-a (/dev/nvidia0)\n"
        "  fix: remove --gpu-bind=none: Slurm 22.05 then leaves CUDA_VISIBLE_DEVICES out.\n"
        "       #SBATCH --gpus-per-node=1 --ntasks-per-node=1",
    ),
    "a rank left without one": (
        [rank_gpu(0, "GPU-a", 0), rank_gpu(1, "", visible=0)],
        "rank 1 has no GPU: it is local rank 1 on gpu1 and sees no GPU\n"
        f"  found: {HEAD}0     gpu1  0           GPU-a (/dev/nvidia0)\n"
        "         1     gpu1  1           none\n"
        "  fix: #SBATCH --gpus-per-node=2 --ntasks-per-node=2",
    ),
}


@cases("case", *BAD)
def test_bad_layout_is_rejected_with_the_correct_flags(case: str) -> None:
    ranks, text = BAD[case]
    assert str(check_binding(ranks, ENV)) == text


@cases(
    "launcher, fix",
    ("torchrun", "#SBATCH --gpus-per-node=2 --ntasks-per-node=1, and torchrun --nproc-per-node=2"),
    ("spawn", "#SBATCH --gpus-per-node=2 --ntasks-per-node=1, and spawn(nprocs=2)"),
)
def test_flags_are_those_of_the_launcher(launcher: str, fix: str) -> None:
    fault = check_binding([rank_gpu(0, "GPU-a"), rank_gpu(1, "GPU-a")], replace(ENV, launcher=launcher))  # type: ignore[arg-type]
    assert fault is not None and fault.fix == fix


def test_only_visible_gpu_is_used_else_the_gpu_of_the_local_rank() -> None:
    third = replace(ENV, rank=2, local_rank=2, local_world_size=4)
    four = [GpuDevice(f"GPU-{letter}", minor) for minor, letter in enumerate("abcd")]
    assert choose_gpu(third, four, {}).uuid == "GPU-c" and choose_gpu(third, four[3:], {}).uuid == "GPU-d"
    beyond = choose_gpu(third, four[:2], {"SLURM_JOB_GPUS": "0,1"})
    assert (beyond.gpu, beyond.visible, beyond.allocated) == ("", 2, (0, 1))
    assert check_binding([beyond], third).what == "rank 2 has no GPU: it is local rank 2 on gpu1 and sees 2 GPUs"  # type: ignore[union-attr]


def test_job_without_gpus_reports_that_nothing_is_proved() -> None:
    binding = Binding((rank_gpu(0, "", visible=0),))
    assert not binding.proved
    assert str(binding) == (
        "rank  node  local rank  GPU\n0     gpu1  0           none\nNo rank has a GPU: there is no binding to prove."
    )


@cases(
    "environ, numbers",
    ({"SLURM_JOB_GPUS": "0"}, (0,)),
    ({"SLURM_JOB_GPUS": "0", "SLURM_STEP_GPUS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, (1,)),
    ({"SLURM_JOB_GPUS": "0", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, ()),
    ({}, ()),
    ids=["a batch script", "a step", "a step that only knows the batch host's", "no Slurm"],
)
def test_allocation_is_that_of_this_node(environ: dict[str, str], numbers: tuple[int, ...]) -> None:
    assert choose_gpu(ENV, [GpuDevice("GPU-a", 1)], environ).allocated == numbers


@cases("text, numbers", ("0,1", (0, 1)), ("4-7", (4, 5, 6, 7)), ("", ()), ("GPU-a", ()))
def test_slurm_gpu_list_is_parsed(text: str, numbers: tuple[int, ...]) -> None:
    assert device_numbers(text) == numbers


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Four device files of which Slurm's cgroup would leave the upper two: here, the lower two are dangling."""
    place = tmp_path / "dev"
    place.mkdir()
    for minor in (2, 3):
        (place / f"nvidia{minor}").symlink_to("/dev/null")
    for minor in (0, 1):
        (place / f"nvidia{minor}").symlink_to("/nowhere")
    (place / "nvidiactl").symlink_to("/dev/null")
    return place


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nfor n in 0 1 2 3; do echo $n, GPU-$n; done\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.usefixtures("nvidia_smi")
def test_device_files_are_numbered_as_in_cuda(devices: Path) -> None:
    assert usable_minors(devices) == [2, 3]
    seen = {
        "0,1": (GpuDevice("GPU-2", 2), GpuDevice("GPU-3", 3)),
        "1": (GpuDevice("GPU-3", 3),),
        "GPU-3": (GpuDevice("GPU-3", 3),),
        "1,7,0": (GpuDevice("GPU-3", 3),),
        "NoDevFiles": (),
        "": (),
    }
    assert {text: device_file_gpus({"CUDA_VISIBLE_DEVICES": text}, devices) for text in seen} == seen
    assert device_file_gpus({"SLURM_GPUS_ON_NODE": "1"}, devices) == (GpuDevice("GPU-2", 2), GpuDevice("GPU-3", 3))
    assert device_file_gpus({}, devices) == ()


def test_driver_table_gives_the_device_number_of_a_uuid(tmp_path: Path) -> None:
    (tmp_path / "0000:1b:00.0").mkdir()
    text = "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-77\nDevice Minor: \t 5\n"
    (tmp_path / "0000:1b:00.0" / "information").write_text(text)
    assert uuid_minors(tmp_path) == {"GPU-77": 5}


def prove(store: object, rank: int, world_size: int, visible: str) -> Binding:
    env: Env = replace(ENV, rank=rank, local_rank=rank, world_size=world_size)
    return prove_binding(env, store, {"CUDA_VISIBLE_DEVICES": visible}, timeout=20)


def test_every_rank_gets_the_same_table_from_the_store() -> None:
    store = torch.distributed.HashStore()
    with ThreadPoolExecutor() as pool:
        tables = [future.result() for future in [pool.submit(prove, store, rank, 2, "") for rank in (0, 1)]]
    assert tables[0] == tables[1] and [rank_gpu.rank for rank_gpu in tables[0].ranks] == [0, 1]


def test_every_rank_gets_the_reason_of_the_rejection() -> None:
    store = torch.distributed.HashStore()
    one = json.dumps({"rank": 1, "node": "gpu1", "local_rank": 1, "index": 0, "visible": 1, "uuid": "GPU-x"})
    zero = json.dumps({"rank": 0, "node": "gpu1", "local_rank": 0, "index": 0, "visible": 1, "uuid": "GPU-x"})
    with ThreadPoolExecutor() as pool:
        refused = [pool.submit(prove, _Claims(store, rank, text), rank, 2, "") for rank, text in ((0, zero), (1, one))]
        texts = {str(future.exception()) for future in refused}
    assert [text.partition("\n")[0] for text in texts] == ["ranks 0 and 1 are on the same GPU of gpu1: GPU-x"]


class _Claims:
    """The job's store, in which this rank's GPU is another than this machine has."""

    def __init__(self, store: torch.distributed.Store, rank: int, rank_gpu: str) -> None:
        self.store, self.key, self.rank_gpu = store, f"binding/{rank}", rank_gpu

    def set(self, key: str, value: str) -> None:
        self.store.set(key, json.dumps(json.loads(self.rank_gpu) | {"allocated": []}) if key == self.key else value)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


def test_rank_that_does_not_report_its_gpu_is_named() -> None:
    store = torch.distributed.HashStore()
    with pytest.raises(BindingError) as error:
        prove_binding(replace(ENV, world_size=2), store, {}, timeout=0.2)
    assert str(error.value) == (
        "1 of 2 ranks did not report their GPU within 0.2 s\n"
        "  found: nothing from rank 1\n"
        "  fix: read the logs of these ranks; nvidia-smi on their nodes may hang"
    )
