"""Images on a node, as the job's user: unpacked once, and containers with a name.

    IMAGES/USER/ID/rootfs            an unpacked image, whole or absent; read-only for jobs
    IMAGES/USER/containers/NAME      a container: a copy of an image that jobs may change
    STORE/containers/NAME/NODE       that this node has it, beside the user's images, where nodes see them
    IMAGES/USER/*.lock               held by each process that runs in it

A directory has its name only once all of it is there. What only unpacking needs is imported then: every rank waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import stat
import sys

from .variables import DEFAULT_PATH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

IMAGES = "/var/lib/shoal/images"
PROGRAMS = "/usr/local/lib/shoal/images"
"""Where nodes have this program, for steps that `shoal run` does not start."""
CRUN_STATE = "crun"
"""In the user's directory: what crun knows of the bundles of other tools that it runs."""
STOPPED_STATE = "stopped.json"
"""Beside it: what Slurm is told of a container that crun does not know."""
OWN_REGISTRY, OWN_LOGINS = "/etc/shoal/registry/address", "/etc/shoal/registry/logins"
"""The cluster's own registry, and each user's password for it."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""The words of images for CPU types, by those of the kernel."""
TAG = "image"
"""The name of an image in its OCI layout."""
RECORD = "record"
"""In a container: the path of the file that says so beside the user's images."""
PRIVATE = re.compile(r"unauthorized|authentication required|denied: ")
"""What registries say of images that need a login."""
DISK_FACTOR = 3
"""So many times the size of the packed image must be free."""
RENTED_MARK = "/usr/local/lib/shoal/watchdog"
"""What only rented machines have. Their containers go with them, so no other machine is told of those."""
LIMIT_FILE = PROGRAMS + "/disk"
"""The bytes that a user's images and containers may take on this node, where the file of the cluster says so."""
PROGRESS_INTERVAL_S = 15.0
MESSAGE_END = 120
"""The end of a program's message has the cause; paths stand before it."""


class Problem(Exception):
    """Why the command cannot run in the image, and what to do about it."""


def require_cpu_type(settings: dict[str, Any]) -> None:
    """Raise Problem for an image of another CPU type: a step of a bundle may be on any node."""
    here, wanted = ARCHITECTURES.get(os.uname().machine, ""), settings.get("architecture", "")
    if here and wanted and here != wanted:
        fix = "use `-C images-%s`" % wanted if wanted in ARCHITECTURES.values() else "use an image for %s" % here
        raise Problem("image %s is for %s, and this node is %s; %s" % (settings["name"], wanted, here, fix))


def own_store() -> str:
    """The user's own directory on this node.

    Everybody may make directories here. Where somebody else made the one of this name, the user has one whose name
    nobody can know before.
    """
    name = pwd.getpwuid(os.getuid()).pw_name
    path = os.path.join(IMAGES, name)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if not is_own_directory(path):
            import tempfile

            others = sorted(other for other in os.listdir(IMAGES) if other.startswith(name + "."))
            own = [other for other in others if is_own_directory(os.path.join(IMAGES, other))]
            path = os.path.join(IMAGES, own[0]) if own else tempfile.mkdtemp(prefix=name + ".", dir=IMAGES)
        os.makedirs(os.path.join(path, "containers"), 0o700, exist_ok=True)
    except OSError as error:
        raise Problem("cannot use %s: %s; `shoal up` makes it" % (IMAGES, error.strerror)) from None
    return path


def is_own_directory(path: str) -> bool:
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def hold(path: str, how: int) -> int:
    """A lock that lasts as long as this process, and the command that it becomes."""
    lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, how)
    os.set_inheritable(lock, True)
    return lock


def unpacked(store: str, settings: dict[str, Any]) -> str:
    path = os.path.join(store, settings["id"])
    lock = hold(path, fcntl.LOCK_SH)
    os.utime(path + ".lock")
    while not os.path.isdir(path):  # also where it was removed while the lock was changed
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.isdir(path):
            from .image_space import evict

            evict(store)
            unpack(store, path, settings)
        fcntl.flock(lock, fcntl.LOCK_SH)
    return os.path.join(path, "rootfs")


def unpack(store: str, path: str, settings: dict[str, Any]) -> None:
    from .image_space import disk_limit, make_space, remove, size_of

    new = path + ".new"
    remove(new)
    os.mkdir(new, 0o700)
    try:
        layout = settings["layout"]
        if not os.path.isdir(layout):
            layout = os.path.join(new, "layout")
            pull(settings, layout)
        make_space(store, DISK_FACTOR * packed_size(layout), "image " + settings["name"])
        sys.stderr.write("shoal: unpacking image %s\n" % settings["name"])
        line = ["umoci", "unpack", "--rootless", "--image", layout + ":" + TAG, new + "/bundle"]
        run(line, settings["name"], growing=new + "/bundle")
        repair(new + "/bundle/rootfs")
        if disk_limit():  # a small archive may hold large files
            make_space(store, size_of(new + "/bundle"), "image " + settings["name"], new)
        with open(new + "/bundle/image.json", "w") as file:
            json.dump(image_config(layout), file)
        os.rename(new + "/bundle", path)
    finally:
        remove(new)


def pull(settings: dict[str, Any], layout: str) -> None:
    if not settings["source"]:
        text = "image %s is in %s, which this node does not have; put the jobs' directory on a share (`storage:`)"
        if os.path.isdir(os.path.dirname(settings["layout"])):
            text = "image %s was removed since: there is no %s any more; make or pull it again, and submit the job anew"
        raise Problem(text % (settings["name"], settings["layout"]))
    policy = [] if os.path.exists("/etc/containers/policy.json") else ["--insecure-policy"]
    options = [*policy, "copy", "--quiet", *own_login(os.path.dirname(layout))]
    line = ["skopeo", *options, settings["source"], "oci:%s:%s" % (layout, TAG)]
    sys.stderr.write("shoal: getting image %s\n" % settings["name"])
    run(line, settings["name"], settings["proxy"], growing=layout)


def own_login(place: str) -> list[str]:
    """skopeo's options for the cluster's own registry, where it has one and the user has a login."""
    import base64

    name = pwd.getpwuid(os.getuid()).pw_name
    try:
        with open(OWN_REGISTRY) as file, open(os.path.join(OWN_LOGINS, name)) as login:
            registry, pair = file.read().strip(), "%s:%s" % (name, login.read().strip())
    except OSError:
        return []
    path = os.path.join(place, "auth.json")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"auths": {registry: {"auth": base64.b64encode(pair.encode()).decode()}}}, file)
    return ["--authfile", path]


def run(line: list[str], image: str, proxy: dict[str, str] | None = None, growing: str = "") -> None:
    """Run a program, and say meanwhile how much is in the directory that it fills."""
    import subprocess

    from .image_space import size_of

    variables = {"HOME": os.environ.get("HOME", "/"), "PATH": DEFAULT_PATH, **(proxy or {})}
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, env=variables)
    except FileNotFoundError:
        raise Problem("%s is not installed; `containers:` in the file installs it" % line[0]) from None
    with process:
        while True:
            try:
                output = process.communicate(timeout=PROGRESS_INTERVAL_S if growing else None)[0]
                break
            except subprocess.TimeoutExpired:
                sys.stderr.write("shoal: %d MB of image %s are here\n" % (size_of(growing) // 1000000, image))
                sys.stderr.flush()
    if process.returncode != 0:
        lines = output.decode(errors="replace").strip().splitlines() or ["status %d" % process.returncode]
        cause = lines[-1].strip()[-MESSAGE_END:]
        if PRIVATE.search(cause):
            cause += "; nodes have none of your logins: pull it where you log in, with the jobs' directory on a share"
        raise Problem("cannot get image %s: %s: %s" % (image, line[0], cause))


def packed_size(layout: str) -> int:
    blobs = os.path.join(layout, "blobs", "sha256")
    return sum(os.stat(os.path.join(blobs, blob)).st_size for blob in os.listdir(blobs))


def repair(root: str) -> None:
    """Let the user remove the image again, and give the host's files a place to be mounted at."""
    from .image_space import open_directories

    open_directories(root)
    etc = os.path.join(root, "etc")
    if os.path.isdir(etc) and not os.path.islink(etc):
        for name in ("hosts", "resolv.conf", "passwd", "group"):
            path = os.path.join(etc, name)
            if os.path.islink(path) and name in ("hosts", "resolv.conf"):
                os.unlink(path)
            if not os.path.lexists(path):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def image_config(layout: str) -> dict[str, Any]:
    """What the image says of its variables and working directory."""

    def blob(digest: str) -> dict[str, Any]:
        with open(os.path.join(layout, "blobs", *digest.split(":"))) as file:
            content: dict[str, Any] = json.load(file)
        return content

    with open(os.path.join(layout, "index.json")) as file:
        manifest = blob(json.load(file)["manifests"][0]["digest"])
    return blob(manifest["config"]["digest"]).get("config") or {}


def find_container(store: str, settings: dict[str, Any]) -> str:
    """The container of this name, made of the image where the node has none."""
    name = settings["container"]
    path = os.path.join(store, "containers", name)
    lock = hold(path, fcntl.LOCK_SH)
    os.utime(path + ".lock")
    while not os.path.isdir(path):
        from .image_space import make_space, remove, size_of

        if not settings["id"]:
            raise Problem("there is no container %s here; give --image once to make it" % name)
        image = os.path.dirname(unpacked(store, settings))
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.isdir(path):
            new = path + ".new"
            remove(new)
            make_space(store, size_of(image), "container " + name)
            sys.stderr.write("shoal: making container %s of image %s\n" % (name, settings["name"]))
            try:
                run(["cp", "-a", "--reflink=auto", image, new], settings["name"], growing=new)
                with open(new + "/image", "w") as file:
                    file.write(settings["id"])
                record_container(settings, new)
                os.rename(new, path)
            finally:
                remove(new)
        fcntl.flock(lock, fcntl.LOCK_SH)
    with open(path + "/image") as file:
        made_of = file.read()
    if settings["id"] and made_of != settings["id"]:
        raise Problem("container %s was made of another image; use another name" % name)
    return os.path.join(path, "rootfs")


def record_container(settings: dict[str, Any], path: str) -> None:
    """Tell `shoal image list`, where the user's images are on a share. A container is whole without it."""
    store = os.path.dirname(settings["layout"])
    node = os.environ.get("SLURMD_NODENAME", "")
    if not node or not os.path.isdir(settings["layout"]) or os.path.exists(RENTED_MARK):
        return
    record = os.path.join(store, "containers", settings["container"], node)
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(record), 0o700, exist_ok=True)
        with open(record, "w") as file:
            file.write(settings["name"])
        with open(path + "/" + RECORD, "w") as file:
            file.write(record)
