"""Changes to the user's file that leave everything else in it as it is: comments, blanks, quotes, order.

The text is cut at the places where the parser saw the value. Then the result is loaded, and rejected unless it
names exactly the expected hosts.
"""

from __future__ import annotations

from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from shoal import hostlist
from shoal.errors import SpecError, UsageError
from shoal.remote.agent.file_io import write_atomic
from shoal.spec.hosts import HostSet, parse_host
from shoal.spec.loader import load_text
from shoal.spec.members import members
from shoal.spec.model import Spec


def without_host(text: str, name: str, path: Path) -> str:
    """The text of the file without one host. Raises UsageError, with what to do instead, where that cannot be."""
    spec = load_text(text, str(path))
    place, entry = _set_of(spec, name, path)
    root = YAML(pure=True).compose(text)
    node = _at(root, place)
    changed = (
        _decrement_count(text, node, entry, name, place) if entry.provider else _without(text, node, entry, name, place)
    )
    _check(changed, spec, name, path)
    return changed


def write(path: Path, text: str) -> None:
    """Replace the file in one step, so that no reader sees half of it. Its mode and owner stay."""
    path = path.resolve()  # a link stays a link
    try:
        status = path.stat()
        write_atomic(str(path), text.encode(), status.st_mode & 0o7777, status.st_uid, status.st_gid)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="make it writable, or edit it by hand"
        ) from None


def _set_of(spec: Spec, name: str, path: Path) -> tuple[tuple[str, ...], HostSet]:
    """Which set of hosts holds the host, and its place in the file."""
    for member in members(spec):
        if member.name != name:
            continue
        if member.nodeset == "controller":
            raise UsageError(f"{name} is the controller", hint="a cluster cannot do without; `shoal down` ends it")
        if member.nodeset == "login":
            assert spec.login is not None
            return ("login",), spec.login
        return ("nodesets", member.nodeset), spec.nodesets[member.nodeset]
    names = hostlist.compress(member.name for member in members(spec))
    raise UsageError(f"{path} has no host {name}", hint=f"its hosts are {names}")


def _decrement_count(text: str, node: Node, entry: HostSet, name: str, place: tuple[str, ...]) -> str:
    count = entry.count or 0
    if count == 1:
        raise _only_host_error(name, place)
    last = f"{place[-1]}{count}"
    if name != last:
        raise UsageError(
            f"{name} is not the last host of `{'.'.join(place)}`, which has {count} numbered from 1",
            hint=f"remove {last} first",
        )
    value = _at(node, ("count",))
    return text[: value.start_mark.index] + str(count - 1) + text[value.end_mark.index :]


def _without(text: str, node: Node, entry: HostSet, name: str, place: tuple[str, ...]) -> str:
    hosts = _at(node, ("hosts",))
    assert isinstance(hosts, SequenceNode)
    index = next(index for index, host in enumerate(entry.hosts) if name in host.names)
    other_names = [other for other in entry.hosts[index].names if other != name]
    if other_names:
        return _replace_names(text, hosts.value[index], other_names)
    if len(entry.hosts) == 1:
        raise _only_host_error(name, place)
    return _cut_flow(text, hosts.value, index) if hosts.flow_style else _cut_block(text, hosts.value[index])


def _replace_names(text: str, item: Node, names: list[str]) -> str:
    """Write a hostlist again, with whatever stands around it."""
    node = _at(item, ("name",)) if isinstance(item, MappingNode) else item
    assert isinstance(node, ScalarNode)
    old = str(node.value)
    before = old if isinstance(item, MappingNode) else str(parse_host(old)["name"])
    new = old.replace(before, hostlist.fold(names))
    quote = node.style if node.style in ("'", '"') else ""
    return text[: node.start_mark.index] + quote + new + quote + text[node.end_mark.index :]


def _cut_flow(text: str, items: list[Node], index: int) -> str:
    """`[a, b, c]` without one: with the comma after it, or before it when it is the last."""
    if index + 1 < len(items):
        return text[: items[index].start_mark.index] + text[items[index + 1].start_mark.index :]
    return text[: items[index - 1].end_mark.index] + text[items[index].end_mark.index :]


def _cut_block(text: str, item: Node) -> str:
    """The lines of one `- item`, whole."""
    start = text.rfind("\n", 0, item.start_mark.index) + 1
    end = text.find("\n", _end(item))
    return text[:start] + (text[end + 1 :] if end >= 0 else "")


def _end(node: Node) -> int:
    """Where a value ends. A block's own mark lies further down, behind the comments that follow it."""
    if isinstance(node, MappingNode) and not node.flow_style:
        return _end(node.value[-1][1])
    if isinstance(node, SequenceNode) and not node.flow_style:
        return _end(node.value[-1])
    return int(node.end_mark.index)


def _check(changed: str, spec: Spec, name: str, path: Path) -> None:
    other_members = [member for member in members(spec) if member.name != name]
    try:
        new_members = list(members(load_text(changed, str(path))))
    except SpecError:
        new_members = []
    if new_members != other_members:
        raise UsageError(f"{path} has a layout that Shoal cannot edit", hint=f"take {name} out of it by hand")


def _only_host_error(name: str, place: tuple[str, ...]) -> UsageError:
    path = ".".join(place)
    return UsageError(
        f"{name} is the only host of `{path}`",
        hint=f"delete `{path}` from the file, and from the partitions' nodesets",
    )


def _at(node: Node, place: tuple[str, ...]) -> Node:
    for part in place:
        node = next(value for key, value in node.value if key.value == part)
    return node
