"""Values of the file that would hang the command, hide a host's own directories, or make a user as good as root."""

import os
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.errors import error_text

from shoal.environments import requirements
from shoal.errors import SpecError, UsageError
from shoal.spec.loader import load_text
from shoal.spec.local_files import MAX_KEY_BYTES, read_regular_file, resolve_secret

HEAD = "cluster: reef\ncontroller: {host: c1}\nnodesets: {lab: {hosts: [n1]}}\npartitions: {main: {nodesets: [lab]}}\n"


def problems(text: str) -> list[str]:
    try:
        load_text(HEAD + text, "shoal.yaml")
    except SpecError as error:
        return [str(finding) for finding in error.findings]
    return []


def special_file(kind: str, directory: Path) -> tuple[str, str]:
    """The path of a file that must not be read, and what is said about it."""
    path = directory / "key"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(2500 * 1024**2)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        return "/dev/zero", "it is not a regular file"
    return str(path), "it is longer than 64 KiB" if kind == "huge" else "it is not a regular file"


@cases("kind", "device", "fifo", "directory", "huge", "link")
def test_keys_secrets_and_requirements_are_read_from_regular_files(tmp_path: Path, kind: str) -> None:
    path, cause = special_file(kind, tmp_path)
    (found,) = problems(f"users: {{alice: {{uid: 2001, keys: ['file:{path}']}}}}\n")
    assert f"the key file cannot be read: {cause}" in found
    assert "give the path of a public key on your machine" in found
    assert error_text(UsageError, resolve_secret, f"file:{path}", "providers.lambda.key") == (
        f"providers.lambda.key is file:{path}, and it cannot be read: {cause}\n"
        "  fix: write the secret into a file of its own, readable by you alone"
    )
    with pytest.raises(UsageError, match=cause.replace("64", "16384")):
        requirements._read(Path(path))


def test_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"x" * MAX_KEY_BYTES)
    assert len(read_regular_file(tmp_path / "key", MAX_KEY_BYTES)) == MAX_KEY_BYTES


@cases(
    "path",
    *("/var/lib/slurm", "/var/lib/shoal", "/var/lib", "/var", "/var/spool/slurmd", "/var/log/jobs", "/var/run/x"),
    *("/opt", "/opt/shoal", "/opt/shoal/lib", "/usr", "/usr/local", "/usr/local/lib/shoal", "/usr/local/bin"),
    *("/usr/lib/data", "/usr/share/data", "/etc", "/etc/slurm", "/boot", "/proc/self", "/root", "/root/data"),
    *("/dev/shm", "/sys/fs", "/run/user", "/tmp", "/tmp/data", "/lib/x", "/nix/store", "/sbin"),
)
def test_share_leaves_the_hosts_own_directories_alone(path: str) -> None:
    for text in (f"storage: {{{path}: {{}}}}\n", f"storage: {{/data: {{path: {path}}}}}\n"):
        (found,) = problems(text)
        assert "a host needs this directory for itself" in found
        assert "choose another, such as /data or /srv/data" in found


@cases("path", "/data", "/srv/data", "/home", "/mnt/nvme0", "/opt/models", "/usr/local/data", "/var/data", "/variants")
def test_other_directories_can_be_shared(path: str) -> None:
    assert problems(f"storage: {{{path}: {{}}}}\n") == []


@cases(
    "group",
    *("sudo", "wheel", "admin", "adm", "disk", "shadow", "kmem", "lxd", "libvirt", "staff", "input", "tape"),
    *("slurm", "munge", "mysql", "systemd-journal", "shoal-copy", "_ssh", "root", "docker"),
)
def test_group_with_rights_over_the_host_is_rejected(group: str) -> None:
    (found,) = problems(f"users: {{alice: {{uid: 2001, groups: [{group}]}}}}\n")
    if group in ("root", "docker"):
        assert "this group is not given by name" in found
        return
    assert "users.alice.groups[0]: this group gives rights over the host or over other users" in found
    assert "name a group of your own" in found


@cases("group", "vision", "video", "render", "audio", "users", "plugdev", "kvm")
def test_other_groups_are_accepted(group: str) -> None:
    assert problems(f"users: {{alice: {{uid: 2001, groups: [{group}]}}}}\n") == []


@cases("name", "sudo", "disk", "shadow", "docker", "root", "mysql")
def test_user_of_such_a_name_would_own_that_group(name: str) -> None:
    (found,) = problems(f"users: {{{name}: {{uid: 2001}}}}\n")
    assert "this account is not a person's" in found
