"""Bundles of a user's images, for `srun --container`, as `image_store.py` keeps them.

A bundle has the files that Slurm reads, and `run`, which runs a command in its image without Slurm's help.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ANNOTATION = "shoal.image"
"""Where a bundle says what its commands run in: `runner/bundle.py` reads it."""
KEEP_DAYS = 30
"""How long a bundle is kept whose image is gone."""


def bundle(store: str, name: str, settings: str, program: str) -> dict[str, Any]:
    """Write what Slurm reads of a bundle, whole files only: a job may start from it meanwhile.

    Its root is empty: nodes unpack the image themselves.
    """
    path = os.path.join(store, "bundles", name)
    os.makedirs(os.path.join(path, "rootfs"), 0o700, exist_ok=True)
    process = {"args": ["true"], "cwd": "/", "env": [], "user": {"uid": os.getuid(), "gid": os.getgid()}}
    config = {"ociVersion": "1.0.2", "root": {"path": "rootfs"}, "process": process, "mounts": []}
    script = '#!/bin/sh\nexec python3 -I -S %s step %s -- "$@"\n' % (program, shlex.quote(path))
    replace_file(os.path.join(path, "run"), script, 0o700)
    replace_file(os.path.join(path, "config.json"), json.dumps({**config, "annotations": {ANNOTATION: settings}}))
    return {"path": path}


def remove_bundles(store: str) -> None:
    """Remove old bundles of images that are gone. A job that waits in the queue reads of the image in a young one."""
    place = os.path.join(store, "bundles")
    for name in os.listdir(place) if os.path.isdir(place) else ():
        config = os.path.join(place, name, "config.json")
        try:
            with open(config) as file:
                settings = json.loads(json.load(file)["annotations"][ANNOTATION])
            # A container with a name outlives its image.
            is_there = settings["container"] or os.path.isdir(settings["directory"] or settings["layout"])
            is_old = os.stat(config).st_mtime <= time.time() - KEEP_DAYS * 86400
        except (OSError, ValueError, KeyError):
            continue  # it is being written
        if is_old and not is_there:
            shutil.rmtree(os.path.join(place, name))


def replace_file(path: str, text: str, mode: int = 0o666) -> None:
    new = "%s.%d" % (path, os.getpid())
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    os.replace(new, path)
