"""The image of a host under podman or docker: the sandbox's packages and settings, built by the engine itself.

Its base is the sandbox's own image where root asks, a system from the machine's package mirror where mmdebstrap is
installed, else one of a registry.
"""

# Files here are small and local: reading one takes less time than a thread would.
# ruff: noqa: ASYNC240
from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from shoal.errors import ProviderError
from shoal.hosts.provider import Progress
from shoal.local_files import locked
from shoal.sandbox import images
from shoal.sandbox.engine import Engine
from shoal.sandbox.programs import call_logged, last_lines

REGISTRY_BASE = "docker.io/library/debian"
CERTIFICATES = Path("/usr/local/share/ca-certificates")
ROOM = "engine-images"
"""In the cache: what is needed while an image is built, and the log."""
ENTRY_PATH = "/usr/local/lib/shoal-entry"
CONTAINERFILE = f"""\
ARG BASE
FROM ${{BASE}}
COPY files/ /
RUN sh /usr/local/lib/shoal-build
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT ["{ENTRY_PATH}"]
"""
ENTRY = """\
#!/bin/sh
# The first process of a host that a container engine runs. `systemd` as argument: fail where systemd cannot run.
# The engine mounts files of its own over these, anew at each start. The host keeps what is below.
resolver=$(cat /etc/resolv.conf)
for name in hosts hostname resolv.conf; do
    umount "/etc/$name" 2> /dev/null
done
printf '%s\\n' "$resolver" > /etc/resolv.conf
if [ -n "${SHOAL_AUTHORIZED_KEY:-}" ]; then
    mkdir -p -m 700 /root/.ssh
    printf '%s\\n' "$SHOAL_AUTHORIZED_KEY" > /root/.ssh/authorized_keys
    chmod 600 /root/.ssh/authorized_keys
fi
unset SHOAL_AUTHORIZED_KEY
ls /etc/ssh/ssh_host_*_key > /dev/null 2>&1 || ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
[ ! -d /shared ] || chmod 1777 /shared
# systemd needs a writable group of its own.
groups=/sys/fs/cgroup
[ ! -d $groups/systemd ] || groups=$groups/systemd
[ -w $groups ] || mount -o remount,bind,rw $groups 2> /dev/null
[ -w $groups ] || mount -o remount,rw $groups 2> /dev/null
if [ "${1:-}" = systemd ] || { mkdir $groups/shoal && rmdir $groups/shoal; } 2> /dev/null; then
    given=/etc/shoal-sandbox.d/cpus
    [ ! -e $given ] || exec taskset --cpu-list "$(cat $given)" /lib/systemd/systemd
    exec /lib/systemd/systemd
fi
# Without systemd: only the SSH server, for a node in reduced mode.
mkdir -p /run/sshd
/usr/sbin/sshd -D -e &
trap 'kill $!; exit 0' TERM INT 37
while kill -0 $! 2> /dev/null; do wait; done
"""
BUILD = """\
set -eu
mkdir -p /etc/shoal-sandbox.d /shared
: > /etc/machine-id
if id shoal > /dev/null 2>&1; then exit 0; fi
export DEBIAN_FRONTEND=noninteractive
if command -v update-ca-certificates; then update-ca-certificates; fi
apt-get -q update
apt-get -qy install --no-install-recommends {packages}
update-ca-certificates
for unit in {masked}; do ln -sf /dev/null "/etc/systemd/system/$unit"; done
{useradd}
systemctl enable ssh.service shoal-sandbox.service
apt-get clean
apt-get -qy install --download-only --no-install-recommends {downloaded}
rm -f /etc/ssh/ssh_host_* /var/lib/dbus/machine-id
: > /etc/machine-id
"""


async def ensure(engine: Engine, cache: Path, image: str, progress: Progress) -> str:
    """The engine's name of the image, built first if it has none. Two processes at once build it once."""
    images.require(image)
    settings = await images.apt_settings()
    name = f"localhost/shoal-sandbox-{image}:{_recipe_hash(image, settings)}"
    if await _exists(engine, name):
        return name
    room = cache / ROOM
    room.mkdir(parents=True, exist_ok=True)
    async with locked(room):
        if not await _exists(engine, name):
            await _build(engine, cache, image, name, settings, progress)
    return name


def render_build(image: str) -> str:
    """The program that makes a base system the image."""
    return BUILD.format(
        packages=" ".join(images.PACKAGES),
        masked=" ".join(images.MASKED),
        useradd=" ".join(images.USERADD),
        downloaded=" ".join(images.PACKAGES_OF_IMAGES.get(image, images.DOWNLOADED_PACKAGES)),
    )


async def _build(engine: Engine, cache: Path, image: str, name: str, settings: str, progress: Progress) -> None:
    room = cache / ROOM
    for left in room.glob(".building-*"):
        await images.remove_tree(left)
    log = room / f"{image}.log"
    log.write_bytes(b"")
    with tempfile.TemporaryDirectory(prefix=".building-", dir=room) as work:
        progress(f"building image {image} for {engine.name}: base system", 0.0)
        base = await _base(engine, cache, Path(work), image, log, progress)
        progress(f"building image {image} for {engine.name}: packages", 0.4)
        _write_context(Path(work), image, settings)
        # `chroot` needs no cgroup of the builder's own, and has this machine's network.
        options = ("--isolation=chroot", "--layers=false") if engine.name == "podman" else ()
        command = ("build", *options, "--build-arg", f"BASE={base}", "--file", f"{work}/Containerfile")
        await _step(engine, log, f"building image {image}", *engine.prefix, *command, "--tag", name, work)
    await _prune(engine, image, name)
    progress(f"building image {image} for {engine.name}", 1.0)


async def _base(engine: Engine, cache: Path, work: Path, image: str, log: Path, progress: Progress) -> str:
    """The name of the base image in the engine, or in a registry."""
    suite, archive, what = images.SUITES[image], work / "base.tar", f"building image {image}"
    if not shutil.which("mmdebstrap"):
        return f"{REGISTRY_BASE}:{suite}"
    if os.geteuid() == 0:
        place = await images.ensure(cache, image, progress)
        await _step(engine, log, what, *("tar", "--xattrs", "--xattrs-include=*", "-C", place, "-cf", archive, "."))
    else:
        options = [f"--dpkgopt={line}" for line in images.DPKG.splitlines()]
        options += [f"--aptopt={line}" for line in images.APT.splitlines()]
        options += ['--aptopt=Acquire::Check-Valid-Until "false"', f"--include={','.join(images.PACKAGES)}"]
        await _step(engine, log, what, "mmdebstrap", *options, "--variant=minbase", suite, archive)
    name = f"localhost/shoal-base-{image}:latest"
    await _step(engine, log, what, *engine.prefix, "import", archive, name)
    archive.unlink()
    return name


def _write_context(work: Path, image: str, settings: str) -> None:
    """What the engine's build reads: the Containerfile, and the files that it copies."""
    (work / "Containerfile").write_text(CONTAINERFILE)
    files = {
        **images.FILES,
        "etc/apt/apt.conf.d/91machine": (settings, 0o644),
        "usr/local/lib/shoal-build": (render_build(image), 0o644),
        ENTRY_PATH.lstrip("/"): (ENTRY, 0o755),
    }
    mask = os.umask(0o022)
    try:
        for name, (text, mode) in files.items():
            path = work / "files" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(mode)
        if CERTIFICATES.is_dir():
            shutil.copytree(CERTIFICATES, work / "files" / str(CERTIFICATES).lstrip("/"))
    finally:
        os.umask(mask)


async def _step(engine: Engine, log: Path, what: str, *argv: str | Path) -> None:
    status = await call_logged(*argv, log=log)
    if status != 0:
        output = last_lines(log.read_text(errors="replace"))
        hint = f"the whole log is {log}; see that this machine reaches its package mirror, then try again"
        raise ProviderError(f"{what} for {engine.name} failed with status {status}: {output}", hint=hint)


async def _exists(engine: Engine, name: str) -> bool:
    try:
        await engine.run("image", "inspect", name)
    except ProviderError:
        return False
    return True


async def names(engine: Engine, image: str = "*") -> list[str]:
    """The engine's names of the builds of an image, or of all images of the sandbox."""
    reference = f"reference=localhost/shoal-sandbox-{image}"
    listed = await engine.run("images", "--filter", reference, "--format", "{{.Repository}}:{{.Tag}}")
    return [line for line in listed.split() if line.startswith("localhost/shoal-sandbox-")]


async def _prune(engine: Engine, image: str, name: str) -> None:
    """Remove older builds of the image. The engine keeps those that a host stands on."""
    older = [other for other in await names(engine, image) if other != name]
    base = f"localhost/shoal-base-{image}:latest"
    with contextlib.suppress(ProviderError):
        await asyncio.gather(*(engine.run("rmi", one, check=False) for one in (*older, base)))


def _recipe_hash(image: str, settings: str) -> str:
    recipe = [os.uname().machine, CONTAINERFILE, ENTRY, render_build(image), images.FILES, images.DPKG, settings]
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
