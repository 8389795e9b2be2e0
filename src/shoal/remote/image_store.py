"""Keeps a user's images where the user logs in: standard library, Python 3.8. Run as that user.

    image_store.py find STORE IMAGE             what an image is, as JSON; `null` for one that is not here
    image_store.py pull STORE SOURCE NAME       from a registry, an archive or an OCI layout
    image_store.py build STORE SOURCE NAME      from a directory with a root file system
    image_store.py receive STORE NAME COMMAND...    from a job that builds an image or saves a container
    image_store.py push STORE NAME REFERENCE    to a registry; the cluster's own where REFERENCE is empty
    image_store.py login STORE REGISTRY USER    keeps the password on standard input, for pulls and pushes
    image_store.py logout STORE REGISTRY        forgets it
    image_store.py bundle STORE NAME SETTINGS PROGRAM    for `srun --container`: what commands run in, what runs them
    image_store.py list STORE                   all of them
    image_store.py containers STORE             containers with a name, and the nodes that have them
    image_store.py remove STORE NAME            forgets a name, and removes the image if it has no other
    image_store.py prune STORE                  removes what has no name, such as an image that a pull replaced
    image_store.py sweep STORE                  removes what a pull or a build has left that was killed

Each prints JSON. What is wrong goes to standard error, status 3.

    STORE/ID                an OCI layout with one image, named by the digest of its manifest; whole or absent
    STORE/.new.*            an image that is not whole yet, or of a program that was killed: then its lock is free
    STORE/names/NAME.json   what the name, or a reference such as docker.io/library/debian:12, stands for
    STORE/containers/NAME/NODE    that a node has this container: nodes write it, with the name of the image
    STORE/bundles/NAME      a bundle: `config.json` names its image, and `run COMMAND...` runs a command in it
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.parse

from .image_archives import CHUNK_BYTES, copy_archive, require_archive, stamp, write_files, write_layer
from .image_bundles import bundle, remove_bundles, replace_file
from .image_facts import config_facts, directory_architecture, directory_facts
from .image_registry import (
    AUTH_FILE,
    MESSAGE_END,
    Problem,
    growth_shown,
    login,
    logout,
    own_name,
    own_registry,
    pull_image,
    push_image,
    read_digest,
    repository,
    run,
    show_progress,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import IO, Any, Optional

EXIT_WITH_CAUSE = 3
TAG = "image"
"""The name of an image in its OCI layout."""
ID = re.compile(r"[0-9a-f]{64}\Z")
NEW = ".new."
CAUSE = "shoal: error: "
"""How our own program on a node begins what is wrong. Slurm has lines of its own."""
LAST_LINES = 20
"""Of what a job says: the cause is among them."""
JOB_NAME = "--job-name="
CANCEL_ATTEMPTS, CANCEL_PAUSE_S = 5, 10
"""A job that srun is just submitting is not known yet. Slurm ends a cancelled one within KillWait, which is 30 s."""
KEPT = ("names", "bundles", "containers", ".lock", AUTH_FILE)
"""In the store, beside images."""
WRITTEN_S = 86400
"""So long another file may be one that a program is writing."""
PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    mode, store, words = argv[0], argv[1], argv[2:]
    try:
        os.makedirs(os.path.join(store, "names"), 0o700, exist_ok=True)
        modes: dict[str, Callable[..., object]] = {
            **{"find": find, "pull": pull, "build": build, "receive": receive, "push": push},
            **{"login": login, "logout": logout, "bundle": bundle},
            **{"list": list_images, "containers": list_containers},
            **{"remove": remove, "prune": prune, "sweep": sweep},
        }
        sys.stdout.write(json.dumps(modes[mode](store, *words)) + "\n")
    except Problem as error:
        return fail(str(error))
    except OSError as error:
        return fail("%s: %s" % (error.filename, error.strerror) if error.filename else str(error))
    return 0


def fail(text: str) -> int:
    sys.stderr.write(text + "\n")
    return EXIT_WITH_CAUSE


def find(store: str, image: str) -> Optional[dict[str, Any]]:
    """The image of a name or reference, or in a path: an archive that has changed counts as not here."""
    if not image.startswith("/"):
        return read_name(store, image)
    if os.path.isdir(image) and not os.path.exists(os.path.join(image, "oci-layout")):
        return describe(image, "", "", "", directory=image, **directory_facts(image))
    require_archive(image)
    stored = read_name(store, image)
    return stored if stored and stored["stamp"] == stamp(image) else None


def read_name(store: str, name: str) -> Optional[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError, KeyError):
        with open(name_file(store, name)) as file:
            image: dict[str, Any] = json.load(file)
        if os.path.isdir(os.path.join(store, image["id"])):
            return {**image, "layout": os.path.join(store, image["id"])}
    return None


def name_file(store: str, name: str) -> str:
    return os.path.join(store, "names", urllib.parse.quote(name, safe="") + ".json")


def describe(name: str, reference: str, digest: str, id: str, **values: object) -> dict[str, Any]:
    """Every key that `shoal.containers.images` reads."""
    empty = {"layout": "", "directory": "", "source": "", "architecture": "", "cuda": "", "bytes": 0, "stamp": ""}
    return {"name": name, "reference": reference, "digest": digest, "id": id, "made_at": 0, **empty, **values}


def pull(store: str, source: str, name: str) -> dict[str, Any]:
    with new_place(store) as new:
        if source.startswith("/"):
            before = stamp(source)
            copy_archive(source, new, TAG)
            return keep(store, new + "/layout", name, source, "", stamp=before)
        # The digest first: what is pulled is what was asked for, and nodes can pull the same.
        digest = read_digest(store, source)
        pinned = "docker://%s@%s" % (repository(source), digest)
        pull_image(store, pinned, new + "/layout", TAG)
        return keep(store, new + "/layout", name, source, digest, source=pinned)


def build(store: str, source: str, name: str) -> dict[str, Any]:
    """From a directory. Device nodes in it become empty files when a user unpacks the image."""
    if not os.path.isdir(source):
        raise Problem("%s is no directory; `shoal image pull` takes archives and references" % source)
    architecture = directory_architecture(source)
    with new_place(store) as new:
        layout = new + "/layout"
        image = "%s:%s" % (layout, TAG)
        run(["umoci", "init", "--layout", layout])
        run(["umoci", "new", "--image", image])
        write_layer(source, new + "/layer")
        with growth_shown(layout, "%d MB packed"):
            run(["umoci", "raw", "add-layer", "--image", image, new + "/layer"])
        if architecture:
            run(["umoci", "config", "--image", image, "--architecture", architecture])
        run(["umoci", "gc", "--layout", layout])
        return keep(store, layout, name, source, "")


def receive(store: str, name: str, size: str, *command: str) -> dict[str, Any]:
    """From a job, which prints the tar of a layout (runner/image_export.py, image_build.py).

    So many bytes of our input are the job's. The end of our input ends the job: nobody waits for its image any more.
    """
    with new_place(store) as new:
        lines: list[str] = []
        pipe = subprocess.PIPE
        # What kills us kills our session: with SIGKILL srun would leave its job. In its own it gets SIGTERM.
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=end_with_parent, start_new_session=True
        ) as node:
            assert node.stdout and node.stderr
            threading.Thread(target=pass_input, args=(node, int(size), command), daemon=True).start()
            relay = threading.Thread(target=relay_lines, args=(node.stderr, lines))
            relay.start()
            damage = ""
            try:
                with tarfile.open(fileobj=node.stdout, mode="r|") as tar:
                    write_files(tar, new + "/layout")
            except (tarfile.TarError, Problem) as error:
                damage = str(error)
            while node.stdout.read(CHUNK_BYTES):
                pass  # a job that cannot print its end would not end
            relay.join()
        if node.returncode != 0:
            raise Problem(job_failure(lines))
        if damage or not os.path.exists(new + "/layout/oci-layout"):
            raise Problem("the image was not read whole: %s" % (damage or "it has no end"))
        return keep(store, new + "/layout", name, "", "")


def pass_input(node: subprocess.Popen[bytes], size: int, command: Sequence[str]) -> None:
    """Give the job its input, and end it at the end of ours."""
    assert node.stdin
    with contextlib.suppress(OSError), node.stdin:  # the job may have ended
        while size:
            data = os.read(0, min(size, CHUNK_BYTES))
            if not data:
                break
            size -= len(data)
            node.stdin.write(data)
    while os.read(0, CHUNK_BYTES):
        pass
    names = [word for word in command if word.startswith(JOB_NAME)]
    for _ in range(CANCEL_ATTEMPTS if names else 0):
        # Not srun: it kills the job at once, and the job has files to remove.
        subprocess.run(["scancel", "--name=" + names[0][len(JOB_NAME) :]], stderr=subprocess.DEVNULL, check=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(CANCEL_PAUSE_S)
            return
    node.terminate()


def job_failure(lines: list[str]) -> str:
    """Why a job failed, by what it and Slurm said."""
    slurm = "\n".join(line for line in lines if line.startswith(("slurmstepd", "srun: ")))
    end = re.search("CANCELLED AT [^ ]+(?: DUE TO ([A-Z ]+[A-Z]))?|Force Terminated", slurm)
    if end:
        return "Slurm ended its job: %s" % end[1].lower() if end[1] else "its job was cancelled"
    if re.search("oom[-_ ]?kill|out of memory", slurm, re.IGNORECASE):
        return "its job used up its memory"
    causes = [line for line in lines if line.startswith(CAUSE)] or lines[-1:] or ["srun failed"]
    return causes[-1].replace(CAUSE, "").replace("srun: error: ", "")


def end_with_parent() -> None:
    """A job must not go on when nobody waits for its image any more."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def relay_lines(messages: IO[bytes], lines: list[str]) -> None:
    """Print what a job says, as it comes, and keep its last lines."""
    for raw in messages:
        text = raw.decode(errors="replace").rstrip()
        lines[:] = [*lines, text][-LAST_LINES:]
        with contextlib.suppress(OSError):  # nobody reads it any more
            show_progress(text[-MESSAGE_END:])


def push(store: str, name: str, reference: str) -> dict[str, Any]:
    """To a registry; without a reference to the cluster's own, below the user's name."""
    image = read_name(store, name)
    if image is None:
        raise unknown_image(store, name)
    if not reference:
        if not own_registry():
            raise Problem(
                "the cluster has no registry of its own; name one, such as registry.example.org/lab/%s" % name
            )
        reference = "%s/%s/%s" % (own_registry(), own_name(), name.rpartition("/")[2].lower())
    registry, _, place = reference.partition("/")
    if registry == own_registry() and place.partition("/")[0] != own_name():
        text = "in the cluster's registry you write below your own name, such as %s/%s/%s"
        raise Problem(text % (registry, own_name(), place))
    with new_place(store) as new:
        try:
            digest = push_image(store, image["layout"], TAG, reference, new + "/digest")
        except Problem:
            if not os.path.isdir(image["layout"]):
                raise Problem("image %s was removed while it was pushed" % name) from None
            raise
    return {"name": name, "reference": reference, "digest": digest}


def keep(store: str, new: str, name: str, reference: str, digest: str, **values: object) -> dict[str, Any]:
    """Give the new layout the place of its digest, and the name."""
    try:
        with open(os.path.join(new, "index.json")) as file:
            manifest_digest = json.load(file)["manifests"][0]["digest"]
        described = config_facts(read_blob(new, read_blob(new, manifest_digest)["config"]["digest"]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Problem("the image is damaged (%r); make it again" % error) from None
    id = manifest_digest.rpartition(":")[2]
    blobs = os.path.join(new, "blobs", "sha256")
    size = sum(os.stat(os.path.join(blobs, blob)).st_size for blob in os.listdir(blobs))
    facts = {**described, "bytes": size, "made_at": int(time.time())}
    image = describe(name, reference, digest or manifest_digest, id, **{**facts, **values})
    place = os.path.join(store, id)
    with locked(store, fcntl.LOCK_SH):
        try:
            os.rename(new, place)
        except OSError:
            if not os.path.isdir(place):
                raise
        replace_file(name_file(store, name), json.dumps(image))
    return {**image, "layout": place}


def read_blob(layout: str, digest: str) -> dict[str, Any]:
    if not re.match(r"sha256:[0-9a-f]{64}\Z", digest):
        raise ValueError(digest)
    with open(os.path.join(layout, "blobs", *digest.split(":"))) as file:
        content: dict[str, Any] = json.load(file)
    return content


def list_images(store: str) -> list[dict[str, Any]]:
    names = sorted(urllib.parse.unquote(name[: -len(".json")]) for name in names_in(store))
    return [image for image in (read_name(store, name) for name in names) if image]


def list_containers(store: str) -> list[dict[str, Any]]:
    """One entry for each name; an image may have another name by now."""
    place = os.path.join(store, "containers")
    entries = []
    for name in sorted(os.listdir(place)) if os.path.isdir(place) else ():
        nodes, image, made_at = [], "", 0
        for node in sorted(os.listdir(os.path.join(place, name))):
            path = os.path.join(place, name, node)
            with contextlib.suppress(OSError), open(path) as file:  # a node removes it meanwhile
                image, made_at = file.read(), int(os.stat(path).st_mtime)
                nodes.append(node)
        if nodes:
            entries.append({"name": name, "image": image, "nodes": nodes, "made_at": made_at})
    return entries


def names_in(store: str) -> list[str]:
    return [name for name in os.listdir(os.path.join(store, "names")) if name.endswith(".json")]


def remove(store: str, name: str) -> list[str]:
    if not os.path.exists(name_file(store, name)):
        raise unknown_image(store, name)
    with locked(store, fcntl.LOCK_EX):
        os.unlink(name_file(store, name))
    return prune(store)


def unknown_image(store: str, name: str) -> Problem:
    known = ", ".join(image["name"] for image in list_images(store)) or "none"
    text = "you have no image %s; yours are: %s" % (name, known)
    nodes = [node for one in list_containers(store) if one["name"] == name for node in one["nodes"]]
    if nodes:
        text += "; it is a container of %s: name the node with --node" % ", ".join(nodes)
    return Problem(text)


def prune(store: str) -> list[str]:
    """The ids of what was removed. A job that waits in the queue fails if its image is: its message says so."""
    sweep(store)
    with locked(store, fcntl.LOCK_EX):
        used = {image["id"] for image in list_images(store)}
        left = [name for name in os.listdir(store) if name not in used and is_left(os.path.join(store, name))]
        for name in left:
            remove_path(os.path.join(store, name))
        for name in os.listdir(os.path.join(store, "names")):
            path = os.path.join(store, "names", name)
            if not name.endswith(".json") or read_name(store, urllib.parse.unquote(name[: -len(".json")])) is None:
                os.unlink(path)
        remove_bundles(store)
    return [name for name in left if ID.match(name)]


def is_left(path: str) -> bool:
    """Whether nothing needs it that is there, without a name. What a program is writing is young."""
    name = os.path.basename(path)
    with contextlib.suppress(FileNotFoundError):  # a login has its name by now
        return bool(ID.match(name)) or (name not in KEPT and os.lstat(path).st_mtime <= time.time() - WRITTEN_S)
    return False


def remove_path(path: str) -> None:
    """A program that was killed may have left files, too."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


@contextlib.contextmanager
def locked(store: str, how: int) -> Iterator[None]:
    """For a moment: nobody waits here for a registry or a job."""
    with open(os.path.join(store, ".lock"), "w") as lock:
        fcntl.flock(lock, how)
        yield


@contextlib.contextmanager
def new_place(store: str) -> Iterator[str]:
    """A directory for an image that is not whole yet."""
    sweep(store)
    with contextlib.ExitStack() as stack:
        with locked(store, fcntl.LOCK_EX):
            lock, lock_path = tempfile.mkstemp(prefix=NEW, suffix=".lock", dir=store)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = lock_path[: -len(".lock")]
            os.mkdir(path, 0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.unlink(lock_path)


def sweep(store: str) -> None:
    """Remove the places of programs that were killed: nobody holds their locks."""
    with locked(store, fcntl.LOCK_EX):
        for name in os.listdir(store):
            if not name.startswith(NEW) or not name.endswith(".lock"):
                continue
            path = os.path.join(store, name)
            with contextlib.suppress(BlockingIOError), open(path, "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path[: -len(".lock")], ignore_errors=True)
                os.unlink(path)
