"""What a job is: the fields of `job.yaml` and of `shoal run`, spelled as sbatch spells them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool, ValidationError, WithJsonSchema

from shoal import hostlist
from shoal.contract import WARNING
from shoal.errors import SpecError
from shoal.jobs.record import JOBS_DIRECTORY
from shoal.jobs.sbatch_options import parse_options
from shoal.spec.finding import Finding, nearest, show
from shoal.spec.values import Between, SpecModel, choice, refusal, slurm_time

RENAMED_FIELDS = {"env": "write `export:` for variables, or `environment:` for a Python environment"}
"""Fields of earlier releases, and what to write instead."""
LAUNCHER_NAMES = ("srun", "torchrun", "spawn", "pmix", "mpirun", "python")
PROFILER_NAMES = ("torch", "nsys", "line")
SECRETS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
"""Variables of the operator's that go to a job with a tracker, and never into its script: anybody may read that."""

_DEPENDENCY = r"(singleton|after(any|burstbuffer|corr|notok|ok)?(:[0-9]+(_[0-9]+)?(\+[0-9]+)?)+)"
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
        raise refusal("a process cannot catch this signal, so it cannot save its work", f"use USR1@{match[5]}")
    return f"{match[3].upper()}@{match[5]}"


def _time(value: object) -> str:
    """A time limit as sbatch reads it, so `1:30` is 90 seconds. The spec refuses that spelling."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,6}:[0-5][0-9]", value) and value.strip("0:"):
        return value
    return slurm_time(value)


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
        raise refusal("this variable is a secret, and every user can read a batch script", fix, value)
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
            "the address has a password in it, and every user can read a batch script",
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


_dependency = _word(
    "dependency", f"{_DEPENDENCY}([,?]{_DEPENDENCY})*", "write it like afterok:17, afterany:17:18 or singleton", 4096
)
_size = _word("size", r"[0-9]{1,12}[KMGTkmgt]?", "write a number and K, M, G or T: 512M, 16G; 0 is the whole node")
_array = _word("range of an array", r"[0-9]+(-[0-9]+(:[0-9]+)?)?(,[0-9]+(-[0-9]+(:[0-9]+)?)?)*(%[0-9]+)?", "as 0-9%2")
_name = _word("name", r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", "use letters, digits, `-`, `_`, `.` and `+`", 64)
_constraint = _word("constraint", r"[A-Za-z0-9_.&|()\[\]*,:=-]+", "write features and & | ( ) [ ] *, without blanks")
_path = _word("path", r"[A-Za-z0-9_.%/+=@:,~-]+", "use letters, digits and _ . % / + = @ : , ~ -, without blanks", 1024)
_directory = _word("directory", r"(/[A-Za-z0-9_.+=@-]+)+", "give an absolute path without blanks", 512)


def _patterns(value: object) -> tuple[str, ...]:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(text, str) and text for text in patterns):
        raise refusal("not patterns of files", "give a list: ['*.bin', data/]")
    return tuple(patterns)


def _python(value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or value[0] == "-":
        raise refusal("not a Python", "give a program, such as python3 or /opt/env/bin/python")
    return value


_SBATCH_SCHEMA: dict[str, Any] = {"type": ["array", "object"], "items": {"type": "string"}, "title": "sbatch options"}

Count = Annotated[int, Between(1, 65533)]
Name = Annotated[str, BeforeValidator(_name)]
OutputPath = Annotated[str, BeforeValidator(_path)]
Text = Annotated[str, BeforeValidator(_value)]
NodeList = Annotated[str, BeforeValidator(_nodelist)]
JobTime = Annotated[str, BeforeValidator(_time), WithJsonSchema({"type": ["string", "integer"], "title": "time"})]
Experiment = Annotated[str, BeforeValidator(_experiment)]
Python = Annotated[str, BeforeValidator(_python)]
Constraint = Annotated[str, BeforeValidator(_constraint)]


def option(
    help: str, metavar: str = "", short: str = "", *, name: str = "", negative: str = "", default: Any = None
) -> Any:
    """A field that is also an option of `shoal run`, whose command line is made from these.

    `metavar` stands behind the option in its help, and is empty for a flag; `negative` turns the flag off. `name` is
    the option where it is not spelled as the field is.
    """
    spelling: dict[str, Any] = {"metavar": metavar, "short": short, "name": name, "negative": negative}
    return Field(default=default, description=help, json_schema_extra=spelling)


class JobSpec(SpecModel):
    """A job as a user asks for it: the fields of `job.yaml`, and the options of `shoal run`.

    What is left out comes from the cluster: `nodes: 2` alone uses all GPUs of two nodes.
    """

    script: Text
    """The program: a Python script, or any executable of your working tree."""
    args: tuple[Text, ...] = ()
    """Its arguments."""
    launcher: Annotated[str, BeforeValidator(choice("launcher", LAUNCHER_NAMES))] = option(
        f"What starts the processes: {', '.join(LAUNCHER_NAMES[:-1])} or {LAUNCHER_NAMES[-1]}. Default: srun.",
        "WORD",
        default="srun",
    )
    nodes: Count | None = option("How many nodes. Default: 1, or as many as --nodelist names.", "NUMBER", "-N")
    gpus_per_node: Annotated[int, Between(0, 1024)] | None = option(
        "GPUs of each node. Default: all they have; 0 for none.", "NUMBER"
    )
    ntasks_per_node: Count | None = option("Processes of the script on each node. Default: one per GPU.", "NUMBER")
    cpus_per_task: Count | None = option("CPUs of each process. Default: an equal share of the node.", "NUMBER", "-c")
    mem: Annotated[str, BeforeValidator(_size)] | None = option(
        "Memory of each node, as 16G; 0 for all of it. Default: in proportion to the CPUs.", "SIZE"
    )
    time: JobTime | None = option(
        "The time limit as for sbatch: minutes, MM:SS or [D-]HH:MM:SS. Default: the partition's.", "TIME", "-t"
    )
    partition: Name | None = option("The partition. Default: the cluster's default.", "NAME", "-p")
    constraint: Constraint | None = option("Features the nodes must have.", "FEATURES", "-C")
    account: Name | None = option("The account to charge.", "NAME", "-A")
    qos: Name | None = option("The quality of service.", "NAME", "-q")
    array: Annotated[str, BeforeValidator(_array)] | None = option(
        "Run it many times: 0-9 or 0-99%10. SLURM_ARRAY_TASK_ID tells the script which one it is.", "RANGE", "-a"
    )
    dependency: Annotated[str, BeforeValidator(_dependency)] | None = option(
        "Wait for other jobs: afterok:17, or singleton for those of the same name.", "JOBS", "-d"
    )
    nodelist: NodeList | None = option("Exactly these nodes: gpu[01-02].", "HOSTS", "-w")
    switches: Count | None = option("How many sites it may span. Default: one.", "NUMBER")
    exclusive: StrictBool = option("Share the nodes with no other job.", default=False)
    requeue: StrictBool = option(
        "Queue it again after a node failure or a preemption, or when the script asks. Default: --requeue.",
        default=True,
        negative="--no-requeue",
    )
    signal: Annotated[str, BeforeValidator(_signal)] = option(
        "The warning before the end, and how many seconds before it. Scripts that do not handle it do not notice it."
        f" Default: {WARNING}.",
        "SIGNAL@SECONDS",
        default=WARNING,
    )
    output: OutputPath | None = option(
        "A file on the first node for all output, named as sbatch names it. `shoal logs` needs none.", "FILE", "-o"
    )
    error: OutputPath | None = option("The same for the error output of srun and the launcher.", "FILE", "-e")
    job_name: Name | None = option("The job's name. Default: the script's.", "NAME", "-J")
    profile: Annotated[str, BeforeValidator(choice("profiler", PROFILER_NAMES))] | None = option(
        "Profile every rank with torch, nsys or line. `shoal logs` prints where the files are.", "WORD"
    )
    tracking_uri: Annotated[str, BeforeValidator(_tracking_uri)] | None = option(
        "The MLflow server. MLFLOW_TRACKING_USERNAME, _PASSWORD and _TOKEN are passed on from your environment.", "URL"
    )
    experiment: Experiment | None = option("The MLflow experiment. Default: the job's name.", "NAME")
    export: dict[Annotated[str, BeforeValidator(_variable)], Text] = option(
        "A variable for the script's environment; may be repeated. The batch script contains it: set no password here.",
        "NAME=VALUE",
        default={},
    )
    include: Annotated[tuple[Text, ...], BeforeValidator(_patterns)] = option(
        "Send files that .gitignore excludes: '*.bin' or data/; may be repeated.", "PATTERN", default=()
    )
    sbatch: Annotated[tuple[str, ...], BeforeValidator(parse_options), WithJsonSchema(_SBATCH_SCHEMA)] = option(
        "Any other option of sbatch, such as --hold; may be repeated.", "OPTION", default=()
    )
    environment: Name | None = option(
        "The environment in the file that runs the script. `shoal env build` makes it.", "NAME", name="--env"
    )
    python: Python = option("The Python on the nodes. Default: python3.", "PROGRAM", default="python3")
    directory: Annotated[str, BeforeValidator(_directory)] | None = option(
        "Where the hosts keep code and logs. Default: /var/lib/shoal/jobs/CLUSTER; of users, their own.", "DIRECTORY"
    )

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
    owner: int = 0
    """Who root is below `root` on some of the nodes, where it is root on others (NFS)."""


def job_from_options(values: Mapping[str, Any]) -> JobSpec:
    """The job of a command line or a Python call. Raises SpecError with every finding, spelled as options."""
    try:
        return JobSpec.model_validate(dict(values))
    except ValidationError as error:
        raise SpecError(tuple(_option_finding(detail) for detail in error.errors(include_url=False))) from None


def _option_finding(detail: Any) -> Finding:
    name = str(detail["loc"][0]) if detail["loc"] else ""
    if detail["type"] == "extra_forbidden":
        fix = RENAMED_FIELDS.get(name) or nearest(name, list(JobSpec.model_fields))
        return Finding("error", "unknown field", show(name), fix)
    if detail["type"] == "missing":
        return Finding("error", "no script is named", fix="shoal run train.py, or `script:` in the job's file")
    context = detail.get("ctx", {})
    what, fix = context.get("what", "not a value that can stand here"), context.get("fix", "")
    return Finding("error", what, context.get("found", show(detail["input"])), fix, path=option_name(name))


def option_name(field: str) -> str:
    """The option of `shoal run` for a field."""
    extra = JobSpec.model_fields[field].json_schema_extra
    return str((isinstance(extra, dict) and extra["name"]) or f"--{field.replace('_', '-')}")


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
    for name in RENAMED_FIELDS.keys() & tree.data.keys():
        place = tree.keys.get((name,))
        findings.append(tree.finding((), "renamed key", show(name), RENAMED_FIELDS[name], place=place))
    # File and options are validated apart, so that each finding names its own place.
    values = {name: value for name, value in tree.data.items() if name not in over and name not in RENAMED_FIELDS}
    try:
        JobSpec.model_validate({**values, **({"script": "x"} if "script" in over else {})})
    except ValidationError as error:
        findings += explain(error, tree, JobSpec)
    try:
        job_from_options({"script": "x", **over})
    except SpecError as error:
        findings += [finding for finding in error.findings if isinstance(finding, Finding)]
    if findings:
        findings.sort(key=reader.by_place)
        raise SpecError(tuple(findings))
    return JobSpec.model_validate({**values, **over})
