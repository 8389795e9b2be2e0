"""The host key of a rented machine: made here for the order, installed by the boot script, replaced at the join.

The controller expects the public half from the first connection on, so that no other machine can answer in its place.
The private half is in the order only: it is never stored here. But the provider's API shows it, and so may the
machine's metadata service, to any of its processes. So the machine makes another key at the join, before any job
runs there. The machines of one order share the key until then, as some providers give them one script.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from shoal.hosts.key_pair import make_key_pair

FOLDER = "/etc/ssh"
KEY = "ssh_host_ed25519_key"
MARK = "shoal-host-key"
"""Says whether the key is the boot script's or the machine's own. Some providers run the script at every boot."""
RELOAD = " || ".join(f"systemctl --no-block try-reload-or-restart {name}.service" for name in ("ssh", "sshd"))
"""Makes sshd read its keys again. Its name differs between distributions."""
RELOAD_NOW = RELOAD.replace(" --no-block", "")
"""The same, over when sshd has been told. Not for a boot script, which sshd may have to wait for."""
CONTAINER_RELOAD = '[ ! -e /run/sshd.pid ] || kill -HUP "$(cat /run/sshd.pid)"'


@dataclass(frozen=True)
class MachineKey:
    """A host key for one order."""

    public: str
    """Type and text, as in known_hosts."""
    private: str = field(repr=False)
    """In OpenSSH's format."""

    @classmethod
    def make(cls) -> Self:
        pair = make_key_pair()
        return cls(" ".join(pair.public.split()[:2]), pair.private)


def install_script(key: MachineKey, reload: str, folder: str = FOLDER) -> str:
    """The part of a boot script that installs the key, once."""
    return f"""\
if [ ! -e {folder}/{MARK} ]; then
    mkdir -p {folder}
    ( umask 077; cat > {folder}/{KEY}.new ) <<'end'
{key.private}end
    echo '{key.public}' > {folder}/{KEY}.pub.new
    chmod 0644 {folder}/{KEY}.pub.new
    mv -f {folder}/{KEY}.pub.new {folder}/{KEY}.pub
    mv -f {folder}/{KEY}.new {folder}/{KEY}
    echo boot > {folder}/{MARK}
    {reload} || true
fi
"""


def replace_script(folder: str = FOLDER, reload: str = "") -> str:
    """A shell script that gives a machine a key of its own, once, and prints the public half. Connections stay."""
    reload = reload or f"if [ -d /run/systemd/system ]; then {RELOAD}; else {CONTAINER_RELOAD}; fi"
    return f"""\
set -eu
cd {folder}
if [ "$(cat {MARK})" != own ]; then
    rm -f {KEY}.new {KEY}.new.pub
    ssh-keygen -q -t ed25519 -N '' -C '' -f {KEY}.new
    mv -f {KEY}.new.pub {KEY}.pub
    mv -f {KEY}.new {KEY}
    echo own > {MARK}
    {reload}
fi
cut -d ' ' -f 1,2 {KEY}.pub
"""


def prepare_script(folder: str = FOLDER) -> str:
    """A shell script that makes the key which `activate_script` installs, once, and prints the public half.

    In two steps, so that the expected key can be stored before the machine shows it.
    """
    return f"""\
set -eu
cd {folder}
if [ "$(cat {MARK})" = own ]; then
    cut -d ' ' -f 1,2 {KEY}.pub
    exit
fi
[ -s {KEY}.new.pub ] || {{ rm -f {KEY}.new; ssh-keygen -q -t ed25519 -N '' -C '' -f {KEY}.new; }}
cut -d ' ' -f 1,2 {KEY}.new.pub
"""


def activate_script(folder: str = FOLDER, reload: str = RELOAD_NOW) -> str:
    """A shell script that installs the prepared key, if it is not installed. Connections stay.

    sshd refuses connections for a moment while it reads its keys again, but shows a new key before that: a connection
    with the new key proves that the moment is over only if sshd has been told before.
    """
    return f"""\
set -eu
cd {folder}
[ "$(cat {MARK})" != own ] || exit 0
if [ -e {KEY}.new ]; then mv -f {KEY}.new {KEY}; fi
if [ -e {KEY}.new.pub ]; then mv -f {KEY}.new.pub {KEY}.pub; fi
echo own > {MARK}
{reload}
"""


REPLACE = ("sh", "-c", replace_script())
PREPARE = ("sh", "-c", prepare_script())
ACTIVATE = ("sh", "-c", activate_script())
