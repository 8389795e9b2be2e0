"""Another build of Shoal's own Slurm: the same programs with the next number, as a later release brings them."""

import io
import re
import tarfile
from pathlib import Path

from shoal.local_files import cache_dir
from shoal.roles.slurm_tree import TREES, SlurmTree


def next_build(tree: SlurmTree, cache: Path) -> str:
    """Puts the next build into a cache directory that has everything else of this machine's. Returns its prefix.

    Programs have the path of their tree in them: the new one must have the same length.
    """
    for path in cache_dir().iterdir():
        if path.name != "slurm":
            (cache / path.name).symlink_to(path)
    version, number = re.fullmatch(r"(.*-)(\d+)", tree.version).groups()  # type: ignore[union-attr]
    name = f"slurm-{version}{int(number) + 1}"
    old, new = f"slurm-{tree.version}".encode(), name.encode()
    assert len(old) == len(new)
    archive = cache / "slurm" / f"{name}-{tree.arch}.tar.gz"
    archive.parent.mkdir()
    with (
        tarfile.open(fileobj=io.BytesIO(tree.content)) as source,
        tarfile.open(archive, "w:gz", compresslevel=1) as target,
    ):
        for entry in source:
            content = source.extractfile(entry) if entry.isfile() else None
            entry.name = entry.name.replace(old.decode(), name)
            target.addfile(entry, io.BytesIO(content.read().replace(old, new)) if content else None)
    return f"{TREES}/{name}"
