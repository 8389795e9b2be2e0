"""Snapshots of booted virtual machines, so that emulated hosts start in seconds.

    <boot files of the image>/booted/<key>/disk.qcow2, state, sums

A machine without seed and network card boots once for each number of CPUs and size of memory, and its state is kept. A
new host continues from it over a disk layer of its own: its network card and /shared are plugged in, then it gets its
seed, fresh random numbers, its clock and the size of its disk. After that it is a host like any other.
"""

# Files here are small and local: reading one takes less time than a thread would.
from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ProviderError
from shoal.hosts.provider import Progress
from shoal.local_files import locked, write_atomic
from shoal.sandbox.images import remove_tree
from shoal.sandbox.programs import call, last_lines
from shoal.sandbox.qemu import guest_options, resumable_options
from shoal.sandbox.vm_disk import SNAPSHOT, BootFiles

BOOT_TIMEOUT_S = 900.0
SAVE_TIMEOUT_S = 300.0
RESUME_TIMEOUT_S = 300.0
"""It takes ten seconds on an idle machine."""
RETRY_S = 86400.0
"""Until a snapshot that failed is made anew."""
RANDOM_BYTES = 64
POLL_S = 0.1


@dataclass(frozen=True)
class Snapshot:
    """A booted machine: `state` is its memory and devices, `disk` a layer over the disk of its image."""

    place: Path

    @property
    def disk(self) -> Path:
        return self.place / "disk.qcow2"

    @property
    def state(self) -> Path:
        return self.place / "state"

    @property
    def sums(self) -> Path:
        """The checksums of both, written last: without it the snapshot is not finished."""
        return self.place / "sums"

    async def is_whole(self) -> bool:
        """Whether both files are as they were written. A damaged state would end or corrupt a host that runs."""
        try:
            return self.sums.read_text() == await asyncio.to_thread(_checksums, self.disk, self.state)
        except (OSError, ValueError):
            return False

    @property
    def was_discarded(self) -> bool:
        """Whether it failed not long ago: then hosts boot, and do not wait for another one to be made."""
        mark = self.place / "discarded"
        return mark.exists() and time.time() - mark.stat().st_mtime < RETRY_S

    def discard(self) -> None:
        """Remove it: no host continues from it."""
        (self.place / "discarded").touch()
        self.sums.unlink(missing_ok=True)
        self.state.unlink(missing_ok=True)


def find(boot: BootFiles, cpus: int, memory_mb: int, version: str) -> Snapshot:
    """Where the snapshot of such a machine is: QEMU continues only from what the same QEMU saved."""
    key = json.dumps([version, _command(BootFiles(Path("/")), cpus, memory_mb)])
    return Snapshot(boot.place / "booted" / hashlib.sha256(key.encode()).hexdigest()[:12])


def _command(boot: BootFiles, cpus: int, memory_mb: int) -> list[str]:
    return [*guest_options(boot, "tcg", cpus, memory_mb, SNAPSHOT), *resumable_options()]


async def ensure(boot: BootFiles, cpus: int, memory_mb: int, progress: Progress) -> Snapshot | None:
    """The snapshot of such a machine, made first if it is not in the cache. None where making it has failed."""
    version = await call(_command(boot, cpus, memory_mb)[0], "--version")
    snapshot = find(boot, cpus, memory_mb, version)
    snapshot.place.mkdir(parents=True, exist_ok=True)
    async with locked(snapshot.place):
        if snapshot.was_discarded:
            return None
        if not await snapshot.is_whole():
            if snapshot.sums.exists():
                progress("the snapshot of a booted virtual machine is damaged, and is made anew", 0.0)
            try:
                await _make(boot, snapshot, cpus, memory_mb, progress)
            except (ProviderError, OSError, TimeoutError, json.JSONDecodeError) as error:
                progress(f"cannot make a snapshot of a booted virtual machine: {error}", 0.0)
                snapshot.discard()
                return None
    return snapshot


def _checksums(*files: Path) -> str:
    lines = []
    for file in files:
        with file.open("rb") as source:
            lines.append(f"{hashlib.file_digest(source, 'sha256').hexdigest()}  {file.name}\n")
    return "".join(lines)


async def _make(boot: BootFiles, snapshot: Snapshot, cpus: int, memory_mb: int, progress: Progress) -> None:
    what = f"booting a virtual machine once for all with {cpus} CPUs and {memory_mb} MB"
    work = snapshot.place / "new"
    await remove_tree(work)
    work.mkdir()
    for file, name in ((boot.disk, "disk.img"), (boot.kernel, "vmlinuz"), (boot.initrd, "initrd")):
        (work / name).hardlink_to(file)
    await call("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", work / "disk.img", work / "disk.qcow2")
    # Hosts have both files in their own directory.
    await call("qemu-img", "rebase", "-u", "-F", "raw", "-b", "disk.img", work / "disk.qcow2")
    command = _command(BootFiles(work), cpus, memory_mb)
    with (work / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *("setpriv", "--pdeathsig", "KILL", *command),
            cwd=work,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        async with _connected(work, "seed.sock", lambda: process.returncode is None) as (reader, _):
            for seconds in range(0, int(BOOT_TIMEOUT_S), 10):
                progress(f"{what}, {seconds} s so far", 0.0)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(10):
                        if await reader.readline() == b"ready\n":
                            break
                        raise ProviderError(f"it ended during boot: {_console(work)}")
            else:
                raise ProviderError(f"it does not boot within {BOOT_TIMEOUT_S:.0f} s")
            async with asyncio.timeout(SAVE_TIMEOUT_S):
                await _save(work, process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    (work / "disk.qcow2").rename(snapshot.disk)
    (work / "state").rename(snapshot.state)
    write_atomic(snapshot.sums, await asyncio.to_thread(_checksums, snapshot.disk, snapshot.state))
    await remove_tree(work)


async def _save(work: Path, process: asyncio.subprocess.Process) -> None:
    """Stop the machine, write its state to a file, and end QEMU."""
    arrived = asyncio.Event()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (work / "state").open("wb") as sink:
            while data := await reader.read(1 << 20):
                sink.write(data)
        writer.close()
        arrived.set()

    with _short_path(work) as short:
        server = await asyncio.start_unix_server(receive, short / "state.sock", limit=1 << 22)
    async with server, _connected(work, "qmp.sock", lambda: True) as (reader, writer):
        monitor = await Monitor.open(reader, writer)
        await monitor.run("stop")
        await monitor.run("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
        await monitor.run("migrate", uri="unix:state.sock")
        while (status := (await monitor.run("query-migrate")).get("status")) != "completed":
            if status in ("failed", "cancelled"):
                raise ProviderError(f"QEMU did not save its state: {status}")
            await asyncio.sleep(POLL_S)
        await arrived.wait()
        with contextlib.suppress(ConnectionError, ProviderError):
            await monitor.run("quit")
    await process.wait()


async def give_identity(home: Path, hardware_address: str, disk_bytes: int, runs: Callable[[], bool]) -> None:
    """Make a resumed machine the host whose seed is in its directory. Raises ProviderError, and TimeoutError."""
    async with asyncio.timeout(RESUME_TIMEOUT_S):
        async with _connected(home, "qmp.sock", runs) as (reader, writer):
            monitor = await Monitor.open(reader, writer)
            while (status := (await monitor.run("query-status"))["status"]) == "inmigrate":  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            if status != "paused":  # as it was when it was saved
                raise ProviderError(f"QEMU did not load the snapshot: {status}")
            card = {"driver": "virtio-net-pci", "netdev": "net", "romfile": "", "mac": hardware_address}
            await monitor.run("device_add", id="card", bus="port1", **card)
            await monitor.run(
                "device_add", id="shares", bus="port2", driver="vhost-user-fs-pci", chardev="shared", tag="shared"
            )
            await monitor.run("block_resize", device="root", size=disk_bytes)
            await monitor.run("cont")
        async with _connected(home, "seed.sock", runs) as (reader, writer):
            data = seed_archive(home / "seed")
            writer.write(f"{len(data)}\n".encode() + data)
            await writer.drain()
            await _expect(reader, b"clock\n")
            writer.write(f"{time.time():.3f}\n".encode())
            await writer.drain()
            await _expect(reader, b"done\n")


async def _expect(reader: asyncio.StreamReader, line: bytes) -> None:
    answer = await reader.readline()
    if answer != line:
        raise ProviderError(f"a resumed virtual machine answers {answer!r}, not {line!r}")


def seed_archive(seed: Path) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(seed, ".")
        entry = tarfile.TarInfo("./etc/shoal-random")
        entry.size, entry.mode = RANDOM_BYTES, 0o600
        archive.addfile(entry, io.BytesIO(os.urandom(RANDOM_BYTES)))
    return data.getvalue()


@dataclass
class Monitor:
    """QEMU's control socket (QMP)."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Monitor:
        await reader.readline()  # its greeting
        monitor = cls(reader, writer)
        await monitor.run("qmp_capabilities")
        return monitor

    async def run(self, command: str, **arguments: Any) -> Any:
        """Run one command, and return its result. Events in between are skipped."""
        self.writer.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        await self.writer.drain()
        while line := await self.reader.readline():
            answer = json.loads(line)
            if "error" in answer:
                raise ProviderError(f"QEMU refused {command}: {answer['error'].get('desc')}")
            if "return" in answer:
                return answer["return"]
        raise ProviderError(f"QEMU ended during {command}")


@contextlib.asynccontextmanager
async def _connected(
    home: Path, name: str, runs: Callable[[], bool]
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a socket of QEMU's, which may not be there yet."""
    while True:
        with _short_path(home) as short, contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            reader, writer = await asyncio.open_unix_connection(short / name)
            break
        if not runs():
            raise ProviderError(f"QEMU ended: {_console(home)}")
        await asyncio.sleep(POLL_S)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _console(home: Path) -> str:
    return last_lines((home / "log").read_text(errors="replace"))


@contextlib.contextmanager
def _short_path(directory: Path) -> Iterator[Path]:
    """Another path of a directory: the kernel allows 107 bytes for the path of a socket."""
    handle = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)
