"""Images for tests, as archives that `docker save` or skopeo could have written: a small Debian, and hostile ones."""

import fcntl
import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from shoal.remote.runner.unpacked_image import ARCHITECTURES
from shoal.sandbox.provider import SandboxProvider

SUITE = "bookworm"
PACKAGES = ("python3", "libstdc++6")
"""What jobs need of the image, the second for torch."""
ENTRY = "application/vnd.oci.image."
HERE = ARCHITECTURES[platform.machine()]
"""The CPU type of this machine, in the words of images."""
OTHER = next(name for name in ARCHITECTURES.values() if name != HERE)


def debian_layer(*more: str) -> Path:
    """The files of a small Debian with Python, about 100 MB, and more packages: made once on this machine."""
    packages = (*PACKAGES, *more)
    place = SandboxProvider().cache / "test-images"
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{'-'.join([SUITE, *packages])}.tar"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            new = path.with_suffix(".new.tar")
            excluded = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
            options = ["--variant=essential", f"--include={','.join(packages)}", *excluded]
            subprocess.run(["mmdebstrap", "--quiet", *options, SUITE, new], check=True, timeout=900)
            new.rename(path)
    return path


def training_root(shared: Path, *packages: str) -> None:
    """`train` in the share of a sandbox cluster that has torch: a root file system with torch and more packages."""
    root = write_root(shared / "train", *packages)
    site = root / "usr/lib/python3/dist-packages"
    subprocess.run(["cp", "-al", f"{shared / 'env'}/.", site], check=True, timeout=300)


def write_root(root: Path, *packages: str) -> Path:
    """The small Debian as a directory, with its name in /mark."""
    root.mkdir()
    subprocess.run(["tar", "-xf", debian_layer(*packages), "-C", root, "--exclude=./dev/*"], check=True, timeout=300)
    (root / "mark").write_text(f"{root.name}\n")
    return root


def layer_of(members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def file(name: str, data: str | bytes = "", mode: int = 0o644, **values: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.mode = mode
    for key, value in values.items():
        setattr(info, key, value)
    return info, data if isinstance(data, bytes) else data.encode()


def hostile_files() -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Files that try to get out of the image, or to give rights."""
    yield file("dev-sda", type=tarfile.BLKTYPE, devmajor=8, devminor=0, mode=0o666)
    with tarfile.open(debian_layer()) as layer:
        program = layer.extractfile("./usr/bin/id")
        assert program is not None
        # Linux ignores the setuid bit of scripts. This one says whom it runs as.
        yield file("become-root", program.read(), 0o4755, uid=0, gid=0)
    yield file("escape", type=tarfile.SYMTYPE, linkname="/etc")
    yield file("escape/shoal-was-here", "outside")
    yield file("../../../../../../tmp/shoal-was-here", "outside")
    yield file("climb", type=tarfile.SYMTYPE, linkname="../../../../../../..")
    yield file("etc/resolv.conf", type=tarfile.SYMTYPE, linkname="/etc/shadow")


def write_archive(path: Path, *layers: Path | bytes, architecture: str = HERE, env: Iterable[str] = ()) -> None:
    """An OCI archive of these layers, the first at the bottom."""
    with tarfile.open(path, "w") as tar:

        def add(name: str, data: bytes) -> None:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))

        def add_blob(content: Path | bytes | object, kind: str) -> dict[str, object]:
            if isinstance(content, Path):
                content = content.read_bytes()
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            digest = hashlib.sha256(data).hexdigest()
            add(f"blobs/sha256/{digest}", data)
            return {"mediaType": f"{ENTRY}{kind}", "size": len(data), "digest": f"sha256:{digest}"}

        entries = [add_blob(layer, "layer.v1.tar") for layer in layers]
        system = {"type": "layers", "diff_ids": [entry["digest"] for entry in entries]}
        config = {"architecture": architecture, "os": "linux", "config": {"Env": [*env]}, "rootfs": system}
        manifest = {"schemaVersion": 2, "config": add_blob(config, "config.v1+json"), "layers": entries}
        index = {"schemaVersion": 2, "manifests": [add_blob(manifest, "manifest.v1+json")]}
        add("index.json", json.dumps(index).encode())
        add("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')


def write_broken_layer(path: Path) -> None:
    """An archive whose digests are right, and whose layer is no archive."""
    write_archive(path, b"no files" * 100)


def write_changed(path: Path) -> None:
    """An archive with another byte in a blob than its digest says."""
    write_archive(path, layer_of([file("mark", "before")]))
    path.write_bytes(path.read_bytes().replace(b"before", b"beyond"))


def write_cut(path: Path) -> None:
    """The first half of an archive."""
    write_archive(path, layer_of([file("mark", "x" * 100000)]))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write_text(path: Path) -> None:
    path.write_text("no image\n")


BROKEN = {"cut": write_cut, "changed": write_changed, "layer": write_broken_layer, "text": write_text}
"""What writes an archive that is no image, by its name."""
