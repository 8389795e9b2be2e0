"""Ends a process with a status of failure although its script goes on to its end: that may still have work to do."""

from __future__ import annotations

import atexit
import os
import sys


def fail_at_exit(status: int) -> None:
    """From now on this process ends with `status`, unless its script raises before: that is told by itself."""
    atexit.register(_leave, status)


def _leave(status: int) -> None:
    atexit.unregister(_leave)
    if hasattr(sys, "last_type"):  # Python has just printed the traceback of what ended the script
        return
    # Python knows no way to change the status this late but to leave at once, which is the end of all others' handlers.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
