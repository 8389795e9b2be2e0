"""Snapshots of booted machines: which one fits, what a failed one leads to, and what a resumed host is given."""

import asyncio
import io
import itertools
import json
import os
import tarfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from tests.support.cases import cases

from shoal.errors import ProviderError
from shoal.sandbox import vm, vm_snapshot
from shoal.sandbox.layout import HostRecord, Layout
from shoal.sandbox.vm_disk import BootFiles
from shoal.sandbox.vm_snapshot import Monitor, Snapshot, find, give_identity, seed_archive
from shoal.spec.member import Shape

BOOT = BootFiles(Path("/cache/vm/debian12/abc"))


def test_a_snapshot_fits_one_machine_and_one_qemu() -> None:
    places = {
        find(BOOT, 1, 1024, "7.2").place,
        find(BOOT, 2, 1024, "7.2").place,
        find(BOOT, 1, 2048, "7.2").place,
        find(BOOT, 1, 1024, "9.0").place,
    }
    assert len(places) == 4 and all(place.parent == BOOT.place / "booted" for place in places)
    assert find(BOOT, 1, 1024, "7.2") == find(BOOT, 1, 1024, "7.2")


def test_resumed_machine_has_the_devices_of_its_snapshot_and_slots_for_the_rest() -> None:
    host = HostRecord("n1", 3, "10.70.1.2", "/image", "", Shape(cpus=1, memory_mb=2048, vm=True))
    layout = Layout(Path("/var/cache/shoal"), "reef")
    command = vm.qemu_command(layout, host, BOOT, "tcg", resume=True)
    devices = [value.split(",")[0] for option, value in itertools.pairwise(command) if option == "-device"]
    assert devices == [
        *("virtio-blk-pci", "virtio-rng-pci", "pcie-root-port", "pcie-root-port", "virtio-serial-pci", "virtserialport")
    ]
    assert command[-2:] == ["-incoming", "fd:3"]
    # After a reboot it is a host as any other: its kernel does not wait for a seed again.
    assert "shoal.snapshot" not in " ".join(command)


async def test_failed_snapshot_is_not_made_again_the_same_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    async def fail(*arguments: Any) -> None:
        attempts.append(arguments)
        raise ProviderError("it does not boot")

    monkeypatch.setattr(vm_snapshot, "call", AsyncMock(return_value="7.2"))
    monkeypatch.setattr(vm_snapshot, "_make", fail)
    messages: list[str] = []
    for _ in range(2):
        boot = BootFiles(tmp_path)
        assert await vm_snapshot.ensure(boot, 1, 1024, lambda text, part: messages.append(text)) is None
    assert len(attempts) == 1 and "it does not boot" in messages[0]
    mark = find(boot, 1, 1024, "7.2").place / "discarded"
    os.utime(mark, (0, time.time() - vm_snapshot.RETRY_S - 1))
    await vm_snapshot.ensure(boot, 1, 1024, lambda text, part: None)
    assert len(attempts) == 2


@cases("damage", "cut", "changed", "lost", "unfinished", "disk")
async def test_damaged_snapshot_is_made_anew_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    snapshot = Snapshot(tmp_path)
    snapshot.state.write_bytes(b"state" * 1000)
    snapshot.disk.write_bytes(b"disk" * 1000)
    snapshot.sums.write_text(vm_snapshot._checksums(snapshot.disk, snapshot.state))
    made = []

    async def make(boot: BootFiles, snapshot: Snapshot, *arguments: Any) -> None:
        made.append(snapshot)

    monkeypatch.setattr(vm_snapshot, "call", AsyncMock(return_value="7.2"))
    monkeypatch.setattr(vm_snapshot, "_make", make)
    monkeypatch.setattr(vm_snapshot, "find", lambda *arguments: snapshot)
    messages: list[str] = []
    assert await vm_snapshot.ensure(BOOT, 1, 1024, lambda text, part: messages.append(text)) == snapshot
    assert not made and not messages
    match damage:
        case "cut":
            snapshot.state.write_bytes(snapshot.state.read_bytes()[:-1])
        case "changed":
            snapshot.state.write_bytes(b"stale" + snapshot.state.read_bytes()[5:])
        case "lost":
            snapshot.state.unlink()
        case "unfinished":
            snapshot.sums.unlink()
        case "disk":
            snapshot.disk.write_bytes(b"")
    assert await vm_snapshot.ensure(BOOT, 1, 1024, lambda text, part: messages.append(text)) == snapshot
    assert made == [snapshot]
    assert [text for text in messages if "damaged" in text] or damage == "unfinished", messages


def test_discarded_snapshot_has_no_state(tmp_path: Path) -> None:
    snapshot = Snapshot(tmp_path)
    snapshot.state.write_bytes(b"state")
    snapshot.sums.write_text("sums")
    assert not snapshot.was_discarded
    snapshot.discard()
    assert snapshot.was_discarded and not snapshot.state.exists() and not snapshot.sums.exists()


def test_seed_of_a_resumed_host_has_fresh_random_numbers(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/key").write_text("secret")
    (tmp_path / "etc/key").chmod(0o600)
    seeds = []
    for _ in range(2):
        with tarfile.open(fileobj=io.BytesIO(seed_archive(tmp_path))) as archive:
            assert archive.getmember("./etc/key").mode == 0o600
            member = archive.extractfile("./etc/shoal-random")
            assert member is not None
            seeds.append(member.read())
    assert seeds[0] != seeds[1] and len(seeds[0]) == vm_snapshot.RANDOM_BYTES


async def test_monitor_skips_events_and_raises_what_qemu_refuses(tmp_path: Path) -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"QMP": {}}\n')
        while line := await reader.readline():
            if json.loads(line)["execute"] == "device_add":
                writer.write(b'{"error": {"class": "GenericError", "desc": "no such bus"}}\n')
            else:
                writer.write(b'{"event": "RESUME"}\n{"return": {"status": "running"}}\n')
        writer.close()
        await writer.wait_closed()
        closed.set()

    async with await asyncio.start_unix_server(serve, tmp_path / "qmp.sock"):
        monitor = await Monitor.open(*await asyncio.open_unix_connection(tmp_path / "qmp.sock"))
        assert await monitor.run("query-status") == {"status": "running"}
        with pytest.raises(ProviderError, match="QEMU refused device_add: no such bus"):
            await monitor.run("device_add", driver="x")
        monitor.writer.close()
        await monitor.writer.wait_closed()
        await closed.wait()


async def test_qemu_that_ended_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("qemu: load of migration failed: Invalid argument\n")
    with pytest.raises(ProviderError, match="load of migration failed"):
        await give_identity(tmp_path, "02:00:00:00:00:01", 1 << 30, lambda: False)
