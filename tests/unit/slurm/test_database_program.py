"""The program that backs up and restores the database, run whole, with stand-ins for MariaDB and systemd."""

import gzip
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.slurm.accounting import BACKUPS, database_program

MARIADB = """\
#!/bin/sh
case "$*" in
  *"SHOW TABLES"*slurm_acct_db_restore) cat {place}/loaded ;;
  *"SHOW TABLES"*) printf 'reef_job_table\\ntres_table\\n' ;;
  *-e*) echo "$2" >> {place}/heard ;;
  slurm_acct_db_restore) grep -o '[a-z]*_job_table' > {place}/loaded || true ;;
  *) cat >> {place}/heard ;;
esac
"""
DUMP = """\
#!/bin/sh
[ ! -e {place}/fails ] || {{ echo "mariadb-dump: Got errno 28 on write" >&2; exit 5; }}
echo "CREATE TABLE reef_job_table"; echo "-- Dump completed on today"
"""
SYSTEMCTL = """\
#!/bin/sh
echo "$*" >> {place}/heard
"""
Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    programs = {"mariadb": MARIADB, "mariadb-dump": DUMP, "systemctl": SYSTEMCTL}
    programs = {name: text.format(place=tmp_path) for name, text in programs.items()}
    for name, text in {**programs, "database": database_program("reef", 3)}.items():
        (tmp_path / name).write_text(text.replace(BACKUPS, str(tmp_path / "backups")))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "backups").mkdir()

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        line = [tmp_path / "database", *words]
        return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)

    return run


def backups(place: Path) -> list[str]:
    return sorted(path.name for path in (place / "backups").iterdir() if not path.name.startswith("."))


def put(place: Path, name: str, text: str) -> None:
    (place / "backups" / name).write_bytes(gzip.compress(text.encode()))


def heard(place: Path) -> list[str]:
    return (place / "heard").read_text().splitlines() if (place / "heard").exists() else []


def test_newest_backups_of_each_reason_are_kept_with_mode_600(program: Program, tmp_path: Path) -> None:
    for day in range(1, 6):
        put(tmp_path, f"slurm_acct_db-2026010{day}T030000Z-daily.sql.gz", "old")
    put(tmp_path, "slurm_acct_db-20250101T000000Z-change.sql.gz", "old")
    name = program("backup", "daily").stdout.strip()
    assert backups(tmp_path) == [
        "slurm_acct_db-20250101T000000Z-change.sql.gz",
        "slurm_acct_db-20260104T030000Z-daily.sql.gz",
        "slurm_acct_db-20260105T030000Z-daily.sql.gz",
        name,
    ]
    assert (tmp_path / "backups" / name).stat().st_mode & 0o777 == 0o600


def test_failed_dump_leaves_no_file_and_keeps_the_others(program: Program, tmp_path: Path) -> None:
    for day in range(1, 5):
        put(tmp_path, f"slurm_acct_db-2026010{day}T030000Z-daily.sql.gz", "old")
    before = backups(tmp_path)
    (tmp_path / "fails").touch()
    done = program("backup", "daily")
    assert done.returncode != 0 and done.stderr == "mariadb-dump: Got errno 28 on write\n"
    assert backups(tmp_path) == before


def test_restore_replaces_the_tables_in_a_single_statement(program: Program, tmp_path: Path) -> None:
    put(tmp_path, "old.sql.gz", "CREATE TABLE reef_job_table\n-- Dump completed on 2026-01-01\n")
    done = program("restore", "old.sql.gz")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in backups(tmp_path) and done.stdout.strip().endswith("-restore.sql.gz")
    assert heard(tmp_path) == [
        "DROP DATABASE IF EXISTS slurm_acct_db_restore",
        "CREATE DATABASE slurm_acct_db_restore",
        "stop slurmdbd",
        "DROP DATABASE IF EXISTS slurm_acct_db_former",
        "CREATE DATABASE slurm_acct_db_former",
        "RENAME TABLE slurm_acct_db.`reef_job_table` TO slurm_acct_db_former.`reef_job_table`,"
        "slurm_acct_db.`tres_table` TO slurm_acct_db_former.`tres_table`,"
        "slurm_acct_db_restore.`reef_job_table` TO slurm_acct_db.`reef_job_table`",
        "DROP DATABASE IF EXISTS slurm_acct_db_former",
        "start slurmdbd",
        "DROP DATABASE IF EXISTS slurm_acct_db_restore",
    ]


@cases(
    "text, told",
    ("CREATE TABLE reef_job_table\n", "old.sql.gz breaks off before its end"),
    ("CREATE TABLE pond_job_table\n-- Dump completed\n", "old.sql.gz has no records of the cluster reef"),
    ("CREATE TABLE pets\n-- Dump completed\n", "old.sql.gz has no records of the cluster reef"),
)
def test_invalid_backup_is_rejected_while_slurmdbd_keeps_running(
    program: Program, tmp_path: Path, text: str, told: str
) -> None:
    put(tmp_path, "old.sql.gz", text)
    done = program("restore", "old.sql.gz")
    assert (done.returncode, done.stderr) == (2, told + "\n")
    assert not any("slurmdbd" in line or "RENAME" in line for line in heard(tmp_path))


def test_restore_needs_a_backup_of_the_current_records(program: Program, tmp_path: Path) -> None:
    put(tmp_path, "old.sql.gz", "CREATE TABLE reef_job_table\n-- Dump completed\n")
    (tmp_path / "fails").touch()
    assert program("restore", "old.sql.gz").returncode != 0
    assert "start slurmdbd" in heard(tmp_path) and not any("RENAME" in line for line in heard(tmp_path))


@cases("name", "../shadow.gz", "", ".lock", "none.sql.gz")
def test_invalid_backup_name_is_rejected(program: Program, tmp_path: Path, name: str) -> None:
    assert program("restore", name).returncode == 2
    assert heard(tmp_path) == []
