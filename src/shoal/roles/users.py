"""Users: the same names and ids on all hosts, their keys and homes, and who may log in where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shoal.agent.document import HEADER, Block, Command, Directory, Document, File, Group, Item, User
from shoal.agent.facts import Facts
from shoal.jobs.record import USER_JOBS_DIRECTORY
from shoal.roles import node_logins
from shoal.roles.component import PACKAGES_PREFIX, AccountIds, Cluster, Component, FileQuery, Stage
from shoal.roles.current_conf import confinement
from shoal.roles.shares import ServedShare, access_kind, homes_of, reload_sshd, sshd_file
from shoal.roles.user_ids import RECORD, SYSTEM_ID_LIMIT, recorded_users, user_id_conflicts
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec
from shoal.spec.users import ClusterUser
from shoal.storage import sshfs

USERS_GROUP = "shoal-users"
"""The group of all users of the spec. The rules of logins apply to this group only."""
SSHD_CONF = "/etc/ssh/sshd_config.d/10-shoal-users.conf"
PAM, PAM_BLOCK = "/etc/pam.d/sshd", "jobs"
FIRST_GROUP = 3000


class UsersComponent(Component):
    """The users of the spec on every host."""

    in_containers = True
    files: Mapping[str, FileQuery] = {RECORD: "text"}

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        if not spec.users or facts is None or not _restricts_logins(spec, member):
            return ()
        return ("libpam-slurm-adopt",) if confinement((facts,), ()).tracked else ()

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        users = cluster.spec.users
        before = recorded_users(cluster.facts[member.name])
        if not users and not before:
            return {}
        return {
            Stage.BASE: (
                *_record(before, cluster.user_ids),
                *_accounts(cluster, member),
                *_locked_users(before, users),
                *_logins(cluster, member),
            ),
            Stage.SERVICES: (*_homes(cluster, member), *_job_directories(users)),
        }

    def removal(self) -> Document:
        """Users, files and keys stay: a host that leaves the cluster locks nobody out."""
        return (Block(PAM, PAM_BLOCK, ""), File(RECORD))

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        users = cluster.spec.users
        findings = [*user_id_conflicts(cluster.spec, cluster.facts, cluster.user_ids)]
        if users and cluster.conf.nodes and not cluster.conf.confinement.tracked:
            what = "every user may log in to every node by SSH, with or without a job there"
            cause = "not all hosts let Slurm use cgroups, and pam_slurm_adopt needs them"
            findings.append(Finding("info", what, cause, path="users"))
        return tuple(findings)


def home_of(spec: Spec, name: str) -> str:
    share = homes_of(spec)
    return f"{share.where if share else '/home'}/{name}"


def _record(before: Mapping[str, int], ids: Mapping[str, AccountIds]) -> Document:
    """The record of present and former users, written before any user is created, in case the run fails."""
    lines = {**before, **{name: user.uid for name, user in ids.items()}}
    text = "".join(f"{name} {uid}\n" for name, uid in sorted(lines.items()))
    return (Directory("/etc/shoal"), File(RECORD, HEADER + text))


def _accounts(cluster: Cluster, member: Member) -> Iterator[Item]:
    facts, users = cluster.facts[member.name], cluster.spec.users
    if not users:
        return
    numbers = group_ids(cluster)
    for name, number in numbers.items():
        if number is not None:
            yield Group(name, number)
    creates_home = creates_homes(cluster, member)
    for name, user in users.items():
        # A system group keeps its id, and users join it on hosts that have it.
        groups = [group for group in user.groups if numbers[group] is not None or group in facts.groups]
        home = home_of(cluster.spec, name)
        ids = cluster.user_ids[name]
        yield Group(name, ids.gid)
        # `shell` is that of a login.
        yield User(  # noqa: S604  # nosec B604
            name,
            ids.uid,
            group=name,
            home=home,
            shell="/bin/bash",
            groups=(USERS_GROUP, *groups),
            system=False,
            owns=(home,) if creates_home else (),
        )


def group_ids(cluster: Cluster) -> dict[str, int | None]:
    """The ids of the users' groups, the same on all hosts. None for system groups."""
    tables = [cluster.facts[name].groups for name in sorted(cluster.facts, key=lambda n: n != cluster.controller.name)]
    users = cluster.spec.users
    names = [USERS_GROUP, *sorted({group for user in users.values() for group in user.groups})]
    taken = {group.id for table in tables for group in table.values()} | {ids.gid for ids in cluster.user_ids.values()}
    numbers: dict[str, int | None] = {}
    for name in names:
        existing = [table[name].id for table in tables if name in table]
        if any(number < SYSTEM_ID_LIMIT for number in existing):
            numbers[name] = None
            continue
        number = existing[0] if existing else next(n for n in range(FIRST_GROUP, 60000) if n not in taken)
        taken.add(number)
        numbers[name] = number
    return numbers


def _locked_users(before: Mapping[str, int], users: Mapping[str, ClusterUser]) -> Iterator[Item]:
    """Users that the spec no longer names. They are locked; their files stay."""
    for name, uid in before.items():
        if name not in users:
            yield User(name, uid, group=name, system=False, locked=True)
            yield File(f"{sshfs.KEYS}/{name}")


def _logins(cluster: Cluster, member: Member) -> Iterator[Item]:
    users = cluster.spec.users
    yield Directory(sshfs.KEYS)
    for name, user in users.items():
        yield File(f"{sshfs.KEYS}/{name}", "".join(f"{key}\n" for keys in user.keys for key in keys.splitlines()))
    share = homes_of(cluster.spec)
    key_files = [f"{sshfs.KEYS}/%u", ".ssh/authorized_keys"]
    if share is not None and share.server == member.name:
        key_files.insert(1, sshfs.HOME_KEYS)
    match = f"{HEADER}Match User {','.join(sorted(users))}\n    AuthorizedKeysFile {' '.join(key_files)}\n"
    yield Block(PAM, PAM_BLOCK, _pam_rules(cluster, member))
    yield sshd_file(SSHD_CONF, match if users else None)
    yield from node_logins.server_items(cluster, member)
    yield reload_sshd()


def _pam_rules(cluster: Cluster, member: Member) -> str:
    if cluster.spec.users and cluster.conf.confinement.tracked and _restricts_logins(cluster.spec, member):
        return pam_block(cluster.slurm_prefix)
    accepts = node_logins.accepts_node_logins(cluster, member)
    return node_logins.session_rules(USERS_GROUP) if accepts else ""


def pam_block(prefix: str = PACKAGES_PREFIX) -> str:
    """PAM rules: a user of the cluster may log in to a node only where a job of theirs runs, and joins that job."""
    module = "pam_slurm_adopt.so" if prefix == PACKAGES_PREFIX else f"{prefix}/lib/security/pam_slurm_adopt.so"
    return (
        f"account [success=1 default=ignore] pam_succeed_if.so quiet user notingroup {USERS_GROUP}\n"
        f"account required {module} action_no_jobs=deny\n"
        "account required pam_permit.so\n"
    )


def _restricts_logins(spec: Spec, member: Member) -> bool:
    """Whether users may log in only with a job: on hosts that are compute nodes and nothing else."""
    share = homes_of(spec)
    return member.roles == {"compute"} and (share is None or share.server != member.name)


def _homes(cluster: Cluster, member: Member) -> Iterator[Item]:
    """Homes are created once, on the host that has them, and never changed afterwards."""
    if not creates_homes(cluster, member):
        return
    share = homes_of(cluster.spec)
    for name, ids in cluster.user_ids.items():
        home = f"{share.path}/{name}" if share and share.server == member.name else home_of(cluster.spec, name)
        make = (
            'install -d -m 0755 "$(dirname "$1")" && new=$(mktemp -d "$1.XXXXXX") && cp -R /etc/skel/. "$new" && '
            'chown -R "$2" "$new" && chmod 0700 "$new" && mv -T "$new" "$1"'
        )
        owner = f"{ids.uid}:{ids.gid}"
        yield Command(f"make {home}", ("sh", "-c", make, "sh", home, owner), unless=("test", "-d", home))


def _job_directories(users: Iterable[str]) -> Iterator[Item]:
    """For users' jobs without a share. Slurm opens the output of a batch script there before the script starts."""
    for number, name in enumerate(users):
        if number == 0:
            yield Directory(USER_JOBS_DIRECTORY)
        yield Directory(f"{USER_JOBS_DIRECTORY}/{name}", name, name, 0o700)


def creates_homes(cluster: Cluster, member: Member) -> bool:
    share: ServedShare | None = homes_of(cluster.spec)
    return share is None or access_kind(cluster, share, member.name) in ("local", "stage")
