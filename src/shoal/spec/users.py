"""Users of the cluster in the file: the same on all hosts."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, StrictBool

from shoal.spec.checks import matching, refusal
from shoal.spec.finding import Problem, show
from shoal.spec.local_files import MAX_KEY_BYTES, read_regular_file
from shoal.spec.values import Between, SpecModel, text_schema

_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_NAME_FIX = "use a lower-case letter, then lower-case letters, digits, `_` and `-`"
_KEY_KINDS = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521",
              "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com")  # fmt: skip
RESERVED_NAMES = (
    *("root", "daemon", "bin", "sys", "nobody", "munge", "slurm", "sshd"),
    *("shoal-share", "shoal-copy", "shoal-users", "shoal-homes"),
)
"""Accounts that hosts or Shoal have for themselves."""
ROOT_GROUPS = frozenset(
    (
        *("root", "sudo", "wheel", "admin", "adm", "staff", "operator", "backup"),
        *("disk", "tape", "floppy", "kmem", "mem", "shadow", "input", "tty", "utmp", "crontab"),
        *("docker", "lxd", "incus", "incus-admin", "libvirt", "libvirt-qemu", "podman", "wireshark", "tcpdump"),
        *("daemon", "bin", "sys", "mail", "src", "www-data", "nogroup", "ssh", "_ssh", "sshd", "messagebus", "polkitd"),
        *("munge", "slurm", "mysql", "postgres", "mlflow", "chrony", "_chrony", "ganesha", "tailscale"),
    )
)
"""Groups whose members read or change what is root's, a daemon's or another user's. `video` and `render` are none."""


_RESERVED = ("this account is not a person's", "give the user another name")
_account = matching(_NAME, "not a user name", _NAME_FIX, {*RESERVED_NAMES, *ROOT_GROUPS}, _RESERVED)


def _group(value: object) -> str:
    name = matching(_NAME, "not a group name", _NAME_FIX)(value)
    if name in ("root", "docker", "shoal-users", "shoal-share"):
        fix = "say `docker: true`" if name == "docker" else "delete it here"
        raise refusal("this group is not given by name", fix)
    if name in ROOT_GROUPS or name.startswith(("shoal-", "systemd-")):
        fix = "delete it here, or name a group of your own; who administers a host gets such a group on that host"
        raise refusal("this group gives rights over the host or over other users", fix)
    return name


def _key(value: object) -> str:
    """A public key, or `file:PATH` with some. Options in front of a key are refused: they are Shoal's to set."""
    if not isinstance(value, str):
        raise refusal("not a public key", "write file:PATH, or the key itself: ssh-ed25519 AAAA... alice")
    text = _read(value.removeprefix("file:")) if value.startswith("file:") else value
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not keys:
        raise refusal("no public key in this file", "give the file that ends in .pub")
    for key in keys:
        if "PRIVATE KEY" in key:
            fix = "give the public one, which ends in .pub, and nobody the private one"
            raise refusal("a private key", fix, "(hidden)")
        kind, _, data = key.partition(" ")
        if kind not in _KEY_KINDS or not _is_base64(data.partition(" ")[0]) or not key.isprintable():
            raise refusal("not a public key", "write file:PATH, or the key itself: ssh-ed25519 AAAA... alice")
    return "\n".join(keys)


def _read(path: str) -> str:
    try:
        return read_regular_file(Path(path).expanduser(), MAX_KEY_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        cause = (error.strerror if isinstance(error, OSError) else None) or "not text"
        fix = "give the path of a public key on your machine"
        raise refusal(f"the key file cannot be read: {cause}", fix) from None


def _is_base64(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) > 16
    except (binascii.Error, ValueError):
        return False


UserName = Annotated[str, BeforeValidator(_account), text_schema("name", pattern=f"^{_NAME.pattern}$")]
GroupName = Annotated[str, BeforeValidator(_group), text_schema("group", pattern=f"^{_NAME.pattern}$")]
PublicKey = Annotated[str, BeforeValidator(_key), text_schema("public key or file:PATH")]


class ClusterUser(SpecModel):
    """A person who logs in and has jobs run, with the same ids on all hosts."""

    uid: Annotated[int, Between(1000, 59999)] | None = None
    """The user's number on every host: files on shares belong to it. Without it, one that is free on all hosts."""
    gid: Annotated[int, Between(1000, 59999)] | None = None
    """The number of the user's own group. Without it, the same as `uid`."""
    groups: tuple[GroupName, ...] = ()
    """Further groups. One that no host has yet is made, with the same number everywhere."""
    keys: tuple[PublicKey, ...] = ()
    """SSH keys to log in with: a public key, or `file:PATH` on your machine."""
    docker: StrictBool = False
    """May use Docker in jobs, with `containers: {docker: true}`."""


def user_problems(users: Mapping[str, ClusterUser | None]) -> Iterator[Problem]:
    """Two users have two numbers, and so have their groups."""
    readable = {name: user for name, user in users.items() if user is not None}
    for key in ("uid", "gid"):
        owners: dict[int, str] = {}
        for name, user in readable.items():
            number = user.uid if key == "uid" or user.gid is None else user.gid
            if number is None or ("gid" in user.invalid and key == "gid"):  # Shoal chooses a free one
                continue
            if number in owners:
                field = key if key == "uid" or user.gid is not None else "uid"
                fix = f"`{owners[number]}` has it"
                yield Problem(("users", name, field), f"two users with one {key}", str(number), fix)
            owners.setdefault(number, name)
    for name, user in readable.items():
        for index, group in enumerate(user.groups):
            if group in users:
                fix = "a user's own group is that user's alone; make one of another name"
                yield Problem(("users", name, "groups", index), "the group of a user", show(group), fix)
