"""The file of known host keys, with concurrent writers and with damage."""

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import HostKeyChanged, ShoalError
from shoal.hosts.host_keys import HostKey, HostKeys

A = HostKey("ssh-ed25519", "QUFBQQ==")
B = HostKey("ssh-ed25519", "QkJCQg==")

WRITER = """
import sys
from pathlib import Path
from shoal.hosts.host_keys import HostKey, HostKeys
keys = HostKeys(Path(sys.argv[1]))
for number in range(40):
    keys.remember(f"{sys.argv[2]}{number}", "10.0.0.1", 22, HostKey("ssh-ed25519", "QUFBQQ=="))
"""


def test_concurrent_writers_lose_no_key(tmp_path: Path) -> None:
    path = tmp_path / "cluster" / "known_hosts"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name]) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    names = {line.split(",")[0] for line in path.read_text().splitlines()}
    assert names == {f"{name}{number}" for name in "ab" for number in range(40)}
    assert sorted(file.name for file in path.parent.iterdir()) == ["known_hosts", "known_hosts.lock"]


def test_first_key_of_another_process_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    ours, theirs = HostKeys(path), HostKeys(path)
    assert ours.find("n1") is None
    theirs.remember("n1", "10.0.0.1", 22, A)
    with pytest.raises(HostKeyChanged):
        ours.remember("n1", "10.0.0.1", 22, B)
    assert HostKeys(path).find("n1") == A


def test_address_can_move_to_another_host(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    HostKeys(path).remember("n1", "10.0.0.1", 22, A)
    HostKeys(path).remember("n2", "10.0.0.1", 22, B)
    assert (HostKeys(path).find("n1"), HostKeys(path).find("n2")) == (A, B)


def test_invalid_lines_are_kept_and_ignored(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text("# mine\nn1,[10.0.0.1]:22 ssh-ed25519 ???\nhalf a\n")
    keys = HostKeys(path)
    assert keys.find("n1") is None
    keys.remember("n2", "10.0.0.2", 22, B)
    assert path.read_text().startswith("# mine\nn1,[10.0.0.1]:22 ssh-ed25519 ???\nhalf a\nn2,")


def test_forgetting_leaves_hosts_with_similar_names(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    keys = HostKeys(path)
    keys.remember("n1", "10.0.0.1", 22, A)
    keys.remember("n10", "10.0.0.2", 22, B)
    assert HostKeys(path).forget("n1") and (HostKeys(path).find("n1"), HostKeys(path).find("n10")) == (None, B)


def test_forgetting_an_unknown_host_creates_no_file(tmp_path: Path) -> None:
    assert not HostKeys(tmp_path / "none" / "known_hosts").forget("n1") and not (tmp_path / "none").exists()


def test_unwritable_path_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "known_hosts"
    with pytest.raises(ShoalError, match=f"cannot use the file of known host keys {path}: Not a directory") as caught:
        HostKeys(path).remember("n1", "10.0.0.1", 22, A)
    assert caught.value.hint.endswith("XDG_STATE_HOME names another")


def test_fingerprint_equals_ssh_keygen(tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    shown = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "key.pub")], capture_output=True, text=True, check=True)
    assert HostKey.parse((tmp_path / "key.pub").read_text()).fingerprint == shown.stdout.split()[1]
