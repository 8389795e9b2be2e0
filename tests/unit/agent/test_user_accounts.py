"""User accounts on a host: a system account of the host is never taken for a user's."""

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.cases import cases

from shoal.remote.agent import unix_accounts
from shoal.remote.agent.running import Failure

DAEMON = pwd.getpwnam("daemon")


def user(name: str, uid: int, **more: Any) -> dict[str, Any]:
    settings = {"group": name, "home": "/home/" + name, "shell": "/bin/bash", "groups": (), "owns": [], "services": []}
    return {"kind": "user", "name": name, "uid": uid, "system": False, **settings, **more}


def world(*items: dict[str, Any]) -> Any:
    return SimpleNamespace(items=list(items), dry=True)


@cases("uid", 58123, DAEMON.pw_uid)
def test_system_account_is_not_reused_for_a_user(uid: int) -> None:
    person = user("daemon", uid)
    with pytest.raises(Failure) as caught:
        unix_accounts.check_user(person, world(person))
    assert str(caught.value) == (
        f"user daemon is this host's own, with id {DAEMON.pw_uid}, and programs of it run as that; choose another name"
    )


def test_system_group_is_not_reused_for_a_user() -> None:
    group, gid = {"kind": "group", "name": "video", "gid": 58123}, grp.getgrnam("video").gr_gid
    with pytest.raises(Failure) as caught:
        unix_accounts.check_group(group, world(group, user("video", 58123)))
    assert str(caught.value).startswith(f"group video is this host's own, with id {gid}, and programs of it run as")


def test_conflicting_id_is_reported_with_its_owner() -> None:
    person = user("shoal-test-user", DAEMON.pw_uid)
    with pytest.raises(Failure) as caught:
        unix_accounts.check_user(person, world(person))
    assert str(caught.value).startswith(
        f"the id {DAEMON.pw_uid} wanted for user shoal-test-user belongs to user daemon on this host; give daemon "
    )


def test_existing_user_keeps_extra_groups_and_is_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    there = SimpleNamespace(pw_uid=2001, pw_gid=2001, pw_dir="/home/ann", pw_shell="/bin/sh")
    ran: list[list[str]] = []
    monkeypatch.setattr(unix_accounts, "user_of", lambda name: there)
    monkeypatch.setattr(unix_accounts, "run_checked", lambda argv, what: ran.append(argv))
    assert unix_accounts.make_user(user("ann", 2001, groups=("team",)), world()) == ""
    [argv] = ran
    assert argv[0] == "usermod" and argv[-1] == "ann" and "--append" in argv
    assert argv[argv.index("--groups") + 1] == "team" and argv[argv.index("--expiredate") + 1] == ""


def test_removed_user_is_locked_only_under_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_accounts, "expired", lambda name: False)
    change = unix_accounts.check_user(user("daemon", DAEMON.pw_uid, locked=True), world())
    assert change is not None and change.action == "lock user daemon"
    assert unix_accounts.check_user(user("daemon", 58123, locked=True), world()) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_new_id_is_given_to_links_and_not_to_what_they_lead_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, system_file = tmp_path / "home", tmp_path / "shadow"
    home.mkdir()
    for path in (system_file, home / "notes"):
        path.touch()
    (home / "planted").symlink_to(system_file)
    for path in (home, home / "notes", home / "planted"):
        os.lchown(path, 2001, 2001)
    there = SimpleNamespace(pw_uid=2001, pw_gid=2001, pw_dir=str(home), pw_shell="/bin/bash")
    monkeypatch.setattr(unix_accounts, "user_of", lambda name: there)
    monkeypatch.setattr(unix_accounts, "run_checked", lambda argv, what, timeout: None)
    ann = user("ann", 2002, home=str(home), owns=[str(home)])
    assert unix_accounts.make_user(ann, SimpleNamespace(noted={}, due={})) == "id 2001 became 2002"
    assert {path.lstat().st_uid for path in (home, home / "notes", home / "planted")} == {2002}
    assert system_file.stat().st_uid == 0
