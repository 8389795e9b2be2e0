"""What runs on the nodes of a job: a program of the standard library, for Python 3.8 and later, run by `start.py`.

    start.py rank --rank-from VARIABLE -- COMMAND    one rank: its log with time stamps, its signals, how it ended
    start.py spawn --nproc N -- COMMAND              one a node, starts N of the above
    start.py agent -- TORCHRUN ...                   one a node, starts torchrun and passes signals on to its ranks
    start.py image -- COMMAND                        becomes the command, in the job's image
    start.py bundle DIRECTORY ID --                  becomes the command of a bundle, for `srun --container`
    start.py crun ACTION USER ID --                  becomes crun, which is asked about the bundle of another tool
    start.py step DIRECTORY -- COMMAND               becomes the command in the image of a bundle, without Slurm's help
    start.py export NAME --                          prints a container of this node as an image
    start.py remove NAME --                          removes a container of this node
    start.py evict --                                removes images that users have not used for long, as root
    start.py build SETTINGS --                       builds an image of what it reads, and prints it
    start.py relay --                                one a node beside mpirun, passes warnings on to its ranks
    start.py watch --srun PID [--mpirun PID] --      beside srun, ends it when ranks are gone and Slurm has not noticed
    start.py ended --                                after srun has failed: was it because a host was started again?
    start.py lost --                                 prints which ranks of this node are gone, and why
    start.py restarted --                            prints which of them ran when this node was started again

It is sent as it is and stands alone there, so its files know each other by where they lie.
"""

from __future__ import annotations


def main(argv: list[str]) -> int:
    mode, options, command = argv[0], argv[1 : argv.index("--")], argv[argv.index("--") + 1 :]
    if mode == "rank":
        from .rank import Rank  # every rank waits for what it loads

        return Rank(options[1], command).run()
    if mode in ("watch", "ended", "lost", "restarted"):
        from .watch import check_end, print_lost, watch

        if mode == "watch":
            return watch(*map(int, options[1::2]))
        return check_end() if mode == "ended" else print_lost(mode)
    if mode == "image":
        from .image import run_in_image

        return run_in_image(command)
    if mode == "bundle":
        from .bundle import run_bundle

        return run_bundle(*options)
    if mode == "crun":
        from .bundle import ask_crun

        return ask_crun(*options)
    if mode == "step":
        from .bundle import run_step

        return run_step(options[0], command)
    if mode == "export":
        from .image_export import export_container

        return export_container(*options)
    if mode == "remove":
        from .image_export import discard_container

        return discard_container(*options)
    if mode == "evict":
        from .image_space import evict_all

        return evict_all()
    if mode == "build":
        from .image_build import build_image

        return build_image(*options)
    from .launch import agent, relay, spawn

    if mode == "relay":
        return relay()
    return spawn(int(options[1]), command) if mode == "spawn" else agent(command)
