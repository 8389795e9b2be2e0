"""Slurm listens at one address of each host: which addresses are possible, and how a host resolves its own name."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of
from tests.support.role_items import in_force, items_of, text_of
from tests.support.specs import WITH_LOGIN

from shoal.agent.facts import Address, Facts, FileFact
from shoal.cloud.service.membership import cluster_with_rented_nodes
from shoal.network.addresses import addresses_in, hosts_block, names_program, own_name_rule
from shoal.network.wireguard import PUBLIC_KEY
from shoal.plan.connections import Fleet
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Stage
from shoal.roles.current_conf import HOSTS, HOSTS_BLOCK, read_current_conf
from shoal.roles.documents import documents, membership
from shoal.roles.host_address import CLOUD_INIT, DROP_INS, HOSTS_COPY, NAMES_PROGRAM, NAMES_UNIT, host_name_removal
from shoal.slurm.accounting import sacctmgr_conf, slurmdbd_conf
from shoal.slurm.conf import slurm_settings

TEXT = WITH_LOGIN + "accounting: {host: door}\n"
SPEC = spec_of(TEXT)
FACTS = {
    "c1": host_facts("c1", "10.0.0.1"),
    "door": host_facts("door", "10.0.0.2"),
    "n1": host_facts("n1", "10.0.0.11"),
}
LISTENS = "NoInAddrAny,NoCtldInAddrAny"
DEBIAN = "127.0.0.1 localhost\n127.0.1.1 n1.lab n1\n"


def with_n1(**changes: object) -> dict[str, Facts]:
    return {**FACTS, "n1": replace(FACTS["n1"], **changes)}  # type: ignore[arg-type]


def with_hosts(text: str, **more: FileFact) -> dict[str, Facts]:
    """The facts with this `/etc/hosts` on n1, and more files there."""
    return with_n1(files={**FACTS["n1"].files, HOSTS: FileFact(text=text), **more})


def names(cluster: Cluster, name: str) -> str:
    return str(items_of(cluster, name)[f"block {HOSTS_BLOCK} in {HOSTS}"].content)


def told(facts: dict[str, Facts]) -> list[str]:
    return [str(finding) for finding in assemble(SPEC, facts, {}).findings]


# ---- where daemons listen


def test_slurmdbd_listens_on_the_address_of_its_host() -> None:
    cluster = assemble(SPEC, FACTS, {})
    assert "address show to 10.0.0.2 " in text_of(cluster, "door", DROP_INS["slurmdbd"])
    assert "CommunicationParameters=NoInAddrAny\n" in text_of(cluster, "door", "/etc/slurm/slurmdbd.conf")
    assert "AccountingStorageHost=10.0.0.2\n" in text_of(cluster, "door", "/etc/shoal/accounting.conf")
    for key in ("command register the cluster", "command accounts, users and limits"):
        assert "/dev/tcp/10.0.0.2/6819 " in " ".join(items_of(cluster, "door")[key].unless)


def test_slurmdbd_enables_ipv6_for_an_ipv6_address_and_keeps_defaults_without() -> None:
    assert "CommunicationParameters=NoInAddrAny,EnableIPv6\n" in slurmdbd_conf("n1", address="fd00::1")
    assert "CommunicationParameters" not in slurmdbd_conf("n1")
    assert "AccountingStorageHost=localhost\n" in sacctmgr_conf("reef", "c1")


def test_new_address_changes_the_unit_and_restarts_the_daemon() -> None:
    moved = assemble(SPEC, with_n1(addresses=(Address("eth0", "10.0.0.99", 24),)), {})
    item = items_of(moved, "n1")[f"file {DROP_INS['slurmd']}"]
    assert item.restarts == ("slurmd",) and "address show to 10.0.0.99 " in str(item.content)


@cases(
    "changes, found, fix",
    (
        {"addresses": (Address("docker0", "172.17.0.1", 16),)},
        *("it has no address that others can reach", "connect it to the network of the others"),
    ),
    ({"hostname": "localhost"}, "its host name is localhost", "give it a name: `hostnamectl set-hostname NAME`"),
    ({"hostname": "C1"}, "its host name is c1, which is another member's", "give each host its own name in the file"),
)
def test_host_without_a_usable_name_or_address_makes_slurm_listen_everywhere(
    changes: dict[str, object], found: str, fix: str
) -> None:
    facts = with_n1(**changes)
    cluster = assemble(SPEC, facts, {})
    assert "InAddrAny" not in slurm_settings(cluster.conf) and text_of(cluster, "c1", DROP_INS["slurmctld"]) == ""
    assert text_of(cluster, "door", DROP_INS["slurmdbd"]) == ""
    what = "because of it Slurm listens on all addresses of all hosts, not only on the network's"
    assert told(facts) == [f"n1: {what}, found {found}, {fix}"]


def test_host_behind_nat_makes_slurm_listen_on_all_addresses() -> None:
    behind = with_n1(addresses=())
    cluster = assemble(SPEC, behind, {"n1": "203.0.113.5"})
    assert not cluster.conf.one_address
    [finding] = cluster.findings
    assert (finding.host, finding.found) == ("n1", "others reach it at 203.0.113.5, which is not its own")


def test_host_in_two_subnets_makes_slurm_listen_on_all_addresses() -> None:
    both = (Address("eth0", "10.0.0.2", 24), Address("eth1", "192.168.1.2", 24))
    apart = with_n1(addresses=(Address("eth0", "192.168.1.11", 24),))
    facts = {**apart, "door": replace(FACTS["door"], addresses=both)}
    assert [line.partition("found ")[2] for line in told(facts)] == [
        "it is 10.0.0.2 to the others, and 192.168.1.2 to n1, give all hosts addresses in one subnet"
    ]


def test_single_host_without_a_network_listens_on_loopback() -> None:
    one = spec_of("cluster: reef\ncontroller: {host: {name: c1, address: 127.0.0.1}, compute: true}\n")
    cluster = assemble(one, {"c1": host_facts("c1", "10.0.0.1", addresses=())}, {"c1": "127.0.0.1"})
    assert cluster.conf.one_address and cluster.addresses == {"c1": "127.0.0.1"}


# ---- hosts that do not answer


def test_silent_host_delays_the_change_and_never_reverts_the_change() -> None:
    silent = {name: fact for name, fact in FACTS.items() if name != "n1"}
    whole = assemble(SPEC, FACTS, {})
    old = replace(whole, conf=replace(whole.conf, one_address=False))
    assert not assemble(SPEC, silent, {}, read_current_conf(in_force(old))).conf.one_address, (
        "nobody has mended its own name yet"
    )
    assert assemble(SPEC, silent, {}, read_current_conf(in_force(whole))).conf.one_address


def test_joining_node_keeps_the_listen_setting_of_the_cluster() -> None:
    """The service on the controller sees the controller alone, and chooses its address among fewer."""
    whole = assemble(SPEC, FACTS, {})
    for one_address in (True, False):
        cluster = replace(whole, conf=replace(whole.conf, one_address=one_address))
        seen = {"c1": in_force(cluster)}
        assert cluster_with_rented_nodes(SPEC, Fleet({}, None), seen, ()).conf.one_address is one_address  # type: ignore[arg-type]


# ---- the host's own name


def test_own_name_resolves_to_the_host_address_before_daemons_start() -> None:
    cluster = assemble(SPEC, with_hosts(DEBIAN), {})
    member = cluster.members[2]
    command = items_of(cluster, "n1", None, Stage.BASE)["command own name"]
    assert command.restarts == ("munge", "slurmdbd", "slurmctld", "slurmd")
    assert command in membership(cluster, member)
    assert "command own name" not in items_of(assemble(SPEC, FACTS, {}), "n1")


def test_change_to_wireguard_restarts_slurm_only_after_the_network_is_up() -> None:
    """A LAN in force: its daemons would not start at an address that comes with a later stage."""
    spec, key = spec_of(TEXT + "network: wireguard\n"), FileFact(text="key=\n")
    facts = {
        name: replace(fact, modules=("wireguard",), files={**fact.files, PUBLIC_KEY: key})
        for name, fact in with_hosts(DEBIAN).items()
    }
    cluster = assemble(spec, facts, {})
    assert items_of(cluster, "n1")["command own name"].restarts == ("munge",)
    drop_in = items_of(cluster, "n1")[f"file {DROP_INS['slurmd']}"]
    assert "10.77.0." in str(drop_in.content) and drop_in.restarts == ("slurmd",)


def test_hostname_is_an_alias_only_on_its_own_host() -> None:
    cluster = assemble(SPEC, with_n1(hostname="ip-10-0-0-11.lab"), {})
    assert "10.0.0.11  n1 ip-10-0-0-11.lab\n" in names(cluster, "n1") and "ip-10-0-0-11" not in names(cluster, "c1")
    block = f"# BEGIN shoal members\n{names(cluster, 'n1')}# END shoal members\n"
    assert addresses_in(block, HOSTS_BLOCK) == cluster.addresses


def test_hosts_file_is_restored_only_after_slurm_listens_on_all_addresses() -> None:
    changed = with_hosts("#shoal 127.0.1.1 n1\n")
    changed["door"] = replace(changed["door"], hostname="localhost")
    cluster = assemble(SPEC, changed, {})
    last = [item.key for item in documents(cluster, cluster.members[2])[Stage.NODES]]
    assert {"command own name", f"file {NAMES_UNIT}", "service shoal-names"} <= {*last[last.index("service slurmd") :]}
    assert "command own name" not in items_of(assemble(SPEC, {**FACTS, "door": changed["door"]}, {}), "n1")


# ---- the file itself


HOSTS_FILES = {
    DEBIAN: "127.0.0.1 localhost\n#shoal 127.0.1.1 n1.lab n1\n",
    "127.0.0.1\tlocalhost N1 localhost.localdomain # by hand\n::1 localhost\n": (
        "#shoal 127.0.0.1\tlocalhost N1 localhost.localdomain # by hand\n"
        "127.0.0.1\tlocalhost localhost.localdomain #shoal: the rest of the line above\n"
        "::1 localhost\n"
    ),
    "127.0.0.1 n1 n1.lab localhost\n": (
        "#shoal 127.0.0.1 n1 n1.lab localhost\n127.0.0.1 localhost #shoal: the rest of the line above\n"
    ),
    "10.9.9.9 n1-storage other-n1\n# 10.0.0.5 n1\n10.0.0.5 x # n1\n": (
        "10.9.9.9 n1-storage other-n1\n# 10.0.0.5 n1\n10.0.0.5 x # n1\n"
    ),
    "# BEGIN shoal members\n10.0.0.11  n1 n1.lab\n# END shoal members\n192.168.7.7 n1#odd\n": (
        "# BEGIN shoal members\n10.0.0.11  n1 n1.lab\n# END shoal members\n#shoal 192.168.7.7 n1#odd\n"
    ),
}


@cases("before, after", *HOSTS_FILES.items())
def test_conflicting_hosts_lines_are_commented_out_and_restored(tmp_path: Path, before: str, after: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(before)
    for _ in range(2):  # the second time changes nothing
        subprocess.run(["sed", "-i", "-E", own_name_rule(HOSTS_BLOCK, ("n1", "n1.lab")), hosts], check=True)
        assert hosts.read_text() == after
    back = host_name_removal()[-1]
    subprocess.run([str(hosts) if word == HOSTS else word for word in back.argv], check=True)
    assert hosts.read_text() == before


def test_names_rewritten_by_cloud_init_are_restored_at_boot_before_slurm(tmp_path: Path) -> None:
    cluster = assemble(SPEC, with_hosts(DEBIAN, **{CLOUD_INIT: FileFact(there=True)}), {})
    assert "Before=munge.service slurmdbd.service slurmctld.service slurmd.service\n" in text_of(
        cluster, "n1", NAMES_UNIT
    )
    assert f"ExecStart=/bin/sh {NAMES_PROGRAM}\n" in text_of(cluster, "n1", NAMES_UNIT)
    assert "service shoal-names" in items_of(cluster, "n1") and "service shoal-names" not in items_of(cluster, "c1")

    hosts, kept = tmp_path / "hosts", tmp_path / "kept"
    kept.write_text(text_of(cluster, "n1", HOSTS_COPY))
    program = text_of(cluster, "n1", NAMES_PROGRAM).replace(HOSTS_COPY, str(kept)).replace(f" {HOSTS}", f" {hosts}")
    block = f"# BEGIN shoal members\n{kept.read_text()}# END shoal members\n"
    wanted = f"127.0.0.1 localhost\n#shoal 127.0.1.1 n1.lab n1\n{block}"
    for fresh in (DEBIAN, wanted, f"{wanted}127.0.1.1 n1.lab n1\n"):
        hosts.write_text(fresh)
        subprocess.run(["sh", "-c", program], check=True)
        assert hosts.read_text().startswith(wanted) and "\n127.0.1.1" not in hosts.read_text()


def test_resolver_returns_the_listen_address_for_the_own_name(tmp_path: Path) -> None:
    """As Slurm resolves it: getaddrinfo of the host's own name."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost n1\n127.0.1.1 ip-10-0-0-11\n")
    kept = tmp_path / "kept"
    kept.write_text(hosts_block({"c1": "10.0.0.1", "n1": "10.0.0.11"}, {"n1": "ip-10-0-0-11"}))
    rule = own_name_rule(HOSTS_BLOCK, ("n1", "ip-10-0-0-11"))
    subprocess.run(["sh", "-c", names_program(str(hosts), HOSTS_BLOCK, str(kept), rule)], check=True)
    ask = f"mount --bind {hosts} /etc/hosts && getent ahostsv4 ip-10-0-0-11 && getent ahostsv4 localhost"
    found = subprocess.run(["unshare", "-m", "sh", "-c", ask], capture_output=True, text=True)
    if "Operation not permitted" in found.stderr:
        pytest.skip("no namespaces here")
    assert {line.split()[0] for line in found.stdout.splitlines()} == {"10.0.0.11", "127.0.0.1"}, found
