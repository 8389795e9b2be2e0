"""Options of sbatch that `shoal run` has no option for: `--sbatch` and `sbatch:`. Pure.

Most are passed on as they are. Those that say how many processes and GPUs there are become numbers of the job, so that
Shoal and Slurm count the same ranks. What contradicts the job, or what Shoal sets itself, is rejected.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shoal.hostlist import expand
from shoal.spec.checks import refusal

SHORT_OPTIONS = {
    **{"A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus"},
    **{"H": "hold", "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet"},
    **{"S": "core-spec", "V": "version", "W": "wait", "a": "array", "b": "begin", "c": "cpus-per-task"},
    **{"d": "dependency", "e": "error", "h": "help", "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks"},
    **{"o": "output", "p": "partition", "q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose"},
    **{"w": "nodelist", "x": "exclude"},
}
OWN_OPTIONS = (
    *("nodes", "gpus-per-node", "ntasks-per-node", "cpus-per-task", "mem", "time", "partition", "constraint"),
    *("account", "qos", "array", "dependency", "nodelist", "switches", "requeue", "no-requeue", "signal", "output"),
    *("error", "job-name", "export"),
)
"""Options of sbatch that are options of `shoal run`."""
_EACH_NODE = "the job has as many processes on each node as --ntasks-per-node says"
_ALL_GPUS = "every process sees all GPUs of its job on the node, and takes that of its local rank"
_ONE_FILE = "sbatch would read this file on the cluster's host"
REJECTED = {
    **{name: ("`shoal run` has this option itself", f"leave out --sbatch: --{name}") for name in OWN_OPTIONS},
    "chdir": ("the script starts where you stand in the working tree", "use --directory for the jobs' directory"),
    "comment": ("Shoal keeps a note about the job's code there", "use --job-name for words of your own"),
    "open-mode": ("a job that is queued again appends to its files", "leave it out"),
    "cpus-per-gpu": ("Shoal sets --cpus-per-task, and Slurm takes one of the two", "use --cpus-per-task"),
    "ntasks-per-gpu": (_EACH_NODE, "use --ntasks-per-node"),
    "ntasks-per-core": (_EACH_NODE, "use --ntasks-per-node"),
    "ntasks-per-socket": (_EACH_NODE, "use --ntasks-per-node"),
    "gpus-per-socket": ("the job has equally many GPUs on each node", "use --gpus-per-node"),
    "gpu-bind": (_ALL_GPUS, "leave it out"),
    "tres-bind": (_ALL_GPUS, "leave it out"),
    "tres-per-task": (_ALL_GPUS, "use --gpus-per-node, or --sbatch --gpus-per-task=NUMBER"),
    "nodefile": (_ONE_FILE, "use --nodelist"),
    "export-file": (_ONE_FILE, "use --export, or `export:` in the job's file"),
    "clusters": ("the job is sent to the cluster whose nodes have its code", "use --cluster or --file"),
    "wait": ("sbatch itself would wait", "leave out --sbatch: --wait"),
    "test-only": ("sbatch would submit nothing", "leave out --sbatch: --dry-run"),
    "wrap": ("Shoal sends a batch script", "name the program: shoal run PROGRAM"),
    "parsable": ("Shoal reads the job's number from sbatch", "leave it out"),
    **{name: ("the job runs as the user who logs in", "log in as that user") for name in ("uid", "gid")},
    **{name: ("it submits nothing", "leave it out") for name in ("help", "usage", "version")},
}
"""Why an option cannot stand there, and what to use instead."""
FEWER_CPUS = ("threads-per-core", "hint", "core-spec", "thread-spec", "extra-node-info")
"""With these Slurm counts fewer CPUs on a node than `scontrol show node` says."""
COUNTED = ("ntasks", "gpus", "gpus-per-task", "gres", "exclude")
"""What becomes part of the job's own numbers and nodes."""
FLAGS = (
    *("contiguous", "hold", "no-kill", "overcommit", "oversubscribe", "quiet", "reboot", "spread-job"),
    *("use-min-nodes", "verbose"),
)
"""A word behind one of these is not its value."""
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_GPUS = re.compile(r"(?:([A-Za-z][\w.-]*):)?([0-9]{1,5})")
_GRES_GPUS = re.compile(r"gpu(?:[:=]([A-Za-z][\w.-]*))?(?:[:=]([0-9]{1,5}))?")
MAX_VALUE_LENGTH = 4096


def parse_options(value: object) -> tuple[str, ...]:
    """The options of a list of texts, one text, or a mapping, each as `--name` or `--name=value`. Raises a refusal."""
    if isinstance(value, Mapping):
        options = [_from_pair(name, item) for name, item in value.items()]
    elif isinstance(value, str):
        options = list(_from_text(value))
    elif isinstance(value, Iterable) and not isinstance(value, bytes):
        options = [option for text in value for option in _from_text(text)]
    else:
        raise refusal("not options of sbatch", "give a list: [--hold, --mem-per-cpu=2G]")
    names = [name for name, _ in options]
    for name, option_value in options:
        _check(name, option_value)
        if names.count(name) > 1:
            raise refusal(f"--{name} is there twice", "name it once")
    return tuple(f"--{name}" if text is None else f"--{name}={text}" for name, text in options)


def _from_pair(name: object, value: object) -> tuple[str, str | None]:
    if not isinstance(name, str):
        raise refusal("not an option of sbatch", "write its name: mem-per-cpu")
    name = name.lstrip("-").replace("_", "-")
    if value is True:
        return name, None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise refusal(f"no value of --{name}", "give text, a number, or `true` for an option without a value")
    return SHORT_OPTIONS.get(name, name), str(value)


def _from_text(text: object) -> Iterator[tuple[str, str | None]]:
    """Options as on a command line. A word that is no option is the value of the one before it."""
    try:
        words = shlex.split(text) if isinstance(text, str) else []
    except ValueError as error:
        raise refusal(f"not an option of sbatch: {error}", "close the quotes") from None
    if not words or not words[0].startswith("-"):
        raise refusal("not an option of sbatch", "write it as sbatch has it: --mem-per-cpu=2G")
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            name, value = SHORT_OPTIONS.get(word[1:2], word), word[2:]
            equals = value
        if not equals and words and not words[0].startswith("-"):
            if name in FLAGS:
                raise refusal(f"--{name} has no value", f"leave out {words[0]}")
            equals, value = "=", words.pop(0)
        yield name, value if equals else None


def _check(name: str, value: str | None) -> None:
    if not _NAME.fullmatch(name):
        raise refusal("not an option of sbatch", "write it as sbatch has it: --mem-per-cpu=2G")
    if name in REJECTED:
        why, fix = REJECTED[name]
        raise refusal(f"--{name}: {why}", f"{fix}={value}" if fix.endswith(f"--{name}") and value else fix)
    # sbatch takes any beginning of a name for the name.
    whole = next((full for full in (*REJECTED, *COUNTED) if full.startswith(name)), name)
    if whole != name and name not in COUNTED:
        raise refusal(f"--{name} is not the whole name of an option", f"write --{whole}")
    if value is not None and (not value.isprintable() or len(value) > MAX_VALUE_LENGTH):
        raise refusal(f"the value of --{name} is not one line of text", "leave out control characters")
    if name == "exclusive" and value is None:
        raise refusal("--exclusive: `shoal run` has this option itself", "leave out --sbatch: --exclusive")
    if name == "distribution" and value and value.lower().startswith("arbitrary"):
        raise refusal("--distribution=arbitrary: the nodes may then have unequal numbers of processes", "use block")
    if name == "exclude":
        _hosts(value)
    read_request((f"--{name}" if value is None else f"--{name}={value}",))


def _hosts(value: str | None) -> list[str]:
    try:
        return expand(value or "")
    except ValueError as error:
        raise refusal(f"--exclude is not a hostlist: {error}", "write it like gpu[01-04]") from None


@dataclass(frozen=True)
class SbatchRequest:
    """What a job asks of sbatch beyond the options of `shoal run`."""

    passed: tuple[str, ...] = ()
    """Options as they go into the batch script."""
    names: frozenset[str] = field(default_factory=frozenset)
    ntasks: int | None = None
    """Processes in all."""
    gpus: int | None = None
    """GPUs in all."""
    gpus_per_task: int | None = None
    gres_gpus: int | None = None
    """GPUs of each node."""
    gpu_type: str = ""
    shards: bool = False
    """It asks for parts of GPUs."""
    exclude: tuple[str, ...] = ()


def read_request(options: Iterable[str]) -> SbatchRequest:
    """What options say that `parse_options` has read. Raises a refusal for a number that is none."""
    values = {name: value for name, _, value in (text[2:].partition("=") for text in options)}
    passed = [_line(name, value) for name, value in values.items() if name not in COUNTED]
    types = set()
    numbers: dict[str, int] = {}
    for name in ("gpus", "gpus-per-task"):
        if name in values:
            gpu_type, numbers[name] = _gpus(name, values[name])
            types.add(gpu_type)
    others = []
    for item in filter(None, values.get("gres", "").removeprefix("gres/").split(",")):
        if match := _GRES_GPUS.fullmatch(item):
            numbers["gres"] = int(match[2] or 1)
            types.add(match[1] or "")
        elif item == "none" or re.match("gpu\\b", item):
            raise refusal(f"--gres={item} is not a number of GPUs", "write it like gpu:2 or gpu:h100:2; for none gpu:0")
        else:
            others.append(item)
    if others:
        passed.append(_line("gres", ",".join(others)))
    if "ntasks" in values:
        numbers["ntasks"] = _number("ntasks", values["ntasks"])
    return SbatchRequest(
        tuple(passed),
        frozenset(values),
        numbers.get("ntasks"),
        numbers.get("gpus"),
        numbers.get("gpus-per-task"),
        numbers.get("gres"),
        max(types, default=""),
        any(item.startswith(("shard", "mps")) for item in others),
        tuple(_hosts(values["exclude"])) if values.get("exclude") else (),
    )


def _gpus(name: str, text: str) -> tuple[str, int]:
    match = _GPUS.fullmatch(text)
    if match is None or int(match[2]) == 0:
        raise refusal(f"--{name}={text} is not a number of GPUs", f"write it like --{name}=2 or --{name}=h100:2")
    return match[1] or "", int(match[2])


def _number(name: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text) or int(text) == 0:
        raise refusal(f"--{name}={text} is not a number of processes", f"write it like --{name}=8")
    return int(text)


def _line(name: str, value: str) -> str:
    """As sbatch reads it in a batch script, where `#` begins a comment and a backslash counts also within quotes."""
    if value and not re.fullmatch(r"[\w.,:;=@%+/*&|()\[\]-]+", value):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"--{name}={value}" if value else f"--{name}"
