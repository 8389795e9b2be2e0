"""What ordinary users' commands need: a description of the cluster where they log in, and a place for their jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from shoal.agent.document import Command, Directory, Document, File
from shoal.contract import VERSION
from shoal.errors import UsageError
from shoal.hostlist import compress, expand
from shoal.jobs.record import USER_JOBS_DIRECTORY
from shoal.network.tunnel import LOOPBACK
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.roles.environments import directory_of
from shoal.roles.rented import rented_containers
from shoal.roles.shares import access_kind, homes_of, shares
from shoal.spec.cluster_record import RECORD_PATH, ClusterRecord, RecordMember, RecordNodeset, RecordShare, parse_record
from shoal.spec.member import Member
from shoal.spec.members import all_members, rented_sets
from shoal.spec.rental import SANDBOX
from shoal.spec.storage import SANDBOX_SHARED
from shoal.storage.sshfs import HOST_KEY, strip_comment

JOBS_NAME = "shoal-jobs"
"""On a share: the directory of root's that has one for each user."""
ENTRY_ROLES = frozenset({"controller", "login"})
"""Where users log in."""


class ClientComponent(Component):
    """Written where users log in. It has no secret in it."""

    files: Mapping[str, FileQuery] = {HOST_KEY: "text", RECORD_PATH: "text"}

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        stages: dict[Stage, Document] = {Stage.SERVICES: tuple(_job_directories(cluster, member))}
        if ENTRY_ROLES & member.roles:
            stages[Stage.NODES] = (Directory("/etc/shoal"), File(RECORD_PATH, cluster_record(cluster).as_json()))
        return {stage: items for stage, items in stages.items() if items}

    def removal(self) -> Document:
        return (File(RECORD_PATH),)


def cluster_record(cluster: Cluster) -> ClusterRecord:
    """What users may know of the cluster."""
    spec = cluster.spec
    entries = [member for member in cluster.members if ENTRY_ROLES & member.roles]
    keys = {member.name: strip_comment(cluster.facts_of(member.name).text(HOST_KEY)) for member in entries}
    share = job_share(cluster)
    return ClusterRecord(
        cluster=spec.cluster,
        version=VERSION,
        controller=cluster.controller.name,
        members=tuple(
            RecordMember(member.name, cluster.addresses.get(member.name, LOOPBACK), tuple(sorted(member.roles)))
            for member in entries
        ),
        host_keys={name: key for name, key in keys.items() if key},
        shares=shared_directories(cluster),
        jobs=f"{share}/{JOBS_NAME}" if share else "" if homes_of(spec) else USER_JOBS_DIRECTORY,
        environments={name: directory_of(spec, entry) for name, entry in spec.environments.items()},
        accounting=spec.accounting is not None,
        tracking=spec.tracking.kind if spec.tracking else "",
        containers=tuple(sorted(rented_containers(spec))),
        nodesets=_nodesets(cluster),
        proxy=spec.proxy.variables if spec.proxy else {},
    )


def _nodesets(cluster: Cluster) -> dict[str, RecordNodeset]:
    """The nodes of each nodeset, with the prices that `usage` needs. What it costs to rent is not in the file.

    A node that is leaving stays in its nodeset until its jobs have ended.
    """
    spec = cluster.spec
    set_of = {member.name: member.nodeset for member in all_members(spec) if "compute" in member.roles}
    former: Mapping[str, RecordNodeset] = {}
    with contextlib.suppress(UsageError):  # before the first `up`
        former = parse_record(cluster.controller_facts.text(RECORD_PATH), RECORD_PATH).nodesets
    former_set_of = {node: name for name, nodeset in former.items() for node in expand(nodeset.nodes)}
    for node in cluster.conf.nodes:
        if node.name in former_set_of:
            set_of.setdefault(node.name, former_set_of[node.name])
    prices = {name: nodeset.price for name, nodeset in former.items()}
    prices |= {name: nodeset.price for name, nodeset in spec.nodesets.items()}
    rented = rented_sets(spec)
    return {
        name: RecordNodeset(
            compress(node for node, nodeset in set_of.items() if nodeset == name), prices.get(name), name in rented
        )
        for name in dict.fromkeys(set_of.values())
    }


def shared_directories(cluster: Cluster) -> dict[str, RecordShare]:
    """The directories that all hosts have in common. Where one host has only a copy, it is none."""
    found = {SANDBOX_SHARED: RecordShare("sandbox")} if _is_sandbox(cluster) else {}
    for share in shares(cluster.spec):
        kinds = {access_kind(cluster, share, name) for name in cluster.facts}
        if "stage" not in kinds:
            # Over SSH every file belongs to one account, but in homes, which each user's own account mounts.
            private = share.homes or "sshfs" not in kinds
            found[share.where] = RecordShare(share.share.kind, not share.share.read_only, private)
    return found


def job_share(cluster: Cluster) -> str:
    """The share for the jobs of users; empty where homes are shared, or no share keeps owners and modes."""
    if homes_of(cluster.spec) is not None:
        return ""
    return next((path for path, share in shared_directories(cluster).items() if share.writable and share.private), "")


def _is_sandbox(cluster: Cluster) -> bool:
    return any(member.provider == SANDBOX for member in cluster.members)


def _job_directories(cluster: Cluster, member: Member) -> Iterator[Command]:
    """A directory for the jobs of each user, made on the host that keeps the share: others are not root there."""
    spec = cluster.spec
    where = job_share(cluster)
    if not where or not spec.users:
        return
    share = spec.storage.get(where)
    if member.name != (share.server(cluster.controller.name) if share else cluster.controller.name):
        return
    place = f"{(share.path if share else None) or where}/{JOBS_NAME}"
    program, done = ("sh", "-c", _MAKE, "sh", place, *spec.users), ("sh", "-c", _IS_MADE, "sh", place, *spec.users)
    yield Command(f"make {place}", program, unless=done, fix=_FIX.format(place))


_FIX = "remove {0} or give it to root, then run `shoal up`"
_MAKE = r"""
set -eu
place=$1
shift
if [ -L "$place" ] || { [ -e "$place" ] && [ "$(stat -c %u "$place")" != 0 ]; }; then
    echo "$place is a link, or does not belong to root" >&2
    exit 1
fi
[ -d "$place" ] || mkdir -m 0700 "$place"
chmod 0755 "$place"
for user; do
    [ -d "$place/$user" ] || mkdir -m 0700 "$place/$user"
    chown -h "$user:$user" "$place/$user"
done
"""
"""Below a share that everybody may write to, somebody may have made the directory first."""
_IS_MADE = r"""
place=$1
shift
[ "$(stat -c '%u %a %F' "$place" 2> /dev/null)" = "0 755 directory" ] || exit 1
for user; do
    [ "$(stat -c '%U:%G %F' "$place/$user" 2> /dev/null)" = "$user:$user directory" ] || exit 1
done
"""
