"""`tracker()`: records of a training script, written to disk first, then sent to MLflow if there is a server."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from shoal.contract import SHOAL_TRACKING_URI
from shoal.train.env import Env, read_env
from shoal.train.errors import StopExit
from shoal.train.file_io import replace_file
from shoal.train.proof_record import ProofRecorder, detach, proof_recorder
from shoal.train.tracking.delivery import Delivery, DeliveryThread
from shoal.train.tracking.mlflow_client import MlflowClient, RunName
from shoal.train.tracking.run_identity import job_tags, open_run_directory, recovery_command, run_id
from shoal.train.tracking.spool import Spool, now_ms, read_tail
from shoal.train.tracking.system_metrics import SystemMetrics

Status = Literal["FINISHED", "FAILED", "KILLED", "SCHEDULED"]
"""MLflow's states. SCHEDULED: the job is requeued."""

FLUSH_TIMEOUT_S = 5.0
MAX_ARTIFACT_BYTES = 64 * 1024 * 1024
TAIL_BYTES = 4 * 1024 * 1024
"""How much of the spool a restarted job reads to find steps that it repeats."""

log = logging.getLogger("shoal.train")


def tracker(
    params: Mapping[str, Any] | None = None,
    *,
    directory: str | os.PathLike[str] | None = None,
    uri: str | None = None,
    experiment: str | None = None,
    title: str | None = None,
    env: Env | None = None,
    environ: Mapping[str, str] = os.environ,
    system_every: float = 15.0,
) -> Tracker:
    """The run of this job, the same one on every rank and after every requeue. Call it on all ranks.

    Rank 0 records what the script logs, the first rank of each node what its node does; on the others every call
    returns at once. With a server (`uri`, SHOAL_TRACKING_URI or MLFLOW_TRACKING_URI) records are sent to it; without
    one they stay in the JSON-lines files of `directory`, by default `tracking` in the job's directory.
    """
    proof = proof_recorder(environ)
    if proof is not None:
        directory = proof.directory / "tracking"  # not with the records of a real run
    env = env if env is not None else read_env(environ)
    if env.rank != 0 and (env.local_rank != 0 or not run_id(environ)):
        return Tracker(proof=proof)
    server_uri = uri or environ.get(SHOAL_TRACKING_URI) or environ.get("MLFLOW_TRACKING_URI") or ""
    server = _server(server_uri if proof is None else "", environ)

    def open_at(directory: Path | None) -> tuple[Path, RunName, tuple[Spool, ...]]:
        address = server.uri if server else ""
        first = env.rank == 0
        place, name = open_run_directory(
            directory, environ, experiment=experiment, title=title, uri=address, first=first
        )
        names = ["metrics.jsonl", "artifacts.jsonl"] if first else []
        names += [f"system-{env.node}.jsonl"] if env.local_rank == 0 else []
        return place, name, tuple(Spool(place / file) for file in names)

    try:
        place, name, spools = open_at(Path(directory) if directory else None)
    except OSError as error:
        place = Path(tempfile.mkdtemp(prefix="shoal-tracking-"))
        log.error("tracking: %s; records go to %s on %s instead", error, place, env.node)
        place, name, spools = open_at(place)
    delivery = Delivery(server, name, [s.path for s in spools], create=env.rank == 0) if server else None
    new_tracker = Tracker(place, spools, DeliveryThread(spools, delivery), env, system_every, proof)
    if env.rank == 0:
        new_tracker.tags(job_tags(env, environ))
        new_tracker.status("RUNNING")
        new_tracker.attach_script(env.job_id)
    new_tracker.params(params or {})
    return new_tracker


class Tracker:
    """Records metrics, parameters, tags and files of one run. No call raises or waits for a server."""

    def __init__(
        self,
        directory: Path | None = None,
        spools: tuple[Spool, ...] = (),
        background: DeliveryThread | None = None,
        env: Env | None = None,
        system_every: float = 0.0,
        proof: ProofRecorder | None = None,
    ) -> None:
        self._proof = proof
        self.directory = directory
        self._background = background
        self._all = spools
        by_name = {spool.path.name: spool for spool in spools}
        self._spool = by_name.get("metrics.jsonl")
        self._artifacts = by_name.get("artifacts.jsonl")
        self._last, self._steps_at_last = 0, set[int]()
        self._recorded_values = _read_recorded_values(self._spool)
        self._last_recorded_step = max((step for _, step, _ in self._recorded_values), default=-1)
        self._logged: set[str] = set()
        self._closed = False
        self._pid = os.getpid()
        self._system: SystemMetrics | None = None
        if env and system_every > 0:
            system = spools[-1]
            steps = [record["step"] for record in read_tail(system.path, 64 * 1024) if "step" in record]
            self._system = SystemMetrics(system, env.node, system_every, max(steps, default=-1) + 1)
        if spools:
            atexit.register(self._at_exit)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record numbers of a step. Reading a tensor waits for its GPU: do not log at every step.

        After a requeue, repeated steps with the same values are not recorded again.
        """
        if self._proof is not None:
            self._proof.metrics(metrics, step)
        if self._spool is None or self._closed:
            return
        values: dict[str, float | str] = {}
        for key, value in metrics.items():
            try:
                number = float(detach(value))
            except (TypeError, ValueError) as error:
                self._log_once(f"the metric {key} is not a number: {error}")
                continue
            # JSON has no NaN or Infinity; MLflow accepts these strings.
            values[key] = number if math.isfinite(number) else json.dumps(number)
        step = int(step)
        if step <= self._last_recorded_step:
            values = {key: value for key, value in values.items() if (key, step, value) not in self._recorded_values}
        if values:
            self._spool.append({"t": self._time(step), "step": step, "metrics": values})

    def params(self, params: Mapping[str, Any]) -> None:
        """Record parameters of the run. Nested ones become `optimizer.lr`."""
        if self._spool is not None and params and not self._closed:
            self._spool.append({"t": now_ms(), "params": dict(_flat(params))})

    def tags(self, tags: Mapping[str, Any]) -> None:
        """Record tags; the last value of a key counts."""
        if self._spool is not None and tags and not self._closed:
            self._spool.append({"t": now_ms(), "tags": {str(key): str(value) for key, value in tags.items()}})

    def artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Attach a copy of a file, as `name`."""
        file = Path(path)
        try:
            if file.stat().st_size > MAX_ARTIFACT_BYTES:
                self._log_once(f"{file} is not attached: it is larger than {MAX_ARTIFACT_BYTES >> 20} MiB")
                return
            self.data(name or file.name, file.read_bytes())
        except OSError as error:
            self._log_once(f"{file} is not attached: {error.strerror}")

    def data(self, name: str, content: bytes) -> None:
        """Attach bytes as a file of this name, which may contain directories."""
        if self._artifacts is None or self.directory is None or self._closed:
            return
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not name.strip("/."):
            self._log_once(f"{name!r} cannot be the name of an artifact")
            return
        file = Path("artifacts", f"{hashlib.sha256(content).hexdigest()[:16]}-{PurePosixPath(name).name}")
        try:
            (self.directory / "artifacts").mkdir(exist_ok=True)
            replace_file(self.directory / file, content)
        except OSError as error:
            self._log_once(f"{name} is not attached: {error.strerror}")
            return
        self._artifacts.append({"t": now_ms(), "artifact": {"path": name, "file": str(file)}})

    def attach_script(self, job_id: str) -> None:
        """Attach Slurm's batch script, in the background."""

        def attach() -> None:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                command = ["scontrol", "write", "batch_script", job_id, "-"]
                options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 10}
                self.data("job.sbatch", subprocess.check_output(command, **options))

        if job_id and shutil.which("scontrol"):
            threading.Thread(target=attach, daemon=True).start()

    def status(self, status: Status | Literal["RUNNING"]) -> None:
        if self._spool is not None:
            self._spool.append({"t": now_ms(), "status": status})

    def flush(self, timeout: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until everything is on disk and sent, up to `timeout` seconds. True if it is."""
        return self._background is None or self._background.flush(timeout)

    def close(self, status: Status = "FINISHED", timeout: float = FLUSH_TIMEOUT_S) -> bool:
        """End the recording. What is not sent in time stays on disk, for the next start or for the command that is
        logged."""
        if self._closed or self._background is None:
            return True
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._system:
            self._system.stop()
        self.status(status)
        all_sent = self._background.stop(timeout)
        if not all_sent:
            assert self.directory is not None
            host = os.environ.get("SLURM_SUBMIT_HOST")
            log.warning(
                "tracking: unsent records; the job's next start sends them, or%s: %s",
                f", on {host}" if host else "",
                recovery_command(self.directory),
            )
        if self._background.ended:
            for spool in self._all:
                spool.close()
        return all_sent

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StopExit):
            self.close("SCHEDULED" if error.requeued else "KILLED")
            return
        succeeded = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        self.close("FINISHED" if succeeded else "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")

    def _time(self, step: int) -> int:
        """Now, in milliseconds, unique per step: the server uses it as part of its key."""
        now = now_ms()
        if now > self._last or step in self._steps_at_last:
            self._last = max(now, self._last + 1)
            self._steps_at_last.clear()
        self._steps_at_last.add(step)
        return self._last

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.error("tracking: %s", text)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:  # the end of a forked child is not that of the run
            return
        self.close("FAILED" if getattr(sys, "last_value", None) is not None else "FINISHED")


def _server(uri: str, environ: Mapping[str, str]) -> MlflowClient | None:
    if not uri:
        return None
    try:
        return MlflowClient(uri, environ)
    except (ValueError, OSError) as error:
        log.error("tracking: %s; records stay on disk", error)
        return None


def _read_recorded_values(spool: Spool | None) -> set[tuple[str, int, float | str]]:
    """The last records of earlier starts: steps after the checkpoint are repeated."""
    if spool is None or spool.fresh:
        return set()
    records = [record for record in read_tail(spool.path, TAIL_BYTES) if "step" in record]
    return {(key, record["step"], value) for record in records for key, value in record.get("metrics", {}).items()}


def _flat(params: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in params.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", str(value))]
    return pairs
