"""Sandbox hosts as containers of podman or docker: made, listed and removed through the engine's command line.

The engine owns their processes, disks and network. The machine reaches each over a port of its loopback that leads to
the host's SSH server, which needs no root and also works where the engine runs in a virtual machine.
"""

# Files here are small and local: reading one takes less time than a thread would.
from __future__ import annotations

import asyncio
import hashlib
import io
import os
import secrets
import socket
import tarfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.errors import ProviderError
from shoal.hosts.api import Target
from shoal.hosts.provider import Instance, Progress, Request
from shoal.local_files import write_atomic
from shoal.sandbox import engine_image, seed
from shoal.sandbox.engine import LABEL, LOOPBACK, Engine, create_arguments, find_engine, network_prefix
from shoal.sandbox.images import remove_tree
from shoal.sandbox.layout import OPEN_SITE, HostRecord, Layout, Site
from shoal.sandbox.lifecycle import BOOT_TIMEOUT_S, cpus_of, each_host, ssh_answers
from shoal.sandbox.network import choose_sites, new_host
from shoal.sandbox.programs import last_lines

FIRST_PORT, PORTS = 23000, 7000
POLL_S = 0.1
ENGINE_FILE = "engine"
"""In the cluster's directory: the name of its engine, written before the engine is asked for anything."""
STATES = {"running": "running", "up": "running", "paused": "frozen"}
"""The engine's word for a container's state -> ours. All others are `stopped`."""


async def instances(layout: Layout, hosts: Sequence[HostRecord]) -> list[Instance]:
    """The hosts as the rest of Shoal sees them, with the states that their engine reports."""
    states: dict[str, str] = {}
    for name in sorted({host.shape.engine for host in hosts}):
        states |= await list_states(find_engine(name), layout)
    return [_instance(layout, host, states) for host in hosts]


async def create(layout: Layout, requests: Sequence[Request], progress: Progress) -> list[Instance]:
    """Make the hosts that are not there yet, start those that are stopped, and wait for SSH on each."""
    engine = find_engine(requests[0].shape.engine)
    built = {}
    for image in sorted({request.shape.image for request in requests}):
        built[image] = await engine_image.ensure(engine, layout.cache, image, progress)
    async with layout.locked():
        write_atomic(layout.dir / ENGINE_FILE, f"{engine.name}\n")
        site = (await choose_sites(layout, (OPEN_SITE,)))[OPEN_SITE]
        network = await _ensure_surroundings(engine, layout, site)
        hosts = _lay_out(layout, site, built, requests, progress)
        await _start(engine, layout, network, hosts, progress)
    return await instances(layout, hosts)


async def delete(layout: Layout, host: HostRecord) -> None:
    """Remove a host. The caller holds the cluster's lock."""
    engine, name = find_engine(host.shape.engine), layout.namespace(host.name)
    if name in await _containers(engine, layout):
        await _remove_containers(engine, [name])
    await remove_tree(layout.host_dir(host.name))


async def destroy(layout: Layout) -> None:
    """Remove whatever the engine has of the cluster, found by label and name. The caller holds the cluster's lock."""
    engine = find_engine(engine_of(layout))
    await _remove_containers(engine, list(await _containers(engine, layout)))
    if networks := await _networks(engine, layout):
        await engine.run("network", "rm", *networks)
    try:
        await remove_tree(layout.shared)
    except ProviderError:  # jobs' files belong to ids that only the engine may use
        image = await _any_image(engine, layout)
        mount = ("--network", "none", "--entrypoint", "find", "--volume", f"{layout.shared}:/shared")
        await engine.run("run", "--rm", *mount, image, "/shared", "-mindepth", "1", "-delete")


async def _any_image(engine: Engine, layout: Layout) -> str:
    """An image that can remove files: a host's, or another of the sandbox once all hosts have been removed."""
    images = [host.image for host in layout.hosts().values()] or await engine_image.names(engine)
    if not images:
        what = f"{layout.shared} has files of jobs, whose ids only {engine.name} may use, and no image is left"
        raise ProviderError(what, hint=f"remove it: sudo rm -rf {layout.shared}")
    return images[0]


def engine_of(layout: Layout) -> str:
    """The engine that may have something of the cluster; empty for a cluster without one."""
    note = layout.dir / ENGINE_FILE
    return note.read_text().strip() if note.exists() else ""


async def list_states(engine: Engine, layout: Layout) -> dict[str, str]:
    """The state of every host of the cluster that the engine has, by the name of the host."""
    found = await _containers(engine, layout)
    return {name.removeprefix(layout.prefix): STATES.get(state, "stopped") for name, state in found.items()}


async def _containers(engine: Engine, layout: Layout) -> dict[str, str]:
    """The containers of the cluster, with the engine's word for their states."""
    label = f"label={LABEL}={layout.id}"
    output = await engine.run("ps", "--all", "--filter", label, "--format", "{{.Names}} {{.State}}")
    return parse_containers(output, layout.prefix)


def parse_containers(output: str, prefix: str) -> dict[str, str]:
    """Names and states in a list of containers, beside which the engine may print warnings."""
    rows = (line.lower().split() for line in output.splitlines() if line.startswith(prefix))
    return {row[0]: "paused" if "(paused)" in row else row[1] for row in rows if len(row) > 1}


async def _remove_containers(engine: Engine, names: list[str]) -> None:
    if names:
        at_once = ("--time", "0") if engine.name == "podman" else ()
        await engine.run("rm", "--force", *at_once, *names)


async def _networks(engine: Engine, layout: Layout) -> list[str]:
    """The engine's networks of the cluster: one, or none."""
    prefix = network_prefix(layout)
    output = await engine.run("network", "ls", "--filter", f"name={prefix}", "--format", "{{.Name}}")
    return [name for name in output.split() if name.startswith(prefix)]


async def _ensure_surroundings(engine: Engine, layout: Layout, site: Site) -> str:
    """The directory that the cluster's hosts have in common, and their network: its name."""
    layout.shared.mkdir(mode=0o1777, exist_ok=True)
    for network in await _networks(engine, layout):
        return network
    network = f"{network_prefix(layout)}-{secrets.token_hex(3)}"
    options = ("--disable-dns",) if engine.name == "podman" else ()
    await engine.run("network", "create", "--label", f"{LABEL}={layout.id}", *options, "--subnet", site.subnet, network)
    return network


def _lay_out(
    layout: Layout, site: Site, built: Mapping[str, str], requests: Sequence[Request], progress: Progress
) -> list[HostRecord]:
    """The record of every host that is asked for; those that have none yet get one, and their seed."""
    authorized = seed.ensure_identity(layout)
    records = layout.hosts()
    for request in requests:
        if request.name in records:
            if request.shape != records[request.name].shape:
                progress(f"host {request.name} keeps the shape it was made with; remove it to change that", 0.0)
            continue
        image = built[request.shape.image]
        host = new_host(request.name, request.shape, Path(image), {OPEN_SITE: site}, records.values())
        host = replace(host, image=image, port=free_port(layout, {one.port for one in records.values()}))
        public, files = seed.identity_files(layout, host, authorized)
        if request.shape.cpus and hasattr(os, "sched_getaffinity"):
            files["etc/shoal-sandbox.d/cpus"] = ",".join(map(str, cpus_of(host))).encode(), 0o644
        layout.host_dir(host.name).mkdir(parents=True, exist_ok=True)
        seed.write_file(layout.host_dir(host.name) / "seed.tar", pack(files), 0o600)
        records[request.name] = replace(host, host_key=public)
        layout.save_host(records[request.name])
    return [records[request.name] for request in requests]


def free_port(layout: Layout, taken: Collection[int]) -> int:
    """A port of the loopback that nothing listens on; a cluster begins its search at a place of its own."""
    start = int(hashlib.sha256(layout.id.encode()).hexdigest(), 16) % PORTS
    for step in range(PORTS):
        port = FIRST_PORT + (start + step) % PORTS
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port not in taken and probe.connect_ex((LOOPBACK, port)) != 0:
                return port
    raise ProviderError(f"no port from {FIRST_PORT} to {FIRST_PORT + PORTS} is free", hint="take other clusters down")


def pack(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    """Files of root's, as an archive for the engine's `cp`."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, (content, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.uname, entry.gname = len(content), mode, "root", "root"
            archive.addfile(entry, io.BytesIO(content))
    return data.getvalue()


async def _start(engine: Engine, layout: Layout, network: str, hosts: Sequence[HostRecord], progress: Progress) -> None:
    """Start what is stopped, a few at a time, and wait for SSH on whatever has not answered yet."""
    places = asyncio.Semaphore(2 * (os.cpu_count() or 1))
    containers = await _containers(engine, layout)
    done = 0

    async def bring_up(host: HostRecord) -> None:
        nonlocal done
        ready = layout.host_dir(host.name) / "ready"
        async with places:
            state = containers.get(layout.namespace(host.name), "")
            if STATES.get(state, "stopped") == "stopped":
                ready.unlink(missing_ok=True)
                await _start_container(engine, layout, network, host, state)
            if not ready.exists():
                await _wait_for_ssh(engine, layout, host)
        done += 1
        progress(f"host {host.name} is up", done / len(hosts))

    def hint(name: str) -> str:
        return f"look at `{engine.name} logs {layout.namespace(name)}`, then run it again"

    await each_host(hosts, bring_up, total=len(hosts), hint=hint)


async def _start_container(engine: Engine, layout: Layout, network: str, host: HostRecord, state: str) -> None:
    """Start the host's container. One that has never run may lack its seed, and is made anew."""
    name = layout.namespace(host.name)
    if state in ("", "created", "configured", "initialized"):
        await engine.run("rm", "--force", name, check=False)  # also what a killed engine left without a record
        await engine.run(*create_arguments(layout, host, network, engine.name))
        await engine.run("cp", "-", f"{name}:/", stdin=(layout.host_dir(host.name) / "seed.tar").read_bytes())
    # Killed at it, podman would keep the host's address for a container that is gone.
    await engine.run("start", name, apart=True)


async def _wait_for_ssh(engine: Engine, layout: Layout, host: HostRecord) -> None:
    name, clock = layout.namespace(host.name), asyncio.get_running_loop().time
    end, next_look = clock() + BOOT_TIMEOUT_S, clock() + 1
    while clock() < end:
        if await ssh_answers(LOOPBACK, port=host.port):
            seed.write_file(layout.host_dir(host.name) / "ready", b"", 0o644)
            return
        if clock() > next_look:
            next_look = clock() + 1
            if (await list_states(engine, layout)).get(host.name, "stopped") == "stopped":
                output = last_lines(await engine.run("logs", "--tail", "15", name, check=False))
                raise ProviderError(f"host {host.name} ended during boot: {output}")
        await asyncio.sleep(POLL_S)
    raise ProviderError(f"SSH does not answer on host {host.name} ({LOOPBACK}:{host.port}) {BOOT_TIMEOUT_S:.0f} s on")


def _instance(layout: Layout, host: HostRecord, states: Mapping[str, str]) -> Instance:
    state = states.get(host.name, "stopped")
    if state == "running" and not (layout.host_dir(host.name) / "ready").exists():
        state = "starting"
    target = Target(
        name=host.name,
        address=LOOPBACK,
        port=host.port,
        user="root",
        identity=layout.identity,
        host_key=host.host_key,
    )
    return Instance(name=host.name, state=state, target=target, shape=host.shape)
