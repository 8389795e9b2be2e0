"""What the cluster, `shoal run` and the training library agree on when a job must stop, and a job's variables.

    near its time limit    WARNING to ranks that handle it; at the limit SIGTERM, and SIGKILL after KILL_WAIT_S
    preempted              WARNING to ranks that handle it; after the partition's GraceTime, SIGTERM and SIGKILL, and
                           queued again
    told by scancel -b -s  the signal to ranks that handle it, and nothing more; without -b to every process
    cancelled              SIGTERM, and SIGKILL after KILL_WAIT_S
    a node is lost         SIGKILL, and queued again

A script runs without any of the variables: each one only takes a guess away.
"""

from __future__ import annotations

import signal

VERSION = "0.1.0"
"""Shoal's own. A client and a cluster whose versions differ before the last dot do not work together."""

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
"""What asks a job to stop: --signal and preemption send the first two, scancel and the time limit the third."""

STOP_NOTE = "stop"
"""In the job's directory, with the number of its restarts: the warning that came, for a script that still starts."""

PROGRESS_FILE = "progress.json"
"""In the job's directory: how far the training is, for `shoal jobs`."""

STACK_SIGNAL = 50
"""Asks a rank of `shoal.train` for its Python stack: SIGRTMAX-14, which no framework uses. Without a handler it would
kill: only a process with a file STACK_MEMORY and a handler for it gets it."""
STACK_MEMORY, STEP_MEMORY = "shoal-stack", "shoal-step"
"""The names of a rank's files in memory: its stacks, and its last step as one JSON object of RECORD_BYTES."""
RECORD_BYTES = 256

PROFILE_DIRECTORY = "profile"
"""In the job's directory: what its profiler leaves."""

STAGE_PROGRAM = "/usr/local/lib/shoal/stage"
"""On nodes that have copies of shares: fills them before a job, and brings them back after it."""

WARNING_SIGNAL = "USR1"
WARNING_S = 60
"""How long before its time limit a job is warned at the latest. Slurm may be up to a minute early."""
WARNING = f"{WARNING_SIGNAL}@{WARNING_S}"
"""The --signal of a job that does not say."""
WARNINGS_VARIABLE = "SHOAL_WARNINGS"
"""In the batch script: the pipe through which it hands warnings to the ranks."""

GRACE_S = WARNING_S
"""A partition's GraceTime: a preempted job has as long to save as one that comes to its time limit."""

KILL_WAIT_S = 30
"""KillWait: seconds from SIGTERM to SIGKILL. Without cgroups a batch job has none of them: srun, in the batch script,
gets SIGTERM as well, and kills the ranks at once. A job counts on its warning."""

SHOAL_PROOF_DIR = "SHOAL_PROOF_DIR"
"""Where `shoal prove` wants the records of this run; below SHOAL_JOB_DIR where it is relative. Set: a proof runs."""

SHOAL_PROOF_DTYPE = "SHOAL_PROOF_DTYPE"
"""The precision of a proof: float64 or float32."""

SHOAL_PROOF_PARALLEL = "SHOAL_PROOF_PARALLEL"
"""How a proof spreads the model, whatever the script says: ddp or fsdp."""

SHOAL_PROOF_STEPS = "SHOAL_PROOF_STEPS"
"""After so many steps of the optimizer a proof has seen enough."""

EXIT_REQUEUE = 85
"""The status a script leaves with when it has saved and wants to go on later, and could not requeue itself."""

EXIT_UNSAVED = 86
"""The status a script leaves with when its last state, or all of a turn, could not be saved."""

# ---- environment variables

SHOAL_JOB_DIR = "SHOAL_JOB_DIR"
"""The job's directory: code, logs, checkpoints. The same path on every node; on storage that the nodes share where
--directory names some, otherwise on each node's own disk."""

SHOAL_STORE_DIR = "SHOAL_STORE_DIR"
"""A directory all nodes of the job see, where rank 0 writes the address and port it listens on."""

SHOAL_NODE_ADDRS = "SHOAL_NODE_ADDRS"
"""The nodes' addresses on the cluster's network, as `name=address,name=address`. Wins over every other source."""

SHOAL_INTERFACE = "SHOAL_INTERFACE"
"""The network interface for NCCL and Gloo, where the user named one. Wins over the route to rank 0."""

SHOAL_RUN_ID = "SHOAL_RUN_ID"
"""Names the training run over all its requeues, where a job id would not."""

SHOAL_CODE_HASH = "SHOAL_CODE_HASH"
"""The content hash of the working tree that the job runs."""

SHOAL_PROFILE = "SHOAL_PROFILE"
"""What to profile the ranks with: torch, nsys or line. The traces land in `profile` of the job's directory."""

SHOAL_GRACE_SECONDS = "SHOAL_GRACE_SECONDS"
"""Seconds from the warning signal to the kill: those of --signal."""

SHOAL_TRACKING_URI = "SHOAL_TRACKING_URI"
"""The address of the MLflow server. Without a password in it: that comes in MLflow's own variables."""

SHOAL_EXPERIMENT = "SHOAL_EXPERIMENT"
"""The MLflow experiment the run belongs to."""


def parse_node_addrs(text: str) -> dict[str, str]:
    """The addresses in a value of SHOAL_NODE_ADDRS. ValueError says which part is broken."""
    addresses: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, address = part.partition("=")
        if not (name and equals and address):
            raise ValueError(f"{part!r} is not name=address")
        addresses[name] = address
    return addresses
