"""The documents of users: the same on all hosts, locked when a user leaves, login where a job of theirs runs."""

from dataclasses import replace
from typing import Any

from tests.support.fake_world import host_facts, spec_of
from tests.support.role_items import items_of

from shoal.agent.document import File, Group
from shoal.agent.facts import Cgroup, FileFact, UnixIds
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster
from shoal.roles.node_logins import session_rules
from shoal.roles.users import PAM, RECORD, SSHD_CONF, USERS_GROUP, UsersComponent, group_ids, home_of, pam_block
from shoal.storage import sshfs

REEF = """
cluster: reef
controller: {host: c1}
login: {hosts: [door]}
nodesets:
  lab: {hosts: [n1]}
users:
  alice: {uid: 2001, groups: [team, video], keys: [ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGrm alice@desk]}
  bob: {uid: 2002, gid: 2100, docker: true}
"""
ADDRESSES = {"c1": "10.0.0.1", "door": "10.0.0.2", "n1": "10.0.0.11"}
CGROUPS = {"cgroup": Cgroup(2, ("cpuset", "memory", "devices"))}


def reef(text: str = REEF, **changes: dict[str, Any]) -> Cluster:
    facts = {name: host_facts(name, at, **changes.get(name, {})) for name, at in ADDRESSES.items()}
    return assemble(spec_of(text), facts, {})


def items(cluster: Cluster, name: str) -> dict[str, Any]:
    return items_of(cluster, name, UsersComponent())


def user(cluster: Cluster, host: str, name: str) -> Any:
    return items(cluster, host)[f"user {name}"]


def test_names_ids_and_groups_are_equal_on_all_hosts() -> None:
    cluster = reef()
    for host in ADDRESSES:
        there = items(cluster, host)
        assert there["group alice"] == Group("alice", 2001) and there["group bob"] == Group("bob", 2100)
        assert there[f"group {USERS_GROUP}"] == Group(USERS_GROUP, 3000) and there["group team"] == Group("team", 3001)
        alice = user(cluster, host, "alice")
        assert (alice.uid, alice.group, alice.home, alice.system) == (2001, "alice", "/home/alice", False)
        assert alice.groups == (USERS_GROUP, "team", "video") or alice.groups == (USERS_GROUP, "team")


def test_system_group_keeps_its_id_and_is_joined_where_present() -> None:
    cluster = reef(n1={"groups": {"video": UnixIds(44)}})
    assert group_ids(cluster)["video"] is None and "group video" not in items(cluster, "n1")
    assert user(cluster, "n1", "alice").groups == (USERS_GROUP, "team", "video")
    assert user(cluster, "c1", "alice").groups == (USERS_GROUP, "team")


def test_existing_group_keeps_its_id_and_a_new_group_gets_a_free_id() -> None:
    groups = {"team": UnixIds(3500), "other": UnixIds(3000), "more": UnixIds(3001)}
    assert group_ids(reef(c1={"groups": groups})) == {USERS_GROUP: 3002, "team": 3500, "video": 3003}


def test_authorized_keys_are_outside_the_home_share() -> None:
    there = items(reef(), "n1")
    keys = there[f"file {sshfs.KEYS}/alice"]
    assert keys.owner == "root" and keys.content == "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGrm alice@desk\n"
    conf = there[f"file {SSHD_CONF}"]
    assert conf.content.splitlines()[1:] == [
        "Match User alice,bob",
        f"    AuthorizedKeysFile {sshfs.KEYS}/%u .ssh/authorized_keys",
    ]
    assert conf.accepted_by[-1].endswith("exec /usr/sbin/sshd -t -f /dev/stdin")


def test_only_a_node_with_cgroups_restricts_logins_to_jobs() -> None:
    for host, guarded in {"c1": False, "door": False, "n1": True}.items():
        block = items(reef(n1=CGROUPS), host)[f"block jobs in {PAM}"]
        assert ("pam_slurm_adopt" in block.content) is guarded
    cluster = reef(n1=CGROUPS)
    assert UsersComponent().packages(cluster.spec, cluster.members[2], cluster.facts["n1"]) == ("libpam-slurm-adopt",)
    assert UsersComponent().packages(cluster.spec, cluster.members[0], cluster.facts["c1"]) == ()
    assert not any("log in" in finding.what for finding in UsersComponent().findings(cluster))


def test_only_users_of_the_file_need_a_job_to_log_in() -> None:
    assert pam_block() == (
        "account [success=1 default=ignore] pam_succeed_if.so quiet user notingroup shoal-users\n"
        "account required pam_slurm_adopt.so action_no_jobs=deny\n"
        "account required pam_permit.so\n"
    )


def test_node_that_serves_the_homes_is_open_for_logins_and_owns_the_homes() -> None:
    nfs = {"filesystems": ("nfs4", "nfsd")}
    cluster = reef(REEF + "storage: {/home: {host: n1}}\n", n1={**CGROUPS, **nfs}, c1=nfs)
    assert items(cluster, "n1")[f"block jobs in {PAM}"].content == session_rules(USERS_GROUP)
    assert user(cluster, "n1", "alice").owns == ("/home/alice",) and user(cluster, "c1", "alice").owns == ()


def test_open_nodes_without_cgroups_are_reported() -> None:
    cluster = reef(n1={"cgroup": Cgroup()})
    assert items(cluster, "n1")[f"block jobs in {PAM}"].content == ""
    assert [str(finding) for finding in UsersComponent().findings(cluster) if "log in" in finding.what] == [
        "users: every user may log in to every node by SSH, with or without a job there, found not all hosts let Slurm "
        "use cgroups, and pam_slurm_adopt needs them"
    ]


def test_removed_user_is_locked_and_stays_recorded() -> None:
    cluster = reef()
    facts = replace(cluster.facts["n1"], files={RECORD: FileFact(text="# ours\nalice 2001\ncarol 2003\n")})
    there = items(replace(cluster, facts={**cluster.facts, "n1": facts}), "n1")
    carol = there["user carol"]
    assert carol.locked and carol.uid == 2003 and there[f"file {sshfs.KEYS}/carol"] == File(f"{sshfs.KEYS}/carol")
    assert there[f"file {RECORD}"].content.splitlines()[1:] == ["alice 2001", "bob 2002", "carol 2003"]
    # Recorded before any user is made: after a failed run, the next one has the record.
    assert list(there)[:2] == ["directory /etc/shoal", f"file {RECORD}"]


def test_removing_the_last_user_locks_all_recorded_users() -> None:
    none = reef(REEF.partition("users:")[0])
    facts = replace(none.facts["n1"], files={RECORD: FileFact(text="alice 2001\n")})
    there = items(replace(none, facts={**none.facts, "n1": facts}), "n1")
    assert there["user alice"].locked and there[f"file {SSHD_CONF}"].content is None and items(none, "c1") == {}


def test_homes_are_on_the_home_share() -> None:
    assert home_of(spec_of(REEF), "alice") == "/home/alice"
    assert home_of(spec_of(REEF + "storage: {/data: {}, /shared: {homes: true}}\n"), "alice") == "/shared/alice"
