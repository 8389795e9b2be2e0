"""`auth: slurm`: the keys with which Slurm signs, the same on all hosts, in the file that its daemons read."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import Directory, Document, File, Secret, SecretRef, Service
from shoal.agent.facts import Facts
from shoal.roles.cluster import Cluster
from shoal.roles.part import How, Kept, Part
from shoal.roles.stage import Stage
from shoal.slurm.auth import JWKS, Key, jwks
from shoal.slurm.versions import Version
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec

KEY = "/etc/shoal/slurm.key"
NEXT = "/etc/shoal/slurm.key.next"
"""On the controller, and then on all hosts, while the key is being rotated: what it is to become."""
DIGITS = 64
KEY_SECRET, NEXT_SECRET = "slurm-key", "slurm-key-next"
WORD, NEXT_WORD = "@KEY@", "@NEXT@"


class Auth(Part):
    in_containers = True
    services = ("sackd",)
    files: Mapping[str, How] = {KEY: "hash", NEXT: "hash", JWKS: "there"}

    def kept(self, spec: Spec) -> Mapping[str, Kept]:
        if spec.auth != "slurm":
            return {}
        controller = members_of(spec)[0].name
        return {KEY_SECRET: Kept(controller, KEY, DIGITS), NEXT_SECRET: Kept(controller, NEXT, DIGITS)}

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        return ("sackd",) if spec.auth == "slurm" and "login" in member.roles else ()

    def prepare(self, spec: Spec, member: Member, facts: Facts) -> Document:
        """The controller has a key before anything is planned: its name is in the file that all hosts get."""
        known = facts.files.get(KEY)
        if spec.auth != "slurm" or "controller" not in member.roles or (known and known.sha256):
            return ()
        return (Directory("/etc/shoal"), Secret(KEY, digits=DIGITS))

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        there = cluster.facts[member.name].files.get(JWKS)
        if cluster.spec.auth != "slurm":
            return {Stage.BASE: without_keys()} if there and there.there else {}
        stages: dict[Stage, Document] = {Stage.BASE: key_files(_digest(cluster, KEY), _digest(cluster, NEXT))}
        if "login" in member.roles:
            # Where no daemon of Slurm's runs, this one signs for the commands.
            stages[Stage.NODES] = (Service("sackd", command=("/usr/sbin/sackd", "-D")),)
        return stages

    def farewell(self) -> Document:
        return without_keys()


def key_files(digest: str | None, following: str | None = None, *, flipped: bool = False) -> Document:
    """The key, and, while it is being rotated, the one to come; `flipped`: that one signs already."""
    files: Document = (Directory("/etc/shoal"), _secret(KEY, KEY_SECRET, digest))
    keys = [Key(WORD, digest or "new", signs=not flipped)]
    fills = [(WORD, KEY)]
    if following is not None:
        files = (*files, _secret(NEXT, NEXT_SECRET, following))
        keys.append(Key(NEXT_WORD, following, signs=flipped))
        fills.append((NEXT_WORD, NEXT))
    else:
        files = (*files, File(NEXT))
    return (
        *files,
        Directory("/etc/slurm"),
        File(JWKS, jwks(*keys), owner="slurm", group="slurm", mode=0o600, fills=tuple(fills)),
    )


def without_keys() -> Document:
    return (Service("sackd", enabled=False, running=False), File(JWKS), File(NEXT), File(KEY))


def auth_skew(spec: Spec, versions: Mapping[str, Version]) -> tuple[Finding, ...]:
    """Hosts whose Slurm has no auth/slurm with several keys."""
    if spec.auth != "slurm":
        return ()
    return tuple(
        Finding(
            "error",
            what="`auth: slurm` needs Slurm 24.05 or later",
            found=f"Slurm {version}",
            fix="take `auth: slurm` out of the file, or upgrade the host to a distribution with a newer Slurm",
            host=name,
        )
        for name, version in versions.items()
        if not version.knows("auth_slurm")
    )


def _secret(path: str, name: str, digest: str | None) -> File:
    return File(path, SecretRef(name, digest), mode=0o400)


def _digest(cluster: Cluster, path: str) -> str | None:
    fact = cluster.facts.get(cluster.controller.name)
    return fact.files[path].sha256 if fact and path in fact.files else None
