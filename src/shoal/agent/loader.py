"""How the agent gets to a host: the files of its program in one payload, and the few lines that receive them."""

from __future__ import annotations

import hashlib
import json
import zlib
from functools import cache
from importlib import resources

STATE = "/var/lib/shoal"
"""The directory on a host where the agent keeps what has to outlive a run."""

PACKAGE = "shoal.remote.agent"
# Each imports only from those before it: they are run in this order.
MODULES = (
    *("fast_stdlib", "file_io", "running", "context", "network", "packages"),
    *("unix_accounts", "files", "supervise", "services", "mounts", "facts", "converge", "main"),
)

# Runs before the program does, on any Python 3. The program's compiled form is kept on the host: compiling it again
# costs as much as all the rest of a run that changes nothing. Files are compiled under their own names, so that a
# traceback names the place.
LOADER = """
import marshal, os, sys
if sys.version_info < (3, 8):
    print('{"event": "refused", "python": "%d.%d"}' % sys.version_info[:2])
    sys.exit(3)
pipe = open(0, "rb", 0, closefd=False)
size, digest, state = pipe.readline().decode().split()
packed = b""
while len(packed) < int(size):
    part = pipe.read(int(size) - len(packed))
    if not part:
        sys.exit(4)
    packed += part
folder = state + "/agent"
path = folder + "/" + digest + "-" + sys.implementation.cache_tag
def sources():
    import json, zlib
    return json.loads(zlib.decompress(packed[:-1]).decode())
codes = None
try:
    owner = os.stat(folder)
    if owner.st_uid == os.geteuid() and not owner.st_mode & 0o077:
        with open(path, "rb") as file:
            codes = marshal.loads(file.read())
except (OSError, ValueError, EOFError, TypeError):
    pass
if codes is None:
    codes = [(name, compile(text, name.replace(".", "/") + ".py", "exec")) for name, text in sources()]
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        os.chmod(folder, 0o700)
        for name in os.listdir(folder):
            os.unlink(folder + "/" + name)
        new = path + ".%d" % os.getpid()
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(marshal.dumps(codes))
        os.rename(new, path)
    except OSError:
        pass
for name, code in codes:
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
module.main(state, lambda name: dict(sources())[name])
"""
COMMAND = ("python3", "-I", "-S", "-B", "-c", LOADER)


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
