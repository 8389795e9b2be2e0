"""How a host joins and leaves the tailnet, and which problems are found before a change."""

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of
from tests.unit.network.test_tailscale_status import STATUS

from shoal.agent.document import Command, Document, File, Packages, SecretRef, Service, to_wire
from shoal.agent.facts import Facts, FileFact, Package
from shoal.remote import python_command
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Stage
from shoal.roles.current_conf import HOSTS
from shoal.roles.documents import documents
from shoal.roles.host_address import DROP_INS, address_wait_drop_in
from shoal.roles.registry import component_packages, preparation, user_secrets
from shoal.roles.tailscale import (
    CONTROL_SERVER,
    DROP_IN,
    FLAGS,
    JOINED,
    KEY,
    KEYRING,
    SOURCE,
    TailscaleComponent,
    join,
    original_source,
)
from shoal.slurm.conf import slurm_settings
from shoal.spec.member import Member
from shoal.spec.members import members
from shoal.spec.model import Spec

REEF = """
cluster: reef
network: {kind: tailscale, auth_key: env:TS_AUTHKEY, tags: [slurm]}
controller: {host: c1}
nodesets: {lab: {hosts: [n1]}}
"""
SPEC = spec_of(REEF)
MARK = (
    "# Written by shoal: how this host joined the tailnet.\n"
    "--hostname=reef-c1\n--accept-dns=false\n--advertise-tags=tag:slurm\n"
)


def facts(name: str = "c1", mark: str = "", tailscale: dict[str, Any] | None = None, **more: Any) -> Facts:
    found = host_facts(name, "10.0.0.1", tun=True)
    files = {**found.files, JOINED: FileFact(text=mark or None)}
    return replace(found, files=files, tailscale=STATUS if tailscale is None else tailscale, **more)


def prepared(fact: Facts, spec: Spec = SPEC) -> Document:
    return preparation(spec, members(spec)[0], fact)


def argv_of(document: Document) -> tuple[str, ...]:
    [command] = [item for item in document if isinstance(item, Command)]
    return command.argv


def test_new_host_gets_program_key_and_name_and_the_key_is_removed() -> None:
    document = prepared(facts(tailscale={}))
    assert [item.key for item in document] == [
        "packages tailscale",
        f"file {FLAGS}",
        f"file {DROP_IN}",
        "service tailscaled",
        "directory /etc/shoal",
        f"file {KEY}",
        "command join the tailnet",
        f"file {KEY}",
        f"file {JOINED}",
    ]
    key, gone = (item for item in document if isinstance(item, File) and item.path == KEY)
    assert key.content == SecretRef("network.auth_key") and key.mode == 0o600 and gone.content is None
    assert argv_of(document) == (
        *python_command("tailnet_join", CONTROL_SERVER, KEY, "false"),
        *("--hostname=reef-c1", "--accept-dns=false", "--advertise-tags=tag:slurm", "--reset"),
    )
    assert user_secrets(SPEC) == {"network.auth_key": "env:TS_AUTHKEY"}


def test_auth_key_is_in_no_argument_and_no_plan() -> None:
    wire = to_wire(prepared(facts(tailscale={})))
    assert "tskey" not in str(wire).replace("tskey-client-", "", 1)
    assert [item["secret"] for item in wire if item.get("secret")] == [True]


def test_joined_host_is_unchanged() -> None:
    assert prepared(facts(mark=MARK)) == ()
    assert prepared(facts(mark="")) == (), "somebody did it by hand"


@cases(
    "fact, forced",
    (facts(mark=MARK, tailscale={**STATUS, "BackendState": "NeedsLogin"}), False),
    (facts(mark=MARK, tailscale={"problem": "no daemon"}), False),
    (facts(mark=MARK.replace("slurm", "old")), True),
    (facts(mark=MARK, tailscale={**STATUS, "Self": {**STATUS["Self"], "Expired": True}}), True),
    ids=["logged out", "no daemon", "other flags", "expired"],
)
def test_logged_out_host_or_changed_flags_join_again(fact: Facts, forced: bool) -> None:
    document = prepared(fact)
    assert ("--force-reauth" in argv_of(document)) == forced
    assert not any(isinstance(item, Packages) for item in document), "the program is there"


def test_join_without_a_key_shows_the_login_url() -> None:
    spec = spec_of(REEF.replace("{kind: tailscale, auth_key: env:TS_AUTHKEY, tags: [slurm]}", "tailscale"))
    document = prepared(facts(tailscale={**STATUS, "BackendState": "NeedsLogin"}), spec)
    assert argv_of(document) == (
        *python_command("tailnet_join", CONTROL_SERVER, "-", "false"),
        *("--hostname=reef-c1", "--accept-dns=false", "--reset"),
    )
    assert user_secrets(spec) == {}


def test_host_without_tun_uses_userspace_networking() -> None:
    document = prepared(replace(facts(tailscale={}), tun=False))
    files = {item.path: item.content for item in document if isinstance(item, File)}
    assert "FLAGS=--tun=userspace-networking --socks5-server=localhost:1055\n" in str(files[FLAGS])
    assert f"EnvironmentFile={FLAGS}\n" in str(files[DROP_IN]) and "ExecStartPost" not in str(files[DROP_IN])
    [service] = [item for item in document if isinstance(item, Service)]
    assert "--tun=userspace-networking" in service.command


def test_slurm_waits_at_boot_for_the_address_of_a_joined_host(tmp_path: Path) -> None:
    files = {item.path: item.content for item in prepared(facts(tailscale={})) if isinstance(item, File)}
    assert files[FLAGS] is None
    unit = tmp_path / "tailscaled.service"
    unit.write_text(f"[Service]\nExecStart=/bin/true\n{files[DROP_IN]}")
    assert "\nBefore=slurmctld.service slurmd.service\n" in unit.read_text()
    [line] = [line for line in unit.read_text().splitlines() if line.startswith("ExecStartPost=")]
    assert "$" not in line and "%" not in line, "systemd would take it for its own"
    words = shlex.split(line.removeprefix("ExecStartPost="))
    assert words[:2] == ["/bin/sh", "-c"] and len(words) == 3
    assert subprocess.run(words).returncode == 0, "a host that has not joined has nothing to wait for"


def test_other_networks_need_no_tailscale_and_leave_a_joined_tailnet() -> None:
    lan = spec_of(REEF.replace("network: {kind: tailscale, auth_key: env:TS_AUTHKEY, tags: [slurm]}\n", ""))
    member = members(lan)[0]
    assert component_packages(lan, member) == () or "tailscale" not in component_packages(lan, member)
    never = {"c1": facts(tailscale={}), "n1": facts("n1", tailscale={})}
    keys = {i.key for part in documents(assemble(lan, never, {}), member).values() for i in part}
    assert "command leave the tailnet" not in keys and "service tailscaled" not in keys
    once = {**never, "c1": facts(mark=MARK)}
    found = documents(assemble(lan, once, {}), member)[Stage.NODES]
    assert set(TailscaleComponent().removal()) <= set(found)


def both(**n1: Any) -> dict[str, Facts]:
    """The two hosts in the tailnet, with more fields in the status of the second."""
    own = {**STATUS, "TailscaleIPs": ["100.64.0.2"], **n1}
    return {"c1": facts(mark=MARK), "n1": facts("n1", mark=MARK, tailscale=own)}


def waits(cluster: Cluster, name: str, daemon: str) -> str | None:
    """The lines of the daemon's unit about the address that it waits for."""
    member = next(member for member in cluster.members if member.name == name)
    found = [i for part in documents(cluster, member).values() for i in part if i.key == f"file {DROP_INS[daemon]}"]
    return str(found[0].content) if found and isinstance(found[0], File) and found[0].content else None


def test_slurm_listens_only_in_the_tailnet_and_daemons_wait_for_their_address() -> None:
    cluster = assemble(SPEC, both(), {})
    assert cluster.conf.controller_address == "100.64.0.1"
    assert cluster.addresses == {"c1": "100.64.0.1", "n1": "100.64.0.2"}
    assert [node.address for node in cluster.conf.nodes] == ["100.64.0.2"]
    assert "NoInAddrAny,NoCtldInAddrAny" in slurm_settings(cluster.conf)
    assert "address show to 100.64.0.1 " in str(waits(cluster, "c1", "slurmctld"))
    assert "address show to 100.64.0.2 " in str(waits(cluster, "n1", "slurmd"))
    moved = assemble(SPEC, both(TailscaleIPs=["100.64.0.9"]), {})
    assert "address show to 100.64.0.9 " in str(waits(moved, "n1", "slurmd")), "a new file, which restarts slurmd"


def test_wrong_own_name_in_the_hosts_file_is_corrected() -> None:
    found = both()
    debian = FileFact(text="127.0.0.1 localhost\n127.0.1.1 n1\n")
    found["n1"] = replace(found["n1"], files={**found["n1"].files, HOSTS: debian})
    cluster = assemble(SPEC, found, {})
    assert "command own name" in {item.key for item in documents(cluster, cluster.members[1])[Stage.BASE]}
    assert cluster.conf.one_address


def test_userspace_host_makes_slurm_listen_on_all_addresses() -> None:
    cluster = assemble(SPEC, both(TUN=False), {})
    assert "InAddrAny" not in slurm_settings(cluster.conf)
    assert waits(cluster, "c1", "slurmctld") is waits(cluster, "n1", "slurmd") is None


def test_daemon_without_its_address_fails_and_is_restarted(tmp_path: Path) -> None:
    text = address_wait_drop_in("192.0.2.77")
    [line] = [line for line in text.splitlines() if line.startswith("ExecStartPre=")]
    assert "$" not in line and "%" not in line, "systemd would take it for its own"
    words = shlex.split(line.removeprefix("ExecStartPre="))
    assert words[:2] == ["/bin/sh", "-c"] and len(words) == 3
    done = subprocess.run([*words[:2], words[2].replace("timeout 60", "timeout 1")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "192.0.2.77, where this daemon listens, is not an address of this host yet\n"
    here = shlex.split(address_wait_drop_in("127.0.0.1").splitlines()[5].removeprefix("ExecStartPre="))
    assert subprocess.run(here, timeout=60).returncode == 0
    assert "Restart=on-failure\n" in text and "StartLimitIntervalSec=0\n" in text


def test_firewall_accepts_members_only_through_the_tailnet() -> None:
    other = {**STATUS, "TailscaleIPs": ["100.64.0.2"]}
    cluster = assemble(SPEC, {"c1": facts(mark=MARK), "n1": facts("n1", tailscale=other)}, {})
    [rules] = [i for i in documents(cluster, cluster.controller)[Stage.BASE] if i.key == "file /etc/shoal/firewall.nft"]
    assert "elements = { 100.64.0.1, 100.64.0.2 }" in str(rules.content)
    assert 'iifname "tailscale0" ip saddr @members4 tcp dport' in str(rules.content)


# ---- what is found


def findings(c1: Facts, n1: Facts | None = None) -> list[tuple[str, str, str, str]]:
    hosts = {"c1": c1, **({"n1": n1} if n1 else {})}
    found = TailscaleComponent().findings(assemble(SPEC, hosts, {}))
    return [(one.level, one.host or "", one.what, one.found) for one in found]


NOW = 1801303200.0 - 3 * 86400
"""Three days before the key of STATUS ends."""


def test_expiring_key_is_reported_early() -> None:
    assert findings(facts(mark=MARK, clock=NOW)) == [
        ("warning", "c1", "its key in the tailnet expires soon, and then the host is not reachable", "in 3 days")
    ]
    assert findings(facts(mark=MARK, clock=NOW - 30 * 86400)) == []


def test_host_missing_from_its_tailnet_is_an_error() -> None:
    out = facts(mark=MARK, tailscale={**STATUS, "BackendState": "NeedsLogin"})
    assert findings(out) == [("error", "c1", "is not in the tailnet", "NeedsLogin")]
    assert findings(facts(mark="", tailscale={**STATUS, "BackendState": "NeedsLogin"})) == [], "it is yet to join"


def test_missing_tailscale_package_is_reported_with_the_fix() -> None:
    assert findings(facts(tailscale={})) == [("error", "c1", "apt has no package `tailscale`", "")]
    assert findings(facts(tailscale={}, packages={"tailscale": Package(candidate="1.80.2")})) == []
    document = prepared(facts(tailscale={}))
    [package] = [item for item in document if isinstance(item, Packages)]
    assert package.fix.startswith("add Tailscale's package source to the host")


def test_host_without_the_package_gets_the_original_source_for_its_release() -> None:
    bare = facts(tailscale={}, os_id="ubuntu", os_codename="noble")
    assert findings(bare) == [("info", "c1", "apt has no package `tailscale`", "")]
    certificates, source, package = prepared(bare)[:3]
    assert (certificates.names, package.names) == (("ca-certificates",), ("tailscale",))
    address = "https://pkgs.tailscale.com/stable/ubuntu/noble"
    assert source.argv == python_command("tailnet_join", "--source", address, KEYRING, SOURCE)
    assert source.unless == ("test", "-s", SOURCE)
    assert not original_source(facts(os_id="arch", os_codename="x")), "Tailscale has none for it"


def test_relays_foreign_hosts_and_userspace_networking_are_reported() -> None:
    calm = facts(mark=MARK, clock=NOW - 30 * 86400)
    relayed = facts("n1", tailscale={**STATUS, "TailscaleIPs": ["100.64.0.3"], "Self": {}}, clock=1.0)
    assert [(level, host, found) for level, host, _, found in findings(calm, relayed)] == [
        ("warning", "n1", "relay fra")
    ]
    stranger = replace(relayed, tailscale={**STATUS, "TailscaleIPs": ["100.99.0.9"], "Self": {}})
    assert [(level, host) for level, host, _, _ in findings(calm, stranger)] == [("error", "n1")]
    userspace = replace(calm, tailscale={**STATUS, "TUN": False})
    assert [(level, found) for level, _, _, found in findings(userspace)] == [("warning", "userspace networking")]


def test_key_rotation_forces_reauthentication() -> None:
    assert "--force-reauth" in argv_of(join(SPEC, members(SPEC)[0], facts(mark=MARK), again=True))


def test_headscale_gives_the_tags_of_the_auth_key_and_is_asked_for_none() -> None:
    spec = spec_of(REEF.replace("tags:", "login_server: https://headscale.example.org, tags:"))
    line = argv_of(prepared(facts(tailscale={}), spec))
    assert line[6] == "https://headscale.example.org" and "--login-server=https://headscale.example.org" in line
    assert not any(word.startswith("--advertise-tags") for word in line)


def test_host_that_no_other_sees_joins_again() -> None:
    def document(c1: dict[str, Any], **n1: Any) -> Document:
        hosts = {"c1": facts(mark=MARK, tailscale=c1), "n1": facts("n1", mark=MARK.replace("c1", "n1"), **n1)}
        return prepare_host(SPEC, members(SPEC)[1], hosts)

    gone = {**STATUS, "TailscaleIPs": ["100.64.0.9"]}
    assert "--force-reauth" in argv_of(document(STATUS, tailscale=gone))
    seen = {**STATUS, "TailscaleIPs": ["100.64.0.3"]}
    assert document(STATUS, tailscale=seen) == ()
    assert document({**STATUS, "BackendState": "NeedsLogin"}, tailscale=gone) == (), "no other host is in a tailnet"


def prepare_host(spec: Spec, member: Member, hosts: dict[str, Facts]) -> Document:
    return TailscaleComponent().prepare_among(spec, member, hosts)


def test_host_without_the_tags_of_the_file_is_reported() -> None:
    assert "tag:slurm" in STATUS["Self"]["Tags"]
    untagged = {**STATUS, "Self": {**STATUS["Self"], "Tags": ["tag:other"]}}
    assert findings(facts(mark=MARK)) == []
    assert findings(facts(mark=MARK, tailscale=untagged)) == [
        ("warning", "c1", "lacks tags of `network.tags`: tag:slurm", "it has tag:other")
    ]
