"""What makes a sandbox host itself: its name, keys, memory, GPUs and disk, laid out before it first starts."""

# Files here are small and local: reading one takes less time than a thread would.
from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shoal.hosts.key_pair import make_key_pair
from shoal.remote import nvidia_smi
from shoal.sandbox.images import remove_tree
from shoal.sandbox.layout import HostRecord, Layout
from shoal.sandbox.programs import call
from shoal.spec.member import Shape

GPU_MEMORY_MB = 16384
NULL_DEVICE = os.makedev(1, 3)
TERMINALS = tuple(os.makedev(4, n) for n in range(20, 64))
"""What GPUs are on virtual machines: a job that may not open the GPUs of others still has /dev/zero and /dev/random."""
DISTINCT_DEVICES = (os.makedev(1, 7), os.makedev(1, 5), os.makedev(1, 8), *TERMINALS)
"""full, zero, random, then terminals: for hosts with cgroups, whose Slurm forbids a job the device numbers of other
jobs' GPUs. Were they all null devices, it would lose its own GPU and /dev/null with them."""


def ensure_identity(layout: Layout) -> str:
    """The cluster's key pair, made once; returns the public half."""
    public = layout.identity.with_suffix(".pub")
    if not public.exists():
        pair = make_key_pair(f"shoal {layout.cluster}")
        write_file(layout.identity, pair.private.encode(), 0o600)
        write_file(public, f"{pair.public}\n".encode(), 0o644)
    return public.read_text()


async def lay_out(
    layout: Layout, host: HostRecord, authorized: str, more: Mapping[str, tuple[bytes, int]] | None = None
) -> HostRecord:
    """Write the host's seed layer and disk, then its record. Until the record is there, the host does not exist.

    `more` is what else the layer holds: paths with their contents and modes.
    """
    home = layout.host_dir(host.name)
    await remove_tree(home)
    for name in ("seed", "root", "disk"):
        (home / name).mkdir(parents=True)
    public, files = identity_files(layout, host, authorized)
    if host.shape.vm:
        files["etc/tmpfiles.d/shoal-gpus.conf"] = render_gpu_devices(host.shape).encode(), 0o644
    _write_layer(home / "seed", Path(host.image), {**files, **(more or {})})
    _make_gpu_devices(home / "devices", host.shape)
    if host.shape.disk_mb and not host.shape.vm:
        with (home / "disk.img").open("wb") as sink:
            sink.truncate(host.shape.disk_mb << 20)
        options = ("-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1")
        await call("mkfs.ext4", *options, home / "disk.img")
    made = replace(host, host_key=public)
    layout.save_host(made)
    return made


def identity_files(layout: Layout, host: HostRecord, authorized: str) -> tuple[str, dict[str, tuple[bytes, int]]]:
    """A new public key of the host, and the files that make it itself: paths with their contents and modes."""
    pair = make_key_pair(host.name)
    public = pair.public
    machine_id = hashlib.sha256(f"{layout.id}/{host.name}".encode()).hexdigest()[:32]
    files: dict[str, tuple[bytes, int]] = {
        "etc/ssh/ssh_host_ed25519_key": (pair.private.encode(), 0o600),
        "etc/ssh/ssh_host_ed25519_key.pub": (f"{public}\n".encode(), 0o644),
        "etc/ssh/authorized_keys": (authorized.encode(), 0o644),
        "etc/hostname": (f"{host.name}\n".encode(), 0o644),
        "etc/hosts": (f"127.0.0.1 localhost\n::1 localhost\n{host.address} {host.name}\n".encode(), 0o644),
        # Or it would turn away everybody but root for a moment after its SSH server answers: "System is booting up".
        "etc/tmpfiles.d/systemd-nologin.conf": (b"", 0o644),
        "etc/machine-id": (f"{machine_id}\n".encode(), 0o444),
    }
    if host.shape.memory_mb and not host.shape.vm:
        files["etc/shoal-sandbox.d/meminfo"] = render_meminfo(host.shape.memory_mb).encode(), 0o644
    if host.shape.cgroups and not host.shape.vm:
        files["etc/shoal-sandbox.d/cgroups"] = b"yes\n", 0o644
    if host.shape.gpus:
        files["etc/shoal-gpus"] = render_gpus(layout, host).encode(), 0o644
        files["usr/bin/nvidia-smi"] = Path(nvidia_smi.__file__).read_bytes(), 0o755
    return public, files


def render_meminfo(memory_mb: int) -> str:
    """/proc/meminfo of a machine with so much memory, nearly all of it free."""
    total = memory_mb * 1024
    free = total * 9 // 10
    figures = {"MemTotal": total, "MemFree": free, "MemAvailable": free, "Buffers": 0, "Cached": 0, "SwapCached": 0}
    figures |= {"Active": 0, "Inactive": 0, "SwapTotal": 0, "SwapFree": 0, "Shmem": 0, "Slab": 0, "SReclaimable": 0}
    return "".join(f"{name + ':':<15}{value:>9} kB\n" for name, value in figures.items())


def render_gpus(layout: Layout, host: HostRecord) -> str:
    """/etc/shoal-gpus: what the host's nvidia-smi answers from. A host's GPUs keep their UUIDs."""
    lines = []
    for index in range(host.shape.gpus):
        digest = hashlib.sha256(f"{layout.id}/{layout.cluster}/{host.name}/{index}".encode()).hexdigest()
        uuid = "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:32]))
        lines.append(f"{index}, GPU-{uuid}, Simulated GPU, {GPU_MEMORY_MB}\n")
    return "".join(lines)


def write_resolver(seed: Path) -> None:
    """Give the host the machine's name servers; a local stub would be the host's own loopback."""
    candidates = (Path("/run/systemd/resolve/resolv.conf"), Path("/etc/resolv.conf"))
    texts = [path.read_text() for path in candidates if path.exists()]
    usable = [text for text in texts if "nameserver" in text and "nameserver 127." not in text]
    write_file(seed / "etc/resolv.conf", (usable or texts or [""])[0].encode(), 0o644)


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Write a file that never has another mode than this one."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as sink:
        os.fchmod(handle, mode)
        sink.write(data)


def _write_layer(top: Path, image: Path, files: Mapping[str, tuple[bytes, int]]) -> None:
    """Write files into a layer above an image. A directory takes the owner and mode it has in the image."""
    _copy_mode(top, image)
    for name, (data, mode) in files.items():
        for directory in reversed(Path(name).parents[:-1]):
            if not (top / directory).exists():
                (top / directory).mkdir()
                _copy_mode(top / directory, image / directory)
        write_file(top / name, data, mode)


def _copy_mode(path: Path, model: Path) -> None:
    if model.exists():
        status = model.stat()
        path.chmod(stat.S_IMODE(status.st_mode))
        os.chown(path, status.st_uid, status.st_gid)


def _gpu_devices(shape: Shape) -> dict[str, int]:
    """The device files of the simulated GPUs, with the numbers of the devices that they are."""
    devices = {f"nvidia{index}": NULL_DEVICE for index in range(shape.gpus)}
    if shape.cgroups or shape.vm:
        devices |= dict(zip(devices, TERMINALS if shape.vm else DISTINCT_DEVICES, strict=False))
    if shape.gpus:
        devices["nvidiactl"] = NULL_DEVICE
    return devices


def render_gpu_devices(shape: Shape) -> str:
    """The device files of a virtual machine's GPUs, in the format of systemd-tmpfiles."""
    devices = _gpu_devices(shape).items()
    return "".join(f"c /dev/{name} 0666 root root - {os.major(at)}:{os.minor(at)}\n" for name, at in devices)


def _make_gpu_devices(where: Path, shape: Shape) -> None:
    where.mkdir()
    for name, device in _gpu_devices(shape).items():
        os.mknod(where / name, 0o666 | stat.S_IFCHR, device)
        (where / name).chmod(0o666)
