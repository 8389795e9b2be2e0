"""asyncssh, imported without its search for libraries that Shoal has no use for.

It looks for libnettle and liboqs, whose algorithms are not among those in `ssh.py`, with ldconfig, gcc and ld: some ten
processes at every start. Import this before anything else that imports asyncssh.
"""

from __future__ import annotations

import ctypes.util

__all__ = ["asyncssh"]


def _nothing(name: str) -> None:
    """Every library is one that is not installed."""


_search = ctypes.util.find_library
ctypes.util.find_library = _nothing
try:
    import asyncssh
finally:
    ctypes.util.find_library = _search
