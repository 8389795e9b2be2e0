"""The run of a process, the directory of its records and the tags of the job, all from the environment.

One job is one run, on all its ranks and through all its requeues. Slurm keeps a job's id when it requeues it, and the
directory remembers the rest in `run.json`.
"""

from __future__ import annotations

import getpass
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from shoal.contract import SHOAL_CODE_HASH, SHOAL_EXPERIMENT, SHOAL_JOB_DIR, SHOAL_RUN_ID
from shoal.train.env import Env
from shoal.train.file_io import read_json_object, replace_file
from shoal.train.tracking.mlflow_client import RunName
from shoal.train.tracking.spool import Record, encode_record

RUN_FILE = "run.json"

log = logging.getLogger("shoal.train")


def run_id(environ: Mapping[str, str]) -> str:
    """The id that all ranks and requeues of this job share; empty if there is none."""
    job = environ.get("SLURM_JOB_ID", "")
    if environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    elastic = environ.get("TORCHELASTIC_RUN_ID", "none")
    name = (
        environ.get(SHOAL_RUN_ID)
        or (job and f"{environ.get('SLURM_CLUSTER_NAME') or 'slurm'}-{job}")
        or ("" if elastic == "none" else elastic)
    )
    return re.sub(r"[^A-Za-z0-9._:-]", "_", name)[:200]


def open_run_directory(
    directory: Path | None,
    environ: Mapping[str, str],
    *,
    experiment: str | None,
    title: str | None,
    uri: str,
    first: bool,
) -> tuple[Path, RunName]:
    """The directory of a run and its name: those of an earlier start if there was one. OSError where it is read-only.

    The `first` rank keeps `run.json`; another one writes it only where the nodes do not share the directory.
    """
    run = run_id(environ)
    fallback = run or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if directory is None:
        job_dir = environ.get(SHOAL_JOB_DIR)
        directory = Path(job_dir, "tracking") if job_dir else Path("tracking", fallback)
    earlier = read_json_object(directory / RUN_FILE)
    if earlier and run and earlier.get("run") != run:
        log.warning("tracking: %s holds the run %s; this one goes into %s", directory, earlier.get("run"), run)
        directory = directory / run
        earlier = read_json_object(directory / RUN_FILE)
    directory.mkdir(parents=True, exist_ok=True)
    default = environ.get(SHOAL_EXPERIMENT) or environ.get("MLFLOW_EXPERIMENT_NAME")
    job_name = environ.get("SLURM_JOB_NAME")
    name = RunName(
        run=run or str(earlier.get("run") or fallback),
        experiment=experiment or default or str(earlier.get("experiment") or job_name or "Default"),
        title=title or str(earlier.get("title") or job_name or fallback),
        started=int(earlier.get("started") or time.time() * 1000),
    )
    if first or not earlier:  # enough to send the rest later; `uri` is without a password
        record = {"version": 1, "uri": uri, **vars(name)}
        replace_file(directory / RUN_FILE, encode_record(record), durable=True)
    return directory, name


def from_record(record: Record) -> tuple[RunName, str]:
    """The name and the server in a `run.json`. ValueError where it is none."""
    try:
        name = RunName(record["run"], record["experiment"], record["title"], record["started"])
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from None
    return name, str(record.get("uri") or "")


SEND_MODULE = "shoal.train.tracking.send"
JOBS_LOGIN, JOBS_PASSWORD_FILE = "jobs", "/etc/shoal/mlflow/jobs-password"
"""With which the operator's jobs report. The file is root's, where jobs are submitted."""


def recovery_command(directory: Path, environ: Mapping[str, str] = os.environ) -> str:
    """The command that sends a directory, for who reads the job's output. The node may admit its user only in a job."""
    library = Path(__file__).absolute().parents[3]
    command = ["env", f"PYTHONPATH={library}", sys.executable, "-m", SEND_MODULE, str(directory.absolute())]
    node = environ.get("SLURMD_NODENAME")
    if not node:
        return shlex.join(command)
    options = ["--nodes=1", "--ntasks=1", "--mpi=none", f"--nodelist={node}"]
    for option, name in (("partition", "SLURM_JOB_PARTITION"), ("account", "SLURM_JOB_ACCOUNT")):
        if environ.get(name, "(null)") != "(null)":
            options.append(f"--{option}={environ[name]}")
    line = shlex.join(["srun", *options, *command])
    if environ.get("MLFLOW_TRACKING_USERNAME") != JOBS_LOGIN:
        return line
    read = "cat" if os.geteuid() == 0 else "sudo cat"
    login = f'MLFLOW_TRACKING_USERNAME={JOBS_LOGIN} MLFLOW_TRACKING_PASSWORD="$({read} {JOBS_PASSWORD_FILE})"'
    return f"{login} {line}"


def job_tags(env: Env, environ: Mapping[str, str]) -> dict[str, str]:
    """Tags that describe the job."""
    tags = {
        "shoal.job_id": env.job_id,
        "shoal.restarts": str(env.restart_count),
        "shoal.launcher": env.launcher,
        "shoal.world_size": str(env.world_size),
        "shoal.nodes": ",".join(env.nodes),
        "shoal.code_hash": environ.get(SHOAL_CODE_HASH, ""),
        "shoal.cluster": environ.get("SLURM_CLUSTER_NAME", ""),
        "shoal.job_dir": environ.get(SHOAL_JOB_DIR, ""),
        "mlflow.user": _user(),
        "mlflow.source.name": sys.argv[0] if sys.argv else "",
        "mlflow.source.type": "JOB",
    }
    return {key: value for key, value in tags.items() if value}


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        return str(os.getuid())
