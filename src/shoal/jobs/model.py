"""What a job is: the fields of `job.yaml` and of `shoal run`, spelled as sbatch spells them.

Its models need no pydantic, which takes a third of the CPU time of `shoal run` to load.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from shoal.containers.images import JobImage, image_mount, image_name
from shoal.contract import WARNING
from shoal.errors import SpecError
from shoal.jobs import field_checks as checks
from shoal.jobs.field_checks import Check, ListOf, MappingOf, mistake, read_value
from shoal.jobs.record import JOBS_DIRECTORY
from shoal.jobs.sbatch_options import parse_options
from shoal.spec.checks import InvalidValue, choice, whole_number
from shoal.spec.finding import Finding, nearest, show

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

LAUNCHER_NAMES = ("srun", "torchrun", "spawn", "pmix", "mpirun", "python")
PROFILER_NAMES = ("torch", "nsys", "line")

_count = whole_number(1, 65533)


@dataclass(frozen=True)
class JobOption:
    """A field of a job: the check of its values, and how it is spelled as an option of `shoal run`."""

    check: Check | ListOf | MappingOf
    help: str = ""
    metavar: str = ""
    """Stands behind the option in its help; empty for a flag."""
    short: str = ""
    name: str = ""
    """The option where it is not spelled as the field is."""
    negative: str = ""
    """Turns the flag off."""


def option(
    check: Check | ListOf | MappingOf,
    help: str,
    metavar: str = "",
    short: str = "",
    *,
    name: str = "",
    negative: str = "",
    default: Any = None,
) -> Any:
    """A field that is also an option of `shoal run`, whose command line is made from these."""
    metadata = {"option": JobOption(check, help, metavar, short, name, negative)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class JobSpec:
    """A job as a user asks for it: the fields of `job.yaml`, and the options of `shoal run`.

    What is left out comes from the cluster: `nodes: 2` alone uses all GPUs of two nodes.
    """

    script: str = field(metadata={"option": JobOption(checks.text_value)})
    """The program: a Python script, or any executable of your working tree."""
    args: tuple[str, ...] = field(default=(), metadata={"option": JobOption(ListOf(checks.text_value))})
    """Its arguments."""
    launcher: str = option(
        choice("launcher", LAUNCHER_NAMES),
        f"What starts the processes: {', '.join(LAUNCHER_NAMES[:-1])} or {LAUNCHER_NAMES[-1]}. Default: srun.",
        "WORD",
        default="srun",
    )
    nodes: int | None = option(_count, "How many nodes. Default: 1, or as many as --nodelist names.", "NUMBER", "-N")
    gpus_per_node: int | None = option(
        whole_number(0, 1024), "GPUs of each node. Default: all they have; 0 for none.", "NUMBER"
    )
    ntasks_per_node: int | None = option(
        _count, "Processes of the script on each node. Default: one per GPU.", "NUMBER"
    )
    cpus_per_task: int | None = option(
        _count, "CPUs of each process. Default: an equal share of the node.", "NUMBER", "-c"
    )
    mem: str | None = option(
        checks.memory_size,
        "Memory of each node, as 16G; 0 for all of it. Default: in proportion to the CPUs.",
        "SIZE",
    )
    time: str | None = option(
        checks.time_limit,
        "The time limit as for sbatch: minutes, MM:SS or [D-]HH:MM:SS. Default: the partition's.",
        "TIME",
        "-t",
    )
    partition: str | None = option(checks.job_word, "The partition. Default: the cluster's default.", "NAME", "-p")
    constraint: str | None = option(checks.constraint, "Features the nodes must have.", "FEATURES", "-C")
    account: str | None = option(checks.job_word, "The account to charge.", "NAME", "-A")
    qos: str | None = option(checks.job_word, "The quality of service.", "NAME", "-q")
    array: str | None = option(
        checks.array_range,
        "Run it many times: 0-9 or 0-99%10. SLURM_ARRAY_TASK_ID tells the script which one it is.",
        "RANGE",
        "-a",
    )
    dependency: str | None = option(
        checks.dependency, "Wait for other jobs: afterok:17, or singleton for those of the same name.", "JOBS", "-d"
    )
    nodelist: str | None = option(checks.node_list, "Exactly these nodes: gpu[01-02].", "HOSTS", "-w")
    switches: int | None = option(_count, "How many sites it may span. Default: one.", "NUMBER")
    exclusive: bool = option(checks.true_or_false, "Share the nodes with no other job.", default=False)
    requeue: bool = option(
        checks.true_or_false,
        "Queue it again after a node failure or a preemption, or when the script asks. Default: --requeue.",
        default=True,
        negative="--no-requeue",
    )
    signal: str = option(
        checks.warning_signal,
        "The warning before the end, and how many seconds before it. Scripts that do not handle it do not notice it."
        f" Default: {WARNING}.",
        "SIGNAL@SECONDS",
        default=WARNING,
    )
    output: str | None = option(
        checks.output_path,
        "A file on the first node for all output, named as sbatch names it. `shoal logs` needs none.",
        "FILE",
        "-o",
    )
    error: str | None = option(
        checks.output_path, "The same for the error output of srun and the launcher.", "FILE", "-e"
    )
    job_name: str | None = option(checks.job_word, "The job's name. Default: the script's.", "NAME", "-J")
    profile: str | None = option(
        choice("profiler", PROFILER_NAMES),
        "Profile every rank with torch, nsys or line. `shoal logs` prints where the files are.",
        "WORD",
    )
    tracking_uri: str | None = option(
        checks.tracking_address,
        "The MLflow server. MLFLOW_TRACKING_USERNAME, _PASSWORD and _TOKEN are passed on from your environment.",
        "URL",
    )
    experiment: str | None = option(checks.experiment_name, "The MLflow experiment. Default: the job's name.", "NAME")
    export: Mapping[str, str] = option(
        MappingOf(checks.variable_name, checks.text_value),
        "A variable for the script's environment; may be repeated. The batch script contains it: set no password here.",
        "NAME=VALUE",
        default={},
    )
    include: tuple[str, ...] = option(
        checks.file_patterns,
        "Send files that .gitignore excludes: '*.bin' or data/; may be repeated.",
        "PATTERN",
        default=(),
    )
    sbatch: tuple[str, ...] = option(
        parse_options, "Any other option of sbatch, such as --hold; may be repeated.", "OPTION", default=()
    )
    environment: str | None = option(
        checks.job_word,
        "The environment in the file that runs the script. `shoal env build` makes it.",
        "NAME",
        name="--env",
    )
    image: str | None = option(
        image_name,
        "The image to run in: a name of `shoal image list`, a reference as debian:12, or a path on the hosts.",
        "IMAGE",
    )
    mount: tuple[str, ...] = option(
        ListOf(image_mount),
        "A directory or file of the nodes in the image; may be repeated.",
        "SOURCE:DESTINATION[:ro]",
        default=(),
    )
    workdir: str | None = option(
        checks.directory, "Where in the image the script starts. Default: in your working tree.", "DIRECTORY"
    )
    container_name: str | None = option(
        checks.container_name,
        "Run in a copy of the image that jobs may change. Each node keeps it under this name.",
        "NAME",
    )
    home: str = option(
        choice("word for the home", ("on", "off")),
        "Whether the image has your home, or an empty one: on or off. Default: off.",
        "WORD",
        default="off",
    )
    python: str = option(
        checks.python_program, "The Python on the nodes. Default: python3.", "PROGRAM", default="python3"
    )
    directory: str | None = option(
        checks.directory,
        "Where the hosts keep code and logs. Default: /var/lib/shoal/jobs/CLUSTER; of users, their own.",
        "DIRECTORY",
    )
    set_fields: frozenset[str] = field(default=frozenset(), compare=False)
    """The fields that the file or the options name."""

    @property
    def name(self) -> str:
        stem = PurePosixPath(self.script).name.removesuffix(".py")
        return self.job_name or re.sub(r"[^A-Za-z0-9_.+-]", "_", stem)[:64].lstrip(".+-") or "job"

    @property
    def runner_python(self) -> str:
        """The Python that starts the ranks: that of the node, also where the script has one in an image."""
        return "python3" if self.image or self.container_name else self.python

    @property
    def grace(self) -> int:
        """Seconds between the warning and the end."""
        return int(self.signal.rpartition("@")[2])

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as in `job.yaml`."""
        return {name: value for name, value in asdict(self).items() if name in JOB_FIELDS}


JOB_FIELDS: Mapping[str, JobOption] = {
    entry.name: entry.metadata["option"] for entry in fields(JobSpec) if "option" in entry.metadata
}
"""The fields of `job.yaml`, by name."""


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
    gpu_type: str = ""
    """The GPUs that it asks for, where it names a type."""
    sbatch: tuple[str, ...] = ()
    """Other options of sbatch, as they stand in the batch script."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class JobPaths:
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
    carried: bool = False
    """Whether the batch script has the code in it."""
    code_root: str = ""
    """The directory on each node that the code runs from, where that is not `root`."""
    own_tree: bool = False
    """Whether each node unpacks the code there as well: others may write below `root`."""
    image: JobImage | None = None
    """What the ranks run in; None where that is the node."""
    owner: int = 0
    """Who root is below `root` on some of the nodes, where it is root on others (NFS)."""


def job_from_options(values: Mapping[str, Any]) -> JobSpec:
    """The job of a command line or a Python call. Raises SpecError with every finding, spelled as options."""
    fields_read, mistakes = _read_fields(values)
    if mistakes:
        raise SpecError(tuple(map(_option_finding, mistakes)))
    return JobSpec(**fields_read, set_fields=frozenset(values))


def _read_fields(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[ErrorDetails]]:
    """The values as a job has them, and what is wrong with them."""
    mistakes = [] if "script" in values else [mistake("missing", ("script",), None)]
    fields_read: dict[str, Any] = {}
    for name, value in values.items():
        if name not in JOB_FIELDS:
            mistakes.append(mistake("extra_forbidden", (name,), value))
        elif value is None and getattr(JobSpec, name, "") is None:
            fields_read[name] = None
        else:
            fields_read[name] = read_value(JOB_FIELDS[name].check, value, (name,), mistakes)
    return fields_read, mistakes


def _option_finding(detail: ErrorDetails) -> Finding:
    name = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        return Finding("error", "unknown field", show(name), nearest(name, list(JOB_FIELDS)))
    if detail["type"] == "missing":
        return Finding("error", "no script is named", fix="shoal run train.py, or `script:` in the job's file")
    error = detail["ctx"]["error"]
    if not isinstance(error, InvalidValue):
        return Finding("error", "not a value that can stand here", show(detail["input"]), path=option_name(name))
    return Finding("error", error.what, error.found or show(detail["input"]), error.fix, path=option_name(name))


def option_name(field: str) -> str:
    """The option of `shoal run` for a field."""
    return JOB_FIELDS[field].name or f"--{field.replace('_', '-')}"


def job_root(spec: JobSpec, cluster: str) -> str:
    return spec.directory or f"{JOBS_DIRECTORY}/{cluster}"


def load_job(path: Path, over: Mapping[str, Any] | None = None) -> JobSpec:
    """The job in a file, with `over` in place of what the file says. Raises SpecError with every finding."""
    from shoal.spec.loader import read_text  # slow to import, and most jobs have no file

    return load_job_text(read_text(path, missing="name one that describes a job"), str(path), over)


def load_job_text(text: str, file: str, over: Mapping[str, Any] | None = None) -> JobSpec:
    """The same for a text; `file` is the name that findings give it."""
    from shoal.spec import reader
    from shoal.spec.loader import explain

    tree = reader.read(text, file)
    over = dict(over or {})
    findings = list(tree.findings)
    # File and options are validated apart, so that each finding names its own place.
    values = {name: value for name, value in tree.data.items() if name not in over}
    _, mistakes = _read_fields({**values, **({"script": "x"} if "script" in over else {})})
    findings += explain(mistakes, tree, lambda _: list(JOB_FIELDS))
    try:
        job_from_options({"script": "x", **over})
    except SpecError as error:
        findings += [finding for finding in error.findings if isinstance(finding, Finding)]
    if findings:
        findings.sort(key=reader.by_place)
        raise SpecError(tuple(findings))
    return job_from_options({**values, **over})
