"""Starts a sandbox host as a virtual machine under QEMU.

Its disk is a copy-on-write layer over the disk of its image. The kernel and the host's seed come from this machine.
QEMU runs in the host's cgroups, and its network card is a tap device on the bridge of its site.
"""

# Files here are small and local: reading one takes less time than a thread would.
from __future__ import annotations

import asyncio
import ipaddress
import os
from pathlib import Path

from shoal.hosts.provider import Progress
from shoal.sandbox import vm_disk
from shoal.sandbox.layout import HostRecord, Layout
from shoal.sandbox.lifecycle import BOOT_TIMEOUT_S, ENTER, cpus_of, group
from shoal.sandbox.network import gateway, hardware_address
from shoal.sandbox.programs import call
from shoal.sandbox.qemu import (
    Accelerator,
    choose_accelerator,
    console_device,
    find_virtiofsd,
    machine_options,
    recorded_accelerator,
)
from shoal.sandbox.seed import write_file, write_resolver
from shoal.spec.member import Shape

EMULATED_BOOT_TIMEOUT_S = 900.0
"""A boot takes about a minute under emulation on an idle machine; several at once share its cores."""
MEMORY_MB = 1024
"""Of a machine for which the file says nothing."""
DISK_MB = 20480
"""Free space of such a machine. Its disk takes only what it holds."""
COMMAND_LINE = (
    # Self-tests of the kernel's ciphers take minutes under emulation.
    "root=/dev/vda rw net.ifnames=0 mitigations=off cryptomgr.notests=1 random.trust_cpu=on panic=10 "
    "loglevel=4 systemd.show_status=yes"
)
LAUNCH = """\
set -eu
home=$1 cpus=$2 virtiofsd=$3 shared=$4
shift 4
cd "$home"
rm -f shared.sock
"$virtiofsd" --socket-path=shared.sock -o source="$shared" &
while [ ! -S shared.sock ]; do kill -0 $!; sleep 0.05; done
exec taskset --cpu-list "$cpus" "$@"
"""
"""Serves /shared, and becomes QEMU. virtiofsd ends with it. Paths of sockets are short: the kernel allows 107 bytes."""


def memory_mb(shape: Shape) -> int:
    """The memory of such a machine."""
    return shape.memory_mb or MEMORY_MB


def boot_timeout(cache: Path, host: HostRecord) -> float:
    """Seconds that the host may take until SSH answers."""
    emulated = host.shape.vm and recorded_accelerator(cache) != "kvm"
    return EMULATED_BOOT_TIMEOUT_S if emulated else BOOT_TIMEOUT_S


async def start(layout: Layout, host: HostRecord, progress: Progress) -> None:
    """Start the machine and return at once. It lives on when this process ends."""
    home = layout.host_dir(host.name)
    (home / "ready").unlink(missing_ok=True)
    accelerator = await _ensure_disk(layout, host, progress)
    site = layout.sites()[host.site]
    length = ipaddress.IPv4Network(site.subnet).prefixlen
    network = f"ADDRESS={host.address}/{length}\nGATEWAY={gateway(site)}\n"
    write_resolver(home / "seed")
    write_file(home / "seed" / vm_disk.NETWORK_FILE, network.encode(), 0o644)
    boot = vm_disk.BootFiles(home)
    # It holds the host's private key.
    write_file(
        home / "initrd", (home / "initrd.base").read_bytes() + vm_disk.tree_archive(home / "seed", "seed"), 0o600
    )
    cgroups = group(layout, host.name)
    cgroups.make(cpus_of(host), None)
    write_file(home / "groups", "".join(f"{path}\n" for path in cgroups.paths).encode(), 0o644)
    layout.shared.mkdir(mode=0o1777, exist_ok=True)
    layout.shared.chmod(0o1777)
    arguments = [
        "sh", "-c", ENTER, "sh", str(home / "groups"), "setsid", "--fork",
        "sh", "-c", LAUNCH, "sh", str(home), ",".join(str(cpu) for cpu in cpus_of(host)),
        str(find_virtiofsd()), str(layout.shared), *qemu_command(layout, host, boot, accelerator),
    ]  # fmt: skip
    with (home / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
        )
        await process.wait()


def qemu_command(layout: Layout, host: HostRecord, boot: vm_disk.BootFiles, accelerator: Accelerator) -> list[str]:
    """The command that runs the machine. Its console goes to the host's log."""
    home, memory = boot.place, memory_mb(host.shape)
    return [
        *machine_options(os.uname().machine, accelerator, memory_backend="memory"),
        "-name", host.name, "-smp", str(len(cpus_of(host))), "-m", f"{memory}M",
        # virtiofsd shares the machine's memory.
        "-object", f"memory-backend-memfd,id=memory,size={memory}M,share=on",
        "-kernel", str(boot.kernel), "-initrd", str(boot.initrd),
        "-append", f"console={console_device(os.uname().machine)} {COMMAND_LINE}",
        "-chardev", f"file,id=console,path={home / 'log'},append=on", "-serial", "chardev:console",
        # The host's writes reach this machine's page cache when the host flushes them: a killed QEMU loses as much as
        # a machine without power does.
        "-drive", f"if=none,id=root,file={home / 'disk.qcow2'},format=qcow2,cache=unsafe,discard=unmap",
        "-device", "virtio-blk-pci,drive=root",
        "-netdev", f"tap,id=net,ifname={layout.link(host)},script=no,downscript=no",
        "-device", f"virtio-net-pci,netdev=net,romfile=,mac={hardware_address(layout, host.address)}",
        "-chardev", "socket,id=shared,path=shared.sock",
        "-device", "vhost-user-fs-pci,chardev=shared,tag=shared",
        "-device", "virtio-rng-pci",
        "-qmp", "unix:qmp.sock,server=on,wait=off",
    ]  # fmt: skip


async def _ensure_disk(layout: Layout, host: HostRecord, progress: Progress) -> Accelerator:
    """Make the disk of a host that has none; the accelerator that it runs with."""
    home = layout.host_dir(host.name)
    if not (home / "disk.qcow2").exists():
        boot = await vm_disk.ensure(layout.cache, Path(host.image), progress)
        # Links: what the host is made of outlives the removal of an older image.
        for file, name in ((boot.disk, "disk.img"), (boot.kernel, "vmlinuz"), (boot.initrd, "initrd.base")):
            (home / name).unlink(missing_ok=True)
            (home / name).hardlink_to(file)
        size = (home / "disk.img").stat().st_size + ((host.shape.disk_mb or DISK_MB) << 20)
        beside = home / "disk.qcow2.new"
        await call("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", home / "disk.img", beside, str(size))
        beside.rename(home / "disk.qcow2")
    return await choose_accelerator(layout.cache, home / "vmlinuz", home / "initrd.base", progress)
