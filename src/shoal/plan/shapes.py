"""The shape of a host that a provider makes, in words, and what to do about one that was made in another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from shoal.hostlist import compress
from shoal.spec.finding import Finding
from shoal.spec.member import Member, Shape


def words(shape: Shape) -> str:
    """What a host is made as, in short: `debian12, 2 CPUs, 2 simulated GPUs`."""
    parts = [shape.image]
    if shape.cpus:
        parts.append("1 CPU" if shape.cpus == 1 else f"{shape.cpus} CPUs")
    if shape.memory_mb:
        parts.append(f"{shape.memory_mb} MB")
    if shape.gpus:
        parts.append("1 simulated GPU" if shape.gpus == 1 else f"{shape.gpus} simulated GPUs")
    if shape.site != "a":
        parts.append(f"site {shape.site}")
    return ", ".join(parts)


def shape_findings(members: Iterable[Member], made: Mapping[str, Shape]) -> list[Finding]:
    """Hosts that were made in another shape than the file now says: nothing but making them again changes that."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for member in members:
        before = made.get(member.name, member.shape)
        names = [field.name for field in fields(Shape)]
        differ = [name for name in names if getattr(before, name) != getattr(member.shape, name)]
        if differ:
            old, new = (", ".join(_said(shape, name) for name in differ) for shape in (before, member.shape))
            alike.setdefault((old, new, _remake(member)), []).append(member.name)
    return [
        Finding("warning", f"was made with {old}; the file now says {new}", fix=fix, host=compress(names))
        for (old, new, fix), names in alike.items()
    ]


def _said(shape: Shape, name: str) -> str:
    """One field of a shape."""
    value = getattr(shape, name)
    counted = f"{value} GPU" if value == 1 else f"{value} GPUs"
    return {
        "image": f"image {value}",
        "cpus": f"{value} CPUs" if value else "all CPUs",
        "memory_mb": f"{value} MB of memory" if value else "memory without a limit",
        "disk_mb": f"a disk of {value} MB" if value else "no disk of its own",
        "gpus": counted if value else "no GPU",
        "site": f"site {value}",
        "cgroups": "cgroups" if value else "no cgroups",
        "container": "no init system and one open port" if value else "a whole machine",
    }.get(name, f"{name} {value}")


def _remake(member: Member) -> str:
    if "controller" in member.roles:
        return "`shoal down` and `shoal up` remake it"
    if "compute" in member.roles:
        return "`shoal node remove` it, put it back into the file and run `shoal up` to remake it"
    return "take it out of the file and run `shoal up`, then put it back and run `shoal up` to remake it"
