"""One sandbox host: laid out on disk, started, watched, stopped.

Its root is an overlay of three layers: the image (shared, never written), `seed` (what makes this host itself: name,
keys, GPUs) and `upper` (what it writes). The overlay is mounted in a mount namespace of the host's own, so when its
processes end, however they end, no mount is left.
"""

# Files here are small and local: reading one takes less time than a thread would.
# ruff: noqa: ASYNC240
from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from pathlib import Path

import asyncssh

from shoal.errors import ProviderError
from shoal.hosts.api import Target
from shoal.providers.api import Instance
from shoal.providers.sandbox import nvidia_smi
from shoal.providers.sandbox.cgroups import Group, hierarchies, is_v2_only
from shoal.providers.sandbox.images import remove_tree
from shoal.providers.sandbox.layout import HostRecord, Layout
from shoal.providers.sandbox.programs import call, last_lines
from shoal.spec.member import Shape

SECONDS_TO_BOOT = 120.0
GPU_MEMORY_MB = 16384
NULL_DEVICE = os.makedev(1, 3)
DISTINCT_DEVICES = (os.makedev(1, 7), os.makedev(1, 5), os.makedev(1, 8), *(os.makedev(4, n) for n in range(20, 64)))
"""full, zero, random, then terminals: for hosts with cgroups, whose Slurm forbids a job the device numbers of other
jobs' GPUs. Were they all null devices, it would lose its own GPU and /dev/null with them."""

ENTER = """\
set -eu
while read -r group; do echo 0 > "$group/cgroup.procs"; done < "$1"
shift
exec "$@"
"""
"""Enters the host's cgroups before anything else, so that all that follows can be found and ended there."""

LAUNCH = """\
set -eu
home=$1 lower=$2 cgroup2=$3 cpus=$4
shift 4
enter() { while read -r group; do echo 0 > "$group$1/cgroup.procs"; done < "$home/groups2"; }
writable=$home
if [ -e "$home/disk.img" ]; then
    mount -o loop "$home/disk.img" "$home/disk"
    writable=$home/disk
fi
mkdir -p "$writable/upper" "$writable/work"
rm -rf "$writable/work/work/incompat"
mount -t overlay -o "lowerdir=$lower,upperdir=$writable/upper,workdir=$writable/work,volatile" shoal "$home/root"
cd /
enter /launcher
status=133
while [ "$status" = 133 ]; do
    status=0
    if [ "$cgroup2" = yes ]; then
        fresh='umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec "$@"'
        (enter ""; exec unshare --mount --propagation private sh -c "$fresh" sh taskset --cpu-list "$cpus" "$@")
    else
        (enter ""; exec taskset --cpu-list "$cpus" "$@")
    fi || status=$?
done
exit "$status"
"""
"""Runs as the host's parent: mounts its root and starts it, again after each reboot (nspawn's status 133)."""


def group(layout: Layout, name: str) -> Group:
    """The cgroups that hold the host's processes."""
    return Group(layout.namespace(name), hierarchies())


def instance(layout: Layout, host: HostRecord) -> Instance:
    """The host as the rest of Shoal sees it."""
    target = Target(
        name=host.name, address=host.address, port=22, user="root", identity=layout.identity, host_key=host.host_key
    )
    return Instance(name=host.name, state=state(layout, host.name), target=target, site=host.shape.site)


def state(layout: Layout, name: str) -> str:
    """`running`, `starting`, `stopped` or `frozen`."""
    mine = group(layout, name)
    if not mine.alive:
        return "stopped"
    if mine.frozen:
        return "frozen"
    return "running" if is_ready(layout, name) else "starting"


def is_ready(layout: Layout, name: str) -> bool:
    """Whether SSH has answered since the host was last started from outside."""
    return (layout.host_dir(name) / "ready").exists()


def ensure_identity(layout: Layout) -> str:
    """The cluster's key pair, made once; returns the public half."""
    public = layout.identity.with_suffix(".pub")
    if not public.exists():
        key = asyncssh.generate_private_key("ssh-ed25519", comment=f"shoal {layout.cluster}")
        _write(layout.identity, key.export_private_key(), 0o600)
        _write(public, key.export_public_key(), 0o644)
    return public.read_text()


async def lay_out(layout: Layout, host: HostRecord, authorized: str) -> HostRecord:
    """Write the host's seed layer and disk, then its record. Until the record is there, the host does not exist."""
    home = layout.host_dir(host.name)
    await remove_tree(home)
    for name in ("seed", "root", "disk"):
        (home / name).mkdir(parents=True)
    key = asyncssh.generate_private_key("ssh-ed25519", comment=host.name)
    public = key.export_public_key().decode().strip()
    seed = _Seed(home / "seed", Path(host.image))
    seed.write("etc/ssh/ssh_host_ed25519_key", key.export_private_key(), 0o600)
    seed.write("etc/ssh/ssh_host_ed25519_key.pub", f"{public}\n".encode())
    seed.write("etc/ssh/authorized_keys", authorized.encode())
    seed.write("etc/hostname", f"{host.name}\n".encode())
    seed.write("etc/hosts", f"127.0.0.1 localhost\n::1 localhost\n{host.address} {host.name}\n".encode())
    seed.write("etc/machine-id", f"{hashlib.md5(f'{layout.id}/{host.name}'.encode()).hexdigest()}\n".encode(), 0o444)
    if host.shape.memory_mb:
        seed.write("etc/shoal-sandbox.d/meminfo", render_meminfo(host.shape.memory_mb).encode())
    if host.shape.cgroups:
        seed.write("etc/shoal-sandbox.d/cgroups", b"yes\n")
    if host.shape.gpus:
        seed.write("etc/shoal-gpus", render_gpus(layout, host).encode())
        seed.write("usr/bin/nvidia-smi", Path(nvidia_smi.__file__).read_bytes(), 0o755)
    _make_gpu_devices(home / "devices", host.shape)
    if host.shape.disk_mb:
        await _make_disk(home / "disk.img", host.shape.disk_mb)
    made = HostRecord(host.name, host.index, host.address, host.image, public, host.shape)
    layout.save_host(made)
    return made


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


def cpus_of(host: HostRecord) -> list[int]:
    """The machine's CPUs that the host may use: as many as its shape says, spread over the hosts."""
    there = sorted(os.sched_getaffinity(0))
    count = min(host.shape.cpus or len(there), len(there))
    return sorted(there[(host.index * count + step) % len(there)] for step in range(count))


async def start(layout: Layout, host: HostRecord) -> None:
    """Start the host and return at once. It lives on when this process ends."""
    home = layout.host_dir(host.name)
    (home / "ready").unlink(missing_ok=True)
    _write_resolver(home / "seed")
    mine = group(layout, host.name)
    mine.make(cpus_of(host), host.shape.memory_mb)
    # In cgroup v2 a group with groups below it holds no process: nspawn makes two below, the launcher gets a third.
    unified = [path for path in mine.paths if path == mine.roots.get("unified", Path()) / mine.name]
    for path in unified:
        (path / "launcher").mkdir(exist_ok=True)
    _write(home / "groups", "".join(f"{path}\n" for path in mine.paths).encode(), 0o644)
    _write(home / "groups2", "".join(f"{path}\n" for path in unified).encode(), 0o644)
    _write(home / "launch", LAUNCH.encode(), 0o644)
    fresh = host.shape.image != "debian12" and not is_v2_only(mine.roots)
    arguments = [
        "sh", "-c", ENTER, "sh", str(home / "groups"),
        "setsid", "--fork", "unshare", "--mount", "--propagation", "private",
        "sh", str(home / "launch"), str(home), f"{home / 'seed'}:{host.image}", "yes" if fresh else "no",
        ",".join(str(cpu) for cpu in cpus_of(host)), *_nspawn(layout, host),
    ]  # fmt: skip
    # "network": the host may change its own network's kernel settings; "1" (all of /sys) is what cgroups take.
    writable = "1" if host.shape.cgroups else "network"
    # Without its own locks: a killed nspawn would leave their files behind. We hold the cluster's lock.
    env = {**os.environ, "SYSTEMD_NSPAWN_API_VFS_WRITABLE": writable, "SYSTEMD_NSPAWN_LOCK": "0"}
    with (home / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=env
        )
        await process.wait()


async def wait_for_ssh(layout: Layout, host: HostRecord) -> None:
    """Return when the host's SSH server greets us. Raises ProviderError when the host ends or never does."""
    log, mine = layout.host_dir(host.name) / "log", group(layout, host.name)
    clock = asyncio.get_running_loop().time
    end = clock() + SECONDS_TO_BOOT
    while clock() < end:
        if await ssh_answers(host.address):
            _write(layout.host_dir(host.name) / "ready", b"", 0o644)
            return
        if not mine.alive:
            said = last_lines(log.read_text(errors="replace"))
            raise ProviderError(f"host {host.name} ended while it booted: {said}", hint=f"its console log is {log}")
        await asyncio.sleep(0.1)
    raise ProviderError(
        f"host {host.name} has booted for {SECONDS_TO_BOOT:.0f} s and SSH does not answer on {host.address}",
        hint=f"its console log is {log}",
    )


async def ssh_answers(address: str) -> bool:
    """Whether an SSH server greets us there."""
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection(address, 22)
            try:
                return (await reader.read(4)) == b"SSH-"
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def stop(layout: Layout, name: str) -> None:
    """End the host's processes at once. It is throw-away: nothing is asked to shut down."""
    mine = group(layout, name)
    while not mine.remove():  # a process of a killed `create` may still be on its way in
        await mine.kill()
    # Where /run is on a disk, systemd-nspawn does not remove this directory itself.
    await remove_tree(Path("/run/systemd/nspawn/propagate", layout.namespace(name)))


def _nspawn(layout: Layout, host: HostRecord) -> list[str]:
    home = layout.host_dir(host.name)
    devices = [path for path in (Path("/dev/net/tun"), Path("/dev/fuse")) if path.exists()]
    binds = [f"--bind={path}" for path in devices]
    binds += [f"--bind={path}:/dev/{path.name}" for path in sorted((home / "devices").iterdir())]
    return [
        "systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--boot", f"--directory={home / 'root'}",
        f"--machine={layout.namespace(host.name)}", f"--hostname={host.name}",
        f"--network-namespace-path=/run/netns/{layout.namespace(host.name)}", "--capability=all",
        "--resolv-conf=off", "--timezone=off", "--link-journal=no", "--console=read-only", *binds,
    ]  # fmt: skip


class _Seed:
    """Writes into a layer above an image. A directory takes the owner and mode it has in the image."""

    def __init__(self, top: Path, image: Path) -> None:
        self.top = top
        self.image = image
        self._like(top, image)

    def write(self, name: str, data: bytes, mode: int = 0o644) -> None:
        path = self.top
        for part in Path(name).parts[:-1]:
            path = path / part
            if not path.exists():
                path.mkdir()
                self._like(path, self.image / path.relative_to(self.top))
        _write(self.top / name, data, mode)

    def _like(self, path: Path, model: Path) -> None:
        if model.exists():
            found = model.stat()
            path.chmod(stat.S_IMODE(found.st_mode))
            os.chown(path, found.st_uid, found.st_gid)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Write a file that never has another mode than this one."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as sink:
        os.fchmod(handle, mode)
        sink.write(data)


def _write_resolver(seed: Path) -> None:
    """Give the host the machine's name servers; a local stub would be the host's own loopback."""
    candidates = (Path("/run/systemd/resolve/resolv.conf"), Path("/etc/resolv.conf"))
    texts = [path.read_text() for path in candidates if path.exists()]
    usable = [text for text in texts if "nameserver" in text and "nameserver 127." not in text]
    _write(seed / "etc/resolv.conf", (usable or texts or [""])[0].encode(), 0o644)


def _make_gpu_devices(where: Path, shape: Shape) -> None:
    where.mkdir()
    devices = {f"nvidia{index}": NULL_DEVICE for index in range(shape.gpus)}
    if shape.cgroups:
        devices |= dict(zip(devices, DISTINCT_DEVICES, strict=False))
    if shape.gpus:
        devices["nvidiactl"] = NULL_DEVICE
    for name, device in devices.items():
        os.mknod(where / name, 0o666 | stat.S_IFCHR, device)
        (where / name).chmod(0o666)


async def _make_disk(path: Path, size_mb: int) -> None:
    with path.open("wb") as sink:
        sink.truncate(size_mb << 20)
    await call("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1", path)
