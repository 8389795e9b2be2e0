"""QEMU on this machine: its programs, the options that depend on the CPU architecture, and whether KVM works.

A trial guest that boots is the only proof of KVM: machines exist on which /dev/kvm opens, QEMU starts, and a guest
kernel hangs at once.
"""

# Files here are small and local: reading one takes less time than a thread would.
# ruff: noqa: ASYNC240
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Literal

from shoal.errors import ProviderError
from shoal.hosts.provider import Progress
from shoal.local_files import locked, write_atomic
from shoal.sandbox.programs import call
from shoal.sandbox.vm_disk import SEED_PORT, TRIAL, TRIAL_PASSED, BootFiles

Accelerator = Literal["kvm", "tcg"]
"""`kvm` runs the guest's code on the CPU, `tcg` translates it in software."""

SYSTEMS = {"x86_64": "qemu-system-x86_64", "aarch64": "qemu-system-aarch64"}
PACKAGES = {"qemu-system-x86_64": "qemu-system-x86", "qemu-system-aarch64": "qemu-system-arm", "qemu-img": "qemu-utils"}
"""Program -> its Debian package."""
VIRTIOFSD_PLACES = ("/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd")
"""Debian 12 has it in qemu-system-common, later ones in a package of its own."""
TRIAL_TIMEOUT_S = 20.0
"""A guest with KVM gets there in two seconds."""
TRIAL_MEMORY_MB = 256
COMMAND_LINE = (
    # Self-tests of the kernel's ciphers take minutes under emulation.
    "root=/dev/vda rw net.ifnames=0 mitigations=off cryptomgr.notests=1 random.trust_cpu=on panic=10 "
    "loglevel=4 systemd.show_status=yes"
)
EMULATED_CLOCK = {"x86_64": " tsc=reliable"}
"""Under emulation all CPUs have one time stamp counter. The kernel trusts it only when told to, and otherwise asks a
device for the time, which stops both CPUs."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def programs(architecture: str) -> tuple[str, ...]:
    """What running and making virtual machines takes. Empty on an architecture that has no kernel package here."""
    return (SYSTEMS[architecture], "qemu-img") if architecture in SYSTEMS else ()


def find_virtiofsd() -> Path | None:
    """The server of /shared."""
    found = next((Path(place) for place in VIRTIOFSD_PLACES if Path(place).exists()), None)
    return found or (Path(path) if (path := shutil.which("virtiofsd")) else None)


def console_device(architecture: str) -> str:
    """What the kernel calls the first serial port."""
    return "ttyAMA0" if architecture == "aarch64" else "ttyS0"


def machine_options(architecture: str, accelerator: Accelerator, memory_backend: str = "") -> list[str]:
    """The program and the options that every machine has."""
    if architecture == "aarch64":
        machine, emulated_cpu = "virt,gic-version=max", "max,pauth-impdef=on"
    else:
        # Without five-level page tables: emulation walks them in software.
        machine, emulated_cpu = "q35,usb=off,vmport=off", "max,la57=off"
    backend = f",memory-backend={memory_backend}" if memory_backend else ""
    return [
        SYSTEMS[architecture], "-nodefaults", "-no-user-config", "-display", "none",
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny",
        "-machine", machine + backend,
        "-accel", "kvm" if accelerator == "kvm" else "tcg,thread=multi",
        "-cpu", "host" if accelerator == "kvm" else emulated_cpu,
    ]  # fmt: skip


def guest_options(boot: BootFiles, accelerator: Accelerator, cpus: int, memory_mb: int, more: str = "") -> list[str]:
    """The command of a machine without network card and /shared. `more` goes to its kernel."""
    home, architecture = boot.place, os.uname().machine
    words = COMMAND_LINE + (EMULATED_CLOCK.get(architecture, "") if accelerator == "tcg" else "")
    return [
        *machine_options(architecture, accelerator, memory_backend="memory"),
        "-smp", str(cpus), "-m", f"{memory_mb}M",
        # virtiofsd shares the machine's memory.
        "-object", f"memory-backend-memfd,id=memory,size={memory_mb}M,share=on",
        "-kernel", str(boot.kernel), "-initrd", str(boot.initrd),
        "-append", f"console={console_device(architecture)} {words} {more}".rstrip(),
        "-chardev", f"file,id=console,path={home / 'log'},append=on", "-serial", "chardev:console",
        # The host's writes reach this machine's page cache when the host flushes them: a killed QEMU loses as much as
        # a machine without power does.
        "-drive", f"if=none,id=root,file={home / 'disk.qcow2'},format=qcow2,cache=unsafe,discard=unmap",
        "-device", "virtio-blk-pci,drive=root",
        "-device", "virtio-rng-pci",
        "-qmp", "unix:qmp.sock,server=on,wait=off",
    ]  # fmt: skip


def resumable_options() -> list[str]:
    """More for a machine of a snapshot: a port for its seed, and slots for what it gets afterwards."""
    return [
        "-device", "pcie-root-port,id=port1,chassis=1", "-device", "pcie-root-port,id=port2,chassis=2",
        "-device", "virtio-serial-pci", "-chardev", "socket,id=seed,path=seed.sock,server=on,wait=off",
        "-device", f"virtserialport,chardev=seed,name={SEED_PORT}",
    ]  # fmt: skip


def forced_accelerator() -> Accelerator | None:
    """What SHOAL_VM_ACCELERATOR says."""
    value = os.environ.get("SHOAL_VM_ACCELERATOR", "")
    return "kvm" if value == "kvm" else "tcg" if value == "tcg" else None


def recorded_accelerator(cache: Path) -> Accelerator | None:
    """The decision for this boot of the machine, where it has been made."""
    if forced := forced_accelerator():
        return forced
    try:
        data = json.loads(_record(cache).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    accelerator: Accelerator = "kvm" if data.get("accelerator") == "kvm" else "tcg"
    return accelerator if data.get("boot") == BOOT_ID.read_text().strip() else None


async def choose_accelerator(cache: Path, kernel: Path, initrd: Path, progress: Progress) -> Accelerator:
    """KVM where a trial guest boots with it, else emulation. Decided once for each boot of this machine."""
    if recorded := recorded_accelerator(cache):
        return recorded
    async with locked(cache / "vm"):
        if recorded := recorded_accelerator(cache):
            return recorded
        progress("trying whether a virtual machine starts with KVM", 0.0)
        usable = os.access("/dev/kvm", os.R_OK | os.W_OK) and await trial_boots("kvm", kernel, initrd)
        chosen: Accelerator = "kvm" if usable else "tcg"
        decision = {"boot": BOOT_ID.read_text().strip(), "accelerator": chosen}
        write_atomic(_record(cache), json.dumps(decision))
    if chosen == "tcg":
        progress("KVM is not usable here: virtual machines are emulated, and boot in minutes", 0.0)
    return chosen


def _record(cache: Path) -> Path:
    return cache / "vm" / "accelerator.json"


async def trial_boots(accelerator: Accelerator, kernel: Path, initrd: Path, timeout_s: float = TRIAL_TIMEOUT_S) -> bool:
    """Whether the kernel comes as far as its initial RAM disk in a guest."""
    architecture = os.uname().machine
    command = [
        *machine_options(architecture, accelerator), "-m", f"{TRIAL_MEMORY_MB}M", "-no-reboot", "-serial", "stdio",
        "-kernel", str(kernel), "-initrd", str(initrd),
        "-append", f"console={console_device(architecture)} panic=-1 quiet {TRIAL}",
    ]  # fmt: skip
    with contextlib.suppress(TimeoutError, ProviderError):
        async with asyncio.timeout(timeout_s):
            return TRIAL_PASSED in await call(*command, check=False)
    return False
