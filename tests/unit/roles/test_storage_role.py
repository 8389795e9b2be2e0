"""The documents of shares: which host serves, how others mount, and what is removed with a share."""

from dataclasses import replace
from typing import Any

from tests.support.fake_world import host_facts, spec_of
from tests.support.role_items import items_of, member_of

from shoal.agent.document import Command, File, Item, Mount, Service
from shoal.agent.facts import Facts, FileFact, UnixIds
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Component, Stage
from shoal.roles.current_conf import CurrentConf
from shoal.roles.documents import documents, membership
from shoal.roles.shares import RECORD
from shoal.roles.storage import StorageComponent
from shoal.roles.users import SSHD_CONF, UsersComponent
from shoal.storage import nfs, sshfs

HEAD = """
cluster: reef
controller: {host: c1}
nodesets:
  lab: {hosts: [n1, n2]}
"""
SHARES = """
storage:
  /home: {kind: nfs}
  /data: {kind: nfs, path: /srv/data, connections: 8}
  /apps: {kind: sshfs, host: n1, read_only: true}
users:
  alice: {uid: 2001}
"""
ADDRESSES = {"c1": "10.0.0.1", "n1": "10.0.0.11", "n2": "10.0.0.12"}
WHOLE: dict[str, Any] = {"filesystems": ("nfs4", "nfsd"), "fuse": True}
FUSE: dict[str, Any] = {"fuse": True}
POD: dict[str, Any] = {}


def key_of(name: str) -> str:
    return f"ssh-ed25519 AAAA{name}"


def facts_of(name: str, capable: dict[str, Any], **texts: str) -> Facts:
    files = {
        sshfs.PUBLIC_KEY: f"{key_of(name)} shoal {name}\n",
        sshfs.HOST_KEY: f"ssh-ed25519 HOST{name} root@{name}\n",
        **{path.replace("_", "/"): text for path, text in texts.items()},
    }
    return host_facts(name, ADDRESSES[name], **capable, files={path: FileFact(text=t) for path, t in files.items()})


def cluster_of(
    text: str = HEAD + SHARES, before: dict[str, str] | None = None, **hosts: dict[str, Any] | None
) -> Cluster:
    """`hosts` has what each host supports; None: it does not answer."""
    kinds = {name: hosts.get(name, WHOLE) for name in ADDRESSES}
    facts = {name: facts_of(name, capable) for name, capable in kinds.items() if capable is not None}
    for name, record in (before or {}).items():
        facts[name] = replace(facts[name], files={**facts[name].files, RECORD: FileFact(text=record)})
    known = CurrentConf(addresses={name: at for name, at in ADDRESSES.items() if name not in facts})
    return assemble(spec_of(text), facts, {}, known)


def items(cluster: Cluster, name: str, part: Component | None = None) -> dict[str, Any]:
    return items_of(cluster, name, part or StorageComponent())


def text(item: Item) -> str:
    return item.content


def packages(cluster: Cluster, name: str) -> tuple[str, ...]:
    found = StorageComponent().packages(cluster.spec, member_of(cluster, name), cluster.facts[name])
    return tuple(dict.fromkeys(found))


def with_files(cluster: Cluster, name: str, **files: FileFact) -> Cluster:
    """The cluster with these files on a host."""
    facts = cluster.facts[name]
    return replace(cluster, facts={**cluster.facts, name: replace(facts, files={**facts.files, **files})})


def test_cluster_without_shares_has_no_items() -> None:
    cluster = cluster_of(HEAD)
    for member in cluster.members:
        assert items(cluster, member.name) == items(cluster, member.name, UsersComponent()) == {}
        assert packages(cluster, member.name) == ()
        assert StorageComponent().prepare(cluster.spec, member, cluster.facts[member.name]) == ()
    assert StorageComponent().fact_files(cluster.spec) == {} and StorageComponent().filesystems(cluster.spec) == ()


def test_kernel_nfs_server_exports_to_each_member_by_address() -> None:
    cluster = cluster_of()
    served = items(cluster, "c1")
    exports = text(served[f"file {nfs.EXPORTS}"])
    assert "10.0.0.11(rw" in exports and "10.0.0.12(rw" in exports and "10.0.0.1(" not in exports
    assert "host=10.0.0.1\n" in text(served[f"file {nfs.NFS_CONF}"])
    assert served["service nfs-server"] == Service("nfs-server")
    assert served["command make /srv/data"] == Command(
        "make /srv/data", ("install", "-d", "-m", "1777", "/srv/data"), unless=("test", "-d", "/srv/data")
    )
    assert served["mount /data"] == Mount("/data", "/srv/data", "none", "bind")
    assert packages(cluster, "c1") == ("nfs-kernel-server", "rsync", "sshfs")
    assert StorageComponent().ports(cluster.spec, cluster.members[0]) == ("2049",)
    assert StorageComponent().ports(cluster.spec, cluster.members[1]) == ()


def test_existing_exports_keep_their_server_and_are_reported() -> None:
    cluster = with_files(cluster_of(), "c1", **{"/etc/exports": FileFact(text="# mine\n/srv/old *(ro)\n")})
    assert f"file {nfs.NFS_CONF}" not in items(cluster, "c1")
    [finding] = StorageComponent().findings(cluster)
    assert str(finding) == (
        "c1: this host has other exports, so its NFS server listens on all addresses, found "
        "/etc/exports, remove them, or close port 2049 to other hosts yourself"
    )


def test_ganesha_serves_without_kernel_nfs_and_reloads_for_new_members() -> None:
    cluster = cluster_of(c1=FUSE)
    assert packages(cluster, "c1")[:2] == ("nfs-ganesha", "nfs-ganesha-vfs")
    conf = items(cluster, "c1")[f"file {nfs.GANESHA_CONF}"]
    assert conf.restarts == (nfs.GANESHA_SERVICE,)
    assert "Bind_addr = 10.0.0.1;" in text(conf) and "Clients = 10.0.0.11, 10.0.0.12;" in text(conf)
    assert items(cluster, "c1")["service nfs-ganesha"] == Service("nfs-ganesha", enabled=False, running=False)
    then = {nfs.GANESHA_CONF: FileFact(text=text(conf).replace(", 10.0.0.12", ""))}
    conf = items(with_files(cluster, "c1", **then), "c1")[conf.key]
    assert (conf.restarts, conf.reloads) == ((), ("command reload ganesha",))


def test_running_rpcbind_stays_and_a_newly_installed_rpcbind_is_disabled() -> None:
    off = Service("rpcbind", enabled=False, running=False)
    assert items(cluster_of(), "c1")["service rpcbind"] == items(cluster_of(), "n1")["service rpcbind"] == off
    cluster = cluster_of(c1={**WHOLE, "services": {"rpcbind": "active"}})
    assert "service rpcbind" not in items(cluster, "c1")


def test_unneeded_nfs_units_stay_disabled_after_a_reboot() -> None:
    served = items(cluster_of(), "c1")
    for unit in ("rpcbind.socket", "rpcbind.service", "rpc-statd.service"):
        drop_in = served[f"file /etc/systemd/system/{unit}.d/shoal.conf"]
        assert text(drop_in).endswith(f"[Unit]\nConditionPathExists=!{nfs.NFS_CONF}\n")
        assert list(served).index(drop_in.key) < list(served).index("service rpcbind")
    assert text(served[f"file {nfs.SERVER_DROP_IN}"]) == nfs.server_drop_in()
    gone = {item.key: item for item in StorageComponent().removal()}
    for path in (nfs.SERVER_DROP_IN, *(nfs.unneeded_unit_drop_in(unit)[0] for unit in nfs.UNNEEDED_UNITS)):
        assert gone[f"file {path}"] == File(path)


def test_running_rpcbind_and_nfs3_exports_are_not_disabled() -> None:
    cluster = cluster_of(c1={**WHOLE, "services": {"rpcbind": "active"}})
    assert not any("rpcbind" in key or "statd" in key for key in items(cluster, "c1"))
    cluster = with_files(cluster, "c1", **{"/etc/exports": FileFact(text="/srv/old *(ro)\n")})
    assert not any(key.startswith("file ") and "rpc" in key for key in items(cluster, "c1"))


def test_each_host_mounts_by_its_best_method() -> None:
    cluster = cluster_of(n1=FUSE, n2=WHOLE)
    there = items(cluster, "n2")
    assert there["mount /home"] == Mount(
        "/home", "10.0.0.1:/home", "nfs4", nfs.mount_options(4, read_only=False), automount=True
    )
    assert there["mount /data"] == Mount(
        "/data", "10.0.0.1:/srv/data", "nfs4", nfs.mount_options(8, read_only=False), automount=True
    )
    assert packages(cluster, "n2") == ("nfs-common", "netbase", "sshfs")
    over_ssh = items(cluster, "n1")
    assert "mount /home" not in over_ssh
    home = over_ssh["mount /home/alice"]
    assert home.what == "alice@10.0.0.1:/home/alice" and "uid=2001" in home.options
    data = over_ssh["mount /data"]
    assert data.what == "shoal-share@10.0.0.1:/data" and data.automount
    assert home.if_known == data.if_known == "no_contain_symlinks"
    assert text(over_ssh[f"file {sshfs.KNOWN_HOSTS}"]).endswith("10.0.0.1 ssh-ed25519 HOSTc1\n")


def test_host_that_mounts_over_ssh_generates_a_key_once() -> None:
    spec = spec_of(HEAD + "storage: {/data: {}}\n")
    member = assemble(spec, {"c1": host_facts("c1", "10.0.0.1")}, {}).members[1]
    keyless = host_facts("n1", "10.0.0.11", **FUSE)
    made = StorageComponent().prepare(spec, member, keyless)[-1]
    assert made.unless == ("test", "-s", sshfs.PUBLIC_KEY)
    assert StorageComponent().prepare(spec, member, facts_of("n1", FUSE)) == ()
    assert StorageComponent().prepare(spec, member, replace(keyless, filesystems=("nfs4",))) == ()


def test_server_accepts_each_host_key_only_from_its_address() -> None:
    cluster = cluster_of(n1=FUSE, n2=FUSE)
    keys = text(items(cluster, "c1")[f"file {sshfs.KEYS}/{sshfs.ACCOUNT}"])
    assert keys == sshfs.render_authorized_keys(
        [sshfs.MemberKey("n1", "10.0.0.11", key_of("n1")), sshfs.MemberKey("n2", "10.0.0.12", key_of("n2"))]
    )
    assert text(items(cluster, "c1")[f"file {sshfs.HOME_KEYS}"]) == keys
    logins = {name: text(items(cluster, name, UsersComponent())[f"file {SSHD_CONF}"]) for name in ("c1", "n2")}
    assert f"AuthorizedKeysFile {sshfs.KEYS}/%u {sshfs.HOME_KEYS} .ssh/authorized_keys" in logins["c1"]
    assert sshfs.HOME_KEYS not in logins["n2"] and f"file {sshfs.HOME_KEYS}" not in items(cluster, "n2")


def test_server_accepts_the_homes_of_a_host_that_joins() -> None:
    cluster = cluster_of(n1=FUSE, n2=FUSE)
    due = {item.key: item for item in membership(cluster, cluster.members[0])}
    assert "shoal n2" in text(due[f"file {sshfs.HOME_KEYS}"])
    assert f"file {sshfs.KEYS}/alice" not in due, "the keys of users come from the file alone"


def test_keys_of_homes_go_with_the_homes() -> None:
    before = cluster_of(HEAD + "storage: {/data: {}}\n", n1=FUSE, n2=FUSE)
    cluster = with_files(before, "c1", **{sshfs.HOME_KEYS: FileFact(text="restrict ...\n")})
    assert items(cluster, "c1")[f"file {sshfs.HOME_KEYS}"] == File(sshfs.HOME_KEYS)
    assert f"file {sshfs.HOME_KEYS}" not in items(before, "c1")


def test_silent_host_keeps_its_key_and_export() -> None:
    whole, path = cluster_of(n1=FUSE, n2=FUSE), f"{sshfs.KEYS}/{sshfs.ACCOUNT}"
    keys = text(items(whole, "c1")[f"file {path}"])
    silent = cluster_of(n1=FUSE, n2=None, before={"c1": "serves ssh\n"})
    silent = with_files(silent, "c1", **{path: FileFact(text=keys)})
    assert text(items(silent, "c1")[f"file {path}"]) == keys
    assert "10.0.0.12(rw" in text(items(silent, "c1")[f"file {nfs.EXPORTS}"])


def test_silent_server_is_reported_and_its_mounts_stay() -> None:
    before = {"n2": "automount /apps\nautomount /appsold\n"}
    cluster = cluster_of(HEAD + "storage: {/apps: {kind: sshfs, host: n1}}\n", before, n1=None)
    [finding] = StorageComponent().findings(cluster)
    assert str(finding) == (
        "storage./apps: n1, the server of /apps, does not answer; processes that use the share wait, start n1; "
        "`shoal up` then mounts the share where it is missing"
    )
    there = items(cluster, "n2")
    assert "mount /apps" not in there
    assert there["mount /appsold"] == Mount("/appsold", fstype="none", mounted=False, automount=True)
    assert text(there[f"file {RECORD}"]).splitlines()[1:] == ["automount /apps"]


def test_new_share_of_a_silent_server_is_not_mounted() -> None:
    shares = "storage: {/apps: {kind: sshfs, host: n1}, /data: {kind: nfs}}\n"
    there = items(cluster_of(HEAD + shares, n1=None), "n2")
    assert "mount /data" in there and "mount /apps" not in there
    assert text(there[f"file {RECORD}"]).splitlines()[1:] == ["automount /data"]
    assert "mount /apps" in items(cluster_of(HEAD + shares), "n2")


def test_removed_share_is_unmounted_and_not_exported() -> None:
    before = {"n2": "automount /old\nautomount /data\n", "c1": "mount /srv/shoal-shares/old\nserves nfs\nserves ssh\n"}
    cluster = cluster_of(HEAD + "storage: {/data: {host: n1}}\n", before, n1=WHOLE)
    there = items(cluster, "n2")
    assert there["mount /old"] == Mount("/old", fstype="none", mounted=False, automount=True)
    assert there["mount /data"].mounted and text(there[f"file {RECORD}"]).splitlines()[1:] == ["automount /data"]
    gone = items(cluster, "c1")
    assert gone["mount /srv/shoal-shares/old"] == Mount("/srv/shoal-shares/old", fstype="none", mounted=False)
    assert gone[f"file {nfs.GANESHA_UNIT}"] == File(nfs.GANESHA_UNIT)
    assert gone[f"file {sshfs.KEYS}/{sshfs.ACCOUNT}"] == File(f"{sshfs.KEYS}/{sshfs.ACCOUNT}")


def test_record_is_removed_with_the_last_share() -> None:
    cluster = cluster_of(HEAD, {"n2": "automount /old\n"})
    assert items(cluster, "n2")[f"file {RECORD}"] == File(RECORD) and items(cluster, "n1") == {}


def test_host_without_nfs_and_fuse_mounts_nothing_and_gets_local_homes() -> None:
    cluster = cluster_of(n2=POD)
    assert not [item for item in items(cluster, "n2").values() if isinstance(item, Mount)]
    assert "command make /home/alice" in items(cluster, "n2", UsersComponent())
    assert "command make /home/alice" not in items(cluster, "n1", UsersComponent())


def test_copy_user_has_its_own_name_and_the_same_id() -> None:
    cluster = cluster_of(n2=POD)
    found = items(cluster, "c1")
    share, copy = found["user shoal-share"], found["user shoal-copy"]
    assert share.uid == copy.uid == 979 and copy.twin_of == "shoal-share" and share.shell == "/usr/sbin/nologin"
    there = {"shoal-share": UnixIds(979, 979), "shoal-copy": UnixIds(979, 979)}
    facts = replace(cluster.facts["c1"], users=there, groups={"shoal-share": UnixIds(979)})
    again = items(replace(cluster, facts={**cluster.facts, "c1": facts}), "c1")["user shoal-share"]
    assert again.uid == 979
    assert text(items(cluster, "n2")["file /etc/shoal/stage"]).endswith("/data 10.0.0.1 rw\n/apps 10.0.0.11 ro\n")
    assert "user shoal-copy" not in items(cluster_of(n2=FUSE), "c1")


def test_sshd_without_include_is_reported() -> None:
    cluster = with_files(cluster_of(), "n1", **{"/etc/ssh/sshd_config": FileFact(text="PermitRootLogin no\n")})
    [finding] = StorageComponent().findings(cluster)
    assert finding.host == "n1" and "Include /etc/ssh/sshd_config.d/*.conf" in finding.fix


def test_rented_node_mounts_shares_before_its_slurmd_starts() -> None:
    cluster = cluster_of(n1=FUSE, n2=FUSE)
    for member in cluster.members[1:]:
        of = (documents(cluster, replace(member, rented=rented))[Stage.NODES] for rented in (True, False))
        keys, later = ([item.key for item in items] for items in of)
        assert keys.index("mount /data") < keys.index("service slurmd") > keys.index("mount /home/alice")
        # A permanent host whose share cannot be mounted still gets its slurmd.
        assert later.index("service slurmd") < later.index("mount /data")
