"""A real OpenSSH server on a loopback port, with its own keys."""

import contextlib
import getpass
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.hosts.api import Target

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
needs_sshd = pytest.mark.skipif(
    SSHD is None, reason="no sshd on this machine; to run these tests: apt-get install openssh-server"
)


class Sshd:
    """One running server. `target()` leads to it."""

    def __init__(self, folder: Path, *, host_key_type: str = "ssh-ed25519", environment: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self.environment = environment
        self.identity = folder / "identity"
        self._process: subprocess.Popen[bytes] | None = None
        make_key(self.identity)
        (folder / "authorized_keys").write_text((folder / "identity.pub").read_text())
        self.new_host_key(host_key_type)
        self.host_keys = [folder / "host_key"]

    @property
    def host_key(self) -> str:
        return (self.folder / "host_key.pub").read_text().strip()

    def target(self, name: str = "node", **changes: object) -> Target:
        fields: dict[str, object] = {
            "address": "127.0.0.1",
            "port": self.port,
            "user": getpass.getuser(),
            "identity": self.identity,
        }
        return Target(name, **(fields | changes))  # type: ignore[arg-type]

    def new_host_key(self, kind: str = "ssh-ed25519") -> None:
        make_key(self.folder / "host_key", kind)

    def start(self) -> None:
        config = self.folder / "sshd_config"
        config.write_text(
            "".join(f"HostKey {key}\n" for key in self.host_keys)
            + f"Port {self.port}\nListenAddress 127.0.0.1\nPidFile none\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups 200\nPermitRootLogin yes\n"
            # A shell deep enough not to read the user's own start-up files.
            f"SetEnv SHLVL=5 {self.environment}\n"
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        assert SSHD is not None
        self._process = subprocess.Popen([SSHD, "-D", "-f", str(config), "-E", str(self.folder / "log")])
        for _ in range(1200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.05)
        raise AssertionError((self.folder / "log").read_text())

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def running_sshd(folder: Path, *, host_key_type: str = "ssh-ed25519", environment: str = "") -> Iterator[Sshd]:
    server = Sshd(folder, host_key_type=host_key_type, environment=environment)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def make_key(path: Path, kind: str = "ssh-ed25519") -> None:
    path.unlink(missing_ok=True)
    kind = kind.removeprefix("ssh-")
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "", "-f", str(path)], check=True)


def lock_key(path: Path) -> None:
    """Put a passphrase on a private key."""
    path.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(path)], check=True, stdout=subprocess.DEVNULL)


def free_port() -> int:
    """A free port, below those that the kernel gives to outgoing connections of other tests."""
    while True:
        port = random.SystemRandom().randrange(12_000, 16_000)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
