"""Prints a container of this node as an image, for `shoal image save`: a tar of an OCI layout with one layer.

Or removes it, for `shoal image remove NAME --node`.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zlib

from .build_place import SAVE_PLACE
from .image import fail, image_config
from .image_space import remove, remove_container
from .unpacked_image import ARCHITECTURES, TAG, Problem, hold, own_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

MEDIA_TYPE = "application/vnd.oci.image."
FILES_CHANGED = 1
"""The status of tar where a job has changed files meanwhile."""
CHUNK_BYTES = 1 << 20
PROGRESS_INTERVAL_S = 3.0
GZIP, FAST = 31, 1


def export_container(name: str) -> int:
    """Print the container; the status where that is not possible."""
    try:
        store = own_store()
        path = os.path.join(store, "containers", name)
        if not os.path.isdir(path):
            raise Problem("there is no container %s of yours here" % name)
        hold(path, fcntl.LOCK_SH)
        layout = os.path.join(store, "%s%d" % (SAVE_PLACE, os.getpid()))
        hold(layout, fcntl.LOCK_EX)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(fail("saving container %s was cancelled" % name)))
        try:
            write_layout(layout, os.path.join(path, "rootfs"))
            with tarfile.open(fileobj=Meter(sys.stdout.buffer, "%d MB sent"), mode="w|") as tar:
                tar.add(layout, ".")
        finally:
            remove(layout)
            os.unlink(layout + ".lock")
    except Problem as error:
        return fail(str(error))
    except OSError as error:
        return fail("cannot save container %s: %s" % (name, error.strerror))
    return 0


class Meter(io.RawIOBase):
    """A file to write to, which says every few seconds how much was written."""

    def __init__(self, file: BinaryIO, text: str) -> None:
        self.file, self.text = file, text
        self.bytes, self.said_at = 0, time.monotonic()

    def write(self, data: Any) -> int:
        self.bytes += len(data)
        if time.monotonic() - self.said_at >= PROGRESS_INTERVAL_S:
            self.said_at = time.monotonic()
            sys.stderr.write(self.text % (self.bytes // 1000000) + "\n")
            sys.stderr.flush()
        return self.file.write(data)


def discard_container(name: str) -> int:
    """Remove the container; the status."""
    try:
        return remove_container(name)
    except Problem as error:
        return fail(str(error))
    except OSError as error:
        return fail("cannot remove container %s: %s" % (name, error.strerror))


def write_layout(layout: str, root: str) -> None:
    os.makedirs(layout + "/blobs/sha256", 0o700)
    layer, plain_digest = write_layer(layout, root)
    config = {
        "architecture": ARCHITECTURES.get(os.uname().machine, ""),
        "os": "linux",
        "config": image_config(root),
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + plain_digest]},
    }
    manifest = {"schemaVersion": 2, "mediaType": MEDIA_TYPE + "manifest.v1+json", "layers": [layer]}
    manifest["config"] = write_blob(layout, config, "config.v1+json")
    entry = write_blob(layout, manifest, "manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": TAG}
    write_json(layout + "/index.json", {"schemaVersion": 2, "manifests": [entry]})
    write_json(layout + "/oci-layout", {"imageLayoutVersion": "1.0.0"})


def write_layer(layout: str, root: str) -> tuple[dict[str, Any], str]:
    """Pack the files. Returns the layer's entry, and the digest of its tar."""
    # Of root, as in any image. What jobs have mounted is not in here: mounts are of each process.
    line = ["tar", "-c", "--sort=name", "--numeric-owner", "--owner=0", "--group=0", "-C", root, "."]
    packer = zlib.compressobj(FAST, zlib.DEFLATED, GZIP)
    plain, packed = hashlib.sha256(), hashlib.sha256()
    path = os.path.join(layout, "layer")
    with open(path, "wb") as file, subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as tar:
        assert tar.stdout
        meter = Meter(file, "%d MB packed")
        while True:
            data = tar.stdout.read(CHUNK_BYTES)
            plain.update(data)
            block = packer.compress(data) if data else packer.flush()
            packed.update(block)
            meter.write(block)
            if not data:
                break
    if tar.returncode not in (0, FILES_CHANGED):
        raise Problem("tar could not read the container: status %d" % tar.returncode)
    os.rename(path, os.path.join(layout, "blobs", "sha256", packed.hexdigest()))
    entry = {
        "mediaType": MEDIA_TYPE + "layer.v1.tar+gzip",
        "digest": "sha256:" + packed.hexdigest(),
        "size": meter.bytes,
    }
    return entry, plain.hexdigest()


def write_blob(layout: str, content: dict[str, Any], kind: str) -> dict[str, Any]:
    data = json.dumps(content).encode()
    digest = hashlib.sha256(data).hexdigest()
    with open(os.path.join(layout, "blobs", "sha256", digest), "wb") as file:
        file.write(data)
    return {"mediaType": MEDIA_TYPE + kind, "digest": "sha256:" + digest, "size": len(data)}


def write_json(path: str, content: dict[str, Any]) -> None:
    with open(path, "w") as file:
        json.dump(content, file)
