"""What virtual machines boot from: a disk made of an image, Debian's cloud kernel, and an initial RAM disk.

    <cache>/vm/<image>/<recipe>/disk.img, vmlinuz, initrd

They are made once for each image. The initial RAM disk is ours: it loads the drivers of the disk, copies the host's
seed onto it at the first boot, and starts systemd. It takes a second where Debian's takes ten under emulation.
"""

# Files here are small and local: reading one takes less time than a thread would.
from __future__ import annotations

import hashlib
import json
import lzma
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ProviderError
from shoal.hosts.provider import Progress
from shoal.local_files import locked
from shoal.sandbox.images import remove_tree
from shoal.sandbox.programs import call_logged, last_lines

KERNELS = {"x86_64": "linux-image-cloud-amd64", "aarch64": "linux-image-cloud-arm64"}
"""The kernel's package, by the architecture of this machine."""
DRIVERS = ("virtio_pci", "virtio_mmio", "virtio_blk", "virtio_net", "crc32c_generic", "quota_v2", "ext4")
"""What reaching the root disk and the network takes. Some are part of the kernel; udev loads all others."""
UNMASKED = ("systemd-udevd.service", "systemd-udev-trigger.service", "systemd-modules-load.service")
"""Units that a machine with devices of its own needs, and containers do without."""
MASKED = ("serial-getty@ttyS0.service", "serial-getty@ttyAMA0.service", "systemd-binfmt.service")
"""Units that a boot under emulation is faster without."""
NETWORK_FILE = "etc/shoal-network"
TRIAL = "shoal.trial"
"""On the kernel's command line: end at once, once the kernel has proved that it runs."""
TRIAL_PASSED = "shoal: this kernel runs"
SNAPSHOT = "shoal.snapshot"
"""On the kernel's command line: boot without a seed, and wait for one at the port below."""
SEED_PORT = "shoal.seed"
"""The serial port on which a resumed host gets its seed."""

PLACEHOLDER_ID = "5ea0" * 8
"""The machine ID of a disk that no host has got yet. Without any, systemd takes a boot for the very first one, and
enables every service that is installed."""
NETWORK_UNIT = f"""\
[Unit]
Description=The address of this sandbox host
DefaultDependencies=no
After=local-fs.target systemd-sysctl.service
Before=network.target network-online.target
Wants=network.target
ConditionPathExists=/{NETWORK_FILE}

[Service]
Type=oneshot
RemainAfterExit=yes
EnvironmentFile=/{NETWORK_FILE}
ExecStart=ip link set lo up
ExecStart=ip link set eth0 up
ExecStart=ip address replace ${{ADDRESS}} dev eth0
ExecStart=ip route replace default via ${{GATEWAY}}

[Install]
WantedBy=multi-user.target network-online.target
"""
SSH_DROP_IN = "[Unit]\nConditionPathExists=/etc/ssh/ssh_host_ed25519_key\n"
"""Without a seed it would start again and again."""
FSTAB = "shared /shared virtiofs defaults,nofail 0 0\n"
SEED_UNIT = f"""\
[Unit]
Description=The seed of a sandbox host that continues from a snapshot
ConditionKernelCommandLine={SNAPSHOT}

[Service]
ExecStart=/bin/sh /usr/local/lib/shoal-seed

[Install]
WantedBy=multi-user.target
"""
SEED_PROGRAM = f"""\
set -eu
systemctl is-system-running --wait > /dev/null || true
# A boot does not wait for udev, which may still be busy with the drivers of other devices.
until [ -c /dev/virtio-ports/{SEED_PORT} ]; do sleep 0.1; done
exec 3<> /dev/virtio-ports/{SEED_PORT}
sync
echo ready >&3
# Nothing below has run in the snapshot. Reads end at once while nobody is at the other end.
until read -r size <&3; do sleep 0.1; done
head -c "$size" <&3 | tar -xp --numeric-owner -C /
hostname -F /etc/hostname
# Hosts of one snapshot would draw the same random numbers until the kernel mixes in others (RNDRESEEDCRNG).
cat /etc/shoal-random > /dev/urandom
perl -e 'open my $f, ">", "/dev/urandom" or die; ioctl($f, 0x5207, 0) or die'
rm /etc/shoal-random
cat /proc/sys/kernel/random/uuid > /run/shoal-boot-id
mount --bind /run/shoal-boot-id /proc/sys/kernel/random/boot_id
resize2fs /dev/vda
sync
echo > /var/lib/shoal-seeded
sync
until [ -e /sys/class/net/eth0 ]; do sleep 0.1; done
echo clock >&3
read -r now <&3
date -s "@$now"
systemd-tmpfiles --create /etc/tmpfiles.d/shoal-gpus.conf
systemctl restart systemd-journald
systemctl start shoal-network ssh
systemctl start shared.mount
echo done >&3
"""
FILES = {
    "etc/systemd/system/shoal-network.service": NETWORK_UNIT,
    "etc/systemd/system/ssh.service.d/shoal.conf": SSH_DROP_IN,
    "etc/systemd/system/shoal-seed.service": SEED_UNIT,
    "usr/local/lib/shoal-seed": SEED_PROGRAM,
    "etc/fstab": FSTAB,
    "etc/machine-id": f"{PLACEHOLDER_ID}\n",
}
INIT = f"""\
#!/bin/busybox sh
b=/bin/busybox
for directory in proc sys dev newroot; do $b mkdir -p /$directory; done
$b mount -t proc proc /proc
$b mount -t devtmpfs dev /dev
if $b grep -qw {TRIAL} /proc/cmdline; then
    echo "{TRIAL_PASSED}" > /dev/console
    $b poweroff -f
fi
while read -r module; do $b insmod "/modules/$module"; done < /modules/order
tries=0
until $b mount -t ext4 /dev/vda /newroot 2> /dev/null; do
    tries=$((tries + 1))
    [ "$tries" -lt 200 ] || {{ echo "shoal: no root disk" > /dev/console; $b poweroff -f; }}
    $b usleep 50000
done
$b mount --move /dev /newroot/dev
$b mount --move /proc /newroot/proc
if [ ! -e /newroot/var/lib/shoal-seeded ] && ! $b grep -qw {SNAPSHOT} /newroot/proc/cmdline; then
    # The disk of a host is larger than the one that it is made of.
    $b chroot /newroot /sbin/resize2fs /dev/vda > /newroot/dev/console 2>&1
    $b cp -a /seed/. /newroot/
    $b sync
    echo > /newroot/var/lib/shoal-seeded
    $b sync
fi
exec $b switch_root /newroot /sbin/init
"""
BUILD = """\
set -eu
image=$1 work=$2 package=$3
mkdir -p "$work/upper" "$work/work" "$work/tree"
mount -t overlay -o "lowerdir=$image,upperdir=$work/upper,workdir=$work/work" shoal "$work/tree"
tree=$work/tree
rm -f "$tree/etc/resolv.conf"
cp /etc/resolv.conf "$tree/etc/resolv.conf"
# Lists of its own: those of the image fit the packages in its cache.
mkdir -p "$tree/kernel/lists/partial" "$tree/kernel/archives/partial"
options="-q -o Dir::State::lists=/kernel/lists -o Dir::Cache=/kernel"
apt() { chroot "$tree" sh -c 'cd /kernel && exec "$@"' sh "$@"; }
apt apt-get $options update
kernel=$(apt apt-cache $options depends --important "$package" | awk '/Depends: linux-image-/ { print $2 }')
[ -n "$kernel" ] || { echo "the package sources have no $package"; exit 3; }
# Debian 13 does without it. A host's disk is larger than the one it is made of.
[ -x "$tree/sbin/resize2fs" ] || apt apt-get $options -y install --no-install-recommends e2fsprogs
# After Debian 13 the kernel, its modules and their lists are packages of their own.
parts=$(apt apt-cache $options depends --important "$kernel" |
    awk '/ Depends: linux-(base|binary|modules)-[0-9]/ { print $2 }')
apt apt-get $options download "$kernel" $parts busybox-static
for package in "$tree"/kernel/*.deb; do chroot "$tree" dpkg-deb -x "/kernel/${package##*/}" /kernel/unpacked; done
for modules in "$tree"/kernel/unpacked/lib/modules/* "$tree"/kernel/unpacked/usr/lib/modules/*; do
    [ -d "$modules" ] || continue
    mkdir -p "$tree/usr/lib/modules"
    mv "$modules" "$tree/usr/lib/modules/"
    chroot "$tree" depmod "${modules##*/}"
    cp -a "$tree/usr/lib/modules/${modules##*/}" "$work/modules"
done
for file in "$tree"/kernel/unpacked/boot/vmlinuz-* "$work/modules/vmlinuz"; do
    [ ! -e "$file" ] || mv "$file" "$work/vmlinuz"
done
for place in bin usr/bin; do
    [ ! -e "$tree/kernel/unpacked/$place/busybox" ] || mv "$tree/kernel/unpacked/$place/busybox" "$work/busybox"
done
rm -rf "$tree/kernel" "$tree/etc/resolv.conf"
cp -a "$work/files/." "$tree/"
for unit in $4; do rm -f "$tree/etc/systemd/system/$unit"; done
for unit in $5; do ln -s /dev/null "$tree/etc/systemd/system/$unit"; done
mkdir -p "$tree/shared"
chroot "$tree" systemctl enable shoal-network.service shoal-seed.service
size=$(du -s --apparent-size --block-size=1M "$tree" | cut -f1)
options=lazy_itable_init=1,lazy_journal_init=1
mke2fs -q -t ext4 -m 0 -O quota -E "$options" -d "$tree" "$work/disk.img" "$((size + size / 4 + 200))M"
# It has not counted the files that it copied: quotas would begin with none.
e2fsck -fy "$work/disk.img" || [ $? -eq 1 ]
"""


@dataclass(frozen=True)
class BootFiles:
    """What a machine boots from; `place` is their directory."""

    place: Path

    @property
    def disk(self) -> Path:
        return self.place / "disk.img"

    @property
    def kernel(self) -> Path:
        return self.place / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.place / "initrd"


async def ensure(cache: Path, image: Path, progress: Progress) -> BootFiles:
    """The boot files of an image, made first if they are not in the cache. Raises ProviderError."""
    room = cache / "vm" / image.parent.name
    recipe = json.dumps([image.name, FILES, INIT, BUILD, DRIVERS, UNMASKED, MASKED])
    boot = BootFiles(room / hashlib.sha256(recipe.encode()).hexdigest()[:12])
    if boot.place.is_dir():
        return boot
    room.mkdir(parents=True, exist_ok=True)
    lock = room / ".lock"
    lock.touch()
    async with locked(lock):
        if not boot.place.is_dir():
            await _build(image, boot.place, progress)
    return boot


async def _build(image: Path, place: Path, progress: Progress) -> None:
    what = f"making the disk and kernel of virtual machines for image {image.parent.name}"
    progress(what, 0.0)
    room = place.parent
    for left in room.glob(".building-*"):
        await remove_tree(left)
    work, log = room / f".building-{os.getpid()}", room / "build.log"
    log.write_bytes(b"")
    for name, text in FILES.items():
        path = work / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    package = KERNELS[os.uname().machine]
    alone = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"]
    alone += ["--pid", "--fork", "--kill-child", "--mount-proc"]
    arguments = ["sh", "-c", f"umask 022\n{BUILD}", "sh", str(image), str(work), package]
    arguments += [" ".join(UNMASKED), " ".join(MASKED)]
    status = await call_logged(*alone, *arguments, log=log, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    if status != 0:
        hint = f"the whole log is {log}; it needs package {package} from the image's package sources, then try again"
        raise ProviderError(f"{what} failed: {last_lines(log.read_text(errors='replace'))}", hint=hint)
    ready = work / "ready"
    ready.mkdir()
    (ready / "initrd").write_bytes(_initrd(work))
    for name in ("disk.img", "vmlinuz"):
        (work / name).rename(ready / name)
    ready.rename(place)
    await remove_tree(work)
    # Hosts have links of their own to the files they were made of.
    for other in room.iterdir():
        if other.is_dir() and other != place:
            await remove_tree(other)
    progress(what, 1.0)


def _initrd(work: Path) -> bytes:
    modules = list(drivers(work / "modules"))
    order = "".join(f"{name}\n" for name, _ in modules)
    entries = [
        Entry("bin", stat.S_IFDIR | 0o755),
        Entry("bin/busybox", stat.S_IFREG | 0o755, (work / "busybox").read_bytes()),
        Entry("init", stat.S_IFREG | 0o755, INIT.encode()),
        Entry("modules", stat.S_IFDIR | 0o755),
        Entry("modules/order", stat.S_IFREG | 0o644, order.encode()),
        *(Entry(f"modules/{name}", stat.S_IFREG | 0o644, data) for name, data in modules),
    ]
    return archive(entries)


def drivers(tree: Path) -> Iterator[tuple[str, bytes]]:
    """The modules to load, each after those that it needs."""
    needs = {}
    for line in (tree / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[_module_name(path)] = [path, *others.split()]
    seen = set()
    for driver in DRIVERS:
        for path in reversed(needs.get(driver, [])):  # none: it is part of the kernel
            if path not in seen:
                seen.add(path)
                data = (tree / path).read_bytes()
                yield f"{_module_name(path)}.ko", lzma.decompress(data) if path.endswith(".xz") else data


def _module_name(path: str) -> str:
    return Path(path).name.partition(".ko")[0].replace("-", "_")


@dataclass(frozen=True)
class Entry:
    """One file or directory of an archive."""

    name: str
    mode: int
    data: bytes = b""
    uid: int = 0
    gid: int = 0


def archive(entries: Iterable[Entry]) -> bytes:
    """A cpio archive as the kernel unpacks it. Several, one after the other, are one."""
    parts = []
    for number, entry in enumerate([*entries, Entry("TRAILER!!!", 0)], start=1):
        name = entry.name.encode() + b"\0"
        fields = (number, entry.mode, entry.uid, entry.gid, 1, 0, len(entry.data), 0, 0, 0, 0, len(name), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields) + name
        parts += [header, b"\0" * (-len(header) % 4), entry.data, b"\0" * (-len(entry.data) % 4)]
    return b"".join(parts)


def tree_archive(top: Path, prefix: str) -> bytes:
    """The files and directories below `top`, as an archive that unpacks them below `prefix`."""
    entries = []
    for path in (top, *sorted(top.rglob("*"))):
        status = path.lstat()
        data = b""
        if stat.S_ISREG(status.st_mode):
            data = path.read_bytes()
        elif stat.S_ISLNK(status.st_mode):
            data = os.fsencode(path.readlink())
        name = str(Path(prefix) / path.relative_to(top))
        entries.append(Entry(name, status.st_mode, data, status.st_uid, status.st_gid))
    return archive(entries)
