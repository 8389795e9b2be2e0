"""A rank that only meets the others, without torch, and says in JSON what came of it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from shoal.train.addresses import own_addresses
from shoal.train.boards import FileBoard
from shoal.train.env import read_env
from shoal.train.errors import RendezvousError
from shoal.train.rendezvous import Patience, meet


def wait_for_the_other(started: Path, rank: int) -> None:
    """Begin together: on a busy machine one may have started long before the other."""
    started.mkdir(parents=True, exist_ok=True)
    (started / str(rank)).touch()
    while len(list(started.iterdir())) < 2:
        time.sleep(0.01)


def main(timeout: float, explain_after: float) -> int:
    env = read_env()
    wait_for_the_other(Path(os.environ["SHOAL_STORE_DIR"]).with_suffix(".started"), env.rank)
    board = FileBoard(Path(os.environ["SHOAL_STORE_DIR"]), env.key)
    try:
        met = meet(env, board, lambda: own_addresses(env), Patience(timeout, explain_after))
    except RendezvousError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps({"own_address": met.own_address}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:])))
