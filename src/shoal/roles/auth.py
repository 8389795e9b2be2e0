"""`auth: slurm`: the signing keys of Slurm, the same on all hosts."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import Directory, Document, File, Secret, SecretRef, Service
from shoal.agent.facts import Facts
from shoal.roles.component import Cluster, Component, FileQuery, SharedSecret, Stage
from shoal.roles.slurm_tree import daemon
from shoal.slurm.conf import JWKS, SigningKey, jwks
from shoal.slurm.versions import Version
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec

KEY = "/etc/shoal/slurm.key"
NEXT_KEY = "/etc/shoal/slurm.key.next"
"""The next key: on the controller, then on all hosts, during a rotation."""
KEY_DIGITS = 64
KEY_SECRET, NEXT_SECRET = "slurm-key", "slurm-key-next"
KEY_PLACEHOLDER, NEXT_KEY_PLACEHOLDER = "@KEY@", "@NEXT@"


class AuthComponent(Component):
    in_containers = True
    services = ("sackd",)
    files: Mapping[str, FileQuery] = {KEY: "hash", NEXT_KEY: "hash", JWKS: "there"}

    def shared_secrets(self, spec: Spec) -> Mapping[str, SharedSecret]:
        if spec.auth != "slurm":
            return {}
        controller = members_of(spec)[0].name
        return {
            KEY_SECRET: SharedSecret(controller, KEY, KEY_DIGITS),
            NEXT_SECRET: SharedSecret(controller, NEXT_KEY, KEY_DIGITS),
        }

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        return ("sackd",) if spec.auth == "slurm" and "login" in member.roles else ()

    def prepare(self, spec: Spec, member: Member, facts: Facts) -> Document:
        """The controller needs a key before the plan: its name is in the file that all hosts get."""
        if spec.auth != "slurm" or "controller" not in member.roles or facts.digest(KEY):
            return ()
        return (Directory("/etc/shoal"), Secret(KEY, digits=KEY_DIGITS))

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        if cluster.spec.auth != "slurm":
            return {Stage.BASE: self.removal()} if cluster.facts[member.name].has_file(JWKS) else {}
        stages: dict[Stage, Document] = {
            Stage.BASE: key_files(cluster.controller_facts.digest(KEY), cluster.controller_facts.digest(NEXT_KEY))
        }
        if "login" in member.roles:
            # A host without other Slurm daemons needs sackd to sign for commands.
            stages[Stage.NODES] = daemon(cluster, "sackd")
        return stages

    def removal(self) -> Document:
        return (Service("sackd", enabled=False, running=False), File(JWKS), File(NEXT_KEY), File(KEY))


def key_files(digest: str | None, following: str | None = None, *, flipped: bool = False) -> Document:
    """The key, and during a rotation the next one; `flipped`: the next one signs already."""
    keys = [SigningKey(KEY_PLACEHOLDER, digest or "new", signs=not flipped)]
    fills = [(KEY_PLACEHOLDER, KEY)]
    next_file = File(NEXT_KEY)
    if following is not None:
        next_file = File(NEXT_KEY, SecretRef(NEXT_SECRET, following), mode=0o400)
        keys.append(SigningKey(NEXT_KEY_PLACEHOLDER, following, signs=flipped))
        fills.append((NEXT_KEY_PLACEHOLDER, NEXT_KEY))
    return (
        Directory("/etc/shoal"),
        File(KEY, SecretRef(KEY_SECRET, digest), mode=0o400),
        next_file,
        Directory("/etc/slurm"),
        File(JWKS, jwks(*keys), owner="slurm", group="slurm", mode=0o600, fills=tuple(fills)),
    )


def auth_skew(spec: Spec, versions: Mapping[str, Version]) -> tuple[Finding, ...]:
    """Hosts whose Slurm does not support auth/slurm with several keys."""
    if spec.auth != "slurm":
        return ()
    fix = "delete `auth: slurm` from the file, or upgrade the host to a distribution with a newer Slurm"
    return tuple(
        Finding("error", "`auth: slurm` needs Slurm 24.05 or later", f"Slurm {version}", fix, host=name)
        for name, version in versions.items()
        if not version.supports("auth_slurm")
    )
