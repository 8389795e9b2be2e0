"""SSH between nodes: whom hosts know, whose word they take, and for which users."""

from typing import Any

from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of
from tests.support.role_items import items_of

from shoal.agent.document import Block
from shoal.agent.facts import Cgroup, Facts, FileFact
from shoal.network.tunnel import HOST_KEYS
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster
from shoal.roles.current_conf import read_current_conf
from shoal.roles.documents import membership, removal
from shoal.roles.node_logins import EQUIV, KNOWN_HOSTS, PROGRAM, SSH_CONF, SSHD_CONF, NodeLoginsComponent
from shoal.roles.users import PAM

REEF = """
cluster: reef
controller: {host: c1COMPUTE}
login: {hosts: [door]}
nodesets:
  lab: {hosts: [n1, n2]}
users:
  bob: {}
  alice: {}
"""
ADDRESSES = {"c1": "10.0.0.1", "door": "10.0.0.2", "n1": "10.0.0.11", "n2": "10.0.0.12"}


def facts_of(name: str, **changes: Any) -> Facts:
    files = {HOST_KEYS[0]: FileFact(text=f"ssh-ed25519 AAAA{name} root@{name}\n"), **changes.pop("files", {})}
    return host_facts(name, ADDRESSES[name], files=files, **changes)


def reef(text: str = REEF, without: str = "", compute: bool = False, **changes: dict[str, Any]) -> Cluster:
    text = text.replace("COMPUTE", ", compute: true" if compute else "")
    facts = {name: facts_of(name, **changes.get(name, {})) for name in ADDRESSES if name != without}
    return assemble(spec_of(text), facts, {}, read_current_conf(facts["c1"]))


def text_of(there: dict[str, Any], path: str) -> str | None:
    item = there.get(f"file {path}") or there[f"block {'jobs' if path == PAM else 'members'} in {path}"]
    assert item.content is None or isinstance(item.content, str)
    return item.content


def test_every_host_knows_the_keys_of_all_by_name_and_address() -> None:
    rsa = {"files": {HOST_KEYS[2]: FileFact(text="ssh-rsa BBBB root@n2\n")}}
    for host in ADDRESSES:
        assert text_of(items_of(reef(n2=rsa), host), KNOWN_HOSTS) == (
            "c1,10.0.0.1 ssh-ed25519 AAAAc1\n"
            "door,10.0.0.2 ssh-ed25519 AAAAdoor\n"
            "n1,10.0.0.11 ssh-ed25519 AAAAn1\n"
            "n2,10.0.0.12 ssh-ed25519 AAAAn2\n"
            "n2,10.0.0.12 ssh-rsa BBBB\n"
        )


def test_host_that_does_not_answer_keeps_its_key_and_one_that_left_does_not() -> None:
    block = "# BEGIN shoal members\n{}\n# END shoal members\n"
    own = block.format("n2,10.0.0.99 ssh-ed25519 OLDn2\ngone,10.0.0.7 ssh-ed25519 OLDgone")
    names = block.format("10.0.0.12  n2")
    conf = "# Written by shoal; changes here are lost.\nClusterName=reef\n"
    files = {"/etc/slurm/slurm.conf": conf, "/etc/hosts": names, KNOWN_HOSTS: f"n2 ssh-ed25519 FOREIGN\n{own}"}
    cluster = reef(without="n2", c1={"files": {path: FileFact(text=text) for path, text in files.items()}})
    known = text_of(items_of(cluster, "n1"), KNOWN_HOSTS)
    assert known is not None
    assert "n2,10.0.0.12 ssh-ed25519 OLDn2\n" in known and "gone" not in known and "FOREIGN" not in known


def test_nodes_accept_the_word_of_members_for_users_of_the_file() -> None:
    there = items_of(reef(), "n1")
    assert text_of(there, EQUIV) == "10.0.0.1\nc1\n10.0.0.2\ndoor\n10.0.0.11\nn1\n10.0.0.12\nn2\n"
    assert text_of(there, SSHD_CONF) == (
        "# Written by shoal; changes here are lost.\n"
        "Match User alice,bob\n"
        "    HostbasedAuthentication yes\n"
        "    HostbasedUsesNameFromPacketOnly no\n"
        "    IgnoreRhosts yes\n"
    )
    assert "pam_slurm_adopt.so action_no_jobs=deny" in str(text_of(there, PAM))
    keys = list(there)
    assert (
        keys.index(f"block jobs in {PAM}") < keys.index(f"file {SSHD_CONF}") < keys.index(f"block members in {EQUIV}")
    )


def test_clients_use_it_to_nodes_only() -> None:
    for host in ADDRESSES:
        assert text_of(items_of(reef(), host), SSH_CONF) == (
            "# Written by shoal; changes here are lost.\n"
            "EnableSSHKeysign yes\n"
            "Host n1 10.0.0.11 n2 10.0.0.12\n"
            "    HostbasedAuthentication yes\n"
        )


@cases("host", "c1", "door")
def test_controller_and_login_host_accept_no_such_login(host: str) -> None:
    there = items_of(reef(), host)
    assert text_of(there, EQUIV) == "" and text_of(there, SSHD_CONF) is None and text_of(there, PAM) == ""


def test_controller_that_computes_requires_a_job_for_such_a_login() -> None:
    there = items_of(reef(compute=True), "c1")
    assert "10.0.0.11\n" in str(text_of(there, EQUIV)) and "HostbasedAuthentication yes" in str(
        text_of(there, SSHD_CONF)
    )
    assert text_of(there, PAM) == (
        "session [success=1 default=ignore] pam_succeed_if.so quiet user notingroup shoal-users\n"
        f"session required pam_exec.so quiet stdout {PROGRAM}\n"
        "session required pam_permit.so\n"
    )
    assert "--nodelist c1 " in str(text_of(there, PROGRAM))


def test_logins_stay_off_without_cgroups_and_the_finding_says_so() -> None:
    cluster = reef(n2={"cgroup": Cgroup(2, ())})
    there = items_of(cluster, "n1")
    assert text_of(there, EQUIV) == "" and text_of(there, SSHD_CONF) is None and text_of(there, SSH_CONF) is None
    assert text_of(there, KNOWN_HOSTS)
    assert [str(finding) for finding in NodeLoginsComponent().findings(cluster)] == [
        "users: SSH from node to node needs a key of the user: host-based logins are off, found not all hosts let "
        "Slurm use cgroups, and pam_slurm_adopt needs them"
    ]
    assert NodeLoginsComponent().findings(reef()) == ()


def test_logins_stay_off_without_users() -> None:
    there = items_of(reef(REEF.partition("users:")[0]), "n1")
    assert text_of(there, EQUIV) == "" and text_of(there, SSH_CONF) is None and text_of(there, KNOWN_HOSTS)


def test_membership_brings_new_keys_and_removal_leaves_lines_of_others() -> None:
    cluster = reef()
    keys = [item.key for item in membership(cluster, cluster.members[0])]
    assert f"block members in {KNOWN_HOSTS}" in keys and f"block members in {EQUIV}" in keys
    gone = {item.key: item for item in removal()}
    assert gone[f"block members in {KNOWN_HOSTS}"] == Block(KNOWN_HOSTS, "members", "")
    assert gone[f"block members in {EQUIV}"] == Block(EQUIV, "members", "")
