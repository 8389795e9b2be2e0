"""What runs on the nodes of a job: a program of the standard library, for Python 3.8 and later, run by `start.py`.

    start.py rank --rank-from VARIABLE -- COMMAND    one rank: its log with time stamps, its signals, how it ended
    start.py spawn --nproc N -- COMMAND              one a node, starts N of the above
    start.py agent -- TORCHRUN ...                   one a node, starts torchrun and passes signals on to its ranks
    start.py relay --                                one a node beside mpirun, passes warnings on to its ranks
    start.py watch --srun PID [--mpirun PID] --      beside srun, ends it when ranks are gone and Slurm has not noticed
    start.py lost --                                 prints which ranks of this node are gone

It is sent as it is and stands alone there, so its files know each other by where they lie.
"""

from __future__ import annotations

import os


def main(argv: list[str]) -> int:
    mode, options, command = argv[0], argv[1 : argv.index("--")], argv[argv.index("--") + 1 :]
    if mode == "rank":
        from .rank import Rank  # every rank waits for what it loads

        return Rank(options[1], command).run()
    if mode in ("watch", "lost"):
        from .watch import lost_ranks, watch

        if mode == "watch":
            return watch(*map(int, options[1::2]))
        node = os.environ["SLURMD_NODENAME"]
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        for rank in lost_ranks(os.environ["SHOAL_JOB_DIR"], restart, node):
            print(rank, "on", node)
        return 0
    from .launch import agent, relay, spawn

    if mode == "relay":
        return relay()
    return spawn(int(options[1]), command) if mode == "spawn" else agent(command)
