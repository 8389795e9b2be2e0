"""The script that all launchers start: plain torch, one step over all ranks, and the times of the events before it.

It does not depend on the launcher. Earlier events are read from /proc: the start of this interpreter, of the task that
Slurm started, and of the batch script, if there is one.
"""

import time

SCRIPT = time.time()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402


def main() -> None:
    import torch
    import torch.distributed as dist

    imported = time.time()
    dist.init_process_group("gloo")
    met = time.time()
    folder = Path(os.environ["LAUNCH_MARKS"])
    if (folder.parent / "small").exists():
        dist.all_reduce(torch.ones(8))  # a first step is mostly torch's compiler, which takes seconds to import
    else:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
    stepped = time.time()
    marks = {"script": SCRIPT, "imported": imported, "met": met, "stepped": stepped, **start_times()}
    (folder / f".{dist.get_rank()}").write_text(json.dumps(marks))
    (folder / f".{dist.get_rank()}").rename(folder / f"rank-{dist.get_rank()}.json")
    dist.destroy_process_group()


def start_times() -> dict[str, float]:
    """When this interpreter and the task below slurmstepd started; on the first node also the batch script."""
    pid, task = os.getpid(), os.getpid()
    while parent(task) > 1 and name(parent(task)) != "slurmstepd":
        task = parent(task)
    times = {"interpreter": start_time(pid), "task": start_time(task)}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            other, words = int(entry.name), (entry / "cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"/slurm_script") for word in words) and name(parent(other)) == "slurmstepd":
                times["batch"] = start_time(other)
        except OSError:
            continue
    return times


def stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent(pid: int) -> int:
    return int(stat(pid)[1])


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip().split(":")[0]


def start_time(pid: int) -> float:
    """Seconds since 1970, exact to a hundredth."""
    since_boot = int(stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


if __name__ == "__main__":
    sys.exit(main())
