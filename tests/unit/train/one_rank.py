"""A minimal training script: joins the job, adds up the ranks, and prints the result as JSON."""

import json
import os
import sys

import torch
import torch.distributed

from shoal.train import TrainError, init, shutdown

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def main(timeout: float, explain_after: float) -> int:
    try:
        dist = init(timeout, explain_after=explain_after)
    except TrainError as error:
        say({"error": str(error)})
        return 1
    total = torch.tensor([dist.env.rank + 1.0])
    torch.distributed.all_reduce(total)
    found = {
        "rank": dist.env.rank,
        "launcher": dist.env.launcher,
        "master": dist.env.master_address,
        "port": dist.env.master_port,
        "interface": dist.interface,
        "total": total.item(),
        "threads": torch.get_num_threads(),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }
    say(found)
    shutdown()
    return 0


def say(found: dict[str, object]) -> None:
    """One write for the line and its end: torchrun's ranks share a pipe, and print would leave a gap between them."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:] or ("120", "100"))))
