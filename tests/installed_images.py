"""Caches for tests whose images have the packages that `up` installs on hosts, for tests that do not test that.

On a container dpkg takes 6 s of CPU, and under emulation most of the time of an `up`. Here it runs once for each image.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ProviderError
from shoal.local_files import cache_dir, locked
from shoal.sandbox import images
from shoal.sandbox.programs import call_logged, last_lines

SLURM = ("munge", "slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "nftables", "libpmix2")
"""What `up` installs on hosts of any spec, on Debian 12."""
PARTS = (
    *("libpam-slurm-adopt", "wireguard-tools", "wireguard-go", "nfs-ganesha", "nfs-ganesha-vfs", "netbase", "sshfs"),
    *("rsync", "mariadb-server", "slurmdbd", "python3-venv", "python3-pip-whl", "libnfs-utils"),
    *("crun", "skopeo", "umoci", "buildah", "uidmap", "fuse-overlayfs"),
)
"""What it installs on containers for the parts of a spec; and a client of NFS, which is test_storage.py's."""
PACKAGES = (
    *("munge", "slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libpam-slurm-adopt"),
    *("nftables", "chrony", "wireguard-tools", "nfs-kernel-server", "nfs-common", "netbase", "rsync", "sshfs"),
    "python3-venv",
)
MORE_PACKAGES = {
    "debian12": (
        *("libpmix2", "quota", "dmsetup", "docker.io", "iptables", "mariadb-server", "slurmdbd"),
        *("crun", "skopeo", "umoci", "buildah", "uidmap", "fuse-overlayfs", "python3-pip-whl"),
    )
}
"""By image: what only its `up` installs, with `containers`, too, and what test_vm.py needs for its faults."""
STOPPED = (
    *("munge", "slurmctld", "slurmd", "chrony", "nfs-server", "rpcbind.service", "rpcbind.socket"),
    *("docker.service", "docker.socket", "containerd", "mariadb", "slurmdbd", "nfs-ganesha"),
)
"""Services that `up` or a test enables: a host that has only just been made does not run them."""
INSTALL = """\
set -eu
image=$1 work=$2 packages=$3 stopped=$4
tree=$work/tree
mkdir -p "$work/upper" "$work/work" "$tree"
mount -t overlay -o "lowerdir=$image,upperdir=$work/upper,workdir=$work/work" shoal "$tree"
mount -t proc proc "$tree/proc"
cp /etc/resolv.conf "$tree/etc/resolv.conf"
printf '#!/bin/sh\\nexit 101\\n' > "$tree/usr/sbin/policy-rc.d"
chmod 755 "$tree/usr/sbin/policy-rc.d"
chroot "$tree" apt-get -q update
chroot "$tree" apt-get -qy install --no-install-recommends $packages
for unit in $stopped; do chroot "$tree" systemctl disable "$unit" || true; done
umount "$tree/proc"
# What tells one host from another comes with the host.
rm -f "$tree/usr/sbin/policy-rc.d" "$tree/etc/resolv.conf" "$tree/etc/munge/munge.key" "$tree/etc/machine-id" \\
    "$tree/var/lib/dbus/machine-id"
cp -a "$tree" "$work/image"
"""


SHARED = (
    *("environments", "slurm", "runtime", "tests", "test-images"),
    *("images/debian11", "images/debian13", "images/sid"),
)
"""Directories of the user's cache that the one for containers has, too."""


def prepare_containers(*, parts: bool) -> Path:
    """The cache for clusters of containers: the user's, with packages installed in the image of Debian 12."""
    shared = cache_dir()
    cache = _prepare_containers(shared, shared, SLURM)
    return _prepare_containers(shared, cache, SLURM, PARTS) if parts else cache


def _prepare_containers(shared: Path, base: Path, *packages: Sequence[str]) -> Path:
    """The same for one layer of packages, the last, on an image of the cache `base`, which has the others."""
    cache = _place("installed-tests", *packages)
    for name in SHARED:
        _share(shared / name, cache / name)
    asyncio.run(_ensure(base, cache, "debian12", packages[-1]))
    return cache


def prepare_machines(spec: str) -> Path:
    """The cache for a cluster of virtual machines, with the images that this text of a spec names."""
    named = set(re.findall(r"image: (\w+)", spec)) or {"debian12"}
    shared, cache = cache_dir(), _place("vm-tests", PACKAGES, MORE_PACKAGES)
    (cache / "vm").mkdir(parents=True, exist_ok=True)
    for name in ("environments", "slurm"):
        _share(shared / name, cache / name)
    if (shared / "vm/accelerator.json").exists():  # no second trial of KVM
        shutil.copy(shared / "vm/accelerator.json", cache / "vm/accelerator.json")
    for image in sorted(named):
        asyncio.run(_ensure(shared, cache, image, (*PACKAGES, *MORE_PACKAGES.get(image, ()))))
    return cache


def _place(name: str, *packages: object) -> Path:
    """Another directory for every other recipe."""
    return cache_dir() / name / hashlib.sha256(repr((*packages, STOPPED, INSTALL)).encode()).hexdigest()[:12]


def _share(source: Path, link: Path) -> None:
    source.mkdir(parents=True, exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        link.symlink_to(source)


async def _ensure(shared: Path, cache: Path, image: str, packages: Sequence[str]) -> None:
    """Install the packages in a layer over the image, and keep both as an image of the same name."""
    base = await images.ensure(shared, image, lambda text, part: None)
    place = cache / "images" / image / base.name
    place.parent.mkdir(parents=True, exist_ok=True)
    async with locked(place.parent):
        if place.is_dir():
            return
        work, log = place.parent / f".preparing-{os.getpid()}", place.parent / "prepare.log"
        log.write_bytes(b"")
        alone = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"]
        arguments = ["sh", "-c", INSTALL, "sh", str(base), str(work), " ".join(packages), " ".join(STOPPED)]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        if await call_logged(*alone, *arguments, log=log, env=environment) != 0:
            raise ProviderError(f"cannot prepare image {image}: {last_lines(log.read_text(errors='replace'))}")
        (work / "image").rename(place)
        await images.remove_tree(work)
