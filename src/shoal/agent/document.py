"""What a host should be: a document of items, as plain frozen data; and the text of systemd units for them.

Roles build these; `remote/agent` on the host reads them as JSON. An item is named by its `key`; `restarts` names the
services to restart when the item changes.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

HEADER = "# Written by shoal; changes here are lost.\n"
"""The first line of every file that Shoal writes."""


@dataclass(frozen=True)
class SecretRef:
    """A secret that is looked up at the last moment. The digest, where known, lets a host compare without seeing it."""

    name: str
    sha256: str | None = None


@dataclass(frozen=True)
class Item:
    """One thing that a host should have. Each kind has a check and a change in `remote/agent`."""

    kind: ClassVar[str]
    """As the agent spells it: `device_rule` of DeviceRule."""

    def __init_subclass__(cls) -> None:
        cls.kind = re.sub(r"(?<=.)(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def key(self) -> str:
        """The item's name in messages: its kind and its first field, `file /etc/slurm/slurm.conf`."""
        return f"{self.kind.replace('_', ' ')} {getattr(self, fields(self)[0].name)}"


@dataclass(frozen=True)
class Packages(Item):
    """Packages that must be installed. Never upgrades one that is there."""

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

    path: str
    content: str | bytes | SecretRef | None = None
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

    path: str
    owner: str = "root"
    group: str = "root"
    mode: int = 0o400
    digits: int = 48


@dataclass(frozen=True)
class Link(Item):
    """A symbolic link. Never takes the place of a file that is there."""

    path: str
    target: str
    restarts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Directory(Item):
    path: str
    owner: str = "root"
    group: str = "root"
    mode: int = 0o755
    writable: bool = False
    """Fail where its file system is full or read-only, before a daemon that writes there is restarted."""


@dataclass(frozen=True)
class Group(Item):
    name: str
    gid: int


@dataclass(frozen=True)
class User(Item):
    """A system user with fixed ids. One that has other ids is corrected when nothing depends on the old ones."""

    name: str
    uid: int
    group: str
    home: str = "/nonexistent"
    shell: str = "/usr/sbin/nologin"
    groups: tuple[str, ...] = ()
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

    name: str
    enabled: bool = True
    running: bool = True
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block(Item):
    """A marked block inside a file that others write to as well. Empty content removes the block."""

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

    name: str
    content: str
    """The rules; empty removes the file `/etc/udev/rules.d/<name>.rules`."""


@dataclass(frozen=True)
class Command(Item):
    """A guarded command: runs when `unless` fails, or, with `on_change`, when an item that names it has changed."""

    name: str
    argv: tuple[str, ...]
    unless: tuple[str, ...] = ()
    on_change: bool = False
    stdin: str | SecretRef = ""
    """What it reads; a secret must have its digest, and is rejected if it arrives with another one."""
    timeout: float = 300.0
    retries: int = 0
    """How often to try again, two seconds apart."""
    restarts: tuple[str, ...] = ()
    fix: str = ""
    """What to do when it fails, where that is known."""


Document = tuple[Item, ...]


def to_wire(
    document: Document, secrets: Mapping[str, bytes] | None = None, large: float = math.inf
) -> list[dict[str, Any]]:
    """The document as JSON-ready data. A secret without a value travels as its digest, enough for a dry run.

    Of a secret that has at least `large` bytes only the name is in it, as `received`.
    """
    return [_item_to_wire(item, secrets or {}, large) for item in document]


def _item_to_wire(item: Item, secrets: Mapping[str, bytes], large: float) -> dict[str, Any]:
    wire: dict[str, Any] = {"kind": item.kind, "key": item.key}
    for spec in fields(item):
        value = getattr(item, spec.name)
        if isinstance(value, SecretRef):
            wire["secret"] = True
            wire["sha256"] = value.sha256
            if len(secrets.get(value.name, b"")) >= large:
                wire["received"] = value.name
            elif value.name in secrets:
                wire["content_b64"] = base64.b64encode(secrets[value.name]).decode()
            continue
        if isinstance(value, bytes):
            wire["content_b64"], value = base64.b64encode(value).decode(), ""
        wire[spec.name] = list(value) if isinstance(value, tuple) else value
    return wire


Settings = Mapping[str, str | int | tuple[str, ...] | None]
"""The settings of one section. A tuple repeats its key; None leaves it out."""


def render_unit(**sections: Settings) -> str:
    """A unit or a drop-in, its sections in the order given."""
    return HEADER + "\n".join(f"[{name}]\n{_render_settings(settings)}" for name, settings in sections.items())


def daemon_unit(description: str, command: str, restart_s: int, unit: Settings, service: Settings | None = None) -> str:
    """The unit of a daemon that always runs: systemd restarts it without a limit."""
    return render_unit(
        Unit={"Description": description, **unit, "StartLimitIntervalSec": 0},
        Service={"ExecStart": command, "Restart": "always", "RestartSec": restart_s, **(service or {})},
        Install={"WantedBy": "multi-user.target"},
    )


def restart_drop_in(unit: Settings | None = None, service: Settings | None = None) -> str:
    """A drop-in after which systemd restarts a service that fails, without a limit."""
    return render_unit(
        Unit={**(unit or {}), "StartLimitIntervalSec": 0},
        Service={**(service or {}), "Restart": "on-failure", "RestartSec": 3},
    )


def _render_settings(settings: Settings) -> str:
    pairs = ((key, value if isinstance(value, tuple) else (value,)) for key, value in settings.items())
    return "".join(f"{key}={value}\n" for key, values in pairs for value in values if value is not None)
