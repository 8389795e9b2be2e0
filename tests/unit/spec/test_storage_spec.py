"""Shares and users in the file: every invalid one gets its finding, word for word, at its place."""

from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.errors import SpecError
from shoal.spec.loader import load_text

GOOD = "cluster: reef\ncontroller: {host: ctl}\nnodesets:\n  lab: {hosts: [gpu01, gpu02]}\n"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGrm alice@desk"

CASES: dict[str, tuple[str, str]] = {
    "a path that is none": (
        "storage: {data: {}}",
        '5:11 storage.data: not a directory\'s path, found "data", write it like /data/sets: letters, digits, `_`, '
        "`-` and `.` after `/`",
    ),
    "a path that goes up": (
        "storage: {/data/../etc: {}}",
        '5:11 storage."/data/../etc": not a directory\'s path, found "/data/../etc", write it like /data/sets: '
        "letters, digits, `_`, `-` and `.` after `/`",
    ),
    "a directory of the system": (
        "storage: {/etc: {}}",
        '5:11 storage."/etc": a host needs this directory for itself, found "/etc", choose another, such as /data or '
        "/srv/data",
    ),
    "the whole of /var": (
        "storage: {/data: {path: /var}}",
        '5:25 storage."/data".path: a host needs this directory for itself, found "/var", choose another, such as '
        "/data or /srv/data",
    ),
    "an unknown kind": (
        "storage: {/data: {kind: smb}}",
        '5:25 storage."/data".kind: unknown kind of share, found "smb", choose one of nfs, sshfs, stage',
    ),
    "an unknown host": (
        "storage: {/data: {host: gpu1}}",
        '5:25 storage."/data".host: no host of the cluster, found "gpu1", did you mean `gpu01`?',
    ),
    "a share in a share": (
        "storage: {/data: {}, /data/big: {}}",
        '5:22 storage."/data/big": a share inside another, found "/data", give it a path beside that one',
    ),
    "one directory twice": (
        "storage: {/data: {path: /srv/data}, /sets: {host: ctl, path: /srv/data}}",
        '5:62 storage."/sets".path: the share "/data" is this directory already, found "/srv/data", choose another, or '
        "delete one of the two shares",
    ),
    "a directory that is another share's": (
        "storage: {/data: {}, /sets: {path: /data}}",
        '5:36 storage."/sets".path: the share "/data" is this directory already, found "/data", choose another, or '
        "delete one of the two shares",
    ),
    "a directory over which another share is mounted": (
        "storage: {/data: {}, /sets: {host: gpu01, path: /data/sets}}",
        '5:49 storage."/sets".path: the share "/data" is mounted there, and would hide what is in it, found '
        '"/data/sets", choose a directory beside that one',
    ),
    "a directory in which another share is mounted": (
        "storage: {/srv/data: {}, /sets: {host: gpu01, path: /srv}}",
        '5:53 storage."/sets".path: the share "/srv/data" is mounted there, and would hide what is in it, found '
        '"/srv", choose a directory beside that one',
    ),
    "homes twice": (
        "storage: {/home: {}, /data: {homes: true}}",
        '5:22 storage."/data": two shares for the users\' homes, found "/data", `/home` has them already; delete '
        "`homes` in one",
    ),
    "homes that no user can write to": (
        "storage: {/home: {read_only: true}}",
        '5:30 storage."/home".read_only: homes that no user can write to, found true, delete it',
    ),
    "root": (
        "users: {root: {uid: 2001}}",
        '5:9 users.root: this account is not a person\'s, found "root", give the user another name',
    ),
    "a system's uid": (
        "users: {alice: {uid: 0}}",
        "5:22 users.alice.uid: out of range, found 0, give one from 1000 to 59999",
    ),
    "one uid twice": (
        "users: {alice: {uid: 2001}, bob: {uid: 2001}}",
        "5:40 users.bob.uid: two users with one uid, found 2001, `alice` has it",
    ),
    "a group that is docker": (
        "users: {alice: {uid: 2001, groups: [docker]}}",
        '5:37 users.alice.groups[0]: this group is not given by name, found "docker", say `docker: true`',
    ),
    "the group of another user": (
        "users: {alice: {uid: 2001, groups: [bob]}, bob: {uid: 2002}}",
        "5:37 users.alice.groups[0]: the group of a user, found \"bob\", a user's own group is that user's alone; "
        "make one of another name",
    ),
    "groups that are no list": (
        "users: {alice: {uid: 2001, groups: 5}}",
        "5:36 users.alice.groups: not a list, found 5, write [a, b], or one `- a` a line",
    ),
    "a group that is no word": (
        "users: {alice: {uid: 2001, groups: [[team]]}}",
        "5:37 users.alice.groups[0]: not a group name, found a list, use a lower-case letter, then lower-case letters, "
        "digits, `_` and `-`",
    ),
    "a key with options": (
        "users: {alice: {uid: 2001, keys: ['no-pty ssh-ed25519 AAAA']}}",
        '5:35 users.alice.keys[0]: not a public key, found "no-pty ssh-ed25519 AAAA", write file:PATH, or the key '
        "itself: ssh-ed25519 AAAA... alice",
    ),
    "a key file that is not there": (
        "users: {alice: {uid: 2001, keys: ['file:/nowhere.pub']}}",
        '5:35 users.alice.keys[0]: the key file cannot be read: No such file or directory, found "file:/nowhere.pub", '
        "give the path of a public key on your machine",
    ),
}


@cases("case", *CASES)
def test_invalid_share_or_user_is_reported_at_its_place(case: str) -> None:
    lines, expected = CASES[case]
    with pytest.raises(SpecError) as caught:
        load_text(f"{GOOD}{lines}\n", "s.yaml")
    assert f"s.yaml:{expected}" in [str(finding) for finding in caught.value.findings]


def test_adjacent_or_nested_directories_of_a_host_can_be_shared() -> None:
    shares = "{/data: {}, /sets: {path: /data/sets, read_only: true}, /scratch: {host: gpu01, path: /data2}}"
    assert list(load_text(f"{GOOD}storage: {shares}\n", "s.yaml").storage) == ["/data", "/sets", "/scratch"]


def test_private_key_is_rejected_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "id"
    path.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nc2VjcmV0\n-----END OPENSSH PRIVATE KEY-----\n")
    with pytest.raises(SpecError) as caught:
        load_text(f"{GOOD}users: {{alice: {{uid: 2001, keys: ['file:{path}']}}}}\n", "s.yaml")
    said = str([str(finding) for finding in caught.value.findings])
    assert "a private key" in said and "c2VjcmV0" not in said


def test_key_file_can_contain_several_keys_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "alice.pub"
    path.write_text(f"# alice's\n{KEY}\n\n{KEY} too\n")
    spec = load_text(f"{GOOD}users: {{alice: {{uid: 2001, keys: ['file:{path}', '{KEY}']}}}}\n", "s.yaml")
    assert spec.users["alice"].keys == (f"{KEY}\n{KEY} too", KEY)


def test_shared_path_of_the_sandbox_is_rejected_as_a_share() -> None:
    text = "cluster: reef\ncontroller: {provider: sandbox, compute: true}\nstorage: {/shared: {}}\n"
    with pytest.raises(SpecError) as caught:
        load_text(text, "s.yaml")
    assert [str(finding) for finding in caught.value.findings] == [
        's.yaml:3:11 storage."/shared": sandbox hosts have this directory in common already, found "/shared", '
        "delete it, or choose another path"
    ]
    assert load_text(f"{GOOD}storage: {{/shared: {{}}}}\n", "s.yaml").storage["/shared"].kind == "nfs"
