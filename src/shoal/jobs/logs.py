"""What the ranks of a job printed: lines of many files on many nodes, merged in the order of time. Pure."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

BATCH = -1
"""The rank of lines that the batch script itself, srun or Slurm printed."""

_FILE = re.compile(r"rank-(\d+)\.(\d+)\.(node|log|end|bar)")
_LABELLED = re.compile(r" *\d+: (.*)")


@dataclass(frozen=True)
class JobFiles:
    """Where on its nodes the files of a job are."""

    directory: str
    output: str
    """What the batch script prints."""
    error: str
    echo: bool = False
    """The ranks print there too, for srun to label: the person wanted all of it in one file."""
    owner: str = ""
    """Whose job it is: its files are read with that user's rights. Empty where no record says so."""
    batch_host: str = ""
    """The node that the batch script ran on; empty where that is not known, or there were several."""


@dataclass(frozen=True)
class LogLine:
    """One line that a rank printed."""

    time: float
    """Seconds since 1970, by the clock of the node; for the batch script, when its file was last written."""
    rank: int
    restart: int
    text: str
    node: str = ""
    """Where it was printed; empty where that is not known."""
    file: str = ""
    """The file it stands in, as `remote/log_reader.py` calls it."""


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    node: str
    restart: int
    start: float
    end: float
    status: int
    """The exit status; below 0 the signal that ended it."""
    out_of_memory: bool = False
    signals: tuple[str, ...] = ()
    """The signals it was sent before."""


@dataclass(frozen=True)
class JobLogs:
    """Everything that the nodes have of a job."""

    lines: tuple[LogLine, ...] = ()
    ends: tuple[RankEnd, ...] = ()


class LogReader:
    """Takes what `reader.py` prints on each node. A file that several nodes show, on shared storage, counts once; the
    batch output of a job that was queued again may be on two nodes, and both count. With `limit`, only so many of the
    last lines are kept: who follows a job for days has seen the others."""

    def __init__(self, echo: bool = False, batch_host: str = "", limit: int | None = None) -> None:
        self.lines: deque[LogLine] = deque(maxlen=limit)
        self._echo = echo
        self._batch_host = batch_host
        self._labelled: deque[LogLine] = deque(maxlen=limit)
        self.ends: dict[tuple[int, int], RankEnd] = {}
        self.bars: dict[tuple[int, int], LogLine] = {}
        """The last line of each rank while it is not finished, as of a progress bar."""
        self._shown_by: dict[str, str] = {}
        self._node_of: dict[tuple[int, int], str] = {}

    def take(self, node: str, raw: bytes) -> LogLine | None:
        """One line of a node's answer; the log line in it, where it is one."""
        name, tab, rest = raw.decode("utf-8", "replace").rstrip("\n").partition("\t")
        if not tab or self._shown_by.setdefault(name, node) != node:
            return None
        if name.startswith(("output@", "error@")):
            stamp, _, text = rest.partition(" ")
            if self._echo and (labelled := _LABELLED.fullmatch(text)):
                self._labelled.append(LogLine(_seconds(stamp), BATCH, 0, labelled[1], self._batch_host, name))
                return None
            return self._keep(LogLine(_seconds(stamp), BATCH, 0, text, self._batch_host, name))
        match = _FILE.fullmatch(name)
        if match is None:
            return None
        rank, restart = int(match[1]), int(match[2])
        if match[3] == "node":
            self._node_of[(rank, restart)] = rest
            return None
        if match[3] == "end":
            if end := _end(rest):
                self.ends[(rank, restart)] = end
            return None
        stamp, _, text = rest.partition(" ")
        # On shared storage the node that shows a file need not be the one that wrote it.
        line = LogLine(_seconds(stamp), rank, restart, text, self._node_of.get((rank, restart), node), name)
        if match[3] == "bar":
            self.bars[(rank, restart)] = line
            if not text:
                del self.bars[(rank, restart)]
            return None
        return self._keep(line)

    def others(self) -> list[LogLine]:
        """Lines that srun labelled and that are in no rank's log, as torchrun's. Known once those have been read."""
        printed = {line.text for line in self.lines if line.rank != BATCH}
        # Older lines may be of a rank whose own copy is no longer kept.
        begin = self.lines[0].time if len(self.lines) == self.lines.maxlen else 0.0
        return [line for line in self._labelled if line.time >= begin and line.text not in printed]

    def unfinished(self) -> list[LogLine]:
        """The last line of each rank, where it is not finished: of one that runs, or was killed."""
        newest = {rank: restart for rank, restart in sorted({*self.bars, *self._node_of})}
        return [line for key, line in self.bars.items() if key not in self.ends and newest[key[0]] == key[1]]

    def result(self) -> JobLogs:
        ends = sorted(self.ends.values(), key=lambda end: (end.restart, end.end))
        return JobLogs(tuple(merge([*self.lines, *self.others(), *self.unfinished()])), tuple(ends))

    def _keep(self, line: LogLine) -> LogLine:
        self.lines.append(line)
        return line


def merge(lines: Iterable[LogLine]) -> list[LogLine]:
    """In the order of time. Lines of one file keep their order, whatever the node's clock did."""
    last: dict[str, float] = {}
    keyed: list[tuple[float, LogLine]] = []
    for line in lines:
        at = last[line.file] = max(line.time, last.get(line.file, 0.0))
        keyed.append((at, line))
    return [line for _, line in sorted(keyed, key=lambda pair: pair[0])]


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _end(text: str) -> RankEnd | None:
    try:
        values = json.loads(text)
        return RankEnd(
            int(values["rank"]),
            str(values["node"]),
            int(values["restart"]),
            float(values["start"]),
            float(values["end"]),
            int(values["status"]),
            bool(values.get("out_of_memory")),
            tuple(map(str, values.get("signals", ()))),
        )
    except (KeyError, TypeError, ValueError):  # not ours, or cut off
        return None
