"""Users: the same names and numbers on all hosts, keys to log in with, homes made once, and who may log in where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from shoal.agent.document import Block, Command, Directory, Document, File, Group, Item, User
from shoal.agent.facts import Facts
from shoal.roles.confinement import confinement
from shoal.roles.part import How, Part
from shoal.roles.share_server import host_keys
from shoal.roles.shares import Served, homes_of, reload_sshd, sshd_file, text_of, way_of
from shoal.roles.stage import Stage
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec
from shoal.spec.users import ClusterUser
from shoal.storage import sshfs

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

RECORD = "/etc/shoal/users"
"""Whom an earlier run made on a host, so that a later one locks those whom the file no longer names."""
EVERYBODY = "shoal-users"
"""The group of all users of the file. What holds for them holds for nobody else who logs in."""
DOCKER = "docker"
SSHD_CONF = "/etc/ssh/sshd_config.d/10-shoal-users.conf"
PAM, PAM_BLOCK = "/etc/pam.d/sshd", "jobs"
FIRST_GROUP, SYSTEM_IDS = 3000, 1000


class Users(Part):
    """What hosts have to be for the users."""

    in_containers = True
    files: Mapping[str, How] = {RECORD: "text"}

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        if not spec.users or facts is None or not _may_be_guarded(spec, member):
            return ()
        return ("libpam-slurm-adopt",) if confinement((facts,), ()).tracked else ()

    def facts_files(self, spec: Spec) -> Mapping[str, How]:
        return {f"{sshfs.KEYS}/{name}": "text" for name in spec.users if homes_of(spec)}

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        users = cluster.spec.users
        before = _recorded(cluster.facts[member.name])
        if not users and not before:
            return {}
        return {
            Stage.BASE: (
                *_record(before, users),
                *_accounts(cluster, member),
                *_locked(before, users),
                *_logins(cluster, member),
            ),
            Stage.SERVICES: tuple(_homes(cluster, member)),
        }

    def farewell(self) -> Document:
        """The accounts stay, with their files and keys: nobody is locked out of a host because it leaves a cluster."""
        return (Block(PAM, PAM_BLOCK, ""), File(RECORD))

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        users, findings = cluster.spec.users, []
        if users and cluster.conf.nodes and not cluster.conf.proctrack_cgroup:
            what = "every user may log in to every node by SSH, with or without a job there"
            found = "not all hosts let Slurm use cgroups, and pam_slurm_adopt needs them"
            findings.append(Finding("info", what, found, path="users"))
        for name, user in users.items():
            if user.docker and not any(DOCKER in facts.groups for facts in cluster.facts.values()):
                fix = "install Docker on the hosts that are to have it, then run `shoal up`"
                findings.append(Finding("info", "no host has Docker yet", fix=fix, path=f"users.{name}.docker"))
        return tuple(findings)


def home_of(spec: Spec, name: str) -> str:
    share = homes_of(spec)
    return f"{share.where if share else '/home'}/{name}"


def _record(before: Mapping[str, int], users: Mapping[str, ClusterUser]) -> Document:
    """Who is, or was, a user here: noted before anybody is made, so that a run that fails leaves nobody unknown."""
    lines = {**before, **{name: user.uid for name, user in users.items()}}
    text = "".join(f"{name} {uid}\n" for name, uid in sorted(lines.items()))
    return (Directory("/etc/shoal"), File(RECORD, f"# Written by shoal; changes here are lost.\n{text}"))


def _accounts(cluster: Cluster, member: Member) -> Iterator[Item]:
    facts, users = cluster.facts[member.name], cluster.spec.users
    if not users:
        return
    numbers = group_ids(cluster)
    for name, number in numbers.items():
        if number is not None:
            yield Group(name, number)
    local = _makes_homes(cluster, member)
    for name, user in users.items():
        # A group that hosts have for themselves keeps its number, and is joined where it is.
        groups = [group for group in user.groups if numbers[group] is not None or group in facts.groups]
        docker = user.docker and DOCKER in facts.groups
        home = home_of(cluster.spec, name)
        yield Group(name, user.gid or user.uid)
        yield User(  # noqa: S604
            name,
            user.uid,
            group=name,
            home=home,
            shell="/bin/bash",
            groups=(EVERYBODY, *groups, *((DOCKER,) if docker else ())),
            not_in=() if docker else (DOCKER,),
            system=False,
            owns=(home,) if local else (),
        )


def group_ids(cluster: Cluster) -> dict[str, int | None]:
    """The numbers of the groups that users share, the same on all hosts. None for those of the hosts' own."""
    tables = [cluster.facts[name].groups for name in sorted(cluster.facts, key=lambda n: n != cluster.controller.name)]
    users = cluster.spec.users
    names = [EVERYBODY, *sorted({group for user in users.values() for group in user.groups})]
    taken = {group.id for table in tables for group in table.values()} | {u.gid or u.uid for u in users.values()}
    found: dict[str, int | None] = {}
    for name in names:
        there = [table[name].id for table in tables if name in table]
        if any(number < SYSTEM_IDS for number in there):
            found[name] = None
            continue
        number = there[0] if there else next(n for n in range(FIRST_GROUP, 60000) if n not in taken)
        taken.add(number)
        found[name] = number
    return found


def _locked(before: Mapping[str, int], users: Mapping[str, ClusterUser]) -> Iterator[Item]:
    """Users whom the file no longer names. Their accounts and files stay; a key of theirs opens nothing."""
    for name, uid in before.items():
        if name not in users:
            yield User(name, uid, group=name, system=False, locked=True)
            yield File(f"{sshfs.KEYS}/{name}")


def _logins(cluster: Cluster, member: Member) -> Iterator[Item]:
    users = cluster.spec.users
    yield Directory(sshfs.KEYS)
    for name, user in users.items():
        yield File(f"{sshfs.KEYS}/{name}", _keys(cluster, member, name, user))
    match = (
        "# Written by shoal; changes here are lost.\n"
        f"Match User {','.join(sorted(users))}\n"
        f"    AuthorizedKeysFile {sshfs.KEYS}/%u .ssh/authorized_keys\n"
    )
    yield sshd_file(SSHD_CONF, match if users else None)
    yield reload_sshd()
    guarded = users and cluster.conf.proctrack_cgroup and _may_be_guarded(cluster.spec, member)
    yield Block(PAM, PAM_BLOCK, pam_block() if guarded else "")


def _keys(cluster: Cluster, member: Member, name: str, user: ClusterUser) -> str:
    """The user's own keys; and on the host that keeps the homes, those by which other hosts mount this user's."""
    own = "".join(f"{key}\n" for keys in user.keys for key in keys.splitlines())
    share = homes_of(cluster.spec)
    if share is None or share.server != member.name:
        return own
    return own + sshfs.authorized(host_keys(cluster, member.name, f"{sshfs.KEYS}/{name}"))


def pam_block() -> str:
    """Who is a user of the cluster may log in to a node where a job of theirs runs, and is then part of that job."""
    return (
        f"account [success=1 default=ignore] pam_succeed_if.so quiet user notingroup {EVERYBODY}\n"
        "account required pam_slurm_adopt.so action_no_jobs=deny\n"
        "account required pam_permit.so\n"
    )


def _may_be_guarded(spec: Spec, member: Member) -> bool:
    """A host that only computes. Where users submit from, or their homes are fetched from, they must get in."""
    share = homes_of(spec)
    return member.roles == {"compute"} and (share is None or share.server != member.name)


def _homes(cluster: Cluster, member: Member) -> Iterator[Item]:
    """A home is made once, on the host that keeps it; what its user does to it afterwards is the user's own affair."""
    if not _makes_homes(cluster, member):
        return
    share = homes_of(cluster.spec)
    for name, user in cluster.spec.users.items():
        home = f"{share.path}/{name}" if share and share.server == member.name else home_of(cluster.spec, name)
        make = (
            'install -d -m 0755 "$(dirname "$1")" && new=$(mktemp -d "$1.XXXXXX") && cp -R /etc/skel/. "$new" && '
            'chown -R "$2" "$new" && chmod 0700 "$new" && mv -T "$new" "$1"'
        )
        owner = f"{user.uid}:{user.gid or user.uid}"
        yield Command(f"make {home}", ("sh", "-c", make, "sh", home, owner), unless=("test", "-d", home))


def _makes_homes(cluster: Cluster, member: Member) -> bool:
    share: Served | None = homes_of(cluster.spec)
    return share is None or way_of(cluster, share, member.name) in ("local", "stage")


def _recorded(facts: Facts) -> dict[str, int]:
    pairs = (line.split() for line in text_of(facts, RECORD).splitlines() if not line.startswith("#"))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
