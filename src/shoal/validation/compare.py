"""Comparing rows: launchers with each other, nodes with each other, and a node with its last good run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from shoal.spec.finding import Finding
from shoal.validation.limits import limit_findings
from shoal.validation.types import MpirunProgram, PairSpeed, StepEnvironment, ValidationResult, ValidationRow

SLOW_LAUNCHER = 0.5
"""A launcher that reaches less than this part of the best one's speed is far slower."""
SLOW_NODE = 0.5
"""The same for a node beside its peers."""
REGRESSION, QUICK_REGRESSION = 0.75, 0.5
"""The same for a node beside its last good run; short measurements vary more."""
OWN_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "OMP_NUM_THREADS")
OWN_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "UCX_",
    "TORCH_",
    *(f"OMPI_MCA_{name}" for name in ("btl", "pml", "mtl", "osc", "oob")),
)
"""What should be the same under every launcher; mpirun sets many other variables of its own."""


def compare_rows(result: ValidationResult, history: Sequence[ValidationResult]) -> list[Finding]:
    """Everything that is wrong with rows that have passed each for itself. `history` is oldest first."""
    return [
        *launcher_findings(result.rows),
        *slow_node_findings(result.rows),
        *limit_findings(result.rows),
        *regression_findings(result, history),
        *mpirun_findings(result.mpiruns),
    ]


def launcher_findings(rows: Iterable[ValidationRow]) -> list[Finding]:
    """A launcher that is far slower than another at the same test on the same nodes."""
    groups: dict[tuple[str, str, int], list[ValidationRow]] = {}
    for row in rows:
        if row.status == "passed" and row.value and row.sizes:
            groups.setdefault((row.test, row.nodes, row.ranks), []).append(row)
    findings = []
    for group in groups.values():
        best = max(group, key=lambda row: row.value or 0.0)
        for row in group:
            if (row.value or 0.0) < SLOW_LAUNCHER * (best.value or 0.0):
                what = f"{row.launcher} is far slower than {best.launcher}: {row.test}"
                text = f"{row.value:.3g} {row.unit} and {best.value:.3g}"
                fix = "compare the environments of the two below: binding, network interface, NCCL and UCX variables"
                findings.append(Finding("warning", what, text, fix, path=row.nodes))
    return findings


def slow_node_findings(rows: Iterable[ValidationRow]) -> list[Finding]:
    """A node that is far slower than its peers: alone, or in every pair that it is in."""
    findings = []
    for row in rows:
        if row.status != "passed":
            continue
        title = f"{row.launcher} {row.test}".strip()
        for node, ratio in slow_nodes(row.by_node).items():
            text = f"{row.by_node[node]:.3g} {row.unit}, {ratio:.0%} of the median of the others"
            findings.append(Finding("warning", f"slower than its peers: {title}", text, _NODE_FIX, host=node))
        for node, ratio in slow_nodes_of_pairs(row.pairs).items():
            text = f"all its pairs reach {ratio:.0%} of the median of the other pairs"
            findings.append(Finding("warning", f"slow in every pair: {title}", text, _PAIR_FIX, host=node))
    return findings


_NODE_FIX = "`shoal doctor` for this node: clocks, memory, other processes, disk"
_PAIR_FIX = "look at this node's link: cable, speed of the port, MTU, load"


def slow_nodes(by_node: Mapping[str, float]) -> dict[str, float]:
    """Nodes far below the median of the others, each with the ratio. Two nodes do not tell which one is slow."""
    if len(by_node) < 3:
        return {}
    ratios = {}
    for node, value in by_node.items():
        others = median(other for name, other in by_node.items() if name != node)
        if others > 0 and value < SLOW_NODE * others:
            ratios[node] = value / others
    return ratios


def slow_nodes_of_pairs(pairs: Iterable[PairSpeed]) -> dict[str, float]:
    """Nodes whose best pair is far below the median of the pairs without them, each with the ratio.

    Of a pair that was measured both ways the slower one counts: a node may be slow only where it sends, or receives.
    """
    speeds: dict[frozenset[str], float] = {}
    for pair in pairs:
        key = frozenset((pair.first, pair.second))
        speeds[key] = min(pair.speed, speeds.get(key, pair.speed))
    ratios = {}
    for node in sorted({name for key in speeds for name in key}):
        own = [speed for key, speed in speeds.items() if node in key]
        others = [speed for key, speed in speeds.items() if node not in key]
        if others and median(others) > 0 and max(own) < SLOW_NODE * median(others):
            ratios[node] = max(own) / median(others)
    return ratios


def regression_findings(result: ValidationResult, history: Sequence[ValidationResult]) -> list[Finding]:
    """Nodes, and sets of nodes, that are slower than in the last run in which the same row passed."""
    limit = QUICK_REGRESSION if result.quick else REGRESSION
    findings = []
    for row in result.rows:
        if row.status != "passed" or row.value is None:
            continue
        for name, value in (row.by_node or {row.nodes: row.value}).items():
            last = last_good(row, name, result.quick, history)
            if last is not None and value < limit * last:
                title = f"slower than at its last good run: {row.launcher} {row.test}".replace(":  ", ": ")
                text = f"{value:.3g} {row.unit}, {value / last:.0%} of {last:.3g}"
                host, path = (name, "") if row.by_node else ("", name)
                findings.append(Finding("warning", title, text, _NODE_FIX, host=host, path=path))
    return findings


def last_good(row: ValidationRow, name: str, quick: bool, history: Sequence[ValidationResult]) -> float | None:
    """What a node, or a set of nodes, reached at this row when it was last good.

    A run with a finding about it is not good: a slow node must not become the measure of itself.
    """
    for earlier in reversed(history):
        if earlier.quick != quick:
            continue
        blamed = {(finding.host or finding.path, finding.what) for finding in earlier.findings}
        for other in earlier.rows:
            values = other.by_node or ({other.nodes: other.value} if other.value is not None else {})
            same = other.key == row.key and other.ranks == row.ranks and other.status == "passed" and name in values
            if same and not any(host == name and what.endswith(row.test) for host, what in blamed):
                return values[name]
    return None


def mpirun_findings(mpiruns: Iterable[MpirunProgram]) -> list[Finding]:
    """An mpirun that hides another one: conda brings its own."""
    return [
        Finding(
            "warning",
            f"{program.path} comes before {', '.join(program.others)}",
            fix="a program needs the mpirun of the MPI it was built with: change the order in PATH, or name its path",
            host=program.node,
        )
        for program in mpiruns
        if program.others
    ]


def environment_differences(environments: Sequence[StepEnvironment]) -> dict[str, dict[str, str]]:
    """Variables that launchers should agree on and do not: the value under each; empty where it is not set."""
    names = {
        name
        for environment in environments
        for name in environment.variables
        if name in OWN_VARIABLES or name.startswith(OWN_PREFIXES)
    }
    values = {
        name: {environment.launcher: environment.variables.get(name, "") for environment in environments}
        for name in sorted(names)
    }
    return {name: by_launcher for name, by_launcher in values.items() if len(set(by_launcher.values())) > 1}
