"""Builds an image on a node, in a job of the user's: buildah, without root. `start.py build SETTINGS --` runs it.

It reads a tar from standard input, with the Containerfile and what it copies, and prints the image, a tar of an OCI
layout. Everything in between is in the user's own directory on this node and goes with the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import signal
import subprocess
import sys
import tarfile

from .build_place import PLACE, end_early, environment, remove_leftovers, remove_place
from .image import fail
from .unpacked_image import TAG, Problem, hold, own_store
from .unpacked_image import pull as pull_base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BUILT = "localhost/shoal-build"
FUSE, FUSE_OVERLAY = "/dev/fuse", "/usr/bin/fuse-overlayfs"
WHEELS = "/usr/share/python-wheels"
"""Where Debian has pip as one file, for images that have none."""
PIP_SETTINGS = "/etc/pip.conf"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
INSIDE = "/run/shoal-build"
"""Where the image sees files of the node while it is built."""
ID_FILES = ("/etc/subuid", "/etc/subgid")
LAST_LINES = 15
NOISE = re.compile(r"subprocess exited with status \d+|exit status \d+|STEP \d+/\d+: ")
"""Lines of buildah that say less than those around them."""


def build_image(settings_text: str) -> int:
    """Print the image; the status where that is not possible."""
    settings: dict[str, Any] = json.loads(settings_text)
    signal.signal(signal.SIGTERM, end_early)
    try:
        store = own_store()
        remove_leftovers(store)
        place = os.path.join(store, PLACE + os.environ.get("SLURM_JOB_ID", str(os.getpid())))
        hold(place, fcntl.LOCK_EX)
        os.mkdir(place, 0o700)
        try:
            build(place, settings)
            with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
                tar.add(os.path.join(place, "layout"), ".")
        finally:
            remove_place(place)
            if not os.path.lexists(place):  # else the next job removes it
                with contextlib.suppress(OSError):  # another job of the user's was faster
                    os.unlink(place + ".lock")
    except Problem as error:
        return fail(str(error))
    except (OSError, tarfile.TarError) as error:
        return fail("cannot build image %s: %s" % (settings["name"], error))
    return 0


def build(place: str, settings: dict[str, Any]) -> None:
    for name in ("context", "home", "run", "tmp", "storage"):
        os.mkdir(os.path.join(place, name), 0o700)
    read_context(os.path.join(place, "context"))
    buildah = [*storage(place), "build", "--isolation=chroot", "--layers=false", "--pull=missing", "--format=oci"]
    for number, (name, base) in enumerate(sorted(settings["bases"].items())):
        load_base(place, settings, name, base, number)
    base = settings["from"]
    line = [*buildah, *(["--from", base] if base else []), "--tag", BUILT, *volumes(place)]
    line += ["--file", os.path.join(place, "context", settings["file"]), os.path.join(place, "context")]
    run(place, settings, line)
    push = [*storage(place), "push", "--quiet", BUILT, "oci:%s/layout:%s" % (place, TAG)]
    run(place, settings, push, "write the image")


def read_context(place: str) -> None:
    """The user's own files, read as the user. Links among them may lead anywhere, as in any context."""
    # Python 3.14 by itself rejects such links. 3.9 to 3.11 have filters in later releases only.
    options: dict[str, Any] = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
        tar.extractall(place, **options)  # nosec B202


def load_base(place: str, settings: dict[str, Any], name: str, base: dict[str, Any], number: int) -> None:
    """Give an image of the user's the name that the Containerfile has for it."""
    # buildah makes the path a name of an image, which takes neither `.shoal` nor capitals.
    path = "base.%d" % number
    if os.path.isdir(base["layout"]):
        os.symlink(base["layout"], os.path.join(place, path))
    else:
        pull_base({**base, "proxy": settings["proxy"]}, os.path.join(place, path))
    line = [*storage(place), "pull", "--quiet", "oci:%s:%s" % (path, TAG)]
    id = run(place, settings, line, "read the base").strip().splitlines()[-1]
    run(place, settings, [*storage(place), "tag", id, local_name(name)], "name the base")


def local_name(name: str) -> str:
    """Where buildah looks first for an image of this name: below `localhost` for one without a registry."""
    registry, slash, _ = name.partition("/")
    return name if slash and ("." in registry or ":" in registry or registry == "localhost") else "localhost/" + name


def storage(place: str) -> list[str]:
    """buildah, with its files in a place of this build."""
    line = ["buildah", "--root", place + "/storage", "--runroot", place + "/run"]
    if os.access(FUSE, os.R_OK | os.W_OK) and os.path.exists(FUSE_OVERLAY):
        line += ["--storage-driver=overlay", "--storage-opt=overlay.mount_program=" + FUSE_OVERLAY]
        driver = "overlay"
    else:
        line.append("--storage-driver=vfs")
        driver = "vfs"
    return line if has_other_ids() else [*line, "--storage-opt=%s.ignore_chown_errors=true" % driver]


def has_other_ids() -> bool:
    """Whether the user may have further ids in a namespace. Without, every file of the image belongs to one id."""
    me = pwd.getpwuid(os.getuid())
    for path in ID_FILES:
        try:
            with open(path) as file:
                owners = {line.partition(":")[0] for line in file}
        except OSError:
            return False
        if not owners & {me.pw_name, str(me.pw_uid)}:
            return False
    return True


def volumes(place: str) -> list[str]:
    """What `RUN` sees of the node: where packages come from, and whom the node trusts."""
    files = {PIP_SETTINGS: "pip.conf", CERTIFICATES: "certificates.crt"}
    wheels = sorted(os.listdir(WHEELS)) if os.path.isdir(WHEELS) else []
    files.update({os.path.join(WHEELS, name): "pip.whl" for name in wheels if name.startswith("pip-")})
    options = []
    for source, name in files.items():
        if os.path.isfile(source):
            options += ["--volume", "%s:%s/%s:ro" % (source, INSIDE, name)]
    return options


def run(place: str, settings: dict[str, Any], line: list[str], what: str = "") -> str:
    """Run buildah. What it says goes to standard error as it comes; its last lines have the cause."""
    variables = {**environment(place), **settings["proxy"]}
    if settings["auth"] and os.path.exists(settings["auth"]):
        variables["REGISTRY_AUTH_FILE"] = settings["auth"]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            line, cwd=place, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, env=variables, text=True
        )
    except FileNotFoundError:
        raise Problem("%s is not installed; the operator runs `shoal up`" % line[0]) from None
    output: list[str] = []
    assert process.stdout
    try:
        for text in process.stdout:
            output = [*output, text.rstrip()][-LAST_LINES:]
            sys.stderr.write(text)
            sys.stderr.flush()
    except BaseException:
        process.kill()
        process.wait()  # what it still wrote could not be removed
        raise
    finally:
        process.stdout.close()
    if process.wait() != 0:
        raise Problem("cannot %s: %s" % (what, cause(output)) if what else cause(output))
    return "\n".join(output)


def cause(lines: list[str]) -> str:
    """The last line is buildah's; a program that failed has said why before."""
    said = [line.strip() for line in lines if line.strip() and not NOISE.match(line)]
    return "; ".join(said[-3:])[-400:] or "buildah said nothing"
