"""What a job is: the fields of `job.yaml` and of `shoal run`, spelled as sbatch spells them.

JobSpec       what a person asks for; anything left out is worked out from the cluster
ResolvedJob   the same with every number known, made by `resolve.resolve`
Shipped       where on the hosts its code and its files are
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import BeforeValidator, Field, StrictBool

from shoal import hostlist
from shoal.spec.closed import Closed
from shoal.spec.words import Between, SlurmTime, choice, refusal
from shoal.train.contract import WARNING

JOBS_DIRECTORY = "/var/lib/shoal/jobs"
"""Where jobs live on the hosts, one directory a cluster below it."""
LAUNCHER_NAMES = ("srun", "torchrun", "spawn", "mpirun", "python")
PROFILER_NAMES = ("torch", "nsys", "line")
SECRETS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
"""Variables of the operator's that go to a job with a tracker, and never into its script: anybody may read that."""

_DEPENDENCY = re.compile(
    r"(singleton|(after|afterany|afterburstbuffer|aftercorr|afternotok|afterok)(:[0-9]+(_[0-9]+)?(\+[0-9]+)?)+)"
)
_SIGNAL = re.compile(r"(R?B?R?:)?(SIG)?([A-Z][A-Z0-9]*|[0-9]+)(@([0-9]{1,5}))?", re.IGNORECASE)


def _word(kind: str, pattern: str, fix: str, limit: int = 512) -> Callable[[object], str]:
    """A check for text that goes on an #SBATCH line: nothing in it can end the line, the word or the quotes."""
    shape = re.compile(pattern)

    def check(value: object) -> str:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(text, str) or len(text) > limit or not shape.fullmatch(text):
            raise refusal(f"not a {kind}", fix)
        return text

    return check


def _dependency(value: object) -> str:
    fix = "write it like afterok:17, afterany:17:18 or singleton"
    if not isinstance(value, str) or not all(_DEPENDENCY.fullmatch(part) for part in re.split("[,?]", value)):
        raise refusal("not a dependency", fix)
    return value


def _signal(value: object) -> str:
    match = _SIGNAL.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[5] is None:
        raise refusal("not a signal", "write it like USR1@120: the signal, and how many seconds before the end")
    if match[1]:
        fix = f"leave it out: {match[3].upper()}@{match[5]}"
        if "B" not in match[1].upper():
            raise refusal("`R:` is about a reservation, and `shoal run` asks for none", fix)
        raise refusal("`B:` sends the signal to the batch shell alone", fix)
    if match[3].upper() in ("KILL", "9", "STOP", "19"):
        raise refusal("no process hears of this signal, so none can save its work", f"say USR1@{match[5]}")
    return f"{match[3].upper()}@{match[5]}"


def _nodelist(value: object) -> str:
    try:
        if isinstance(value, str) and hostlist.expand(value):
            return _word("hostlist", r"[A-Za-z0-9.,\[\]_-]+", "write it like gpu[01-04]", 4096)(value)
    except ValueError as error:
        raise refusal("not a hostlist", f"{error}; write it like gpu[01-04]") from None
    raise refusal("not a hostlist", "write it like gpu[01-04]")


def _variable(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", value):
        raise refusal("not the name of a variable", "use letters, digits and `_`")
    if value.startswith(("SLURM_", "SHOAL_")):
        raise refusal("Slurm and Shoal set this variable themselves", "give it another name")
    if value in SECRETS:
        fix = "set it where you run `shoal run` with --tracking-uri: it takes it from there, past the script"
        raise refusal("this variable is a secret, and everybody can read a batch script", fix, value)
    return value


def _value(value: object) -> str:
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str) or "\0" in text:
        raise refusal("not text", "put it in quotes")
    return text


def _tracking_uri(value: object) -> str:
    fix = "write it like http://tracking.example:5000"
    if isinstance(value, str) and "@" in value:
        raise refusal(
            "the address has a password in it, and everybody can read a batch script",
            "leave it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where you run `shoal run`",
            "...@" + value.rpartition("@")[2],
        )
    if not isinstance(value, str) or not re.fullmatch(r"https?://[!-~]{1,500}", value):
        raise refusal("not the address of a tracking server", fix)
    return value


def _experiment(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > 200:
        raise refusal("not the name of an experiment", "give one line of text")
    return value


_size = _word("size", r"[0-9]{1,12}[KMGTkmgt]?", "write a number and K, M, G or T: 512M, 16G; 0 is the whole node")
_array = _word("range of an array", r"[0-9]+(-[0-9]+(:[0-9]+)?)?(,[0-9]+(-[0-9]+(:[0-9]+)?)?)*(%[0-9]+)?", "as 0-9%2")
_name = _word("name", r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", "use letters, digits, `-`, `_`, `.` and `+`", 64)
_constraint = _word("constraint", r"[A-Za-z0-9_.&|()\[\]*,:=-]+", "write features and & | ( ) [ ] *, without blanks")
_path = _word("path", r"[A-Za-z0-9_.%/+=@:,~-]+", "use letters, digits and _ . % / + = @ : , ~ -, without blanks", 1024)
_directory = _word("directory", r"(/[A-Za-z0-9_.+=@-]+)+", "give an absolute path without blanks", 512)


def _python(value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or value[0] == "-":
        raise refusal("not a Python", "give a program, such as python3 or /opt/env/bin/python")
    return value


Count = Annotated[int, Between(1, 65533)]
Name = Annotated[str, BeforeValidator(_name)]
OutputPath = Annotated[str, BeforeValidator(_path)]


class JobSpec(Closed):
    """A job as a person asks for it. `job.yaml` holds these fields, and the options of `shoal run` are called the same.

    Whatever is left out comes from the cluster: `nodes: 2` alone uses all GPUs of two nodes.
    """

    script: Annotated[str, BeforeValidator(_value)]
    """The program: a Python script, or any executable of your working tree."""
    args: tuple[Annotated[str, BeforeValidator(_value)], ...] = ()
    """Its arguments."""
    launcher: Annotated[str, BeforeValidator(choice("launcher", LAUNCHER_NAMES))] = "srun"
    """Who starts the processes: srun, torchrun, spawn, mpirun or python."""
    python: Annotated[str, BeforeValidator(_python)] = "python3"
    """The Python on the nodes that runs the script."""
    environment: Name | None = None
    """The environment of the spec whose Python runs the script. `shoal env build` makes it."""
    env: dict[
        Annotated[str, BeforeValidator(_variable)],
        Annotated[str, BeforeValidator(_value)],
    ] = Field(default_factory=dict)
    """Environment variables of the script. They are written into the batch script: no place for a password."""
    nodes: Count | None = None
    """How many nodes. Default: 1, or as many as `nodelist` names."""
    gpus_per_node: Annotated[int, Between(0, 1024)] | None = None
    """GPUs of each node. Default: all that the nodes have; 0 for none."""
    ntasks_per_node: Count | None = None
    """Processes of your script on each node, whoever starts them. Default: one a GPU, or 1 without GPUs."""
    cpus_per_task: Count | None = None
    """CPUs of each such process. Default: the node's CPUs shared out."""
    mem: Annotated[str, BeforeValidator(_size)] | None = None
    """Memory of each node, as 16G; 0 for all of it. Default: in proportion to the CPUs."""
    time: SlurmTime | None = None
    """The time limit: minutes, HH:MM:SS or D-HH:MM:SS. Default: the partition's."""
    partition: Name | None = None
    """The queue. Default: the cluster's default partition."""
    constraint: Annotated[str, BeforeValidator(_constraint)] | None = None
    """Features that the nodes must have."""
    account: Name | None = None
    """The account to charge."""
    qos: Name | None = None
    """The quality of service."""
    array: Annotated[str, BeforeValidator(_array)] | None = None
    """Run it many times, as 0-9 or 0-99%10; SLURM_ARRAY_TASK_ID tells the script which one it is."""
    dependency: Annotated[str, BeforeValidator(_dependency)] | None = None
    """Wait for other jobs: afterok:17, or singleton for those of the same name."""
    nodelist: Annotated[str, BeforeValidator(_nodelist)] | None = None
    """The very nodes to use, as gpu[01-02]."""
    switches: Count | None = None
    """How many sites the job may span, where the cluster has several. Default: one."""
    exclusive: StrictBool = False
    """Share the nodes with no other job."""
    requeue: StrictBool = True
    """Queue the job again when a node fails, when it is preempted, and when the script asks for it."""
    signal: Annotated[str, BeforeValidator(_signal)] = WARNING
    """The warning before the end, and how many seconds before it. Scripts that do not handle it do not notice it."""
    output: OutputPath | None = None
    """A file on the first node for all that the ranks print, as sbatch names them. `shoal logs` needs none."""
    error: OutputPath | None = None
    """The same for what srun and the launcher complain about."""
    profile: Annotated[str, BeforeValidator(choice("profiler", PROFILER_NAMES))] | None = None
    """Profile every rank: with torch.profiler a few steps, with nsys all of it, with line each line of the script."""
    tracking_uri: Annotated[str, BeforeValidator(_tracking_uri)] | None = None
    """The MLflow server that the run is recorded on. Its password comes from MLflow's own variables where you are."""
    experiment: Annotated[str, BeforeValidator(_experiment)] | None = None
    """The MLflow experiment that the run belongs to. Default: the job's name."""
    job_name: Name | None = None
    """The job's name. Default: the script's."""
    directory: Annotated[str, BeforeValidator(_directory)] | None = None
    """Where code and logs are kept on the hosts. Default: /var/lib/shoal/jobs and the cluster's name."""

    @property
    def name(self) -> str:
        stem = PurePosixPath(self.script).name.removesuffix(".py")
        return self.job_name or re.sub(r"[^A-Za-z0-9_.+-]", "_", stem)[:64].lstrip(".+-") or "job"

    @property
    def grace(self) -> int:
        """Seconds between the warning and the end."""
        return int(self.signal.rpartition("@")[2])


@dataclass(frozen=True)
class ResolvedJob:
    """A job with every number known."""

    spec: JobSpec
    partition: str
    nodes: int
    gpus_per_node: int
    ranks_per_node: int
    """Processes of the script on each node."""
    cpus_per_rank: int
    hosts: tuple[str, ...] = ()
    """The nodes that Slurm may choose from and that are always there; all of them get the code."""
    exclude: tuple[str, ...] = ()
    """Nodes that are down now and cannot get it, and rented ones that would not have it."""
    rented: tuple[str, ...] = ()
    """Machines beside `hosts` that are rented when a job needs them. They find the code where all hosts share it."""
    containers: tuple[str, ...] = ()
    """Containers that are rented then. The controller sends them the code, and fetches what the job writes."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Shipped:
    """Where on the hosts the job's code is."""

    cluster: str
    root: str
    """The directory of the cluster's jobs."""
    code: str
    """The content hash of the working tree; `code/HASH.tar` below `root`."""
    runtime: str
    """The content hash of Shoal's own part; `lib/HASH` below `root`."""
    workdir: str = "."
    """Where in the tree the script starts: where the person stood."""
    environment: str = ""
    """The directory of its Python environment; empty where it uses none."""
    copies: bool = False
    """Whether nodes may have copies of shares instead of the shares themselves."""
    staged: bool = False
    """Whether the job may run in a rented container, where it waits for its code."""


@dataclass(frozen=True)
class Note:
    """What `shoal run` leaves in a job's comment, where Slurm keeps it: what it uses, so that nobody cleans it away."""

    code: str
    runtime: str
    profile: str = ""
    environment: str = ""
    """The id of its Python environment."""

    def __str__(self) -> str:
        uses = "/".join(filter(None, (self.code, self.runtime, self.profile)))
        return f"shoal:{uses}@{self.environment}" if self.environment else f"shoal:{uses}"

    @classmethod
    def parse(cls, comment: str) -> Note | None:
        """The note in a comment; None in one that somebody else wrote."""
        match = re.fullmatch(r"shoal:([0-9a-z]+)/([0-9a-z]+)(?:/([a-z]+))?(?:@([0-9a-z]+))?", comment)
        return cls(match[1], match[2], match[3] or "", match[4] or "") if match else None


def job_root(spec: JobSpec, cluster: str) -> str:
    return spec.directory or f"{JOBS_DIRECTORY}/{cluster}"
