"""Commands on hosts over `ssh` alone, without Shoal's client."""

import asyncio
import os
import tempfile
from pathlib import Path

from shoal.hosts.api import Result, Target


class SshFailed(OSError):
    """`ssh` could not log in, or lost the connection."""


def _options(target: Target, user: str, known: Path) -> list[str]:
    known.write_text(f"host {target.host_key}\n" if target.host_key else "")
    options = {
        "BatchMode": "yes",
        "GlobalKnownHostsFile": os.devnull,
        "HostKeyAlias": "host",
        "IdentitiesOnly": "yes",
        "IdentityFile": target.identity,
        "LogLevel": "ERROR",
        "Port": target.port or 22,
        "StrictHostKeyChecking": "yes" if target.host_key else "no",
        "User": user or target.user or "root",
        "UserKnownHostsFile": known,
    }
    return [f"-o{name}={value}" for name, value in options.items()]


async def over_ssh(target: Target, command: str, *, user: str = "", timeout: float = 60) -> Result:
    """How a shell command ended on a host. It must show the target's key, where that has one.

    Raises SshFailed with what `ssh` says, and TimeoutError.
    """
    with tempfile.TemporaryDirectory() as directory:
        options = _options(target, user, Path(directory, "known_hosts"))
        process = await asyncio.create_subprocess_exec(
            *("ssh", "-F", "none", *options),
            *("--", str(target.address), command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(timeout):
                out, error = await process.communicate()
        except BaseException:
            process.kill()
            await process.wait()
            raise
    if process.returncode == 255:
        raise SshFailed(error.decode(errors="replace").strip())
    return Result(process.returncode or 0, out, error)
