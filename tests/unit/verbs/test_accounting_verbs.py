"""The verbs of accounting over a cluster in memory: usage, backups, ended jobs, and its state."""

import time
from dataclasses import replace

import pytest
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_clusters import AT_ONCE, context_of
from tests.support.fake_world import LAB, World, host_facts, lab
from tests.support.screens import screen_text

from shoal.agent.facts import FileFact
from shoal.cli.accounting_commands import show_restore, show_usage
from shoal.cli.cluster_screens import accounting_line
from shoal.cli.host_commands import show_keys
from shoal.errors import ShoalError, SlurmError, Unreachable, UsageError
from shoal.hosts.api import Result
from shoal.jobs.record import JOBCOMP_COMMAND, RECENT_COMMAND, SACCT_COMMAND
from shoal.roles.accounting import DATABASE_PROGRAM, SACCTMGR_CONF
from shoal.slurm.state import JOB_RECORD
from shoal.slurm.usage import UsageRow
from shoal.spec.finding import Finding
from shoal.verbs.health import ACCOUNTING_COMMAND, AccountingHealth, accounting_findings, accounting_health
from shoal.verbs.jobs import jobs
from shoal.verbs.keys import KeysResult, RotatedKey
from shoal.verbs.restore import SLURMDBD_COMMAND, list_backups, restore
from shoal.verbs.up import plan, up
from shoal.verbs.usage import PING_COMMAND, UsageResult, usage
from shoal_simulators.fake_host import Call

BOOKS = LAB + "accounting: true\n"
BOOKS_ON_N2 = LAB + "accounting: {host: n2}\n"
RENTS = BOOKS.replace("[lab]", "[lab, cloud]").replace(
    "partitions:", "  cloud: {provider: lambda, type: gpu_1x_a10, max: 2, image: debian-12, price: 0.75}\npartitions:"
)
LIST = b"slurm_acct_db-2-daily.sql.gz 2048 2000.5\nslurm_acct_db-1-change.sql.gz 1024 1000.5\n"
OLD = (
    b"JobId=3 UserId=root(0) GroupId=root(0) Name=x JobState=COMPLETED Partition=main TimeLimit=UNLIMITED "
    b"StartTime=2026-11-15T09:54:03 EndTime=2026-11-15T09:54:04 NodeList=n1 NodeCnt=1 ProcCnt=1 "
    b"WorkDir=/tmp ExitCode=0:0\n"
)


def world(text: str = BOOKS, **answers: object) -> World:
    made = lab(text)
    made.hosts["c1"].answers = {PING_COMMAND: b"reef\n", **made.hosts["c1"].answers, **answers}  # type: ignore[dict-item]
    return made


def answer(made: World, *command: str, with_: object, host: str = "c1") -> None:
    made.hosts[host].answers |= {command: with_}  # type: ignore[dict-item]


# ---- usage


@cases(
    "text, nodes, row",
    (BOOKS, "n1", ("lab", 2.0, None)),
    (RENTS + "providers: {lambda: {key: env:KEY}}\n", "cloud[1-2]", ("cloud", 2.0, 1.5)),
    ids=["a lab", "rented, in any state"],
)
async def test_usage_is_read_from_slurmdbd_and_summed(text: str, nodes: str, row: tuple[object, ...]) -> None:
    made = world(text)
    line = JOB_RECORD.join(("1", "ann", "lab", "1000", "4600", nodes, "cpu=4,gres/gpu=2", "train")) + "\n"
    answer(made, "env", with_=line.encode())
    result = await usage(context_of(made), "nodeset", "1970-01-01", None)
    assert [(one.name, one.gpu_hours, one.cost) for one in result.rows] == [row]
    assert result.total.jobs == 1


async def test_usage_without_accounting_or_by_an_unknown_grouping_is_rejected() -> None:
    assert await error_of(UsageError, usage(context_of(world(LAB)), "user", None, None)) == (
        "cluster reef has no accounting\n"
        "  fix: add `accounting: true` to the file and run `shoal up`; it records jobs from then on"
    )
    with pytest.raises(UsageError, match="--by host is not a grouping"):
        await usage(context_of(world()), "host", None, None)


async def test_silent_slurmdbd_is_reported() -> None:
    made = world(BOOKS_ON_N2)
    answer(made, *PING_COMMAND, with_=Result(1, stderr=b"sacctmgr: error: n2:6819: Connection refused\n"))
    assert await error_of(SlurmError, usage(context_of(made), "user", None, None)) == (
        "slurmdbd on n2 does not answer: sacctmgr: error: n2:6819: Connection refused\n"
        "  fix: `shoal status` shows its state; `shoal jobs --all` lists ended jobs without it"
    )
    answer(made, *PING_COMMAND, with_=Result(124))
    with pytest.raises(SlurmError, match="slurmdbd on n2 does not answer"):
        await usage(context_of(made), "user", None, None)
    assert not any(argv[0] == "env" for argv in made.hosts["c1"].argvs)  # sacct would wait for minutes


def test_hours_without_a_price_are_shown_separately() -> None:
    rows = (UsageRow("ann", 2, 8.0, 4.0, 10.0), UsageRow("bob", 1, 1.0, 3.0, None, 3.0))
    whole = UsageRow("total", 3, 9.0, 7.0, 10.0, 3.0)
    text = screen_text(show_usage, UsageResult("reef", "user", 0, 100, rows, whole))
    assert "user" in text and "GPU hours" in text and "10.00" in text and "total" in text
    assert "not in the cost: 3.00 GPU hours on nodesets that have no `price`" in text
    assert "no usage" in screen_text(show_usage, UsageResult("reef", "user", 0, 100, (), whole))
    row = UsageRow("17", 1, 1.0, 3.0, None, 3.0, "ann: [red]x")
    text = screen_text(show_usage, UsageResult("reef", "job", 0, 100, (row,), row))
    assert "cost" not in text and "ann: [red]x" in text, "no price, no column"


# ---- backups


def restorable(
    backups: object = LIST, restored: object = b"", slurmdbd: object = b"answers\n", start: object = b""
) -> World:
    made = world()
    answer(made, DATABASE_PROGRAM, "list", with_=backups)
    answer(made, DATABASE_PROGRAM, "restore", with_=restored)
    answer(made, *SLURMDBD_COMMAND, with_=slurmdbd)
    answer(made, "sh", with_=start)
    return made


async def test_latest_backup_is_restored_and_the_previous_records_are_named() -> None:
    told = {"n": LIST}

    def put_back(call: Call) -> bytes:
        assert call.argv[2] == "slurm_acct_db-2-daily.sql.gz"
        told["n"] = b"slurm_acct_db-3-restore.sql.gz 4096 3000.5\n" + LIST
        return b""

    made = restorable(lambda call: told["n"], put_back)
    listed = await list_backups(context_of(made))
    assert [(backup.name, backup.size) for backup in listed.backups] == [
        ("slurm_acct_db-2-daily.sql.gz", 2048),
        ("slurm_acct_db-1-change.sql.gz", 1024),
    ]
    assert "on c1; `shoal restore NAME` restores one" in screen_text(show_restore, listed)
    said = await error_of(UsageError, restore(context_of(made), "../etc/passwd"))
    assert "there is no backup '../etc/passwd'" in said
    assert (DATABASE_PROGRAM, "restore", "../etc/passwd") not in made.hosts["c1"].argvs
    result = await restore(context_of(made), "latest")
    assert (result.restored, result.before) == ("slurm_acct_db-2-daily.sql.gz", "slurm_acct_db-3-restore.sql.gz")
    assert "the previous records are in slurm_acct_db-3-restore.sql.gz" in screen_text(show_restore, result)


@cases(
    "answers, said",
    (
        {"start": Result(1, stderr=b"Job for slurmctld.service failed.\n")},
        "slurm_acct_db-2-daily.sql.gz is restored, but slurmctld on c1 did not start again: "
        "Job for slurmctld.service failed.\n  fix: run `shoal up`",
    ),
    (
        {"restored": Result(1, stderr=b"gzip: unexpected end of file\n")},
        "c1: cannot restore slurm_acct_db-2-daily.sql.gz: gzip: unexpected end of file\n"
        "  fix: try another backup (`shoal restore` lists them); the records are unchanged",
    ),
    ids=["slurmctld does not start", "unreadable backup"],
)
async def test_failed_restore_is_reported_with_the_state_of_the_records(answers: dict[str, object], said: str) -> None:
    assert await error_of(ShoalError, restore(context_of(restorable(**answers)), "latest")) == said


@cases("said, asked", (b"activating\n", 3), (b"active\n", 20), ids=["it ends", "it hangs"])
async def test_backup_rejected_by_slurmdbd_is_reported_with_the_fix(said: bytes, asked: int) -> None:
    made = restorable(b"slurm_acct_db-3-restore.sql.gz 4096 3000.5\n" + LIST, slurmdbd=said)
    assert await error_of(SlurmError, restore(context_of(made), "slurm_acct_db-1-change.sql.gz")) == (
        "slurmdbd on c1 does not start with this backup; `shoal ssh c1 journalctl -u slurmdbd` shows why\n"
        "  fix: `shoal restore slurm_acct_db-3-restore.sql.gz --yes` puts back what was there"
    )
    assert made.hosts["c1"].argvs.count(SLURMDBD_COMMAND) == asked


async def test_missing_backup_differs_from_missing_database() -> None:
    made = restorable(b"")
    with pytest.raises(ShoalError, match="there is no backup yet"):
        await restore(context_of(made), "latest")
    assert "no backups yet" in screen_text(show_restore, await list_backups(context_of(made)))
    with pytest.raises(ShoalError, match="c1 has no accounting database yet"):
        await list_backups(context_of(world()))


# ---- jobs that ended


@cases("text", LAB, BOOKS)
async def test_ended_jobs_come_from_the_file_with_and_without_slurmdbd(text: str) -> None:
    made = world(text)
    answer(made, *JOBCOMP_COMMAND, with_=OLD)
    answer(made, *SACCT_COMMAND, with_=Result(1, stderr=b"sacct: error: Connection refused\n"))
    answer(made, "scontrol", "-o", "show", "job", with_=b"No jobs in the system\n")
    told = await jobs(context_of(made), ended=True)
    assert [(view.record.id, view.record.state) for view in told.jobs] == [("3", "COMPLETED")]
    later = b"2999-01-01T00:00:00\n"
    answer(made, *RECENT_COMMAND, with_=later + OLD)
    assert (await jobs(context_of(made))).jobs == (), "it ended more than a day ago"


# ---- how it does


async def test_status_queries_the_database_host() -> None:
    made = world(BOOKS_ON_N2)
    answer(made, *ACCOUNTING_COMMAND, with_=b"active\nfailed\nsuccess\n1000.5\n", host="n2")
    async with made.fleet() as fleet:
        told = await accounting_health(fleet, made.spec)
    assert told == AccountingHealth("n2", "active", "failed", 1000.5)
    assert not told.well
    assert accounting_line(told).startswith("accounting: [red]slurmdbd is failed[/], on n2; [yellow]newest backup ")


async def test_check_reports_a_stopped_database_and_an_old_or_failed_backup() -> None:
    made = world(BOOKS_ON_N2)
    facts = host_facts("n2", "10.0.0.12", files={SACCTMGR_CONF: FileFact(there=True)})
    async with made.fleet() as fleet:
        assert await accounting_findings(fleet, made.spec, {"n2": host_facts("n2", "10.0.0.12")}) == []  # no `up` yet

        async def found(said: str) -> list[Finding]:
            answer(made, *ACCOUNTING_COMMAND, with_=said.encode(), host="n2")
            return await accounting_findings(fleet, made.spec, {"n2": facts})

        assert await found(f"active\nactive\nsuccess\n{time.time() - 86400}\n") == []
        down, old = await found("inactive\nfailed\nsuccess\n86400\n")
        [failed] = await found(f"active\nactive\nexit-code\n{time.time() - 60}\n")
        [never] = await found("active\nactive\nexit-code\n")
    assert str(down) == (
        "n2: accounting does not work: jobs run on, and slurmctld keeps their records until it does, found MariaDB is "
        "inactive, slurmdbd is failed, run `shoal up`; `shoal ssh n2 journalctl -u mariadb -u slurmdbd` shows why"
    )
    assert (down.level, old.level) == ("error", "warning")
    missing = "n2: the accounting database was not backed up last night, found"
    assert str(old).startswith(f"{missing} newest backup 1970-")
    assert str(failed).startswith(f"{missing} newest backup 20"), "though there is a recent one"
    assert str(never) == (
        f"{missing} no backup yet, `shoal ssh n2 journalctl -u shoal-backup` shows why; is the disk full?"
    )
    assert "; [yellow]newest backup 1970-" in accounting_line(AccountingHealth("n2", "active", "active", 86400.0))


async def test_silent_database_host_does_not_stop_status() -> None:
    made = world(BOOKS_ON_N2)
    made.hosts["n2"].unreachable = Unreachable("n2", "no route")
    async with made.fleet() as fleet:
        told = await accounting_health(fleet, made.spec)
        assert await accounting_health(fleet, world(LAB).spec) is None
    assert told is not None
    assert accounting_line(told) == "accounting: [red]no route[/], on n2"
    well = AccountingHealth("c1", "active", "active")
    assert accounting_line(well) == "accounting: [green]works[/], on c1; no backup yet"


# ---- keys, as a person sees them


def test_rotation_reports_the_failure_time_of_slurm_and_the_missing_hosts() -> None:
    done = RotatedKey("munge", ("c1", "n1"), False, 0.25, {"c1": 0.25}, 40, 1.23)
    text = screen_text(show_keys, KeysResult("reef", (done,), {"n2": Unreachable("n2", "does not answer")}))
    assert "munge: a new key on c1,n1" in text
    assert "Slurm failed for 0.25 s (40 requests, the slowest answer took 1.2 s)" in text
    assert "n2 still has the old key: run `shoal up` once reachable" in text
    again = screen_text(show_keys, KeysResult("reef", (RotatedKey("munge", ("c1",), True, 0.0, {}, 9),)))
    assert "an earlier rotation is finished on c1" in again and "Slurm always answered (9 requests" in again


# ---- another host for the database


async def test_database_moves_without_its_records_only_on_request() -> None:
    made = lab(BOOKS)
    assert (await up(context_of(made), AT_ONCE)).whole
    made.look_again()
    for agent in made.agents.values():
        there = f"file {SACCTMGR_CONF}" in agent.items
        agent.facts = replace(agent.facts, files={**agent.facts.files, SACCTMGR_CONF: FileFact(there=there)})
    moved = context_of(made, BOOKS_ON_N2)
    told = "n2: accounting moves here from c1 and begins with an empty database: the records of earlier jobs stay there"
    findings = [str(finding) for finding in (await plan(moved)).findings]
    assert [text.startswith(f"{told}, to move them") for text in findings] == [True]
    before = len(made.agents["c1"].requests)
    with pytest.raises(ShoalError) as caught:
        await up(moved, AT_ONCE)
    assert str(caught.value).startswith(f"{told}; nothing was changed\n  fix: use --leave-records; to move them")
    assert [request["op"] for request in made.agents["c1"].requests[before:] if request["op"] == "apply"] == []
    assert (await up(moved, AT_ONCE, leave_records=True)).whole
    assert "service slurmdbd" in made.agents["n2"].items
    assert not made.agents["c1"].items["service slurmdbd"]["running"]
