"""Accounting: the texts, the desired accounts in sacctmgr's format, and the commands that create them."""

import json
from typing import Any

import pytest
from tests.goldens import assert_golden
from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of
from tests.support.item_text import folded_text
from tests.unit.roles.test_role_documents import REEF, document_of, reef, roles

from shoal.agent.document import Command, File, Item, Secret
from shoal.agent.facts import FileFact
from shoal.errors import VersionMismatch
from shoal.plan.diff import cluster_goal
from shoal.plan.observe import Observation
from shoal.remote.slurm_accounts import diff_commands, list_names, minutes
from shoal.roles.accounting import SACCTMGR_CONF, AccountingComponent
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Stage
from shoal.roles.documents import documents
from shoal.slurm.accounting import PASSWORD_PLACEHOLDER, accounts_file, buffer_mb

ACCOUNTS = """
accounting:
  accounts:
    sub: {parent: lab, users: {cat: {max_gpus: 1, max_time: 60}, ann: {}}}
    lab: {users: [ann, bob], group_gpus: 4, fairshare: 3, qos: [normal, fast], default_qos: fast, gpu_hours: 100}
  qos:
    fast: {priority: 10, max_time: 1-00:00:00, max_gpus_per_user: 2}
"""
NOTHING: dict[str, Any] = {
    "accounts": {"root": {"parent": "", "settings": {}}},
    "users": {("root", "root"): {}},
    "qos": {"normal": {}},
    "defaults": {"root": "root"},
}


def want(text: str = ACCOUNTS) -> Any:
    accounting = spec_of(REEF + text).accounting
    assert accounting is not None
    return json.loads(accounts_file("reef", accounting))


def items(cluster: Cluster, name: str) -> list[Item]:
    member = next(member for member in cluster.members if member.name == name)
    return [item for document in documents(cluster, member).values() for item in document]


def paths(cluster: Cluster, name: str) -> dict[str, File]:
    return {item.path: item for item in items(cluster, name) if isinstance(item, File)}


# ---- documents


def test_database_host_matches_its_golden() -> None:
    text = folded_text(document_of(reef(REEF + "accounting: true\n"), "c1"), controller=roles()["controller"])
    assert_golden("roles/accounting.txt", text)


def test_accounts_match_their_golden() -> None:
    plain = document_of(reef(REEF + "accounting: true\n"), "c1")
    text = folded_text(document_of(reef(REEF + ACCOUNTS), "c1"), accounting=plain)
    assert_golden("roles/accounting-accounts.txt", text)


def test_database_can_be_on_another_member() -> None:
    cluster = reef(REEF + "accounting: {host: n2}\n")
    assert "/etc/slurm/slurmdbd.conf" in paths(cluster, "n2")
    for name in ("c1", "n1", "door"):
        assert "/etc/slurm/slurmdbd.conf" not in paths(cluster, name)
    assert "AccountingStorageHost=10.0.0.12\n" in str(paths(cluster, "c1")["/etc/slurm/slurm.conf"].content)
    assert "DbdHost=n2\n" in str(paths(cluster, "n2")["/etc/slurm/slurmdbd.conf"].content)


def test_slurmdbd_port_is_open_only_to_members_and_only_on_its_host() -> None:
    cluster = reef(REEF + "accounting: {host: n2}\n")
    assert "tcp dport { 6817, 6818, 60001-63000, 6819 } drop" in str(paths(cluster, "n2")["/etc/shoal/firewall.nft"])
    assert "6819" not in str(paths(cluster, "c1")["/etc/shoal/firewall.nft"].content)


def test_limits_are_enforced_only_with_configured_accounts() -> None:
    plain = str(paths(reef(REEF + "accounting: true\n"), "c1")["/etc/slurm/slurm.conf"].content)
    limited = str(paths(reef(REEF + ACCOUNTS), "c1")["/etc/slurm/slurm.conf"].content)
    assert "AccountingStorageType=accounting_storage/slurmdbd\n" in plain
    assert "AccountingStorageTRES=gres/gpu\n" in plain
    assert "AccountingStorageEnforce" not in plain
    assert "AccountingStorageEnforce=associations,limits,qos\n" in limited


def test_password_is_generated_on_the_host_and_its_files_are_private() -> None:
    cluster = reef(REEF + "accounting: true\n")
    [secret] = [item for item in items(cluster, "c1") if isinstance(item, Secret)]
    assert (secret.owner, secret.mode) == ("root", 0o400)
    filled = [file for file in paths(cluster, "c1").values() if PASSWORD_PLACEHOLDER in str(file.content)]
    assert {(file.path, file.owner, file.mode) for file in filled} == {
        ("/etc/slurm/slurmdbd.conf", "slurm", 0o600),
        ("/etc/shoal/slurmdbd.sql", "root", 0o600),
        ("/etc/shoal/slurmdbd.cnf", "root", 0o600),
    }
    assert all(file.fills == ((PASSWORD_PLACEHOLDER, secret.path),) for file in filled)
    commands = [item for item in items(cluster, "c1") if isinstance(item, Command)]
    assert not any(PASSWORD_PLACEHOLDER in word for item in commands for word in (*item.argv, *item.unless, item.stdin))


def test_host_without_a_database_has_no_items_without_accounting() -> None:
    cluster = reef()
    for member in cluster.members:
        assert Stage.SERVICES not in documents(cluster, member)


def test_removed_database_is_stopped_and_its_records_kept() -> None:
    had = {SACCTMGR_CONF: FileFact(there=True)}
    [document] = [
        document
        for stage, document in documents(reef(c1={"files": had}), reef().controller).items()
        if stage is Stage.SERVICES
    ]
    keys = [item.key for item in document]
    assert keys[0] == "command last backup of the accounting database"
    assert "service slurmdbd" in keys
    assert "file /etc/slurm/slurmdbd.conf" in keys
    assert not any("drop" in " ".join(item.argv).lower() for item in document if isinstance(item, Command))


HAD = {SACCTMGR_CONF: FileFact(there=True)}
MOVES = (
    "n2: accounting moves here from c1 and begins with an empty database: the records of earlier jobs stay there, to "
    "move them: after `shoal up`, as root, copy the newest /var/backups/shoal/slurm_acct_db-*-last.sql.gz, the "
    "last dump on c1, to the same path on n2; then run `shoal restore NAME`, as `shoal restore` lists it"
)


@cases(
    "text, hosts, told",
    ("accounting: {host: n2}\n", ["c1"], [MOVES]),
    ("accounting: {host: n2}\n", ["c1", "n2"], []),  # an earlier run had begun with it
    ("accounting: {host: n2}\n", ["n2"], []),
    ("accounting: {host: n2}\n", [], []),
    ("accounting: true\n", ["c1"], []),
    ("", ["c1"], []),
)
def test_moved_database_that_leaves_its_records_is_reported(text: str, hosts: list[str], told: list[str]) -> None:
    found = reef(REEF + text, **{name: {"files": HAD} for name in hosts})
    assert [str(finding) for finding in AccountingComponent().findings(found)] == told


def test_slurmdbd_older_than_slurmctld_is_rejected() -> None:
    spec = spec_of(REEF + "accounting: {host: n1}\n")
    addresses = {"c1": "10.0.0.1", "door": "10.0.0.2", "n1": "10.0.0.11", "n2": "10.0.0.12"}
    new = {"os_version": "13"}
    facts = {name: host_facts(name, at, **({} if name == "n1" else new)) for name, at in addresses.items()}
    with pytest.raises(VersionMismatch) as caught:
        cluster_goal(spec, Observation(facts), addresses)
    assert "n1: slurmdbd older than slurmctld, found Slurm 22.05.8; the controller c1 has 24.11.5" in str(caught.value)
    assert "delete `accounting.host`, so that c1 has the database" in str(caught.value)


@cases("memory, buffer", (512, 256), (1024, 256), (3900, 512), (15900, 2048), (64000, 8192), (2_000_000, 8192))
def test_mariadb_buffer_is_about_an_eighth_of_the_memory(memory: int, buffer: int) -> None:
    assert buffer_mb(memory) == buffer


def test_accounting_is_part_of_the_cluster_configuration() -> None:
    spec = spec_of(REEF + "accounting: true\n")
    facts = {name: host_facts(name, at) for name, at in {"c1": "10.0.0.1", "n1": "10.0.0.11"}.items()}
    assert assemble(spec, facts, {}).conf.accounting is not None


# ---- accounts


def test_accounts_are_created_top_down_before_their_users() -> None:
    commands = [
        " ".join(command) for command in diff_commands(want(), {"qos": [], "accounts": [], "users": []}, NOTHING)
    ]
    assert commands == [
        "add qos fast",
        "modify qos fast set Priority=10 MaxTRESPerUser=gres/gpu=2 MaxWall=1440",
        "add account lab cluster=reef parent=root description=lab organization=reef",
        "modify account lab cluster=reef set Fairshare=3 QOS=fast,normal DefaultQOS=fast GrpTRES=gres/gpu=4 "
        "GrpTRESMins=gres/gpu=6000",
        "add account sub cluster=reef parent=lab description=sub organization=reef",
        "add user cat account=sub cluster=reef",
        "modify user cat where cluster=reef account=sub set MaxWall=60 MaxTRESPerJob=gres/gpu=1",
        "add user ann account=sub cluster=reef",
        "add user ann account=lab cluster=reef",
        "add user bob account=lab cluster=reef",
    ]


def found() -> dict[str, Any]:
    """What sacctmgr shows once all that is so."""
    plain = {"Fairshare": "1"}
    return {
        "qos": {"normal": {}, "fast": {"Priority": "10", "MaxTRESPerUser": "gres/gpu=2", "MaxWall": "1-00:00:00"}},
        "accounts": {
            "root": {"parent": "", "settings": plain},
            "lab": {
                "parent": "root",
                "settings": {
                    **{"Fairshare": "3", "QOS": "fast,normal", "DefaultQOS": "fast"},
                    **{"GrpTRES": "gres/gpu=4", "GrpTRESMins": "gres/gpu=6000"},
                },
            },
            "sub": {"parent": "lab", "settings": plain},
        },
        "users": {
            ("root", "root"): plain,
            ("cat", "sub"): {"Fairshare": "1", "MaxTRESPerJob": "gres/gpu=1", "MaxWall": "01:00:00"},
            ("ann", "sub"): plain,
            ("ann", "lab"): plain,
            ("bob", "lab"): plain,
        },
        "defaults": {"root": "root", "cat": "sub", "ann": "sub", "bob": "lab"},
    }


def test_no_difference_needs_no_command() -> None:
    assert diff_commands(want(), list_names(want()), found()) == []


def test_removed_limit_is_cleared() -> None:
    later = want(ACCOUNTS.replace(", group_gpus: 4", "").replace(", default_qos: fast", "").replace("max_time: 60", ""))
    commands = [" ".join(command) for command in diff_commands(later, list_names(want()), found())]
    assert commands == [
        "modify account lab cluster=reef set DefaultQOS=-1 GrpTRES=gres/gpu=-1",
        "modify user cat where cluster=reef account=sub set MaxWall=-1",
    ]


def test_removed_entries_are_deleted_and_foreign_entries_kept() -> None:
    there = found()
    there["accounts"]["theirs"] = {"parent": "root", "settings": {"Fairshare": "1"}}
    there["users"]["eve", "theirs"] = {"Fairshare": "1"}
    later = want("accounting: {accounts: {lab: {users: [ann]}}}\n")
    commands = [" ".join(command) for command in diff_commands(later, list_names(want()), there)]
    assert "modify user ann where cluster=reef set defaultaccount=lab" in commands
    assert [command for command in commands if command.startswith("delete")] == [
        "delete user ann account=sub cluster=reef",
        "delete user bob account=lab cluster=reef",
        "delete user cat account=sub cluster=reef",
        "delete account sub cluster=reef",
        "delete qos fast",
    ]
    assert not any("theirs" in command or "eve" in command for command in commands)


def test_nested_accounts_are_deleted_first() -> None:
    later = want("accounting: {accounts: {other: {users: [ann]}}}\n")
    commands = [" ".join(command) for command in diff_commands(later, list_names(want()), found())]
    gone = [command for command in commands if command.startswith("delete account")]
    assert gone == ["delete account sub cluster=reef", "delete account lab cluster=reef"]


def test_default_account_of_a_removed_user_is_deleted_last() -> None:
    there = found()
    there["defaults"]["ann"] = "lab"
    later = want("accounting: {accounts: {lab: {users: [bob]}}}\n")
    commands = [" ".join(command) for command in diff_commands(later, list_names(want()), there)]
    assert [command for command in commands if "user ann" in command] == [
        "delete user ann account=sub cluster=reef",
        "delete user ann account=lab cluster=reef",
    ]
    assert commands.index("delete user ann account=lab cluster=reef") < commands.index(
        "delete account sub cluster=reef"
    )


def test_built_in_qos_is_never_deleted() -> None:
    ours = {"qos": ["normal"], "accounts": [], "users": []}
    assert diff_commands(want("accounting: {accounts: {lab: {}}}\n"), ours, found())[-1][:2] != ["delete", "qos"]


@cases("text, value", ("01:30:00", 90), ("1-00:00:00", 1440), ("", None), ("00:00:30", 0.5))
def test_sacctmgr_times_are_parsed(text: str, value: float | None) -> None:
    assert minutes(text) == value
