"""Fifty jobs of two ranks start at once on this host: 100 processes, each with torch's real store.

torch is imported once and the processes are forked from it, so that two cores are enough. With `ports` all jobs share
a hundred ports, so that most of them find their first choice taken.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed

from shoal.train import address_exchange
from shoal.train.address_exchange import AddressExchange, FileExchange, PortExchange
from shoal.train.env import read_env
from shoal.train.rendezvous import RendezvousTimer, join_rendezvous

JOBS = 50


def main(kind: str, directory: Path) -> int:
    address_exchange.PORT_RANGE = range(21_000, 21_100)
    ranks = {}
    for job in range(JOBS):
        for rank in (1, 0):
            pid = os.fork()
            if not pid:
                os._exit(run(kind, directory, job, rank))
            ranks[pid] = (job, rank)
    failed = [ranks[pid] for pid, status in (os.wait() for _ in range(2 * JOBS)) if status]
    print(f"failed (job, rank): {failed}" if failed else f"{JOBS} jobs connected")
    return bool(failed)


def run(kind: str, directory: Path, job: int, rank: int) -> int:
    """One rank: connects to the other rank of its job, opens the store, and reads what that one has written."""
    slurm = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    slurm |= {"SLURM_NODEID": "0", "SLURM_NTASKS": "2", "SLURM_NODELIST": "gpu1", "SLURM_TASKS_PER_NODE": "2"}
    env = read_env(slurm)
    ports = PortExchange(lambda: ["127.0.0.1"], env.key)
    exchange: AddressExchange = FileExchange(directory, env.key) if kind == "file" else ports
    try:
        rendezvous = join_rendezvous(env, exchange, lambda: ["127.0.0.1"], RendezvousTimer(240, 240))
        store = torch.distributed.TCPStore(
            rendezvous.store_address,
            rendezvous.store_port,
            2,
            is_master=rank == 0,
            timeout=timedelta(seconds=120),
            wait_for_workers=False,
            master_listen_fd=rendezvous.listener.detach() if rendezvous.listener else None,
        )
        store.set(f"from {rank}", f"job {job}")
        other = store.get(f"from {1 - rank}").decode()
        store.add("read", 1)
        while rank == 0 and store.add("read", 0) < 2:
            pass
    except Exception as error:
        print(f"job {job} rank {rank}: {error}", file=sys.stderr, flush=True)
        return 1
    return int(other != f"job {job}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
