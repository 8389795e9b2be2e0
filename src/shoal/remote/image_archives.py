"""Archives, layouts and directories of images, as `image_store.py` reads them."""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import os
import re
import subprocess
import tarfile
import zlib

from .image_registry import Problem, growth_shown, policy, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

LAYOUT_FILE = re.compile(r"(oci-layout|index\.json|blobs/sha256/[0-9a-f]{64})\Z")
UNREADABLE = re.compile(r"tar: \./(.*): Cannot open: ")
CHUNK_BYTES = 1 << 20


def copy_archive(source: str, new: str, tag: str) -> None:
    """Write an archive or a layout to the layout `new`/layout."""
    kind, path = require_archive(source), source
    with errors_named(source):
        if kind == "oci-archive":
            # skopeo gives the files their owners, which a user may not.
            kind, path = "oci", new + "/archive"
            with growth_shown(path, "%d MB read"), tarfile.open(source) as tar:
                write_files(tar, path)
        with growth_shown(new + "/layout"):
            run(["skopeo", *policy(), "copy", "--quiet", "%s:%s" % (kind, path), "oci:%s/layout:%s" % (new, tag)])


def require_archive(path: str) -> str:
    """The kind of an archive or layout, as skopeo names it."""
    if os.path.exists(os.path.join(path, "oci-layout")):
        return "oci"
    with open(path, "rb") as file:
        if file.read(4) == b"hsqs":
            fix = "`unsquashfs -d DIRECTORY %s`, then `shoal image build NAME DIRECTORY`" % path
            raise Problem("%s is a squashfs file, which this engine does not take: run %s" % (path, fix))
    with errors_named(path):
        if tarfile.is_tarfile(path):
            with tarfile.open(path) as tar:
                for member in tar:
                    if member.name.lstrip("./") == "oci-layout":
                        return "oci-archive"
                    if member.name.lstrip("./") == "manifest.json":
                        return "docker-archive"
    raise Problem("%s is no archive of an image; unpack it, then `shoal image build NAME DIRECTORY`" % path)


def write_layer(source: str, layer: str) -> None:
    """Write a directory as a layer, in which root owns every file.

    `umoci insert` changes the rights of directories while it reads them, which only their owner may.
    """
    whose = ["--owner=0", "--group=0", "--numeric-owner"]
    line = ["tar", "--create", "--file", layer, "--directory", source, *whose, "--sort=name", "."]
    with growth_shown(os.path.dirname(layer), "%d MB read"):
        done = subprocess.run(line, stderr=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"}, check=False)
    messages = done.stderr.decode(errors="replace").splitlines()
    unreadable = [found[1] for found in map(UNREADABLE.match, messages) if found]
    if unreadable:
        more = " and %d more" % (len(unreadable) - 1) if len(unreadable) > 1 else ""
        text = "you cannot read %s%s in %s; `--image %s` uses the directory without a copy, and without these files"
        raise Problem(text % (unreadable[0], more, source, source))
    if done.returncode != 0:
        raise Problem("%s: %s" % (source, messages[0] if messages else "tar ended with status %d" % done.returncode))


@contextlib.contextmanager
def errors_named(source: str) -> Iterator[None]:
    """Say which archive or layout it is that cannot be read. An error with a number is the disk's."""
    try:
        yield
    except Problem as error:
        raise Problem("%s: %s" % (source, error)) from None
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Problem("%s is damaged: %s; get it again" % (source, error)) from None


def write_files(tar: tarfile.TarFile, place: str) -> None:
    """Write the files of an OCI layout and no others. A blob whose content is not what its name says is an error."""
    for member in tar:
        name = member.name[2:] if member.name.startswith("./") else member.name
        file = tar.extractfile(member) if LAYOUT_FILE.match(name) and member.isreg() else None
        if file is not None:
            path, digest = os.path.join(place, name), hashlib.sha256()
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as new:
                for data in iter(lambda file=file: file.read(CHUNK_BYTES), b""):  # type: ignore[misc]
                    digest.update(data)
                    new.write(data)
            if name.startswith("blobs/") and os.path.basename(name) != digest.hexdigest():
                raise Problem("%s has other content than its digest says; get the image again" % name)


def stamp(path: str) -> str:
    status = os.stat(path)
    return "%d.%d.%d" % (status.st_ino, status.st_size, status.st_mtime_ns)
