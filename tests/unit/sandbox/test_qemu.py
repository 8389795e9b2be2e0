"""The pure parts of virtual machines: their command line, boot archive and GPUs, what they need, and who is one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.goldens import assert_golden
from tests.support.cases import cases
from tests.unit.sandbox.test_checks import GOOD, texts

from shoal.sandbox import qemu, vm, vm_disk
from shoal.sandbox.layout import HostRecord, Layout
from shoal.sandbox.lifecycle import EMULATED_SLOWNESS, instance
from shoal.sandbox.seed import render_gpu_devices
from shoal.spec.member import Shape
from shoal.spec.members import members
from shoal.spec.model import Spec

LAYOUT = Layout(Path("/var/cache/shoal"), "reef")
MACHINE = replace(GOOD, programs=GOOD.programs | {*qemu.PACKAGES})
VM = Shape(vm=True)


@cases("architecture", "x86_64", "aarch64")
def test_command_line_matches_its_golden(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qemu.os, "uname", lambda: type("uname", (), {"machine": architecture}))
    host = HostRecord("n1", 3, "10.70.1.2", "/image", "", Shape(cpus=1, memory_mb=2048, vm=True))
    home = vm_disk.BootFiles(LAYOUT.host_dir("n1"))
    lines = [
        " ".join(vm.qemu_command(LAYOUT, host, home, accelerator)).replace(" -", "\n  -")
        for accelerator in ("kvm", "tcg")
    ]
    unlike = "sandbox/qemu-x86_64" if architecture == "aarch64" else ""
    assert_golden(f"sandbox/qemu-{architecture}", "\n".join(lines) + "\n", unlike)


def test_archive_holds_names_modes_owners_and_data(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/key").write_text("secret")
    (tmp_path / "etc/key").chmod(0o600)
    (tmp_path / "etc/link").symlink_to("key")
    data = vm_disk.tree_archive(tmp_path, "seed")
    assert len(data) % 4 == 0
    entries = dict(unpack(data))
    assert list(entries) == ["seed", "seed/etc", "seed/etc/key", "seed/etc/link"]
    assert entries["seed/etc/key"] == (0o100600, b"secret") and entries["seed/etc/link"][1] == b"key"


def unpack(data: bytes) -> list[tuple[str, tuple[int, bytes]]]:
    found, at = [], 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name = data[at + 110 : at + 110 + fields[11] - 1].decode()
        at += -(-(110 + fields[11]) // 4) * 4
        if name == "TRAILER!!!":
            return found
        found.append((name, (fields[1], data[at : at + fields[6]])))
        at += -(-fields[6] // 4) * 4


def test_drivers_come_after_those_they_need(tmp_path: Path) -> None:
    dep = "k/virtio_blk.ko: k/virtio_ring.ko k/virtio.ko\nk/virtio_ring.ko: k/virtio.ko\nk/virtio.ko:\nk/other.ko:\n"
    (tmp_path / "modules.dep").write_text(dep)
    (tmp_path / "k").mkdir()
    for name in ("virtio_blk", "virtio_ring", "virtio", "other"):
        (tmp_path / "k" / f"{name}.ko").write_bytes(name.encode())
    loaded = list(vm_disk.drivers(tmp_path))
    assert loaded == [("virtio.ko", b"virtio"), ("virtio_ring.ko", b"virtio_ring"), ("virtio_blk.ko", b"virtio_blk")]


def test_gpu_devices_of_a_machine_have_different_numbers() -> None:
    assert render_gpu_devices(Shape(gpus=2, vm=True)).splitlines() == [
        "c /dev/nvidia0 0666 root root - 4:20",
        "c /dev/nvidia1 0666 root root - 4:21",
        "c /dev/nvidiactl 0666 root root - 1:3",
    ]


def test_missing_programs_of_virtual_machines_are_named_with_their_packages() -> None:
    assert texts(GOOD, Shape()) == [] and texts(MACHINE, VM) == []
    assert texts(replace(GOOD, virtiofsd=False, tun=False), VM) == [
        "error virtual machines need these programs: qemu-system-x86_64, qemu-img, virtiofsd, "
        "run `apt-get install qemu-system-x86 qemu-utils virtiofsd`; Debian 12 has virtiofsd in qemu-system-common",
        "error virtual machines need tap devices, found no /dev/net/tun, run `modprobe tun`",
    ]
    assert "qemu-system-arm qemu-utils" in texts(replace(GOOD, architecture="aarch64"), VM)[0]
    [other] = texts(replace(MACHINE, architecture="riscv64"), VM)
    assert other.endswith("found riscv64, use `kind: container`: virtual machines run on x86_64 and aarch64")


def test_emulation_is_announced() -> None:
    [finding] = texts(replace(MACHINE, kvm=False), VM)
    assert finding.startswith("info KVM is not usable: virtual machines are emulated")
    assert texts(replace(MACHINE, kvm=False), Shape()) == []


def test_memory_of_virtual_machines_must_be_free() -> None:
    [finding] = texts(replace(MACHINE, available_mb=3000), VM, VM, Shape(vm=True, memory_mb=2000))
    assert finding.startswith("error 3 hosts need 4048 MB of memory, found 3000 MB free")


def test_one_line_makes_every_host_a_virtual_machine_and_a_set_may_differ() -> None:
    made = {"provider": "sandbox", "count": 1}
    nodesets = {"a": made, "b": {**made, "kind": "container"}}
    for sandbox in ("vm", {"kind": "vm"}):
        controller = {"provider": "sandbox"}
        text = {"cluster": "reef", "sandbox": sandbox, "controller": controller, "nodesets": nodesets}
        found = {member.name: member.shape.vm for member in members(Spec.model_validate(text))}
        assert found == {"controller": True, "a1": True, "b1": False}


def test_accelerator_is_decided_for_one_boot_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_VM_ACCELERATOR", raising=False)
    (tmp_path / "vm").mkdir()
    record = tmp_path / "vm/accelerator.json"
    assert qemu.recorded_accelerator(tmp_path) is None
    boot = qemu.BOOT_ID.read_text().strip()
    record.write_text(json.dumps({"boot": boot, "accelerator": "kvm"}))
    assert qemu.recorded_accelerator(tmp_path) == "kvm"
    record.write_text(json.dumps({"boot": "an earlier one", "accelerator": "kvm"}))
    assert qemu.recorded_accelerator(tmp_path) is None
    monkeypatch.setenv("SHOAL_VM_ACCELERATOR", "tcg")
    assert qemu.recorded_accelerator(tmp_path) == "tcg"
    host = HostRecord("n1", 0, "10.70.1.2", "/image", "", VM)
    box = replace(host, shape=Shape())
    assert vm.boot_timeout(tmp_path, host) > vm.boot_timeout(tmp_path, box)
    layout = Layout(tmp_path, "reef")
    slowness = [instance(layout, one).target.slowness for one in (host, box)]
    monkeypatch.setenv("SHOAL_VM_ACCELERATOR", "kvm")
    assert [*slowness, instance(layout, host).target.slowness] == [EMULATED_SLOWNESS, 1, 1]
