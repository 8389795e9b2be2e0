"""How the agent gets to a host: the modules of its program in one payload, and the command that receives them."""

from __future__ import annotations

import hashlib
import json
import zlib
from functools import cache
from importlib import resources

from shoal.remote import python_command

STATE = "/var/lib/shoal"
"""The directory on a host where the agent keeps what has to outlive a run."""

PACKAGE = "shoal.remote.agent"
# Each imports only from those before it: they are run in this order.
MODULES = (
    *("fast_stdlib", "file_io", "running", "context", "network", "packages"),
    *("unix_accounts", "files", "supervise", "services", "mounts", "facts", "converge", "main"),
)

COMMAND = python_command("agent_loader")


def payload(state: str = STATE) -> bytes:
    """What COMMAND reads before its first request."""
    packed, digest = _program()
    return f"{len(packed)} {digest} {state}\n".encode() + packed


@cache
def _program() -> tuple[bytes, str]:
    folder = resources.files(PACKAGE)
    sources = [(f"{PACKAGE}.{name}", folder.joinpath(f"{name}.py").read_text("utf-8")) for name in MODULES]
    text = json.dumps(sources).encode()
    return zlib.compress(text) + b"\n", hashlib.sha256(text).hexdigest()
