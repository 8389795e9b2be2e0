"""New SSH keys, as `ssh-keygen` makes them."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ShoalError


@dataclass(frozen=True)
class KeyPair:
    """Both halves of a key, in OpenSSH's formats."""

    public: str
    """`ssh-ed25519 AAAA... comment`, without a line break."""
    private: str = field(repr=False)


def make_key_pair(comment: str = "") -> KeyPair:
    """Raises ShoalError where there is no `ssh-keygen`."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "key")
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ShoalError(
                f"cannot make an SSH key with ssh-keygen: {error}", hint="install openssh-client"
            ) from error
        return KeyPair(Path(f"{path}.pub").read_text().strip(), path.read_text())
