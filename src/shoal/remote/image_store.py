"""Keeps a user's images where the user logs in: standard library, Python 3.8. Run as that user.

    image_store.py find STORE IMAGE             what an image is, as JSON; `null` for one that is not here
    image_store.py pull STORE SOURCE NAME       from a registry, an archive or an OCI layout
    image_store.py build STORE SOURCE NAME      from a directory with a root file system
    image_store.py save STORE NAME COMMAND...   from a container that the command prints (runner/image.py)
    image_store.py bundle STORE NAME SETTINGS PROGRAM    for `srun --container`: what commands run in, what runs them
    image_store.py list STORE                   all of them
    image_store.py remove STORE NAME            forgets a name, and removes the image if it has no other
    image_store.py prune STORE                  removes what has no name, such as an image that a pull replaced

Each prints JSON. What is wrong goes to standard error, status 3.

    STORE/ID                an OCI layout with one image, named by the digest of its manifest; whole or absent
    STORE/names/NAME.json   what the name, or a reference such as docker.io/library/debian:12, stands for
    STORE/bundles/NAME      a bundle: `config.json` names its image, and `run COMMAND...` runs a command in it
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.parse
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO, Any, Optional

EXIT_WITH_CAUSE = 3
TAG = "image"
"""The name of an image in its OCI layout."""
MESSAGE_END = 300
"""The end of a program's message has the cause."""
SHELLS = ("usr/bin/bash", "usr/bin/dash", "bin/bash", "bin/dash", "bin/busybox")
LAYOUT_FILE = re.compile(r"(oci-layout|index\.json|blobs/sha256/[0-9a-f]{64})$")
ELF_MACHINES = {62: "amd64", 183: "arm64"}
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
MEDIA_TYPE = "application/vnd.oci.image."
ANNOTATION = "shoal.image"
"""Where a bundle says what its commands run in: `runner/bundle.py` reads it."""
CAUSE = "shoal: error: "
"""How our own program on a node begins what is wrong. Slurm has lines of its own."""
TAR_END = bytes(1024)
"""How a tar ends; one without was cut off."""
CHUNK_BYTES = 1 << 20
GZIP, FAST = 31, 1


class Problem(Exception):
    """What is wrong, and what to do about it."""


def main(argv: list[str]) -> int:
    mode, store, words = argv[0], argv[1], argv[2:]
    try:
        os.makedirs(os.path.join(store, "names"), 0o700, exist_ok=True)
        modes: dict[str, Callable[..., object]] = {
            **{"find": find, "pull": pull, "build": build, "save": save, "bundle": bundle},
            **{"list": list_images, "remove": remove, "prune": prune},
        }
        sys.stdout.write(json.dumps(modes[mode](store, *words)) + "\n")
    except (Problem, OSError) as error:
        text = str(error) if isinstance(error, Problem) else "%s: %s" % (error.filename, error.strerror)
        sys.stderr.write(text + "\n")
        return EXIT_WITH_CAUSE
    return 0


def find(store: str, image: str) -> Optional[dict[str, Any]]:
    """The image of a name or reference, or in a path: an archive that has changed counts as not here."""
    if not image.startswith("/"):
        return read_name(store, image)
    if os.path.isdir(image) and not os.path.exists(os.path.join(image, "oci-layout")):
        return describe(image, "", "", "", directory=image, architecture=directory_architecture(image))
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
    empty = {"layout": "", "directory": "", "source": "", "architecture": "", "bytes": 0, "stamp": ""}
    return {"name": name, "reference": reference, "digest": digest, "id": id, "made_at": 0, **empty, **values}


def pull(store: str, source: str, name: str) -> dict[str, Any]:
    with locked(store, fcntl.LOCK_SH), new_place(store) as new:
        if source.startswith("/"):
            kind, path, before = require_archive(source), source, stamp(source)
            if kind == "oci-archive":
                # skopeo gives the files their owners, which a user may not.
                kind, path = "oci", new + "/archive"
                extract(source, path)
            run(["skopeo", *policy(), "copy", "--quiet", "%s:%s" % (kind, path), "oci:%s/layout:%s" % (new, TAG)])
            return keep(store, new + "/layout", name, source, "", stamp=before)
        # The digest first: what is pulled is what was asked for, and nodes can pull the same.
        reference = "docker://" + source
        digest = run(["skopeo", *policy(), "inspect", "--format", "{{.Digest}}", reference]).strip()
        pinned = "docker://%s@%s" % (repository(source), digest)
        run(["skopeo", *policy(), "copy", "--quiet", pinned, "oci:%s/layout:%s" % (new, TAG)])
        return keep(store, new + "/layout", name, source, digest, source=pinned)


def build(store: str, source: str, name: str) -> dict[str, Any]:
    """From a directory. Device nodes in it become empty files when a user unpacks the image."""
    if not os.path.isdir(source):
        raise Problem("%s is no directory; `shoal image pull` takes archives and references" % source)
    architecture = directory_architecture(source)
    with locked(store, fcntl.LOCK_SH), new_place(store) as new:
        layout = new + "/layout"
        image = "%s:%s" % (layout, TAG)
        run(["umoci", "init", "--layout", layout])
        run(["umoci", "new", "--image", image])
        run(["umoci", "insert", "--rootless", "--image", image, source, "/"])
        if architecture:
            run(["umoci", "config", "--image", image, "--architecture", architecture])
        run(["umoci", "gc", "--layout", layout])
        return keep(store, layout, name, source, "")


def save(store: str, name: str, *command: str) -> dict[str, Any]:
    """From a container: its files become the one layer of an image with the same variables."""
    with locked(store, fcntl.LOCK_SH), new_place(store) as new:
        layout = new + "/layout"
        os.makedirs(layout + "/blobs/sha256")
        with open(new + "/messages", "w+b") as messages:
            pipe = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": messages}
            with subprocess.Popen(command, **pipe) as node:  # type: ignore[call-overload]
                head = node.stdout.readline()
                layer, plain_digest, is_whole = write_layer(node.stdout, layout)
            messages.seek(0)
            text = messages.read().decode(errors="replace").strip()
        if node.returncode != 0 or not is_whole:
            causes = [line for line in text.splitlines() if line.startswith(CAUSE)] or [text[-MESSAGE_END:]]
            raise Problem(causes[0].replace(CAUSE, "") or "the container was not read whole")
        container = json.loads(head)
        config = {
            "architecture": MACHINES.get(container["machine"], ""),
            "os": "linux",
            "config": container["config"],
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + plain_digest]},
        }
        manifest = {"schemaVersion": 2, "mediaType": MEDIA_TYPE + "manifest.v1+json", "layers": [layer]}
        manifest["config"] = write_blob(layout, config, "config.v1+json")
        entry = write_blob(layout, manifest, "manifest.v1+json")
        entry["annotations"] = {"org.opencontainers.image.ref.name": TAG}
        write_json(layout + "/index.json", {"schemaVersion": 2, "manifests": [entry]})
        write_json(layout + "/oci-layout", {"imageLayoutVersion": "1.0.0"})
        return keep(store, layout, name, "", "")


def write_layer(tar: IO[bytes], layout: str) -> tuple[dict[str, Any], str, bool]:
    """Compress a tar into the layout. Returns its entry, the digest of the tar, and whether the tar was whole."""
    packer = zlib.compressobj(FAST, zlib.DEFLATED, GZIP)
    plain, packed, size, end = hashlib.sha256(), hashlib.sha256(), 0, b""
    path = os.path.join(layout, "layer")
    with open(path, "wb") as file:
        while True:
            data = tar.read(CHUNK_BYTES)
            plain.update(data)
            end = (end + data)[-len(TAR_END) :]
            block = packer.compress(data) if data else packer.flush()
            packed.update(block)
            size += file.write(block)
            if not data:
                break
    os.rename(path, os.path.join(layout, "blobs", "sha256", packed.hexdigest()))
    entry = {"mediaType": MEDIA_TYPE + "layer.v1.tar+gzip", "digest": "sha256:" + packed.hexdigest(), "size": size}
    return entry, plain.hexdigest(), end == TAR_END


def write_blob(layout: str, content: dict[str, Any], kind: str) -> dict[str, Any]:
    data = json.dumps(content).encode()
    digest = hashlib.sha256(data).hexdigest()
    with open(os.path.join(layout, "blobs", "sha256", digest), "wb") as file:
        file.write(data)
    return {"mediaType": MEDIA_TYPE + kind, "digest": "sha256:" + digest, "size": len(data)}


def write_json(path: str, content: dict[str, Any]) -> None:
    with open(path, "w") as file:
        json.dump(content, file)


def bundle(store: str, name: str, settings: str, program: str) -> dict[str, Any]:
    """Write what Slurm reads of a bundle. Its root is empty: nodes unpack the image themselves."""
    path = bundle_directory(store, name)
    os.makedirs(os.path.join(path, "rootfs"), 0o700, exist_ok=True)
    process = {"args": ["true"], "cwd": "/", "env": [], "user": {"uid": os.getuid(), "gid": os.getgid()}}
    config = {"ociVersion": "1.0.2", "root": {"path": "rootfs"}, "process": process, "mounts": []}
    new = "%s/config.%d" % (path, os.getpid())
    write_json(new, {**config, "annotations": {ANNOTATION: settings}})
    os.replace(new, os.path.join(path, "config.json"))
    script = os.path.join(path, "run")
    with open(script, "w") as file:
        file.write('#!/bin/sh\nexec python3 -I -S %s step %s -- "$@"\n' % (program, shlex.quote(path)))
    os.chmod(script, 0o700)
    return {"path": path}


def bundle_directory(store: str, name: str) -> str:
    return os.path.join(store, "bundles", re.sub("[^A-Za-z0-9_.-]", "_", name))


def keep(store: str, new: str, name: str, reference: str, digest: str, **values: object) -> dict[str, Any]:
    """Give the new layout the place of its digest, and the name."""
    with open(os.path.join(new, "index.json")) as file:
        manifest_digest = json.load(file)["manifests"][0]["digest"]
    id = manifest_digest.rpartition(":")[2]
    config = read_blob(new, read_blob(new, manifest_digest)["config"]["digest"])
    blobs = os.path.join(new, "blobs", "sha256")
    size = sum(os.stat(os.path.join(blobs, blob)).st_size for blob in os.listdir(blobs))
    place = os.path.join(store, id)
    try:
        os.rename(new, place)
    except OSError:
        if not os.path.isdir(place):
            raise
    facts = {"architecture": config.get("architecture", ""), "bytes": size, "made_at": int(time.time())}
    image = describe(name, reference, digest or manifest_digest, id, **{**facts, **values})
    path = name_file(store, name)
    with open("%s.%d" % (path, os.getpid()), "w") as file:
        json.dump(image, file)
    os.replace("%s.%d" % (path, os.getpid()), path)
    return {**image, "layout": place}


def read_blob(layout: str, digest: str) -> dict[str, Any]:
    with open(os.path.join(layout, "blobs", *digest.split(":"))) as file:
        content: dict[str, Any] = json.load(file)
    return content


def list_images(store: str) -> list[dict[str, Any]]:
    names = sorted(urllib.parse.unquote(name[: -len(".json")]) for name in names_in(store))
    return [image for image in (read_name(store, name) for name in names) if image]


def names_in(store: str) -> list[str]:
    return [name for name in os.listdir(os.path.join(store, "names")) if name.endswith(".json")]


def remove(store: str, name: str) -> list[str]:
    if not os.path.exists(name_file(store, name)):
        raise unknown_image(store, name)
    with locked(store, fcntl.LOCK_EX):
        os.unlink(name_file(store, name))
        shutil.rmtree(bundle_directory(store, name), ignore_errors=True)
    return prune(store)


def unknown_image(store: str, name: str) -> Problem:
    known = ", ".join(image["name"] for image in list_images(store)) or "none"
    return Problem("you have no image %s; yours are: %s" % (name, known))


def prune(store: str) -> list[str]:
    """The ids of what was removed. A job that waits in the queue fails if its image is: its message says so."""
    with locked(store, fcntl.LOCK_EX):
        used = {image["id"] for image in list_images(store)}
        left = [name for name in os.listdir(store) if name not in used and name not in ("names", "bundles", ".lock")]
        for name in left:
            shutil.rmtree(os.path.join(store, name))
        for name in names_in(store):
            path = os.path.join(store, "names", name)
            if read_name(store, urllib.parse.unquote(name[: -len(".json")])) is None:
                os.unlink(path)
    return [name for name in left if not name.startswith(".new")]


@contextlib.contextmanager
def locked(store: str, how: int) -> Iterator[None]:
    with open(os.path.join(store, ".lock"), "w") as lock:
        fcntl.flock(lock, how)
        yield


@contextlib.contextmanager
def new_place(store: str) -> Iterator[str]:
    path = os.path.join(store, ".new.%s.%d" % (os.uname().nodename, os.getpid()))
    os.mkdir(path, 0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def require_archive(path: str) -> str:
    """The kind of an archive or layout, as skopeo names it."""
    if os.path.exists(os.path.join(path, "oci-layout")):
        return "oci"
    with open(path, "rb") as file:
        if file.read(4) == b"hsqs":
            fix = "`unsquashfs -d DIRECTORY %s`, then `shoal image build NAME DIRECTORY`" % path
            raise Problem("%s is a squashfs file, which this engine does not take: run %s" % (path, fix))
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.lstrip("./") == "oci-layout":
                    return "oci-archive"
                if member.name.lstrip("./") == "manifest.json":
                    return "docker-archive"
    except tarfile.TarError:
        pass
    raise Problem("%s is no archive of an image; unpack it, then `shoal image build NAME DIRECTORY`" % path)


def extract(source: str, place: str) -> None:
    """Write the files of an OCI archive, those of a layout and no others. skopeo compares them with their digests."""
    with tarfile.open(source) as tar:
        for member in tar:
            name = member.name[2:] if member.name.startswith("./") else member.name
            file = tar.extractfile(member) if LAYOUT_FILE.match(name) and member.isreg() else None
            if file is not None:
                path = os.path.join(place, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as new:
                    shutil.copyfileobj(file, new)


def stamp(path: str) -> str:
    status = os.stat(path)
    return "%d.%d.%d" % (status.st_ino, status.st_size, status.st_mtime_ns)


def repository(reference: str) -> str:
    """A reference without its tag and digest."""
    reference = reference.partition("@")[0]
    place, _, last = reference.rpartition("/")
    return (place + "/" if place else "") + last.partition(":")[0]


def directory_architecture(root: str) -> str:
    """The CPU type of the programs in a root file system; empty where that is not plain."""
    for name in SHELLS:
        with contextlib.suppress(OSError), open(os.path.join(root, name), "rb") as file:
            head = file.read(20)
            if head[:4] == b"\x7fELF":
                return ELF_MACHINES.get(int.from_bytes(head[18:20], "little"), "")
    return ""


def policy() -> list[str]:
    return [] if os.path.exists("/etc/containers/policy.json") else ["--insecure-policy"]


def run(line: list[str], stdin: bytes = b"") -> str:
    try:
        pipe = subprocess.PIPE
        done = subprocess.run(line, input=stdin, stdout=pipe, stderr=pipe, check=False)
    except FileNotFoundError:
        raise Problem("%s is not installed; the operator adds `containers:` to the file" % line[0]) from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["status %d" % done.returncode]
        raise Problem("%s: %s" % (line[0], lines[-1].strip()[-MESSAGE_END:]))
    return done.stdout.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
