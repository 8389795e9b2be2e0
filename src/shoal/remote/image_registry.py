"""Registries, as `image_store.py` uses them: skopeo, the user's logins, and errors that say what to do.

STORE/auth.json                  the user's logins, in skopeo's form; nobody else can read it
/etc/shoal/registry/address      the cluster's own registry, where it has one: controller:5001
/etc/shoal/registry/logins/USER  the user's password for it
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pwd
import re
import subprocess
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from typing import Any, Optional

OWN_REGISTRY = "/etc/shoal/registry/address"
OWN_LOGINS = "/etc/shoal/registry/logins"
AUTH_FILE = "auth.json"
ANSWER_TIMEOUT_S = 60
"""How long a registry may take to say what it has."""
PROGRESS_INTERVAL_S = 3.0
MESSAGE_END = 300
"""The end of a program's message has the cause."""
CAUSES = (
    (
        r"connection refused|no route to host|network is unreachable|HTTP status: 50[234]",
        "the registry is down or cannot be reached",
    ),
    (
        r"no such host|server misbehaving|name resolution",
        "the registry's name is not known; check it for a typing error",
    ),
    (
        r"context deadline exceeded|i/o timeout|TLS handshake timeout",
        "the registry does not answer; check `proxy:` too",
    ),
    (r"server gave HTTP response to HTTPS client", "the registry has no TLS, and Shoal takes no image without"),
    (r"x509|certificate", "the hosts do not trust the registry's certificate; the operator adds its CA to them"),
    (r"invalid username/password", "the registry rejects this name or password"),
    (r"unauthorized|authentication required|denied|forbidden|\b40[13]\b", "log in with `shoal image login REGISTRY`"),
    (r"manifest unknown|name unknown|not found|\b404\b", "the registry has no such image or tag"),
    (r"toomanyrequests|\b429\b", "the registry wants fewer requests; log in to it, or try later"),
    (
        r"[Dd]igest (did not match|mismatch|of source)|does not match|invalid character|unexpected EOF"
        r"|unsupported.*type|unexpected end of JSON|invalid (tar|checksum)",
        "the registry returned wrong data; nothing of it was kept, try again or tell its operator",
    ),
    (r"no space left", "the disk is full; `shoal image remove` and `shoal image prune` free space"),
)
"""Words in what skopeo says, and what they mean."""


class Problem(Exception):
    """What is wrong, and what to do about it."""


def policy() -> list[str]:
    return [] if os.path.exists("/etc/containers/policy.json") else ["--insecure-policy"]


def read_digest(store: str, reference: str) -> str:
    """The digest that a reference of a registry stands for now."""
    line = ["skopeo", *policy(), "--command-timeout", "%ds" % ANSWER_TIMEOUT_S]
    line += ["inspect", *auth_options(store), "--no-tags", "--format", "{{.Digest}}", "docker://" + reference]
    digest = run(line, about=reference).strip()
    if not re.match(r"sha256:[0-9a-f]{64}$", digest):
        raise Problem("%s: the registry returned wrong data: %r is no digest" % (reference, digest[:80]))
    return digest


def pull_image(store: str, pinned: str, layout: str, tag: str) -> None:
    line = ["skopeo", *policy(), "copy", *auth_options(store), "--quiet", pinned, "oci:%s:%s" % (layout, tag)]
    with growth_shown(layout):
        run(line, about=pinned[len("docker://") :])


def growth_shown(directory: str, text: str = "%d MB") -> AbstractContextManager[None]:
    """Print how much a directory holds, as a line of JSON, until the block ends."""
    return amount_shown(text, lambda: size_of(directory))


@contextlib.contextmanager
def amount_shown(text: str, count_bytes: Callable[[], int]) -> Iterator[None]:
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(PROGRESS_INTERVAL_S):
            show_progress(text % (count_bytes() // 1000000))

    thread = threading.Thread(target=show)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def show_progress(text: str) -> None:
    sys.stdout.write(json.dumps({"progress": text}) + "\n")
    sys.stdout.flush()


def size_of(directory: str) -> int:
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # skopeo renames it meanwhile
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def bytes_written() -> int:
    """By the programs that we have started: to files, and to the network."""
    total = 0
    with contextlib.suppress(OSError), open("/proc/self/task/%d/children" % os.getpid()) as children:
        for child in children.read().split():
            with contextlib.suppress(OSError), open("/proc/%s/io" % child) as counts:
                total += int(re.findall(r"wchar: (\d+)", counts.read())[0])
    return total


def push_image(store: str, layout: str, tag: str, reference: str, digest_file: str) -> str:
    """In the form that all engines read. Returns its digest."""
    options = [*auth_options(store), "--quiet", "--format", "v2s2", "--digestfile", digest_file]
    source, target = "oci:%s:%s" % (layout, tag), "docker://" + reference
    with amount_shown("%d MB sent", bytes_written):
        run(["skopeo", *policy(), "copy", *options, source, target], about=reference)
    with open(digest_file) as file:
        return file.read().strip()


def login(store: str, registry: str, user: str) -> dict[str, Any]:
    """Try the password on standard input at the registry, and keep it where only this user can read it."""
    password = sys.stdin.read().rstrip("\n")
    path = os.path.join(store, AUTH_FILE)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    if os.stat(path).st_size == 0:
        write_private(path, {"auths": {}})
    line = ["skopeo", "--command-timeout", "%ds" % ANSWER_TIMEOUT_S, "login", "--authfile", path]
    run([*line, "--username", user, "--password-stdin", registry], password.encode(), about=registry)
    os.chmod(path, 0o600)
    return {"registry": registry, "user": user}


def logout(store: str, registry: str) -> dict[str, Any]:
    path = os.path.join(store, AUTH_FILE)
    auths = read_auths(path)
    if auths.pop(registry, None) is None:
        raise Problem("you have no login of your own at %s; yours are: %s" % (registry, ", ".join(auths) or "none"))
    write_private(path, {"auths": auths})
    return {"registry": registry}


def auth_options(store: str) -> list[str]:
    """The user's logins, with the one that the cluster gave for its own registry."""
    path = os.path.join(store, AUTH_FILE)
    auths = read_auths(path)
    own = own_login()
    if own and auths.get(own[0]) != own[1]:
        auths[own[0]] = own[1]
        write_private(path, {"auths": auths})
    return ["--authfile", path] if auths else []


def own_registry() -> str:
    with contextlib.suppress(OSError), open(OWN_REGISTRY) as file:
        return file.read().strip()
    return ""


def own_name() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def own_login() -> Optional[tuple[str, dict[str, str]]]:
    registry, name = own_registry(), own_name()
    if registry:
        with contextlib.suppress(OSError), open(os.path.join(OWN_LOGINS, name)) as file:
            pair = "%s:%s" % (name, file.read().strip())
            return registry, {"auth": base64.b64encode(pair.encode()).decode()}
    return None


def read_auths(path: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(path) as file:
        auths: dict[str, Any] = json.load(file)["auths"]
        return auths
    return {}


def write_private(path: str, content: dict[str, Any]) -> None:
    new = "%s.%d" % (path, os.getpid())
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file)
    os.replace(new, path)


def repository(reference: str) -> str:
    """A reference without its tag and digest."""
    reference = reference.partition("@")[0]
    place, _, last = reference.rpartition("/")
    return (place + "/" if place else "") + last.partition(":")[0]


def run(line: list[str], stdin: bytes = b"", about: str = "") -> str:
    try:
        pipe = subprocess.PIPE
        done = subprocess.run(line, input=stdin, stdout=pipe, stderr=pipe, check=False)
    except FileNotFoundError:
        raise Problem("%s is not installed; the operator adds `containers:` to the file" % line[0]) from None
    if done.returncode != 0:
        raise Problem(explain(line[0], done.stderr.decode(errors="replace"), about, done.returncode))
    return done.stdout.decode(errors="replace")


def explain(program: str, text: str, about: str, status: int) -> str:
    """What a program's message means, before the message itself."""
    last = ((text.strip().splitlines() or ["status %d" % status])[-1]).strip()
    quoted = re.search(r'msg="((?:[^"\\]|\\.)*)"', last)
    message = (quoted[1].replace('\\"', '"') if quoted else last)[-MESSAGE_END:]
    for words, meaning in CAUSES if about else ():
        if re.search(words, message):
            return "%s: %s (%s: %s)" % (about, meaning, program, message)
    return "%s: %s" % (program, message)
