"""The input of both peers: the texts and ids that Shoal itself would write, so that all three build the same cluster.

Shoal computes these in its timed run; the peers get them before the clock starts.
"""

from __future__ import annotations

import json
from pathlib import Path

from shoal.agent.document import Block, DeviceRule, Document, File, Group, Link, Packages, User
from shoal.plan.model import HostPlan
from shoal.verbs.context import open_context
from shoal.verbs.up import plan

ADDRESS = "shoal-address.conf"
"""The only text that differs between hosts: the daemon waits for the address of its host."""


async def write_inputs(spec: Path, directory: Path) -> Path:
    """Compute Shoal's plan, and write `inputs.json` and a file for each text below `directory`."""
    controller, *nodes = (await plan(open_context(spec))).hosts
    roles = {"controller": _all_items(controller), "compute": _all_items(nodes[0])}
    files = directory / "files"
    files.mkdir()
    for document in roles.values():
        for name, text in _texts(document).items():
            (files / name).write_text(text)
    for host in (controller, *nodes):
        (files / host.name).mkdir()
        (files / host.name / ADDRESS).write_text(_texts(_all_items(host))[ADDRESS])
    inputs = {
        "files": str(files),
        "accounts": _accounts(roles["controller"]),
        "packages": {role: _packages(document) for role, document in roles.items()},
        "links": {role: _links(document) for role, document in roles.items()},
        "members": _block(roles["controller"], "/etc/hosts"),
        "host_keys": _block(roles["controller"], "/etc/ssh/ssh_known_hosts"),
        "controller": controller.name,
        "key": str(directory / "munge.key"),
    }
    path = directory / "inputs.json"
    path.write_text(json.dumps(inputs, indent=1))
    return path


def _all_items(host: HostPlan) -> Document:
    return tuple(item for _, document in host.stages for item in document)


def _texts(document: Document) -> dict[str, str]:
    texts = {}
    for item in document:
        if isinstance(item, File) and isinstance(item.content, str):
            texts[Path(item.path).name] = item.content
        if isinstance(item, DeviceRule) and item.content:
            texts[f"{item.name}.rules"] = item.content
    return texts


def _block(document: Document, path: str) -> str:
    return next(item.content for item in document if isinstance(item, Block) and item.path == path)


def _accounts(document: Document) -> list[dict[str, object]]:
    gids = {item.name: item.gid for item in document if isinstance(item, Group)}
    users = [item for item in document if isinstance(item, User)]
    return [{"name": user.name, "uid": user.uid, "gid": gids[user.group], "home": user.home} for user in users]


def _packages(document: Document) -> list[str]:
    return [name for item in document if isinstance(item, Packages) for name in item.names]


def _links(document: Document) -> list[dict[str, str]]:
    return [{"path": item.path, "target": item.target} for item in document if isinstance(item, Link)]
