"""Says what keeps torchrun on this node from the one on the first node, which torchrun itself does after a minute."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # as typing has it, which takes longer to import than all the rest
    from typing import Callable

SILENCE = 8.0
"""Seconds until it is looked into: as long as `shoal.train.init` waits before it explains."""
ANSWER = 2.0
"""Seconds that a host may take to answer."""


def watch(joined: Callable[[], bool]) -> None:
    """Look after this node's torchrun until it has started its ranks: `joined` says whether it has."""
    threading.Thread(target=_watch, args=(joined,), daemon=True).start()


def _watch(joined: Callable[[], bool], silence: float = SILENCE) -> None:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    time.sleep(silence)
    while not joined():
        why = what_is_in_the_way(address, port)
        if why is None:
            return
        if why:
            node = os.environ.get("SLURMD_NODENAME", "this node")
            text = "shoal: torchrun on %s does not reach the one on the first node, at %s port %d: %s\n"
            sys.stderr.write(text % (node, address, port, why))
            return
        time.sleep(ANSWER)


def what_is_in_the_way(address: str, port: int) -> str | None:
    """Why nobody answers there; None when somebody does. Empty while it may still come: torch takes long to load."""
    try:
        socket.create_connection((address, port), timeout=ANSWER).close()
    except ConnectionRefusedError:
        return ""
    except socket.timeout:
        return "no answer within %g s; a firewall between the nodes is the usual cause" % ANSWER
    except OSError as error:
        return error.strerror or str(error)
    return None
