"""New keys for a running cluster. A table of rotations: each changes one key on all hosts, and proves that it did.

What is to become the new key is kept on the controller before anything changes, so that a run which is killed is
finished by the next one, and `shoal up` in between brings all hosts to the one key that the controller has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from shoal.agent.document import Document, File, Service
from shoal.errors import HostError, ShoalError
from shoal.hostlist import compress
from shoal.plan.pause import no_job_starts
from shoal.plan.rotate_slurm import digests, rotate_slurm
from shoal.plan.rotate_wireguard import rotate_wireguard
from shoal.plan.rotation import Rotated, Rotating, Rotation, apply_all, raise_failed
from shoal.plan.tailscale import rotate_tailscale
from shoal.roles.base import MUNGE_KEY, MUNGE_KEY_BYTES, MUNGE_KEY_NEXT, MUNGE_SECRET, MUNGED, munge_file


async def rotate_munge(now: Rotating) -> Rotated:
    """One new munge key for all hosts at once. Daemons keep running: they ask munged for every message."""
    fleet, controller = now.fleet, now.controller
    agent = await fleet.agent(controller)
    known = await digests(now, MUNGE_KEY, MUNGE_KEY_NEXT)
    key, following = known[controller]
    unfinished = following is not None or any(found != key for found, _ in known.values())
    if unfinished and following is None:
        secret = await agent.secret(MUNGE_KEY)  # the controller has the new key, some others have not
    else:
        secret = await agent.secret(MUNGE_KEY_NEXT, make=MUNGE_KEY_BYTES)
    digest = hashlib.sha256(secret).hexdigest()
    document: Document = (munge_file(digest), Service("munge", command=MUNGED))
    async with no_job_starts(await fleet.host(controller)):
        await apply_all(now, dict.fromkeys(now.hosts, document), {MUNGE_SECRET: secret})
        await _verify(now, digest)
    await apply_all(now, {controller: (File(MUNGE_KEY_NEXT),)}, {})
    return Rotated(now.hosts, unfinished)


async def rotate_in_tailnet(now: Rotating) -> Rotated:
    """A new key in the tailnet for every host, by the auth key that the file names."""
    await rotate_tailscale(now.spec, now.fleet, now.controller, now.hosts, now.phase)
    raise_failed(now)
    return Rotated(now.hosts)


async def _verify(now: Rotating, digest: str) -> None:
    """Every host has the key, and every host's munged takes what the controller's made."""
    known = await digests(now, MUNGE_KEY, MUNGE_KEY_NEXT)
    other = [name for name, (found, _) in known.items() if found != digest]
    if other:
        raise ShoalError(f"{compress(other)} still has another munge key", hint="run `shoal keys rotate munge` again")
    credential = (await (await now.fleet.host(now.controller)).run(("munge", "-n"), timeout=30)).stdout

    async def try_it(name: str) -> None:
        host = await now.fleet.host(name)
        result = await host.run(("unmunge", "-o", "/dev/null"), stdin=credential, timeout=30)
        if result.status != 0:
            said = result.error_text.strip() or f"status {result.status}"
            raise HostError(name, f"its munged refuses the controller's message: {said}", hint="run it again")
        now.phase.done(name)

    await now.fleet.each(now.hosts, try_it)
    raise_failed(now)


ROTATIONS: Mapping[str, Rotation] = {
    "munge": Rotation("munge key", lambda spec: True, "", rotate_munge),
    "slurm": Rotation(
        "key of auth/slurm", lambda spec: spec.auth == "slurm", "write `auth: slurm` into the file", rotate_slurm
    ),
    "wireguard": Rotation(
        "WireGuard keys",
        lambda spec: spec.network.kind == "wireguard",
        "it needs `network: wireguard` in the file",
        rotate_wireguard,
    ),
    "tailscale": Rotation(
        "key in a tailnet",
        lambda spec: spec.network.kind == "tailscale" and spec.network.auth_key is not None,
        "it needs `network: {kind: tailscale, auth_key: env:TS_AUTHKEY}` in the file",
        rotate_in_tailnet,
        cuts_off=False,
    ),
}
"""All keys, in the order in which `all` takes them."""
