"""The program that sets up Slurm's accounts, run whole, with stand-ins for Slurm's commands."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.fake_world import spec_of
from tests.unit.roles.test_role_documents import REEF

from shoal.remote import program_text
from shoal.slurm.accounting import accounts_file

LAB = "accounting: {accounts: {lab: {users: [ann]}}, qos: {fast: {priority: 10}}}\n"
SACCTMGR = """\
#!/bin/sh
case "$*" in *show*) cat {place}/shown-"$4" 2>/dev/null; exit 0 ;; esac
echo "sacctmgr $*" >> {place}/heard
! grep -qs "$3 $4 $5" {place}/refuses || {{ echo "Error with request: Job(s) active"; exit 1; }}
"""
SQUEUE = """\
#!/bin/sh
cat {place}/queued
"""
BACKUP = """\
#!/bin/sh
echo backup >> {place}/heard
[ ! -e {place}/full ] || {{ echo "gzip: stdout: No space left on device" >&2; exit 1; }}
"""
Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Runs the program; `wants` is the `accounting:` of a spec."""
    for name, text in {"sacctmgr": SACCTMGR, "squeue": SQUEUE, "backup": BACKUP}.items():
        (tmp_path / name).write_text(text.format(place=tmp_path))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "shown-qos").write_text("normal|0" + "|" * 8 + "\n")
    (tmp_path / "accounts.py").write_text(
        program_text("slurm_accounts").replace("RETRY_PAUSES_S = (2, 3, 5, 5)", "RETRY_PAUSES_S = (0, 0)")
    )
    wanted, record = tmp_path / "wanted.json", tmp_path / "state" / "record.json"

    def run(verb: str, wants: str = LAB) -> subprocess.CompletedProcess[str]:
        accounting = spec_of(REEF + wants).accounting
        assert accounting is not None
        wanted.write_text(accounts_file("reef", accounting))
        line = [sys.executable, "-I", tmp_path / "accounts.py", verb, wanted, record, tmp_path / "backup"]
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)

    return run


def heard(place: Path) -> list[str]:
    return (place / "heard").read_text().splitlines() if (place / "heard").exists() else []


def made_by_us(place: Path) -> None:
    """As if an earlier run had made the account, its user and the QOS."""
    (place / "state").mkdir()
    record = {"qos": ["fast"], "accounts": ["lab"], "users": ["ann@lab"]}
    (place / "state" / "record.json").write_text(json.dumps(record))
    (place / "shown-assoc").write_text("lab||root|1" + "|" * 9 + "\nlab|ann||1" + "|" * 9 + "\n")
    (place / "shown-qos").write_text("normal|0" + "|" * 8 + "\nfast|10" + "|" * 8 + "\n")
    (place / "shown-user").write_text("ann|lab\n")


def test_single_backup_is_made_before_the_first_change(program: Program, tmp_path: Path) -> None:
    assert program("check").returncode == 1 and heard(tmp_path) == []
    done = program("apply")
    assert done.returncode == 0, done.stderr
    first, *rest = heard(tmp_path)
    assert first == "backup" and "backup" not in rest
    assert rest[0] == "sacctmgr -i -Q add qos fast" and any("add user ann account=lab" in line for line in rest)
    record = json.loads((tmp_path / "state" / "record.json").read_text())
    assert record == {"qos": ["fast"], "accounts": ["lab"], "users": ["ann@lab"]}


def test_failed_backup_changes_nothing_and_is_reported(program: Program, tmp_path: Path) -> None:
    (tmp_path / "full").touch()
    done = program("apply")
    assert done.returncode == 1
    assert done.stderr == ("cannot make a backup, so nothing was changed: gzip: stdout: No space left on device\n")
    assert heard(tmp_path) == ["backup"] and not (tmp_path / "state").exists()


def test_failed_command_is_retried_without_a_second_backup(program: Program, tmp_path: Path) -> None:
    (tmp_path / "refuses").write_text("add qos fast\n")
    done = program("apply")
    assert done.stderr == "sacctmgr add qos fast: Error with request: Job(s) active\n"
    assert heard(tmp_path) == ["backup", *["sacctmgr -i -Q add qos fast"] * 3]
    # It failed, and the next run still has the record of what to remove.
    assert json.loads((tmp_path / "state" / "record.json").read_text())["users"] == ["ann@lab"]


def test_no_difference_needs_no_backup_and_no_change(program: Program, tmp_path: Path) -> None:
    made_by_us(tmp_path)
    assert program("check").returncode == 0, program("check").stdout
    assert program("apply").returncode == 0 and heard(tmp_path) == []


def test_qos_used_by_jobs_is_not_deleted(program: Program, tmp_path: Path) -> None:
    made_by_us(tmp_path)
    (tmp_path / "queued").write_text("17\n18\n")
    without = "accounting: {accounts: {lab: {users: [ann]}}}\n"
    done = program("apply", without)
    assert done.returncode == 1
    assert done.stderr == "the QOS fast has jobs: 17, 18. Wait for them, or end them with scancel\n"
    (tmp_path / "queued").unlink()
    silent = program("apply", without).stderr
    assert silent.startswith("cannot list the jobs with the QOS fast: cat: ") and heard(tmp_path) == ["backup"] * 2
    (tmp_path / "queued").write_text("")
    assert program("apply", without).returncode == 0
    assert heard(tmp_path)[-1] == "sacctmgr -i -Q delete qos fast"
    assert json.loads((tmp_path / "state" / "record.json").read_text())["qos"] == []


def test_user_with_active_jobs_is_reported_once_with_the_fix(program: Program, tmp_path: Path) -> None:
    made_by_us(tmp_path)
    (tmp_path / "refuses").write_text("delete user ann\n")
    done = program("apply", "accounting: {accounts: {lab: {}}, qos: {fast: {priority: 10}}}\n")
    assert done.stderr == (
        "sacctmgr delete user ann account=lab cluster=reef: Error with request: Job(s) active. "
        "Wait for the jobs, or end them with scancel\n"
    )
    assert heard(tmp_path) == ["backup", "sacctmgr -i -Q delete user ann account=lab cluster=reef"]


OPTIONS = LAB.replace(
    "priority: 10", "priority: 10, options: {Flags: DenyOnLimit, UsageFactor: 0.5, MaxTRESPerUser: mem=2G}"
)


def test_options_of_a_qos_are_set_compared_in_any_spelling_and_reset(program: Program, tmp_path: Path) -> None:
    assert program("apply", OPTIONS).returncode == 0
    line = "sacctmgr -i -Q modify qos fast set Flags=DenyOnLimit UsageFactor=0.5 MaxTRESPerUser=mem=2G"
    assert line in heard(tmp_path)
    record = json.loads((tmp_path / "state" / "record.json").read_text())
    assert record["qos_options"] == ["fast Flags", "fast MaxTRESPerUser mem", "fast UsageFactor"]
    # As Slurm shows them: the columns of Shoal's own limits, then Flags and UsageFactor.
    (tmp_path / "shown-assoc").write_text("lab||root|1" + "|" * 9 + "\nlab|ann||1" + "|" * 9 + "\n")
    (tmp_path / "shown-user").write_text("ann|lab\n")
    shown = "normal|0" + "|" * 9 + "1.000000\nfast|10|||mem=2048M" + "|" * 6 + "DenyOnLimit|0.500000\n"
    (tmp_path / "shown-qos").write_text(shown)
    assert program("check", OPTIONS).returncode == 0, program("check", OPTIONS).stdout
    assert program("check").stdout == "modify qos fast set Flags=-1 MaxTRESPerUser=mem=-1 UsageFactor=1\n"
    assert program("apply").returncode == 0
    assert "qos_options" not in json.loads((tmp_path / "state" / "record.json").read_text())
