"""What a host should be: a document of items, as plain frozen data.

Roles build these; `remote/agent` on the host reads them as JSON. An item is named by its `key`; `restarts` names the
services to restart when the item changes.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, fields
from typing import Any, ClassVar


@dataclass(frozen=True)
class SecretRef:
    """A secret that is looked up at the last moment. The digest, where known, lets a host compare without seeing it."""

    name: str
    sha256: str | None = None


@dataclass(frozen=True)
class Item:
    """One thing that a host should have. Each kind has a check and a change in `remote/agent`."""

    kind: ClassVar[str]

    @property
    def key(self) -> str:
        """The item's name in messages: its kind and its first field, `file /etc/slurm/slurm.conf`."""
        return f"{self.kind.replace('_', ' ')} {getattr(self, fields(self)[0].name)}"


@dataclass(frozen=True)
class Packages(Item):
    """Packages that must be installed. Never upgrades one that is there."""

    kind: ClassVar[str] = "packages"
    names: tuple[str, ...]
    restarts: tuple[str, ...] = ()
    fix: str = ""
    """What to do when they cannot be installed, where that is known."""

    @property
    def key(self) -> str:
        return f"packages {' '.join(self.names)}"


@dataclass(frozen=True)
class File(Item):
    """A whole file. Written beside its place and renamed into it, so that a reader sees the old or the new one."""

    kind: ClassVar[str] = "file"
    path: str
    content: str | SecretRef | None = None
    """None: the file must not be there."""
    owner: str = "root"
    group: str = "root"
    mode: int = 0o644
    restarts: tuple[str, ...] = ()
    reloads: tuple[str, ...] = ()
    """Keys of Command items with `on_change=True` to run when this file changes."""
    keep: bool = False
    """Put a file that Shoal did not write aside, as `<path>.before-shoal`, before replacing or removing it."""
    accepted_by: tuple[str, ...] = ()
    """A command that must take the new content, on its standard input, before the content is put in place."""
    advice: tuple[tuple[str, str], ...] = ()
    """Words that a complaint about the content may name, each with what to do then."""
    fills: tuple[tuple[str, str], ...] = ()
    """Words in the content, each with the file on the host whose content takes its place: a password stays there."""


@dataclass(frozen=True)
class Secret(Item):
    """A secret that a host makes for itself, once: a line of random hexadecimal digits that never leaves it."""

    kind: ClassVar[str] = "secret"
    path: str
    owner: str = "root"
    group: str = "root"
    mode: int = 0o400
    digits: int = 48


@dataclass(frozen=True)
class Link(Item):
    """A symbolic link. Never takes the place of a file that is there."""

    kind: ClassVar[str] = "link"
    path: str
    target: str
    restarts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Directory(Item):
    kind: ClassVar[str] = "directory"
    path: str
    owner: str = "root"
    group: str = "root"
    mode: int = 0o755


@dataclass(frozen=True)
class Group(Item):
    kind: ClassVar[str] = "group"
    name: str
    gid: int


@dataclass(frozen=True)
class User(Item):
    """A system user with fixed ids. One that has other ids is corrected when nothing depends on the old ones."""

    kind: ClassVar[str] = "user"
    name: str
    uid: int
    group: str
    home: str = "/nonexistent"
    shell: str = "/usr/sbin/nologin"
    groups: tuple[str, ...] = ()
    not_in: tuple[str, ...] = ()
    """Groups that the user must not be a member of."""
    system: bool = True
    """An account of a program's; else a person's."""
    locked: bool = False
    """Nobody may log in as the user. The account and its files stay."""
    twin_of: str = ""
    """Another user with the same id, earlier in the document."""
    owns: tuple[str, ...] = ()
    """Directories whose files may be handed over to the new ids; a file of the old ids elsewhere stops the change."""
    services: tuple[str, ...] = ()
    """Services that may be stopped while the ids change, and are started again."""


@dataclass(frozen=True)
class Service(Item):
    """A daemon. `command` is what a plain supervisor runs on a host without systemd."""

    kind: ClassVar[str] = "service"
    name: str
    enabled: bool = True
    running: bool = True
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block(Item):
    """A marked block inside a file that others write to as well. Empty content removes the block."""

    kind: ClassVar[str] = "block"
    path: str
    name: str
    content: str
    restarts: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"block {self.name} in {self.path}"


@dataclass(frozen=True)
class Mount(Item):
    """A mount that is there now and after a reboot (a systemd mount unit). `mounted=False` removes it."""

    kind: ClassVar[str] = "mount"
    where: str
    what: str = ""
    fstype: str = ""
    options: str = "defaults"
    mounted: bool = True
    automount: bool = False
    """For a share of another host: mounted on first access, and again when it was lost. What hides files of the
    host's own is refused."""
    if_known: str = ""
    """One more option, where the file system's program has it: releases differ, and refuse what they do not know."""


@dataclass(frozen=True)
class DeviceRule(Item):
    """A udev rule file, loaded and triggered when it changes."""

    kind: ClassVar[str] = "device_rule"
    name: str
    content: str
    """The rules; empty removes the file `/etc/udev/rules.d/<name>.rules`."""


@dataclass(frozen=True)
class Command(Item):
    """A guarded command: runs when `unless` fails, or, with `on_change`, when an item that names it has changed."""

    kind: ClassVar[str] = "command"
    name: str
    argv: tuple[str, ...]
    unless: tuple[str, ...] = ()
    on_change: bool = False
    stdin: str = ""
    timeout: float = 300.0
    retries: int = 0
    """How often to try again, two seconds apart."""
    restarts: tuple[str, ...] = ()
    fix: str = ""
    """What to do when it fails, where that is known."""


Document = tuple[Item, ...]


def to_wire(document: Document, secrets: dict[str, bytes] | None = None) -> list[dict[str, Any]]:
    """The document as JSON-ready data. A secret without a value travels as its digest, enough for a dry run."""
    return [_item_to_wire(item, secrets or {}) for item in document]


def _item_to_wire(item: Item, secrets: dict[str, bytes]) -> dict[str, Any]:
    wire: dict[str, Any] = {"kind": item.kind, "key": item.key}
    for spec in fields(item):
        value = getattr(item, spec.name)
        if isinstance(value, SecretRef):
            wire["secret"] = True
            wire["sha256"] = value.sha256
            if value.name in secrets:
                wire["content_b64"] = base64.b64encode(secrets[value.name]).decode()
            continue
        wire[spec.name] = list(value) if isinstance(value, tuple) else value
    return wire
