"""How a verb's result is shown: as text without a terminal, as text on a terminal, and as a JSON object."""

import asyncio
import errno
import json
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import typer
from rich.console import Console
from tests.support.cases import cases
from tests.support.fake_world import lab

from shoal.cli.cluster_commands import finish_check, finish_down, finish_plan, finish_status, finish_up
from shoal.cli.cluster_screens import show_plan, show_status, show_up
from shoal.cli.host_commands import finish_exec, finish_nodes, show_exec
from shoal.cli.output import plain
from shoal.cli.progress import TerminalProgress
from shoal.cli.screen import Columns, print_wrapped, show_failures, show_findings
from shoal.cli.session import Session
from shoal.errors import (
    AuthenticationFailed,
    CommandTimeout,
    ControllerFailed,
    Interrupted,
    PartialFailure,
    ProviderError,
    ShoalError,
    SudoDenied,
    Unreachable,
    UsageError,
    VersionMismatch,
)
from shoal.hosts.api import Result
from shoal.plan.model import Change, Cost, HostPlan, Plan
from shoal.slurm.state import JobState, NodeState, PartitionState
from shoal.spec.finding import Finding
from shoal.verbs.context import Context
from shoal.verbs.down import DownResult
from shoal.verbs.exec import ExecResult
from shoal.verbs.status import ClusterStatus, status
from shoal.verbs.up import UpResult

AWAY = Unreachable("n9", "does not answer within 10 s", hint="is the host up?")
NAMES = ("gpu1", "gpu2", "gpu12")
H100 = NodeState("n1", ("IDLE",), cpus=8, memory_mb=14700, gres="gpu:h100:2(S:0)", version="22.05.8")
NODES = (
    H100,
    replace(H100, name="n2"),
    NodeState("n3", ("DOWN", "DRAIN"), reason="[red]\x1b[2Jfan", cpus=8, cpus_alloc=8, memory_mb=14700),
)
STATUS = ClusterStatus(
    cluster="reef",
    controller="c1",
    version="22.05.8",
    nodes=NODES,
    partitions=(PartitionState("main", "UP", True, "n[1-3]"),),
    jobs=(
        JobState("7", "RUNNING", "bob", "main", "n[1-2]", "None", "0:10", "1-00:00:00", 2, "\x1b]0;owned\x07train"),
        JobState("8_[1-9]", "PENDING", "bob", "main", "", "Resources", "0:00", "UNLIMITED", 1, "[bold]x"),
    ),
    absent=("n4", "n5"),
    extra=("old1",),
)
PLAN = Plan(
    cluster="reef",
    drain=("n3",),
    hosts=(
        HostPlan("n1", (), (Change("n1", "file /etc/x", "update /etc/x", Cost.NOTHING, "--- a\n+++ b\n-old\n+new\n"),)),
        HostPlan("n2", (), (Change("n2", "file /etc/x", "update /etc/x"),)),
        HostPlan("c1", (), (Change("c1", "service slurmctld", "restart slurmctld", Cost.RESTART),)),
    ),
    findings=(Finding("warning", "the clock is off", "+90 s", host="n1"),),
    unreached={"n9": AWAY},
)
UP = UpResult(
    "reef",
    created=("n1",),
    changed=("n1", "n2", "c1"),
    staying=("n3",),
    unready=(("n4", "Low RealMemory"),),
    failures={"n9": AWAY},
)
EXEC = ExecResult(((("n1", "n2"), Result(0, b"6.1\n")), (("n3",), Result(2, b"", b"no such file\n"))), {"n9": AWAY})


def drawn(show: Callable[[Console], None], width: int = 200) -> str:
    console = Console(file=StringIO(), width=width)
    show(console)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"  # type: ignore[attr-defined]


def test_status_shows_nodes_and_jobs() -> None:
    assert drawn(lambda console: show_status(console, STATUS)) == (
        "reef: Slurm 22.05.8 on c1; nodes: 1 down+drain, 2 idle\n"
        "\n"
        "nodes   state       cpus each  memory each  gpus each  slurm    reason\n"
        "n[1-2]  idle        0/8        14.4G        0/2 h100   22.05.8\n"
        "n3      down+drain  8/8        14.4G        -          -        [red]\\x1b[2Jfan\n"
        "n[4-5]: in the file and not in Slurm; `shoal up` adds it\n"
        "old1: in Slurm and not in the file; `shoal up` removes it\n"
        "\n"
        "partition  state  nodes   time limit\n"
        "main*      up     n[1-3]  unlimited\n"
        "\n"
        "job      name                   user  state    time  limit       nodes  where or why\n"
        "7        \\x1b]0;owned\\x07train  bob   running  0:10  1-00:00:00  2      n[1-2]\n"
        "8_[1-9]  [bold]x                bob   pending  0:00  unlimited   1      (Resources)\n"
    )


def test_nodes_share_a_line_only_when_their_values_are_equal() -> None:
    mixed = replace(H100, name="n3", state=("MIXED",), gres_used="gpu:h100:1(IDX:0)", cpus_alloc=4)
    both = replace(H100, name="n7", gres="gpu:h100:2(S:0),gpu:a100:1", gres_used="gpu:h100:2(IDX:0,1),gpu:a100:0")
    nodes = (H100, replace(H100, name="n2", cpus=16), mixed, replace(mixed, name="n4"), both, replace(H100, name="n9"))
    shown = drawn(lambda console: show_status(console, replace(STATUS, nodes=nodes)))
    assert [re.split(r"\s{2,}", line)[:5] for line in shown.splitlines()[3:7]] == [
        ["n[1,9]", "idle", "0/8", "14.4G", "0/2 h100"],
        ["n2", "idle", "0/16", "14.4G", "0/2 h100"],
        ["n[3-4]", "mixed", "4/8", "14.4G", "1/2 h100"],
        ["n7", "idle", "0/8", "14.4G", "2/2 h100, 0/1 a100"],
    ]


def test_plan_groups_hosts_with_equal_changes() -> None:
    assert drawn(lambda console: show_plan(console, PLAN, diff=False)) == (
        "warning n1: the clock is off, found +90 s\n"
        "✗ n9: does not answer within 10 s\n"
        "    fix: is the host up?\n"
        "hosts   change                    costs\n"
        "n3      node: drain, then remove  node drained\n"
        "n[1-2]  update /etc/x             nothing\n"
        "c1      restart slurmctld         daemon restart\n"
        "\n"
        "4 changes on 4 hosts; costs at most: node drained; n9 was not inspected\n"
    )
    with_diffs = drawn(lambda console: show_plan(console, PLAN, diff=True))
    assert "\nn1 file /etc/x\n--- a\n+++ b\n-old\n+new\n" in with_diffs


SUDO = "on {}, as root: visudo"
IMAGES = [
    Finding("warning", "no image", fix=f"see ssh {hosts}, then `shoal up {hosts}`", host=hosts)
    for hosts in ("gpu[1-2,12]", "gpu3", "c1,gpu5")
]


@cases(
    "found, text",
    (
        [
            Finding("error", "ubuntu may not become root", "a password", SUDO.format("gpu02"), host="gpu02"),
            Finding("info", "changes are due", fix="`shoal plan` shows them"),
        ],
        "error gpu02: ubuntu may not become root, found a password\n    fix: on gpu02, as root: visudo\n"
        "info changes are due, `shoal plan` shows them\n",
    ),
    (
        [
            *(Finding("error", "no sudo", "a password", SUDO.format(name), host=name) for name in NAMES),
            *(Finding("info", "x"), Finding("info", "x")),
        ],
        "error gpu[1-2,12]: no sudo, found a password\n    fix: on gpu[1-2,12], as root: visudo\ninfo x\n",
    ),
    (IMAGES, "warning c1,gpu[1-3,5,12]: no image\n    fix: see ssh gpu1, then `shoal up c1,gpu[1-3,5,12]`\n"),
    ids=["fix below", "several hosts once", "a hostlist with others of its kind"],
)
def test_finding_is_shown_once_with_its_hosts_and_its_fix(found: list[Finding], text: str) -> None:
    assert drawn(lambda console: show_findings(console, found)) == text


@cases(
    "names, cause, hint, text",
    (
        NAMES,
        "{0}:22 is silent",
        "compare with: ssh -v {0}",
        "gpu[1-2,12]: gpu[1-2,12]:22 is silent\n    fix: {ssh} gpu1",
    ),
    (NAMES, "no address is known for '{0}'", "", "gpu[1-2,12]: no address is known for 'gpu[1-2,12]'"),
    (("c1",), "{0}:22 is silent", "compare with: ssh -v {0}", "c1: c1:22 is silent\n    fix: {ssh} c1"),
)
def test_failure_of_several_hosts_is_shown_once(names: tuple[str, ...], cause: str, hint: str, text: str) -> None:
    failed = {name: Unreachable(name, cause.format(name), hint=hint.format(name)) for name in names}
    said = text.format(ssh="compare with: ssh -v")
    assert drawn(lambda console: show_failures(console, failed)) == f"✗ {said}\n"


def test_line_wraps_between_words_and_never_inside_a_command() -> None:
    told = "[red]no[/] NFS in the kernel of gpu01, `shoal node drain gpu01` takes it out\n\nof-it-all-and-for-ever"

    def drawn_at(width: int, terminal: bool) -> str:
        out = StringIO()
        print_wrapped(Console(file=out, width=width, force_terminal=terminal, color_system=None), told)
        return out.getvalue()

    assert drawn_at(20, True) == (
        "no NFS in the kernel\nof gpu01,\n`shoal node drain gpu01`\ntakes it out\n\nof-it-all-and-for-ever\n"
    )
    assert drawn_at(20, False) == told.replace("[red]no[/]", "no") + "\n"


def test_empty_plan_names_hosts_that_were_not_inspected() -> None:
    assert drawn(lambda console: show_plan(console, Plan("reef"), diff=True)) == "reef: no changes\n"
    away = Plan("reef", unreached={"n9": AWAY, "n10": Unreachable("n10", AWAY.cause, hint=AWAY.hint)})
    assert drawn(lambda console: show_plan(console, away, diff=False)) == (
        "✗ n[9-10]: does not answer within 10 s\n"
        "    fix: is the host up?\n"
        "reef: no changes on the hosts that answered; n[9-10] were not inspected\n"
    )


def test_up_ends_with_completed_and_failed_work() -> None:
    assert drawn(lambda console: show_up(console, UP)) == (
        "✗ n4: Slurm cannot use it yet: Low RealMemory\n"
        "… n3: drained, still has jobs; run `shoal up` again when they have ended\n"
        "✗ n9: does not answer within 10 s\n"
        "    fix: is the host up?\n"
        "! reef: created n1, changed c1,n2; not complete\n"
        "  fix the problems above, then run `shoal up` again\n"
    )
    assert drawn(lambda console: show_up(console, UpResult("reef", changed=("n1",)))) == (
        "✓ reef: changed n1\n  `shoal status` shows it, `shoal run train.py` trains on it\n"
    )
    assert drawn(lambda console: show_up(console, UpResult("reef"))) == "✓ reef: no changes\n"


def test_errors_and_no_changes_are_never_shown_together() -> None:
    errors = [Finding("error", "n1 was deleted on the server", host="n1")]
    for text in (
        drawn(lambda console: show_plan(console, Plan("reef", findings=tuple(errors)), diff=False)),
        drawn(lambda console: show_up(console, UpResult("reef", findings=tuple(errors)))),
    ):
        assert "n1 was deleted on the server" in text
        assert text.endswith("reef: nothing to apply; fix the errors above\n")
        assert "no changes" not in text
        assert "✓" not in text


def test_finding_and_failure_with_the_same_text_are_shown_once() -> None:
    seen = (
        Finding("error", "it is slow", "does not answer within 10 s", host="n9"),
        Finding("error", "no room", host="n9"),
    )
    shown = drawn(lambda console: show_up(console, UpResult("reef", failures={"n9": AWAY}, findings=seen)))
    assert shown.splitlines()[:2] == ["error n9: no room", "✗ n9: does not answer within 10 s"]


def test_exec_shows_equal_outputs_once_and_suggests_the_corrected_command() -> None:
    assert drawn(lambda console: show_exec(console, EXEC)) == (
        "n[1-2] (2)\n6.1\nn3 (1) (exit 2)\nno such file\n✗ n9: does not answer within 10 s\n    fix: is the host up?\n"
    )
    late = {name: CommandTimeout(name, "`sleep` did not end", hint="give it longer") for name in ("n1", "n2")}
    meant = ExecResult(((("n3",), Result(127, b"", b"sh: not found\n")),), late, "shoal exec -- sh -c 'a | b'")
    assert drawn(lambda console: show_exec(console, meant)) == (
        "n3 (1) (exit 127)\nsh: not found\n  fix: shoal exec -- sh -c 'a | b'\n"
        "✗ n[1-2]: `sleep` did not end\n    fix: give it longer\n"
    )


FINISHES: dict[str, tuple[Callable[[Session], None], int, dict[str, Any]]] = {
    "plan": (lambda s: finish_plan(s, PLAN, False), 3, {"cluster": "reef", "cost": "drain"}),
    "up": (lambda s: finish_up(s, UP), 3, {"whole": False, "unready": [["n4", "Low RealMemory"]]}),
    "up again": (lambda s: finish_up(s, UpResult("reef")), 0, {"whole": True, "unchanged": True}),
    "down": (lambda s: finish_down(s, DownResult("reef", deleted=("n1",))), 0, {"deleted": ["n1"], "failures": {}}),
    "down partly": (lambda s: finish_down(s, DownResult("reef", failures={"n9": AWAY})), 3, {"released": []}),
    "status": (lambda s: finish_status(s, STATUS), 0, {"version": "22.05.8", "absent": ["n4", "n5"]}),
    "check": (lambda s: finish_check(s, [Finding("error", "no")]), 1, {"ok": False}),
    "check ok": (lambda s: finish_check(s, [Finding("info", "so")]), 0, {"ok": True}),
    "exec": (lambda s: finish_exec(s, EXEC), 3, {}),
    "exec 5": (lambda s: finish_exec(s, ExecResult(((("n1",), Result(5)),))), 5, {"failures": {}}),
    "exec killed": (lambda s: finish_exec(s, ExecResult(((("n1",), Result(137)),))), 1, {}),
    "node": (lambda s: finish_nodes(s, "draining", ["n1"]), 0, {"draining": ["n1"]}),
    "no node": (lambda s: finish_nodes(s, "resumed", []), 0, {"resumed": []}),
}


def ended(session: Session, act: Callable[[Session], object]) -> int:
    try:
        with session:
            act(session)
    except typer.Exit as end:
        return end.exit_code
    return 0


@cases("name", *FINISHES)
def test_every_result_has_its_exit_code_as_a_json_object_and_as_text(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finish, code, part = FINISHES[name]
    assert ended(Session(json=True), finish) == code
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert isinstance(told, dict)
    assert {key: told[key] for key in part} == part
    assert err == ""
    assert ended(Session(json=False), finish) == code
    out, err = capsys.readouterr()
    assert out and "\x1b" not in out + err, "a pipe gets no colour"


# ---- errors


async def bug() -> None:
    raise KeyError("a mistake of ours")


def test_internal_error_exits_70_with_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(Session(json=False), lambda session: session.run(bug())) == 70
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("Traceback (most recent call last):\n")
    assert "KeyError: 'a mistake of ours'\n" in err
    assert err.endswith("This is a bug in Shoal. Please report it with the lines above.\n")
    assert ended(Session(json=True), lambda session: session.run(bug())) == 70
    told = json.loads(capsys.readouterr().out)
    assert told["error"] == "bug"
    assert "KeyError: 'a mistake of ours'" in told["traceback"]


def fails(error: Exception) -> Callable[[Session], object]:
    async def work() -> None:
        raise error

    return lambda session: session.run(work())


def test_internal_error_during_a_host_command_is_not_a_host_failure(capsys: pytest.CaptureFixture[str]) -> None:
    world = lab()

    def broken(call: object) -> bytes:
        raise ZeroDivisionError

    world.hosts["c1"].answers = {("scontrol",): broken, ("squeue",): broken}
    context = Context(world.spec, connector=world.connector)
    assert ended(Session(json=False), lambda session: session.run(status(context))) == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


@cases(
    "error, code, text",
    (UsageError("so not", hint="but so"), 2, "error: so not\n  fix: but so\n"),
    (ProviderError("no [red]room[/red]"), 1, "error: no [red]room[/red]\n"),
    (AWAY, 1, "error: n9: does not answer within 10 s\n  fix: is the host up?\n"),
    (Interrupted("stopped", hint="go on"), 130, "stopped\n  go on\n"),
    (asyncio.CancelledError(), 130, "stopped\n  run the same command again to continue\n"),
    (
        OSError(errno.ENOSPC, "No space left on device", "/home/a"),
        1,
        "error: on this machine: /home/a: No space left on device\n"
        "  fix: free space on this machine's disk, then run the same command again\n",
    ),
)
def test_error_has_its_exit_code_and_fix(
    error: Exception, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(Session(json=False), fails(error)) == code
    assert capsys.readouterr().err == text


@cases("error", KeyboardInterrupt(), typer.Abort())
def test_ctrl_c_at_a_prompt_is_not_an_internal_error(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(session: Session) -> None:
        raise error

    assert ended(Session(json=False), ask) == 130
    assert capsys.readouterr().err.startswith("stopped\n")


def test_controller_failure_lists_every_host_failure_and_groups_equal_ones(capsys: pytest.CaptureFixture[str]) -> None:
    failures = {"n2": Unreachable("n2", "no route"), "c1": Unreachable("c1", "silent", hint="is it up?")}
    said = plain(ControllerFailed("c1", failures))
    assert (said["message"], said["fix"]) == ("c1: silent\nand n2: no route", "is it up?")
    told = {name: error["message"] for name, error in said["failures"].items()}
    assert told == {"c1": "c1: silent", "n2": "n2: no route"}
    failures = {name: Unreachable(name, "silent", hint="is it up?") for name in ("n2", "c1", "n1")}
    assert ended(Session(json=False), fails(ControllerFailed("c1", failures))) == 1
    assert capsys.readouterr().err == (
        "✗ c1,n[1-2]: silent\n    fix: is it up?\nerror: cannot go on without c1, the controller\n"
    )
    window = VersionMismatch("cannot talk", findings=(Finding("error", "too old", host="n1"),))
    assert ended(Session(json=True), fails(window)) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["host"] == "n1"


@cases(
    "error, name",
    (Unreachable("n1", "silent"), "Unreachable"),
    (PartialFailure("some"), "Partly"),
    (AuthenticationFailed("n1", "no key"), "AuthRefused"),
    (SudoDenied("n1", "no"), "SudoRefused"),
    (CommandTimeout("n1", "late"), "TimedOut"),
    (VersionMismatch("cannot talk"), "VersionWindow"),
)
def test_json_calls_errors_by_their_stable_names(error: ShoalError, name: str) -> None:
    assert plain(error)["error"] == name


# ---- progress


async def lines_in(console: Console, least: int) -> list[str]:
    """What was printed, once there is as much of it."""
    for _ in range(1000):
        lines: list[str] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        if len(lines) >= least:
            return lines
        await asyncio.sleep(0.01)
    raise AssertionError("too little was printed")


async def test_long_phase_prints_its_progress_without_a_terminal() -> None:
    console = Console(file=StringIO(), width=200)
    with TerminalProgress(console, every=0.01).phase("packages", 6) as phase:
        phase.done("n1")
        for number in range(2, 7):
            phase.update(f"n{number}", "[waits] for apt\x1b[2J")
        await lines_in(console, 2)
    lines = await lines_in(console, 3)
    assert re.fullmatch(
        r"  packages                   1/6         \d\.\d s  n2: \[waits\] for apt\\x1b\[2J; n3: .*; n4: .*; 2 more",
        lines[0],
    )
    assert lines[-1].startswith("  packages                   done")
    await asyncio.sleep(0.05)
    assert await lines_in(console, 1) == lines


async def test_phase_without_hosts_prints_its_percentage() -> None:
    console = Console(file=StringIO(), width=200)
    with TerminalProgress(console, every=0.01).phase("sandbox hosts", 1) as phase:
        phase.set_fraction(0.4, "image debian12: unpack")
        first, *_ = await lines_in(console, 1)
    assert re.fullmatch(r"  sandbox hosts              40%         \d\.\d s  image debian12: unpack", first)


def test_phase_prints_a_single_line_without_a_terminal_and_escapes_host_output_on_one() -> None:
    console = Console(file=StringIO(), width=200)
    with TerminalProgress(console).phase("connect and read facts", 2) as phase:
        phase.update("n1", "busy")
        phase.done("n1")
        phase.done("n2", "it broke")
    assert console.file.getvalue().startswith("  connect and read facts     failed on n2")  # type: ignore[attr-defined]
    console = Console(file=StringIO(), force_terminal=True, width=100, no_color=True)
    with TerminalProgress(console).phase("nodes", 1) as phase:
        phase.update("n1", "unpack [/slurmd] \x1b[2J")
        phase.set_fraction(0.5, "[/half]")
        phase.done("n1")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "✓ nodes" in text
    assert "\x1b[2J" not in text


@cases("width", 60, 80)
def test_values_stay_whole_in_a_narrow_terminal(width: int) -> None:
    shown = drawn(lambda console: show_status(console, STATUS), width)
    words = {word for line in shown.splitlines() for word in line.split()}
    assert {"0/8", "14.4G", "22.05.8", "unlimited", "1-00:00:00", "running", "pending"} <= words
    assert max(map(len, shown.splitlines())) <= width


def test_only_wrapping_columns_wrap() -> None:
    table = Columns("job", "progress or reason", wraps=("progress or reason",))
    table.add_row("12345678", "one two three four five")
    assert drawn(lambda console: console.print(table), 20) == (
        "          progress\n"
        "job       or reason\n"
        "12345678  one two\n"
        "          three four\n"
        "          five\n"
    )  # fmt: skip


@cases("width", *range(12, 60, 4))
def test_every_value_is_shown_at_any_terminal_width(width: int) -> None:
    table = Columns("type", "stock", "$/hour", right=("$/hour",), wraps=("type",))
    table.add_row("gpu_8x_h100_sxm5", "there", "31.92")
    shown = drawn(lambda console: console.print(table), width)
    assert max(map(len, shown.splitlines())) <= width
    for value in ("gpu_8x_h100_sxm5", "there", "31.92"):
        assert sorted(value) == sorted(kept(value, shown)), shown


def kept(value: str, shown: str) -> list[str]:
    """The characters of a value that are left in what is shown, wherever they stand."""
    left = list(shown)
    return [left.pop(left.index(letter)) for letter in value if letter in left]
