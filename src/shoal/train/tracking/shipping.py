"""From the spools to the server, in batches: every record once, whatever happens in between.

A batch whose answer was lost is sent again, byte for byte. MLflow keeps metrics in a table whose primary key is the
whole row (key, timestamp, step, value, run), and passes over rows it has; the timestamp was fixed when the record was
written. Parameters, tags, the status and artifacts replace themselves. So a record counts as sent only when the server
said so, and is never doubled by asking twice. (MLflow's file store, which it has given up, appends blindly.)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.train.tracking.remote import RemoteRun, RunName, delete_doubles, find_run, is_deleted
from shoal.train.tracking.server import Rejected, Server, Unavailable
from shoal.train.tracking.spool import Record, Sent, read_sent, read_spool, write_sent

BATCH_ITEMS, BATCH_NAMES, BATCH_BYTES = 1000, 100, 500_000
"""MLflow takes 1000 entries a request, of them 100 parameters and 100 tags, and a megabyte in all."""
KEY_LENGTH, PARAM_LENGTH, TAG_LENGTH = 250, 6000, 8000

log = logging.getLogger("shoal.train")


@dataclass(frozen=True)
class Item:
    """One entry of a request: a metric, a parameter, a tag, the run's status or an artifact."""

    kind: str
    value: dict[str, Any]
    size: int

    @property
    def name(self) -> tuple[str, str]:
        return self.kind, str(self.value.get("key"))


class Shipping:
    """Sends what spools hold to one run on one server. It belongs to one thread."""

    def __init__(self, server: Server, name: RunName, spools: Iterable[Path], *, create: bool) -> None:
        self.server = server
        self._name = name
        self._create = create
        self.spools = tuple(spools)
        self._run: RemoteRun | None = None
        self.acknowledged: dict[Path, int] = {}

    def ship(self) -> bool:
        """Send the next batch of every spool; True if there may be more. Unavailable where one of them must wait."""
        run = self._run = self._run or find_run(self.server, self._name, create=self._create)
        more, trouble = False, None
        for spool in self.spools:
            try:
                more = self._ship_one(spool, run) or more
            except Unavailable as error:  # an artifact store that is full does not hold metrics back
                trouble = trouble or error
        if trouble:
            raise trouble
        return more

    def _ship_one(self, spool: Path, run: RemoteRun) -> bool:
        with _alone(spool) as alone:
            if not alone:
                raise Unavailable(f"another process is sending {spool.name}")
            sent = read_sent(spool, run.id)
            self.acknowledged[spool] = sent.offset
            end, items = _next_items(spool, sent.offset)
            if end == sent.offset:
                return False
            for request in _requests(items):
                self._send(spool, run, request)
            write_sent(spool, Sent(end, run.id))
            self.acknowledged[spool] = end
            return True

    def _send(self, spool: Path, run: RemoteRun, items: list[Item]) -> None:
        try:
            self._put(spool, run, items)
        except Rejected as error:
            self._see_whether_it_is_there(run)
            if len(items) > 1:  # one bad entry spoils a request: find it, and send the rest
                self._send(spool, run, items[: len(items) // 2])
                self._send(spool, run, items[len(items) // 2 :])
            elif items[0].kind == "param":  # MLflow lets nobody change one, and a restart may have changed it
                self._send(spool, run, [_tag("param." + items[0].value["key"], items[0].value["value"])])
            else:
                _set_aside(spool, items[0], error)

    def _put(self, spool: Path, run: RemoteRun, items: list[Item]) -> None:
        if items[0].kind == "status":
            self.server.post("runs/update", {"run_id": run.id, **items[0].value})
            self._tidy(run)
        elif items[0].kind == "artifact":
            self._upload(spool, run, items[0].value)
        else:
            kinds = {"metrics": "metric", "params": "param", "tags": "tag"}
            entries = {name: [item.value for item in items if item.kind == kind] for name, kind in kinds.items()}
            self.server.post("runs/log-batch", {"run_id": run.id, **entries})

    def _tidy(self, run: RemoteRun) -> None:
        """Whenever a job starts or ends: delete runs that a lost answer doubled."""
        if self._create:
            with contextlib.suppress(Rejected):
                delete_doubles(self.server, self._name, run)

    def _upload(self, spool: Path, run: RemoteRun, artifact: dict[str, Any]) -> None:
        if run.artifacts is None:
            raise Rejected("NO_ARTIFACT_PROXY", "the server was started without --serve-artifacts")
        try:
            data = (spool.parent / artifact["file"]).read_bytes()
        except OSError as error:
            raise Rejected("UNREADABLE", str(error)) from None
        self.server.upload(f"{run.artifacts}/{artifact['path']}", data)

    def _see_whether_it_is_there(self, run: RemoteRun) -> None:
        """Tell a run that is gone from an entry that is bad."""
        try:
            deleted = is_deleted(self.server, run)
        except Rejected as error:
            self._run = None  # a new run gets everything from the start of the spool
            raise Unavailable(str(error)) from None
        if deleted:
            self._run = None
            raise Unavailable(f"the run {run.id} was deleted: `mlflow runs restore --run-id {run.id}` brings it back")


@contextlib.contextmanager
def _alone(spool: Path) -> Iterator[bool]:
    """Whether no other process sends this spool now: the job itself, and somebody who ran the command by hand."""
    try:
        file = os.open(spool.with_name(spool.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass  # a file system without locks: sending twice costs time and changes nothing
        yield True
    finally:
        os.close(file)


def _next_items(spool: Path, offset: int) -> tuple[int, list[Item]]:
    """The entries of the next records, enough for a request, and where those records end."""
    items: list[Item] = []
    for end, record in read_spool(spool, offset):
        items += _items(record or {})
        offset = end
        if len(items) >= BATCH_ITEMS:
            break
    return offset, items


def _items(record: Record) -> Iterator[Item]:
    for key, value in record.get("metrics", {}).items():
        metric = {"key": key[:KEY_LENGTH], "value": value, "timestamp": record["t"], "step": record.get("step", 0)}
        yield Item("metric", metric, len(key) + 100)
    for key, value in record.get("params", {}).items():
        param = {"key": key[:KEY_LENGTH], "value": value[:PARAM_LENGTH]}
        yield Item("param", param, len(json.dumps(param)))
    for key, value in record.get("tags", {}).items():
        yield _tag(key, value)
    if "status" in record:
        ended = {} if record["status"] in ("RUNNING", "SCHEDULED") else {"end_time": record["t"]}
        yield Item("status", {"status": record["status"], **ended}, 100)
    if "artifact" in record:
        yield Item("artifact", record["artifact"], 0)


def _tag(key: str, value: str) -> Item:
    tag = {"key": key[:KEY_LENGTH], "value": value[:TAG_LENGTH]}
    return Item("tag", tag, len(json.dumps(tag)))


def _requests(items: list[Item]) -> Iterator[list[Item]]:
    """Entries in order, in groups that MLflow takes: not too many, no name twice, status and artifacts alone."""
    group: list[Item] = []
    names: set[tuple[str, str]] = set()
    size = 0
    for item in items:
        named = item.kind in ("param", "tag")
        single = item.kind in ("status", "artifact")
        full = len(group) >= BATCH_ITEMS or size + item.size > BATCH_BYTES
        clash = named and (item.name in names or len(names) >= BATCH_NAMES)
        if group and (single or full or clash):
            yield group
            group, names, size = [], set(), 0
        if single:
            yield [item]
            continue
        group.append(item)
        size += item.size
        if named:
            names.add(item.name)
    if group:
        yield group


def _set_aside(spool: Path, item: Item, error: Rejected) -> None:
    """Keep an entry that no server will take, with its answer, where a person can find it."""
    place = spool.with_name(spool.name + ".rejected")
    log.error("tracking: the server refuses %s %s; it is kept in %s", item.kind, error, place)
    with contextlib.suppress(OSError), place.open("a") as file:
        line = {"kind": item.kind, "entry": item.value, "answer": str(error), "time": time.time()}
        file.write(json.dumps(line) + "\n")
