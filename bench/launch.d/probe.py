"""The script that everybody launches: plain torch, one step over all ranks, and the times of what came before it.

Knows nothing of who launched it. What happened before its first line is read from /proc: when this interpreter was
started, when the task was that Slurm started, and when the batch script was, where there is one.
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
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    stepped = time.time()
    marks = {"script": SCRIPT, "imported": imported, "met": met, "stepped": stepped, **before()}
    place = Path(os.environ["LAUNCH_MARKS"])
    (place / f".{dist.get_rank()}").write_text(json.dumps(marks))
    (place / f".{dist.get_rank()}").rename(place / f"rank-{dist.get_rank()}.json")
    dist.destroy_process_group()


def before() -> dict[str, float]:
    """When this interpreter began, and the first process below slurmstepd; on the first node also the batch script."""
    pid, task = os.getpid(), os.getpid()
    while parent(task) > 1 and name(parent(task)) != "slurmstepd":
        task = parent(task)
    found = {"interpreter": began(pid), "task": began(task)}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            other, words = int(entry.name), (entry / "cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"/slurm_script") for word in words) and name(parent(other)) == "slurmstepd":
                found["batch"] = began(other)
        except OSError:
            continue
    return found


def stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent(pid: int) -> int:
    return int(stat(pid)[1])


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip().split(":")[0]


def began(pid: int) -> float:
    """Seconds since 1970, exact to a hundredth."""
    since_boot = int(stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


if __name__ == "__main__":
    sys.exit(main())
