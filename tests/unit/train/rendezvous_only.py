"""A rank that joins the rendezvous only, without torch, and prints the outcome as JSON."""

import json
import os
import sys
import time
from pathlib import Path

from shoal.train.address_exchange import FileExchange, own_addresses
from shoal.train.env import read_env
from shoal.train.errors import RendezvousError
from shoal.train.rendezvous import RendezvousTimer, join_rendezvous


def wait_for_the_other(started: Path, rank: int) -> None:
    """Begin together: on a busy machine one may have started long before the other."""
    started.mkdir(parents=True, exist_ok=True)
    (started / str(rank)).touch()
    while len(list(started.iterdir())) < 2:
        time.sleep(0.01)


def main(timeout: float, report_after: float) -> int:
    env = read_env()
    wait_for_the_other(Path(os.environ["SHOAL_STORE_DIR"]).with_suffix(".started"), env.rank)
    exchange = FileExchange(Path(os.environ["SHOAL_STORE_DIR"]), env.key)
    try:
        rendezvous = join_rendezvous(env, exchange, lambda: own_addresses(env), RendezvousTimer(timeout, report_after))
    except RendezvousError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps({"own_address": rendezvous.own_address}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:])))
