"""Costs from the ledger: sums that are exact to a millionth, and their split by user and job."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases import cases
from tests.support.programs import stand_in
from tests.unit.cloud.rentals import rental

from shoal.cloud.providers.api import Billing
from shoal.cloud.rental import Rental, cost, cost_between, micros
from shoal.cloud.service.costs import (
    CostReport,
    JobCost,
    NodeUse,
    TotalCost,
    decode,
    encode,
    main,
    summary,
    total_cost,
    uses_of,
)
from shoal.cloud.service.ledger import Ledger
from shoal.jobs.record import JobRecord, parse_jobcomp, parse_runs

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC).timestamp()
HOUR = 3600.0


@pytest.fixture
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def machine(node: str = "burst1", since: float = 3.0, until: float | None = None, **values: Any) -> Rental:
    """One at $10 an hour, `since` and `until` in hours before now; its node takes jobs from the first minute on."""
    begun = NOW - since * HOUR
    one = rental(f"t-{node}-{since}", node, state="joined", id="i", usd_hour=10.0, intended_at=begun, made_at=begun)
    one = replace(one, joined_at=begun)
    return replace(one if until is None else replace(one, state="gone", gone_at=NOW - until * HOUR), **values)


def use(job: str, start: float, end: float, node: str = "burst1", user: str = "ann") -> NodeUse:
    return NodeUse(job, user, "train", node, NOW - start * HOUR, NOW - end * HOUR)


@cases(
    "billing, changed, expected",
    (Billing(), 2.0, 10 + 2 * 20),  # one hour at the first price, two at the second
    (Billing(step=3600), 1.5, 2 * 10 + 20),  # an hour that had begun costs what it cost when it began
    (Billing(step=3600), 2.0, 10 + 2 * 20),
    (Billing(), 5.0, 3 * 20),  # before it was made
    (Billing(), -1.0, 3 * 10),  # of which nothing is billed yet
)
def test_new_price_counts_from_its_change(billing: Billing, changed: float, expected: float) -> None:
    one = machine(billing=billing, usd_hour=20.0, prices=((0.0, 10.0), (NOW - changed * HOUR, 20.0)))
    assert cost(one, NOW) == micros(expected)


def test_summary_has_now_today_and_month_by_nodeset() -> None:
    other = machine("spot1", 40, 20, nodeset="spot")  # 4 of its 20 hours were before midnight of yesterday's day
    found = summary([machine(), other], [], NOW)
    assert (found.per_hour, found.machines) == (micros(10), 1)
    assert found.today == micros(30)
    assert found.total == micros(230)
    assert found.nodesets == {"burst": micros(30), "spot": micros(200)}
    assert found.month == "2026-11"


def test_total_is_that_of_all_months() -> None:
    long, host = machine(since=24 * 40), replace(machine("controller", 24 * 40), nodeset="")
    unpriced = replace(machine("lab1", 2), usd_hour=None, prices=())
    assert total_cost([long, host, unpriced], NOW) == TotalCost(micros(9600), micros(9600), ("lab1",))


def test_cost_is_split_at_midnight_and_at_the_month_end() -> None:
    long = machine(since=24 * 20)
    found = summary([long], [], NOW)
    assert found.today == micros(120)
    assert found.total == micros(10) * 24 * 14 + micros(120)
    october = summary([long], [], NOW, "2026-10")
    assert october.month == "2026-10"
    assert october.total == micros(10) * 24 * 20 - found.total
    assert (october.today, october.per_hour) == (found.today, found.per_hour)


def test_failed_order_costs_nothing_and_open_order_counts_hourly() -> None:
    order = rental("o", usd_hour=10.0, intended_at=NOW - HOUR)
    failed = replace(order, token="f", state="failed", gone_at=NOW)
    found = summary([order, failed], [], NOW)
    assert (found.total, found.today, found.per_hour, found.machines) == (0, 0, micros(10), 1)


def test_job_pays_for_its_time_and_the_rest_is_idle() -> None:
    found = summary([machine()], [use("7", 2.5, 1), use("8", 1, 0.5, user="bob")], NOW)
    assert found.jobs == (JobCost("7", "ann", "train", micros(15)), JobCost("8", "bob", "train", micros(5)))
    assert found.users == {"ann": micros(15), "bob": micros(5)}
    assert (found.idle, found.starting) == (micros(10), 0)


def test_time_before_join_is_starting_and_not_idle() -> None:
    found = summary([machine(joined_at=NOW - 2 * HOUR)], [use("7", 2, 1)], NOW)
    assert (found.starting, found.users, found.idle) == (micros(10), {"ann": micros(10)}, micros(10))
    never = summary([machine(joined_at=None)], [], NOW)
    assert (never.starting, never.idle) == (micros(30), 0)


def test_jobs_on_a_shared_machine_share_its_cost() -> None:
    found = summary([machine()], [use("7", 3, 1), use("8", 2, 0, user="bob")], NOW)
    assert {job.id: job.micros for job in found.jobs} == {"7": micros(15), "8": micros(15)}
    assert found.idle == 0


def test_multi_node_job_pays_for_all_its_nodes() -> None:
    uses = [use("7", 3, 0, node) for node in ("burst1", "burst2")]
    found = summary([machine("burst1"), machine("burst2")], uses, NOW)
    assert found.jobs == (JobCost("7", "ann", "train", micros(60)),)


def test_job_pays_for_the_machine_behind_its_node_at_the_time() -> None:
    before, after = machine(since=10, until=8, usd_hour=1.0), machine(since=2)
    found = summary([before, after], [use("7", 9, 8), use("8", 2, 1)], NOW)
    assert {job.id: job.micros for job in found.jobs} == {"7": micros(1), "8": micros(10)}


def test_jobs_on_unrented_nodes_cost_nothing() -> None:
    found = summary([machine()], [use("7", 3, 0, node="lab1")], NOW)
    assert (found.jobs, found.idle) == ((), micros(30))


def test_rounded_up_billing_is_divided_like_the_time() -> None:
    by_hour = machine(since=1.5, billing=Billing(3600))  # two hours are billed
    found = summary([by_hour], [use("7", 0.75, 0)], NOW)
    assert found.total == micros(20)
    assert (found.users, found.idle) == ({"ann": micros(10)}, micros(10))


def test_machine_without_a_price_is_named_and_not_summed() -> None:
    unpriced = machine("odd1", usd_hour=None, offer=replace(machine().offer, usd_hour=None))
    found = summary([machine(), unpriced], [], NOW)
    assert (found.total, found.unpriced) == (micros(30), ("odd1",))
    assert (found.unpriced_now, found.unpriced_today) == (1, 1)
    ended = replace(unpriced, state="gone", gone_at=NOW - HOUR)
    found = summary([ended], [], NOW + 24 * HOUR)
    assert (found.unpriced, found.unpriced_now, found.unpriced_today) == (("odd1",), 0, 0)


@given(
    lives=st.lists(
        st.tuples(st.integers(0, 3), st.floats(0, 900), st.floats(0, 900), st.integers(0, 99_999_999)), max_size=6
    ),
    spans=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 900), st.floats(0, 900)), max_size=12),
    billing=st.builds(Billing, st.sampled_from([1, 60, 3600]), st.sampled_from([0, 60])),
)
def test_users_starting_and_idle_add_up_to_the_month(lives: Any, spans: Any, billing: Billing) -> None:
    rentals = [
        replace(machine(f"n{node}", max(a, b), min(a, b)), token=str(number), usd_hour=price / 1e6, billing=billing)
        for number, (node, a, b, price) in enumerate(lives)
    ]
    uses = [use(str(number), max(a, b), min(a, b), f"n{node}") for number, (node, a, b) in enumerate(spans)]
    found = summary(rentals, uses, NOW)
    begin = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
    assert found.total == sum(cost_between(one, begin, NOW) for one in rentals) == sum(found.nodesets.values())
    assert sum(found.users.values()) + found.starting + found.idle == found.total
    assert sum(job.micros for job in found.jobs) == sum(found.users.values())
    assert all(job.micros > 0 for job in found.jobs)
    assert found.starting >= 0 and found.idle >= 0


# Jobs as Slurm's records have them.


@pytest.mark.usefixtures("in_utc")
def test_job_records_become_node_uses() -> None:
    records = [
        JobRecord(
            "7", "COMPLETED", "a", "ann", nodes="burst[1-2]", start="2026-11-15T09:00:00", end="2026-11-15T10:00:00"
        ),
        JobRecord("8", "RUNNING", "b", "bob", nodes="burst1", start="2026-11-15T11:00:00", end="2026-11-16T11:00:00"),
        JobRecord("9", "PENDING", start="2026-11-17T00:00:00"),
        JobRecord("10", "CONFIGURING", nodes="burst2", start="2026-11-15T11:59:00"),
        JobRecord("11", "CANCELLED", nodes="", start="", end="2026-11-15T10:00:00"),
    ]
    nine, ten, eleven = NOW - 3 * HOUR, NOW - 2 * HOUR, NOW - HOUR
    assert uses_of(records, NOW) == [
        NodeUse("7", "ann", "a", "burst1", nine, ten),
        NodeUse("7", "ann", "a", "burst2", nine, ten),
        NodeUse("8", "bob", "b", "burst1", eleven, NOW),
    ]


@pytest.mark.usefixtures("in_utc")
def test_each_run_of_a_requeued_job_counts() -> None:
    lines = "".join(
        f"JobId=3 UserId=ann(1000) GroupId=x(1) Name=x JobState={state} Partition=main TimeLimit=60 "
        f"StartTime=2026-11-15T0{hour}:00:00 EndTime=2026-11-15T0{hour}:30:00 NodeList=burst1 NodeCnt=1 ProcCnt=1 "
        "WorkDir=/tmp ExitCode=0:0\n"
        for hour, state in ((1, "PREEMPTED"), (2, "NODE_FAIL"), (3, "COMPLETED"))
    )
    assert len(parse_jobcomp(lines)) == 1  # which is right for a list of jobs
    found = uses_of(parse_runs(lines), NOW)
    assert [(one.start, one.end - one.start) for one in found] == [
        (NOW - hours * HOUR, 1800.0) for hours in (11, 10, 9)
    ]


@pytest.mark.usefixtures("in_utc")
def test_job_in_both_records_counts_once() -> None:
    record = JobRecord("7", "COMPLETED", nodes="burst1", start="2026-11-15T09:00:00", end="2026-11-15T10:00:00")
    assert len(uses_of([record, record], NOW)) == 1


# The report that the controller prints.


def test_report_round_trips_and_ignores_unknown_fields() -> None:
    whole = summary([machine(), machine("odd1", usd_hour=None)], [use("7", 2, 1)], NOW)
    assert decode(encode(whole)) == whole
    more = {**json.loads(encode(whole)), "moon": 1}
    more["jobs"][0]["star"] = 2
    assert decode(json.dumps(more)) == whole
    for text in ("", "[]", "{}", "Traceback"):
        with pytest.raises(ValueError, match=r"."):
            decode(text)


def test_command_reads_the_ledger_and_slurm_records(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    now = time.time()
    with Ledger.open(path) as ledger:
        ledger.intend(rental("t", "burst1", usd_hour=36.0, intended_at=now - 100))
        ledger.record_machine("t", "i", None, now - 100)
    programs = tmp_path / "bin"
    started = datetime.fromtimestamp(now - 50).strftime("%Y-%m-%dT%H:%M:%S")
    job = f"JobId=7 JobName=x UserId=ann(1000) JobState=RUNNING NodeList=burst1 StartTime={started} EndTime=Unknown"
    for name, output in (("scontrol", job), ("squeue", "7 1000")):
        stand_in(programs / name, f"echo '{output}'")
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "shoal.cloud.service.costs", "--ledger", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True)
    found = decode(done.stdout)
    assert found.per_hour == micros(36)
    assert found.total >= micros(1)
    assert found.users["ann"] + found.starting == found.total
    assert found.unattributed == ""


def test_sums_are_reported_without_slurm_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.intend(rental("t", usd_hour=36.0, intended_at=time.time() - 100))
        ledger.record_machine("t", "i", None, time.time() - 100)
    assert main(["--ledger", str(tmp_path / "ledger.db")]) == 0
    found: CostReport = decode(capsys.readouterr().out)
    assert found.total > 0
    assert "scontrol" in found.unattributed


def test_unreadable_ledger_is_reported_with_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ledger", str(tmp_path / "none.db")]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "error": f"cannot open the ledger {tmp_path}/none.db: unable to open database file",
        "fix": "nothing was rented yet; `shoal up` creates it",
    }
