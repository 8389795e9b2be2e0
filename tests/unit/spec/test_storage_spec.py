"""Shares and users in the file: every invalid one gets its finding, word for word, at its place."""

from pathlib import Path

import pytest
from tests.support.cases import cases, read_cases

from shoal.errors import SpecError
from shoal.spec.loader import load_text

GOOD = "cluster: reef\ncontroller: {host: ctl}\nnodesets:\n  lab: {hosts: [gpu01, gpu02]}\n"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGrm alice@desk"

CASES = read_cases(Path(__file__).with_name("storage_findings.txt"))


@cases("case", *CASES)
def test_invalid_share_or_user_is_reported_at_its_place(case: str) -> None:
    lines, [expected] = CASES[case]
    with pytest.raises(SpecError) as caught:
        load_text(GOOD + lines, "s.yaml")
    assert expected in [str(finding) for finding in caught.value.findings]


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
