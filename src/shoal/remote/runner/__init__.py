"""What runs on the nodes of a job: a program of the standard library, for Python 3.8 and later, run by `start.py`.

    start.py rank --rank-from VARIABLE -- COMMAND    one rank: its log with time stamps, its signals, how it ended
    start.py spawn --nproc N -- COMMAND              one a node, starts N of the above
    start.py agent -- TORCHRUN ...                   one a node, starts torchrun and passes signals on to its ranks

It is sent as it is and stands alone there, so its files know each other by where they lie.
"""

from __future__ import annotations

import os


def main(argv: list[str]) -> int:
    mode, options, command = argv[0], argv[1 : argv.index("--")], argv[argv.index("--") + 1 :]
    if mode == "rank":
        from .rank import Rank  # every rank waits for what it loads

        return Rank(int(os.environ[options[1]]), command).run()
    from .launch import agent, spawn

    return spawn(int(options[1]), command) if mode == "spawn" else agent(command)
