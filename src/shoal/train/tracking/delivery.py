"""Delivers records from the spools to the server, in batches and from a background thread: each record exactly once.

A batch whose answer was lost is sent again, byte for byte. MLflow stores metrics in a table whose primary key is the
whole row (key, timestamp, step, value, run), and ignores rows it has; a record has its timestamp from the start.
Parameters, tags, the status and artifacts replace themselves. So a record counts as delivered only when the server has
acknowledged it, and sending it twice does not duplicate it. (MLflow's deprecated file store does append duplicates.)
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.train.file_io import lock_file
from shoal.train.tracking import mlflow_client
from shoal.train.tracking.mlflow_client import MlflowClient, RemoteRun, RequestRejected, RunName, ServerUnavailable
from shoal.train.tracking.spool import Record, Spool, read_position, read_spool, write_position

BATCH_ITEMS, BATCH_NAMES, BATCH_BYTES = 1000, 100, 500_000
"""MLflow's limits per request: 1000 entries, of them 100 parameters and 100 tags, and 1 MB in all."""
KEY_LENGTH, VALUE_LENGTHS = 250, {"param": 6000, "tag": 8000}

log = logging.getLogger("shoal.train")


@dataclass(frozen=True)
class LogEntry:
    """One entry of a request: a metric, a parameter, a tag, the run's status or an artifact."""

    kind: str
    value: dict[str, Any]


class Delivery:
    """Sends the records of spools to one run on one server. For use by one thread."""

    def __init__(self, server: MlflowClient, name: RunName, spools: Iterable[Path], *, create: bool) -> None:
        self.server = server
        self._name = name
        self._create = create
        self.spools = tuple(spools)
        self._run: RemoteRun | None = None
        self.acknowledged: dict[Path, int] = {}

    def deliver(self) -> bool:
        """Send the next batch of every spool; True if there may be more. ServerUnavailable if one of them must wait."""
        run = self._run = self._run or mlflow_client.find_run(self.server, self._name, create=self._create)
        more, failure = False, None
        for spool in self.spools:
            try:
                more = self._deliver_spool(spool, run) or more
            except ServerUnavailable as error:  # a full artifact store does not delay metrics
                failure = failure or error
        if failure:
            raise failure
        return more

    def _deliver_spool(self, spool: Path, run: RemoteRun) -> bool:
        with contextlib.ExitStack() as stack:
            locked = True
            with contextlib.suppress(OSError):  # no locks on this file system; sending twice is harmless
                locked = stack.enter_context(lock_file(spool.with_name(spool.name + ".lock"), wait=False))
            if not locked:  # by the job, or by the `send` command
                raise ServerUnavailable(f"another process is sending {spool.name}")
            start = end = self.acknowledged[spool] = read_position(spool, run.id)
            items: list[LogEntry] = []
            for record_end, record in read_spool(spool, start):
                items += _items(record)
                end = record_end
                if len(items) >= BATCH_ITEMS:
                    break
            if end == start:
                return False
            for request in _requests(items):
                self._send(spool, run, request)
            write_position(spool, run.id, end)
            self.acknowledged[spool] = end
            return True

    def _send(self, spool: Path, run: RemoteRun, items: list[LogEntry]) -> None:
        try:
            self._post(spool, run, items)
        except RequestRejected as error:
            self._check_run_exists(run)
            if len(items) > 1:  # one bad entry fails the whole request: bisect, and send the rest
                self._send(spool, run, items[: len(items) // 2])
                self._send(spool, run, items[len(items) // 2 :])
            elif items[0].kind == "param":  # parameters are immutable in MLflow, and a restart may have changed it
                self._send(spool, run, [_named_entry("tag", "param." + items[0].value["key"], items[0].value["value"])])
            else:
                _save_rejected(spool, items[0], error)

    def _post(self, spool: Path, run: RemoteRun, items: list[LogEntry]) -> None:
        if items[0].kind == "status":
            self.server.post("runs/update", {"run_id": run.id, **items[0].value})
            if self._create:  # at the start and end of a job: delete runs that a lost answer duplicated
                with contextlib.suppress(RequestRejected):
                    mlflow_client.delete_duplicates(self.server, self._name, run)
        elif items[0].kind == "artifact":
            self._upload(spool, run, items[0].value)
        else:
            kinds = ("metric", "param", "tag")
            entries = {f"{kind}s": [item.value for item in items if item.kind == kind] for kind in kinds}
            self.server.post("runs/log-batch", {"run_id": run.id, **entries})

    def _upload(self, spool: Path, run: RemoteRun, artifact: dict[str, Any]) -> None:
        if run.artifacts is None:
            raise RequestRejected("NO_ARTIFACT_PROXY", "the server was started without --serve-artifacts")
        try:
            data = (spool.parent / artifact["file"]).read_bytes()
        except OSError as error:
            raise RequestRejected("UNREADABLE", str(error)) from None
        self.server.upload(f"{run.artifacts}/{artifact['path']}", data)

    def _check_run_exists(self, run: RemoteRun) -> None:
        """Raise ServerUnavailable if the request failed because the run no longer exists."""
        try:
            stage = self.server.get("runs/get", run_id=run.id)["run"]["info"].get("lifecycle_stage")
        except RequestRejected as error:
            self._run = None  # a new run receives the whole spool
            raise ServerUnavailable(str(error)) from None
        if stage == "deleted":
            self._run = None
            raise ServerUnavailable(
                f"the run {run.id} was deleted: `mlflow runs restore --run-id {run.id}` brings it back"
            )


def _items(record: Record) -> Iterator[LogEntry]:
    for key, value in record.get("metrics", {}).items():
        metric = {"key": key[:KEY_LENGTH], "value": value, "timestamp": record["t"], "step": record.get("step", 0)}
        yield LogEntry("metric", metric)
    for kind in VALUE_LENGTHS:
        for key, value in record.get(f"{kind}s", {}).items():
            yield _named_entry(kind, key, value)
    if "status" in record:
        end = {} if record["status"] in ("RUNNING", "SCHEDULED") else {"end_time": record["t"]}
        yield LogEntry("status", {"status": record["status"], **end})
    if "artifact" in record:
        yield LogEntry("artifact", record["artifact"])


def _named_entry(kind: str, key: str, value: str) -> LogEntry:
    return LogEntry(kind, {"key": key[:KEY_LENGTH], "value": value[: VALUE_LENGTHS[kind]]})


def _requests(items: list[LogEntry]) -> Iterator[list[LogEntry]]:
    """Entries in order, in groups within MLflow's limits: no name twice, status and artifacts on their own."""
    group: list[LogEntry] = []
    names: set[tuple[str, str]] = set()
    size = 0
    for item in items:
        has_name = item.kind in VALUE_LENGTHS
        name, item_size = (item.kind, str(item.value.get("key"))), len(json.dumps(item.value))
        single = item.kind in ("status", "artifact")
        full = len(group) >= BATCH_ITEMS or size + item_size > BATCH_BYTES
        clash = has_name and (name in names or len(names) >= BATCH_NAMES)
        if group and (single or full or clash):
            yield group
            group, names, size = [], set(), 0
        if single:
            yield [item]
            continue
        group.append(item)
        size += item_size
        if has_name:
            names.add(name)
    if group:
        yield group


def _save_rejected(spool: Path, item: LogEntry, error: RequestRejected) -> None:
    """Write a rejected entry and the server's answer to a file beside the spool."""
    place = spool.with_name(spool.name + ".rejected")
    log.error("tracking: the server rejected %s %s; it is kept in %s", item.kind, error, place)
    with contextlib.suppress(OSError), place.open("a") as file:
        line = {"kind": item.kind, "entry": item.value, "answer": str(error), "time": time.time()}
        file.write(json.dumps(line) + "\n")


DELIVERY_PERIOD_S = 2.0
"""How long records are collected before they are sent."""
SYNC_PERIOD_S = 5.0
MAX_PAUSE_S = 60.0


class DeliveryThread:
    """Syncs spools to disk and delivers them until stopped. Errors are logged once a minute and never raised."""

    def __init__(self, spools: Sequence[Spool], delivery: Delivery | None, period: float = DELIVERY_PERIOD_S) -> None:
        self._spools = tuple(spools)
        self._delivery = delivery
        self._period = period
        self._wake = threading.Event()
        self._done = threading.Condition()
        self._rounds_begun = self._rounds_ended = 0
        self._stopping = False
        self._failures = 0
        self._next_try = 0.0
        self._next_sync = time.monotonic() + SYNC_PERIOD_S
        self._last_logged = (0.0, "")
        self._thread = threading.Thread(target=self._loop, name="shoal-tracking", daemon=True)
        self._thread.start()

    def flush(self, timeout: float) -> bool:
        """Wait until all records are on disk and delivered, up to `timeout` seconds. True if they are."""
        sizes = {spool.path: _size(spool.path) for spool in self._spools}
        deadline = time.monotonic() + timeout
        with self._done:
            first_round = self._rounds_begun
            self._next_try = self._next_sync = 0.0
            self._wake.set()
            # A round that has begun may miss the last record: wait for one that begins now.
            while not (self._rounds_ended > first_round and (self._is_delivered(sizes) or self._failures)):
                if not self._thread.is_alive() or not self._done.wait(max(0.0, deadline - time.monotonic())):
                    break
        return self._is_delivered(sizes)

    def stop(self, timeout: float) -> bool:
        """Flush, and end the thread. If it hangs in a request, it ends with the process."""
        all_sent = self.flush(timeout)
        self._stopping = True
        self._wake.set()
        self._thread.join(0.2)
        return all_sent

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def _is_delivered(self, sizes: dict[Path, int]) -> bool:
        if self._delivery is None:
            return True
        return all(self._delivery.acknowledged.get(path, 0) >= size for path, size in sizes.items())

    def _loop(self) -> None:
        while not self._stopping:
            self._wake.clear()
            self._rounds_begun += 1
            self._sync()
            more = self._deliver()
            with self._done:
                self._rounds_ended = self._rounds_begun
                self._done.notify_all()
            if not more:
                self._wake.wait(self._period)

    def _sync(self) -> None:
        if time.monotonic() >= self._next_sync:
            self._next_sync = time.monotonic() + SYNC_PERIOD_S
            for spool in self._spools:
                spool.sync()

    def _deliver(self) -> bool:
        if self._delivery is None or time.monotonic() < self._next_try:
            return False
        try:
            more = self._delivery.deliver()
        except Exception as error:  # no error of a server or disk may stop training
            self._failures += 1
            self._next_try = time.monotonic() + retry_pause(self._failures, random.random)
            self._log_failure(f"{'' if isinstance(error, ServerUnavailable) else type(error).__name__ + ': '}{error}")
            return False
        if self._failures:
            log.warning("tracking: %s accepts records again", self._delivery.server.uri)
        self._failures, self._last_logged = 0, (0.0, "")
        return more

    def _log_failure(self, text: str) -> None:
        logged_at, logged_text = self._last_logged
        if text != logged_text or time.monotonic() - logged_at > 60:
            self._last_logged = (time.monotonic(), text)
            log.warning("tracking: %s; records stay on disk, training continues", text)


def retry_pause(failures: int, random_fraction: Callable[[], float]) -> float:
    """The pause after this many failures: exponential, with jitter between jobs."""
    return float(min(MAX_PAUSE_S, 2.0 ** min(failures - 1, 10)) * (0.5 + random_fraction() / 2))


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
