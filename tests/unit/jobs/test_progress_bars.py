"""Lines that overwrite themselves: written by a rank, read while it runs, shown on a terminal."""

import io
import time
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.cases import cases
from tests.unit.jobs.test_runner import Node

from shoal.cli.job_screens import BarArea
from shoal.jobs.logs import LogLine, LogReader
from shoal.remote import log_reader
from shoal.remote.runner.output import HOLD_S, MAX_ROWS, Output, last_state

BAR = """\
import os, sys, time
sys.stderr.write("first line\\n")
for step in range(2000):
    sys.stderr.write(f"\\r{step:4d}/2000 " + "#" * 40)
sys.stderr.flush()
while not os.path.exists("../../go"):
    time.sleep(0.02)
sys.stderr.write("\\r2000/2000 done\\nafter\\r\\n")
sys.stderr.write("tail\\rend")
"""


@cases(
    "line, state",
    (b"plain", b"plain"),
    (b"", b""),
    (b"\r 10%\r 20%", b" 20%"),
    (b" 10%\r 20%\r", b" 20%\r"),
    (b"line\r", b"line\r"),
    (b"\r\r", b"\r\r"),
    (b"a\r\r\r", b"a\r\r\r"),
)
def test_last_state_of_a_line_is_kept(line: bytes, state: bytes) -> None:
    assert last_state(line) == state


def test_bar_is_in_a_file_while_it_moves_and_in_the_log_once(tmp_path: Path) -> None:
    node = Node(tmp_path, BAR)
    process = node.start()
    bar, log = node.directory / "rank-1.0.bar", node.directory / "rank-1.0.log"
    deadline = time.monotonic() + 60
    while not (bar.exists() and b"1999/2000" in bar.read_bytes()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    assert [line.split(" ", 1)[1] for line in log.read_text().splitlines()] == ["first line"]
    (node.directory / "go").touch()
    process.communicate(timeout=60)
    lines = [line.split(b" ", 1)[1] for line in log.read_bytes().split(b"\n")[:-1]]
    assert lines == [b"first line", b"2000/2000 done", b"after", b"end"] and not bar.exists()


def texts(lines: list[tuple[float, bytes]]) -> list[bytes]:
    return [text for _, text in lines]


def test_plain_lines_are_finished_at_once() -> None:
    output = Output()
    assert texts(output.take(b"a\nb\r\n\nc")) == [b"a", b"b", b""]
    assert (output.unfinished(), output.waits) == (b"c", False) and texts(output.take(b"d\n")) == [b"cd"]
    assert output.end() == []


def test_bars_below_one_another_are_kept_once_each() -> None:
    """As tqdm draws them, in pieces as a pipe may cut them."""
    output = Output()
    assert output.take(b"\r  0%| epochs") == []
    for batch in range(3):
        for data in (b"\n", b"\r batch %d" % batch, b"\x1b", b"[A"):
            assert output.take(data) == []
    assert output.unfinished() == b"  0%| epochs   batch 2"
    assert output.take(b"\n\r         \x1b[A") == []  # the inner one is cleared at its end
    assert output.unfinished() == b"  0%| epochs" and output.take(b"\r100%| epochs\n") == [] and output.waits
    assert texts(output.take(b"done\nbye\n")) == [b"100%| epochs", b"done", b"bye"]


def test_line_above_a_bar_is_finished_when_the_cursor_stays_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm.write and the inner bars with `leave`: a line in place of the bar, and the bar again below it."""
    output = Output()
    output.take(b"\r 10%|")
    assert output.take(b"\r      \r{'loss': 1.5}\n\r 20%|") == [] and output.waits and output.finished() == []
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + HOLD_S + 0.1)
    assert texts(output.finished()) == [b"{'loss': 1.5}"]
    assert (output.unfinished(), output.waits) == (b" 20%|", False) and texts(output.end()) == [b" 20%|"]


def test_traceback_below_bars_keeps_its_order() -> None:
    output = Output()
    output.take(b"\r 10%| epochs\n\r 5%| batches\x1b[A")
    lines = texts(output.take(b"Traceback (most recent call last):\n  File\nValueError: bad\n"))
    assert lines == [b" 10%| epochsTraceback (most recent call last):", b"  File", b"ValueError: bad"]


def test_rows_and_lines_are_bounded() -> None:
    assert len(Output().take(b"\r x\n" * 1000)) == 1000 - MAX_ROWS + 1
    assert texts(Output().take(b"y" * 20000)) == [b"y" * 20000]


def printed_by(directory: Path, capsysbinary: pytest.CaptureFixture[bytes], bars: dict[str, bytes]) -> list[bytes]:
    paths = {path.name: str(path) for path in directory.glob("*.bar")}
    log_reader.print_bars(paths, bars)
    return capsysbinary.readouterr().out.splitlines()


def test_reader_prints_states_that_have_changed(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    bar, bars = tmp_path / "rank-0.0.bar", {}  # type: tuple[Path, dict[str, bytes]]
    bar.write_bytes(b"1.5 10%\n")
    assert printed_by(tmp_path, capsysbinary, bars) == [b"rank-0.0.bar\t1.5 10%"]
    assert printed_by(tmp_path, capsysbinary, bars) == []
    bar.write_bytes(b"")  # about to be written
    assert printed_by(tmp_path, capsysbinary, bars) == []
    bar.write_bytes(b"2.5 20%\n")
    assert printed_by(tmp_path, capsysbinary, bars) == [b"rank-0.0.bar\t2.5 20%"]
    bar.unlink()
    assert printed_by(tmp_path, capsysbinary, bars) == [b"rank-0.0.bar\t"]
    assert printed_by(tmp_path, capsysbinary, bars) == []


def test_unfinished_lines_are_part_of_the_logs_until_they_end() -> None:
    reader = LogReader()
    for raw in (b"rank-0.0.log\t1.0 begin\n", b"rank-0.0.bar\t2.0 10%\n", b"rank-1.0.bar\t2.5 11%\n"):
        reader.take("n1", raw)
    assert [line.text for line in reader.result().lines] == ["begin", "10%", "11%"]
    reader.take("n1", b"rank-0.0.bar\t\n")
    reader.take("n1", b"rank-0.0.log\t3.0 100%\n")
    assert [line.text for line in reader.unfinished()] == ["11%"]


def test_unfinished_line_of_an_earlier_turn_or_an_ended_rank_is_left_out() -> None:
    reader = LogReader()
    reader.take("n1", b"rank-0.0.bar\t2.0 10%\n")
    reader.take("n1", b"rank-1.0.bar\t2.0 10%\n")
    assert len(reader.unfinished()) == 2
    reader.take("n1", b"rank-0.1.node\tn1\n")
    end = b'{"rank": 1, "node": "n1", "restart": 0, "start": 1, "end": 2, "status": 0}'
    reader.take("n1", b"rank-1.0.end\t" + end + b"\n")
    assert reader.unfinished() == []


def area(height: int = 24, terminal: bool = True) -> tuple[BarArea, io.StringIO]:
    file = io.StringIO()
    return BarArea(Console(file=file, force_terminal=terminal, width=40, height=height)), file


def bars(count: int, text: str = "50%|#####     |") -> list[LogLine]:
    return [LogLine(1.0, rank, 0, text) for rank in reversed(range(count))]


def test_bars_of_ranks_stay_below_the_output() -> None:
    screen, file = area()
    screen.show(bars(2))
    assert file.getvalue() == "[0] 50%|#####     |\n[1] 50%|#####     |\n"
    screen.show(bars(2))
    screen.clear()
    screen.clear()
    assert file.getvalue().count("\x1b[1A\x1b[2K") == 2, "the same bars are not drawn again"


def test_many_ranks_and_long_bars_fit_the_terminal() -> None:
    screen, file = area(height=16)
    screen.show(bars(16, "é" * 100))
    lines = file.getvalue().splitlines()
    assert len(lines) == 8 and lines[-1] == "… and 9 more ranks" and {len(line) for line in lines[:-1]} == {39}


def test_bars_cannot_act_on_the_terminal_and_are_not_shown_in_a_pipe() -> None:
    screen, file = area()
    screen.show(bars(1, "a\x1b[2Jb\rc\x1b[Ad"))
    assert "\x1b" not in file.getvalue()
    screen, file = area(terminal=False)
    screen.show(bars(3))
    screen.clear()
    assert file.getvalue() == ""
