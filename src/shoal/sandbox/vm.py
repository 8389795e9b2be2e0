"""Starts a sandbox host as a virtual machine under QEMU.

Its disk is a copy-on-write layer over the disk of its image. The kernel and the host's seed come from this machine.
QEMU runs in the host's cgroups, and its network card is a tap device on the bridge of its site.
"""

# Files here are small and local: reading one takes less time than a thread would.
from __future__ import annotations

import asyncio
import ipaddress
from pathlib import Path

from shoal.errors import ProviderError
from shoal.hosts.provider import Progress
from shoal.sandbox import vm_disk, vm_snapshot
from shoal.sandbox.layout import HostRecord, Layout
from shoal.sandbox.lifecycle import BOOT_TIMEOUT_S, ENTER, cpus_of, group, is_emulated, stop
from shoal.sandbox.network import gateway, hardware_address
from shoal.sandbox.programs import call
from shoal.sandbox.qemu import (
    Accelerator,
    choose_accelerator,
    find_virtiofsd,
    guest_options,
    resumable_options,
)
from shoal.sandbox.seed import write_file, write_resolver
from shoal.spec.member import Shape

EMULATED_BOOT_TIMEOUT_S = 900.0
"""A boot takes about a minute under emulation on an idle machine; several at once share its cores."""
MEMORY_MB = 1024
"""Of a machine for which the file says nothing."""
DISK_MB = 20480
"""Free space of such a machine. Its disk takes only what it holds."""
RESUMING = "resuming"
"""A file of a host that continues from a snapshot and has not got its identity yet."""
LAUNCH = """\
set -eu
home=$1 cpus=$2 virtiofsd=$3 shared=$4 socket=$5 state=$6
shift 6
cd "$home"
rm -f "$socket" qmp.sock seed.sock
"$virtiofsd" --socket-path="$socket" -o source="$shared" &
while [ ! -S "$socket" ]; do kill -0 $!; sleep 0.05; done
[ -z "$state" ] || exec 3< "$state"
exec taskset --cpu-list "$cpus" "$@"
"""
"""Serves /shared, and becomes QEMU. virtiofsd ends with it. Paths of sockets are short: the kernel allows 107 bytes."""


def memory_mb(shape: Shape) -> int:
    """The memory of such a machine."""
    return shape.memory_mb or MEMORY_MB


def boot_timeout(cache: Path, host: HostRecord) -> float:
    """Seconds that the host may take until SSH answers."""
    return EMULATED_BOOT_TIMEOUT_S if is_emulated(cache, host) else BOOT_TIMEOUT_S


async def start(layout: Layout, host: HostRecord, progress: Progress) -> None:
    """Start the machine. It lives on when this process ends. A new emulated one continues from a snapshot."""
    home = layout.host_dir(host.name)
    (home / "ready").unlink(missing_ok=True)
    if (home / RESUMING).exists():  # it was cut off before it had its identity
        (home / "disk.qcow2").unlink(missing_ok=True)
    accelerator = await _ensure_boot_files(layout, host, progress)
    _write_seed(layout, host)
    if not (home / "disk.qcow2").exists():
        if accelerator == "tcg" and await _resume(layout, host, progress):
            return
        await _make_disk(home, "raw", "disk.img", str(_disk_bytes(host, home)))
    (home / RESUMING).unlink(missing_ok=True)
    await _launch(layout, host, qemu_command(layout, host, vm_disk.BootFiles(home), accelerator))


def is_resuming(layout: Layout, name: str) -> bool:
    """Whether the host was started from a snapshot and never became itself."""
    return (layout.host_dir(name) / RESUMING).exists()


def qemu_command(
    layout: Layout, host: HostRecord, boot: vm_disk.BootFiles, accelerator: Accelerator, resume: bool = False
) -> list[str]:
    """The command that runs the machine. Its console goes to the host's log."""
    card = f"virtio-net-pci,netdev=net,romfile=,mac={hardware_address(layout, host.address)}"
    plugged = ["-device", card, "-device", "vhost-user-fs-pci,chardev=shared,tag=shared"]
    return [
        *guest_options(boot, accelerator, len(cpus_of(host)), memory_mb(host.shape)),
        "-name", host.name,
        "-netdev", f"tap,id=net,ifname={layout.link(host)},script=no,downscript=no",
        "-chardev", f"socket,id=shared,path={_shared_socket(layout, host)}",
        *([*resumable_options(), "-incoming", "fd:3"] if resume else plugged),
    ]  # fmt: skip


async def _resume(layout: Layout, host: HostRecord, progress: Progress) -> bool:
    """Continue from a snapshot as this host; whether that worked."""
    home = layout.host_dir(host.name)
    boot = await vm_disk.ensure(layout.cache, Path(host.image), progress)
    snapshot = await vm_snapshot.ensure(boot, len(cpus_of(host)), memory_mb(host.shape), progress)
    if snapshot is None:
        return False
    progress(f"virtual machine {host.name} continues from a snapshot", 0.0)
    _link(snapshot.disk, home / "booted.qcow2")
    (home / RESUMING).touch()
    await _make_disk(home, "qcow2", "booted.qcow2")
    command = qemu_command(layout, host, vm_disk.BootFiles(home), "tcg", resume=True)
    await _launch(layout, host, command, snapshot.state)
    address, size, cgroups = hardware_address(layout, host.address), _disk_bytes(host, home), group(layout, host.name)
    try:
        await vm_snapshot.give_identity(home, address, size, lambda: cgroups.alive)
    except (ProviderError, OSError, TimeoutError, ValueError) as error:
        progress(f"host {host.name} does not continue from the snapshot, and boots instead: {error}", 0.0)
        await stop(layout, host.name)
        snapshot.discard()
        for name in ("disk.qcow2", "booted.qcow2"):
            (home / name).unlink(missing_ok=True)
        return False
    (home / RESUMING).unlink()
    return True


def _write_seed(layout: Layout, host: HostRecord) -> None:
    """What the host gets at its first boot, in its initial RAM disk. It holds the host's private key."""
    home, site = layout.host_dir(host.name), layout.sites()[host.site]
    length = ipaddress.IPv4Network(site.subnet).prefixlen
    network = f"ADDRESS={host.address}/{length}\nGATEWAY={gateway(site)}\n"
    write_resolver(home / "seed")
    write_file(home / "seed" / vm_disk.NETWORK_FILE, network.encode(), 0o644)
    seed = vm_disk.tree_archive(home / "seed", "seed")
    write_file(home / "initrd", (home / "initrd.base").read_bytes() + seed, 0o600)


async def _launch(layout: Layout, host: HostRecord, command: list[str], state: Path | None = None) -> None:
    """Start QEMU in the host's cgroups, and return at once."""
    home, cgroups = layout.host_dir(host.name), group(layout, host.name)
    cgroups.make(cpus_of(host), None)
    write_file(home / "groups", "".join(f"{path}\n" for path in cgroups.paths).encode(), 0o644)
    layout.shared.mkdir(mode=0o1777, exist_ok=True)
    layout.shared.chmod(0o1777)
    arguments = [
        "sh", "-c", ENTER, "sh", str(home / "groups"), "setsid", "--fork",
        "sh", "-c", LAUNCH, "sh", str(home), ",".join(str(cpu) for cpu in cpus_of(host)),
        str(find_virtiofsd()), str(layout.shared), _shared_socket(layout, host), str(state or ""), *command,
    ]  # fmt: skip
    with (home / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
        )
        await process.wait()


async def _ensure_boot_files(layout: Layout, host: HostRecord, progress: Progress) -> Accelerator:
    """Give a host that has no disk yet what it is made of; the accelerator that it runs with."""
    home = layout.host_dir(host.name)
    if not (home / "disk.qcow2").exists():
        boot = await vm_disk.ensure(layout.cache, Path(host.image), progress)
        # Links: what the host is made of outlives the removal of an older image.
        for file, name in ((boot.disk, "disk.img"), (boot.kernel, "vmlinuz"), (boot.initrd, "initrd.base")):
            _link(file, home / name)
    return await choose_accelerator(layout.cache, home / "vmlinuz", home / "initrd.base", progress)


async def _make_disk(home: Path, kind: str, below: str, *size: str) -> None:
    """Make the host's disk, a layer over another file of its directory."""
    beside = home / "disk.qcow2.new"
    await call("qemu-img", "create", "-q", "-f", "qcow2", "-F", kind, "-b", home / below, beside, *size)
    beside.rename(home / "disk.qcow2")


def _shared_socket(layout: Layout, host: HostRecord) -> str:
    """Where virtiofsd listens, in the host's directory. No two are the same: Debian 12's locks a file of this name."""
    return f"{layout.link(host)}.sock"


def _disk_bytes(host: HostRecord, home: Path) -> int:
    return (home / "disk.img").stat().st_size + ((host.shape.disk_mb or DISK_MB) << 20)


def _link(file: Path, to: Path) -> None:
    to.unlink(missing_ok=True)
    to.hardlink_to(file)
