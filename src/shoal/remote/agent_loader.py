"""Receives the agent's modules through standard input and runs them. For any Python 3, to name one that is too old.

The compiled modules are kept on the host: compiling them again costs as much as all the rest of a run that changes
nothing. Each is compiled under its own name, so that a traceback names the place.
"""

import marshal
import os
import sys

if sys.version_info < (3, 8):
    print('{"event": "refused", "python": "%d.%d"}' % sys.version_info[:2])
    sys.exit(3)
pipe = open(0, "rb", 0, closefd=False)  # noqa: SIM115
size, digest, state = pipe.readline().decode().split()
packed = b""
while len(packed) < int(size):
    part = pipe.read(int(size) - len(packed))
    if not part:
        sys.exit(4)
    packed += part
folder = state + "/agent"
path = folder + "/" + digest + "-" + sys.implementation.cache_tag


def sources() -> "list[list[str]]":
    import json
    import zlib

    modules = json.loads(zlib.decompress(packed[:-1]).decode())  # type: list[list[str]]
    return modules


codes = None
try:
    owner = os.stat(folder)
    if owner.st_uid == os.geteuid() and not owner.st_mode & 0o077:
        with open(path, "rb") as file:
            # Only this user can write into the folder.
            codes = marshal.loads(file.read())  # nosec B302
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
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
            copy.write(marshal.dumps(codes))
        os.rename(new, path)
    except OSError:
        pass
for name, code in codes:
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)  # nosec B102
module.main(state, lambda name: dict(sources())[name])
