"""asyncssh, imported without what Shoal has no use for: saves 80 ms of CPU in every command that connects.

It looks for libnettle and liboqs, whose algorithms are not among those in `ssh.py`, with ldconfig, gcc and ld: some ten
processes at every start. And it loads X.509, a tenth of all its loading, for host certificates that `ssh.py` does not
take. Import this before anything else that imports asyncssh.
"""

from __future__ import annotations

import ctypes.util
import sys

__all__ = ["asyncssh"]

_X509 = "asyncssh.crypto.x509"


def _ignore(name: str) -> None:
    """Every library is one that is not installed."""


_search = ctypes.util.find_library
ctypes.util.find_library = _ignore
if _unloaded := "asyncssh" not in sys.modules:
    sys.modules[_X509] = None  # type: ignore[assignment]  # Python's own way to say that a module is not there
try:
    import asyncssh
finally:
    ctypes.util.find_library = _search
    if _unloaded:
        del sys.modules[_X509]
