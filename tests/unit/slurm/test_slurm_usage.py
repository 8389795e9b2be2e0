"""Usage: sacct's output parsed, and summed by user, account, job and nodeset."""

import pytest
from tests.support.cases import cases

from shoal.errors import UsageError
from shoal.slurm.state import JOB_RECORD
from shoal.slurm.usage import JobUsage, parse_usage, summarize_usage, usage_command, usage_total
from shoal.verbs.usage import parse_period, parse_when

HOUR = 3600.0


def line(*fields: str) -> str:
    return JOB_RECORD.join(fields) + "\n"


ANSWER = (
    line("1", "ann", "lab", "3600", "7200", "gpu[1-2]", "billing=4,cpu=4,gres/gpu=4,node=2", "train | me")
    + line("2", "bob", "lab", "0", "36000", "gpu1", "cpu=1,gres/gpu=8", "old")
    + line("3", "bob", "bio", "Unknown", "Unknown", "None assigned", "", "waits")
    + line("4_1", "bob", "bio", "7200", "Unknown", "far1", "cpu=2,gres/gpu=1", "a\nb")
)
NODESETS = {"gpu1": "gpu", "gpu2": "gpu", "far1": "far"}


def runs() -> list[JobUsage]:
    return parse_usage(ANSWER, now=4 * HOUR)


def test_sacct_query_covers_every_run_of_the_period_in_epoch_seconds() -> None:
    command = usage_command(100.4, 200)
    assert command[:3] == ("env", "SLURM_TIME_FORMAT=%s", "sacct")
    assert {"-a", "-D", "-X", "uts100", "uts200"} <= set(command)


def test_name_of_a_job_is_no_usage_of_another_user() -> None:
    forged = "\x1f".join(("9", "bob", "lab", "3600", "7200", "gpu1", "gres/gpu=8", "x"))
    answer = line("1", "ann", "lab", "3600", "7200", "gpu1", "gres/gpu=1", f"a\n{forged}")
    assert [(run.id, run.user) for run in parse_usage(answer, now=4 * HOUR)] == [("1", "ann")]


def test_unstarted_jobs_use_nothing_and_running_jobs_count_until_now() -> None:
    assert [(run.id, run.gpus, run.end, run.nodes) for run in runs()] == [
        ("1", 4, 7200.0, ("gpu1", "gpu2")),
        ("4_1", 1, 4 * HOUR, ("far1",)),
    ]
    assert runs()[0].name == "train | me"


@cases(
    "by, expected",
    ("user", [("ann", 1, 4.0, 8.0), ("bob", 1, 2.0, None)]),
    ("account", [("lab", 1, 4.0, 8.0), ("bio", 1, 2.0, None)]),
    ("job", [("1", 1, 4.0, 8.0), ("4_1", 1, 2.0, None)]),
    ("nodeset", [("gpu", 1, 4.0, 8.0), ("far", 1, 2.0, None)]),
)
def test_gpu_hours_are_summed_and_priced_where_a_price_exists(by: str, expected: object) -> None:
    rows = summarize_usage(runs(), by, 0, 4 * HOUR, NODESETS, {"gpu": 2.0})  # type: ignore[arg-type]
    assert [(row.name, row.jobs, row.gpu_hours, row.cost) for row in rows] == expected
    whole = usage_total(rows, 2)
    assert (whole.jobs, whole.gpu_hours, whole.cost, whole.unpriced) == (2, 6.0, 8.0, 2.0)


def test_only_usage_inside_the_period_counts() -> None:
    [row] = summarize_usage(runs()[:1], "user", 1.5 * HOUR, 1.75 * HOUR, NODESETS, {})
    assert row.gpu_hours == 1.0


def test_job_over_two_nodesets_is_divided_by_its_nodes() -> None:
    run = JobUsage("7", "ann", "lab", "x", 0, HOUR, ("gpu1", "far1", "lost"), cpus=3, gpus=3)
    rows = summarize_usage([run], "nodeset", 0, HOUR, NODESETS, {"gpu": 2.0, "far": 1.0})
    assert [(row.name, round(row.gpu_hours, 6), row.cost and round(row.cost, 6)) for row in rows] == [
        ("(gone)", 1.0, None),
        ("far", 1.0, 1.0),
        ("gpu", 1.0, 2.0),
    ]


@cases("text, value", ("12h", 1e6 - 12 * HOUR), ("7d", 1e6 - 168 * HOUR), ("1w", 1e6 - 604800))
def test_time_can_be_relative(text: str, value: float) -> None:
    assert parse_when("--since", text, 1e6) == value


def test_time_can_be_a_day_or_a_minute() -> None:
    day = parse_when("--since", "2026-11-01", 0)
    assert parse_when("--since", "2026-11-01T01:30", 0) - day == 1.5 * HOUR


@cases("text", "yesterday", "2026-13-01", "7", "-3d", "d", "", "99999999999d")
def test_invalid_time_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_when("--until", text, 1e9)
    assert str(caught.value).startswith(f"--until {text!r} is not a time\n  fix: write 2026-11-01")


def test_period_starts_in_the_past_and_ends_later() -> None:
    with pytest.raises(UsageError, match="is in the future"):
        parse_period("2999-01-01", None, 1e9, "30d")
    with pytest.raises(UsageError, match="--until 3d is not later than --since 2d"):
        parse_period("2d", "3d", 1e9, "30d")
    assert parse_period(None, None, 1e9, "30d") == (1e9 - 30 * 86400, 1e9)
