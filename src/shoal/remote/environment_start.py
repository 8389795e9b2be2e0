"""Part of every environment, run by each Python of it at its start: follows the link that the environment has as name.

A program that starts by the name then stays in the environment that the name meant at that moment. The name may mean
another one a minute later, and what is imported late must not come from that.
"""

import os
import sys


def follow_link() -> None:
    """Start again without the link, with the same arguments."""
    program, prefix = sys.executable, sys.prefix
    if not os.path.islink(prefix) or os.path.dirname(os.path.dirname(program)) != prefix:
        return
    try:
        target = os.path.join(os.path.dirname(prefix), os.readlink(prefix), "bin", os.path.basename(program))
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read().split(b"\0")[1:-1]
        os.execv(target, [os.fsencode(target), *words])  # nosec B606
    except OSError:
        pass  # it works by the name as well


follow_link()
