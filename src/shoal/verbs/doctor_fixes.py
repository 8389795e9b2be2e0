"""`shoal doctor --fix`: apply fixes, check again, resume nodes, and keep a record of it.

A node is resumed only while its reason is the one that was diagnosed: who has changed it meanwhile has a reason.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace

from shoal.agent.loader import STATE
from shoal.errors import HostError, ShoalError, SlurmError, UsageError
from shoal.health.diagnosis import Diagnosis, Key, diagnose
from shoal.health.faults import REGISTER, RELEASE, RESUME, UP
from shoal.health.node_faults import FORGET
from shoal.health.reasons import FAULTS
from shoal.hosts.api import Host
from shoal.plan.apply import ApplyTimeouts
from shoal.plan.nodes import resume_nodes
from shoal.plan.progress import NoProgress
from shoal.remote import shell_command
from shoal.roles.node_health import FORGET_COMMAND
from shoal.slurm.state import parse_nodes
from shoal.spec.finding import nearest, printable
from shoal.verbs.context import Context
from shoal.verbs.doctor import ALL_NODES_COMMAND, DoctorResult, FixOutcome, doctor, observe_health
from shoal.verbs.slurmctld import slurm_output
from shoal.verbs.up import up

START = "start"
ORDER = (START, FORGET, UP, START, REGISTER, RESUME, RELEASE)
"""What is wrong with a host comes before the state of its node, and nodes before the jobs that wait for them. A slurmd
that needs another key first is started after that."""
VERIFY_TIMEOUT_S = 90.0
"""For the cluster to show that a fix has worked: a node registers when slurmd has read its configuration."""
SERVICE_TIMEOUT_S = 60.0
RECORD = f"{STATE}/doctor.jsonl"
START_SCRIPT = 'systemctl reset-failed "$1" 2> /dev/null; exec systemctl restart "$1"'
"""A restart also starts what is stopped, and ends what hangs."""
APPEND_SCRIPT = f"umask 077; mkdir -p {STATE} && cat >> {RECORD}"
READ_SCRIPT = f"[ ! -e {RECORD} ] || cat {RECORD}"


def choose_fixes(result: DoctorResult, names: Collection[str]) -> list[Diagnosis]:
    """The findings to fix: those that are named, or else all that need no name. Raises UsageError for names that are
    unknown, or that Shoal cannot fix."""
    for name in names:
        if name not in FAULTS:
            raise UsageError(f"there is no finding {printable(name)!r}", hint=nearest(name, [*FAULTS]))
        if not FAULTS[name].action:
            fixes = (diagnosis.fix for diagnosis in result.findings if diagnosis.id == name)
            missing = f"`shoal doctor` does not find it now; {FAULTS[name].fix.replace('{host}', 'HOST')}"
            raise UsageError(f"Shoal cannot fix {name}: a person must", hint=next(fixes, missing))
    return [
        diagnosis
        for diagnosis in result.findings
        if diagnosis.action and (diagnosis.id in names if names else not diagnosis.explicit)
    ]


async def fix(context: Context, selection: Sequence[Diagnosis], hosts: str | None = None) -> DoctorResult:
    """Apply the fixes of these findings, one kind after another, and check the cluster, or these hosts, again."""
    keys = {diagnosis.key for diagnosis in selection}
    names = sorted({diagnosis.host for diagnosis in selection if diagnosis.host})
    current = [*selection]
    outcomes: dict[Key, FixOutcome] = {}
    applied: set[Key] = set()
    for kind in ORDER:
        candidates = [
            diagnosis
            for diagnosis in current
            if diagnosis.key in keys - applied and diagnosis.action.partition(" ")[0] == kind
            if not _needs_key(diagnosis, current)
        ]
        ready = [diagnosis for diagnosis in candidates if not diagnosis.blocked]
        outcomes |= {
            diagnosis.key: _outcome(diagnosis, False, diagnosis.blocked)
            for diagnosis in candidates
            if diagnosis.blocked
        }
        if ready:
            applied |= {diagnosis.key for diagnosis in ready}
            problems = await _act(context, kind, ready)
            attempts = {diagnosis.key for diagnosis in ready if diagnosis.key not in problems}
            current = await _check_again(context, names, attempts)
            for diagnosis in ready:
                text = problems.get(diagnosis.key) or _rest(diagnosis, current)
                outcomes[diagnosis.key] = _outcome(diagnosis, not text, text)
    for diagnosis in selection:  # another fix has solved it, or a person has come first
        text = _rest(diagnosis, current)
        outcomes.setdefault(diagnosis.key, _outcome(diagnosis, not text, text))
    await _record(context, [outcome for key, outcome in outcomes.items() if key in applied])
    after = await doctor(context, hosts)
    return replace(after, fixes=tuple(outcomes.values()))


async def history(context: Context) -> DoctorResult:
    """The fixes that were applied, oldest first."""
    async with context.controller_host() as host:
        output = (await host.run(shell_command(READ_SCRIPT), timeout=SERVICE_TIMEOUT_S)).text
    outcomes = [FixOutcome(**json.loads(line)) for line in output.splitlines() if line.endswith("}")]
    return DoctorResult(context.cluster, history=tuple(outcomes))


async def _act(context: Context, kind: str, ready: Sequence[Diagnosis]) -> dict[Key, str]:
    """Do one kind of thing about these findings. Returns what went wrong, by finding."""
    problems: dict[Key, str] = {}
    if kind in (UP, REGISTER):
        try:
            # A node whose registration is rejected gets ready by the steps that follow.
            result = await up(context, ApplyTimeouts(nodes_s=0) if kind == REGISTER else ApplyTimeouts())
        except ShoalError as error:
            return {diagnosis.key: f"`shoal up`: {error.message}" for diagnosis in ready}
        problems = {
            diagnosis.key: f"`shoal up`: {result.failures[diagnosis.host].cause}"
            for diagnosis in ready
            if diagnosis.host in result.failures
        }
    async with await context.connections() as fleet:
        controller = await fleet.host(context.controller.name)

        async def act_on(diagnosis: Diagnosis) -> None:
            try:
                if kind == START:
                    await _start(await fleet.host(diagnosis.host), diagnosis.action.split()[1])
                elif kind == FORGET:
                    await _forget_baseline(await fleet.host(diagnosis.host))
                elif kind == REGISTER:
                    await _start(await fleet.host(diagnosis.host), "slurmd")
                    await _await_registration(controller, diagnosis.host)
                    await _resume(controller, diagnosis)
                elif kind == RESUME:
                    await _resume(controller, diagnosis)
                elif kind == RELEASE:
                    await slurm_output(controller, ("scontrol", "release", diagnosis.job))
            except ShoalError as error:
                problems[diagnosis.key] = error.cause if isinstance(error, HostError) else error.message

        # A node that has two findings is resumed once.
        firsts = {_target(diagnosis): diagnosis for diagnosis in reversed(ready) if diagnosis.key not in problems}
        await asyncio.gather(*(act_on(diagnosis) for diagnosis in firsts.values()))
        for diagnosis in ready:
            first = firsts.get(_target(diagnosis))
            if first is not None and first.key in problems:
                problems.setdefault(diagnosis.key, problems[first.key])
    return problems


def _target(diagnosis: Diagnosis) -> tuple[str, str, str]:
    """What is done, and where."""
    return diagnosis.action, diagnosis.host, diagnosis.job


async def _start(host: Host, service: str) -> None:
    result = await host.run(shell_command(START_SCRIPT, service), timeout=SERVICE_TIMEOUT_S)
    if result.status != 0:
        output = (result.error_text.strip().splitlines() or [f"status {result.status}"])[0]
        raise HostError(host.name, f"{service} does not start: {output}")


async def _forget_baseline(host: Host) -> None:
    result = await host.run(FORGET_COMMAND, timeout=SERVICE_TIMEOUT_S)
    if result.status != 0:
        output = (result.error_text.strip().splitlines() or [f"status {result.status}"])[-1]
        raise HostError(host.name, f"its health program fails: {output}")


async def _await_registration(controller: Host, node: str) -> None:
    """Wait until Slurm accepts the node's registration: before that it rejects a resume."""
    end = time.monotonic() + VERIFY_TIMEOUT_S
    while True:
        state = await _read_node(controller, node)
        if not {"INVALID_REG", "INVAL"} & {*state[0]}:
            return
        if time.monotonic() > end:
            raise SlurmError(f"Slurm still rejects its registration: {state[1]}")
        await asyncio.sleep(1)


async def _resume(controller: Host, diagnosis: Diagnosis) -> None:
    _, reason = await _read_node(controller, diagnosis.host)
    if reason not in ("", diagnosis.reason):
        raise SlurmError(f"its reason has changed meanwhile: {reason}")
    await resume_nodes(controller, [diagnosis.host])


async def _read_node(controller: Host, name: str) -> tuple[tuple[str, ...], str]:
    """State and reason of a node. Raises SlurmError where they cannot be read: then nothing is changed."""
    nodes = {node.name: node for node in parse_nodes(await slurm_output(controller, ALL_NODES_COMMAND))}
    if name not in nodes:
        raise SlurmError(f"Slurm has no node {name}")
    return nodes[name].state, nodes[name].reason


async def _check_again(context: Context, hosts: Iterable[str], attempts: set[Key]) -> list[Diagnosis]:
    """The findings of these hosts, as soon as what was attempted is gone; after a while as they are."""
    end = time.monotonic() + VERIFY_TIMEOUT_S
    quiet = replace(context, progress=NoProgress())
    while True:
        view = await observe_health(quiet, hosts)
        current = diagnose(view)
        # After a start of slurmctld nodes are unknown until they have registered, and a node whose munge or slurmd was
        # wrong is silent until Slurm asks it again.
        fixed_hosts = {host for _, host, _ in attempts}
        is_unsure = any(
            "UNKNOWN" in node.state or ("NOT_RESPONDING" in node.state and node.name in fixed_hosts)
            for node in view.nodes.values()
        )
        is_settled = not (view.slurm_error or is_unsure or attempts & {diagnosis.key for diagnosis in current})
        if is_settled or time.monotonic() > end:
            return current
        await asyncio.sleep(1)


def _needs_key(diagnosis: Diagnosis, current: Iterable[Diagnosis]) -> bool:
    """Whether slurmd cannot fetch its files, nor register: its host has another munge key."""
    return diagnosis.action == f"{START} slurmd" and any(
        (other.id, other.host) == ("munge-key", diagnosis.host) for other in current
    )


def _rest(diagnosis: Diagnosis, current: Iterable[Diagnosis]) -> str:
    """Why a finding is not solved; empty if it is gone."""
    return "it is still so" if any(diagnosis.key == other.key for other in current) else ""


def _outcome(diagnosis: Diagnosis, fixed: bool, detail: str = "") -> FixOutcome:
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    return FixOutcome(
        diagnosis.id, diagnosis.host, diagnosis.job, diagnosis.action, fixed, detail, round(time.time(), 1), by
    )


async def _record(context: Context, outcomes: Iterable[FixOutcome]) -> None:
    lines = "".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes)
    if lines:
        async with context.controller_host() as host:
            result = await host.run(shell_command(APPEND_SCRIPT), stdin=lines.encode(), timeout=SERVICE_TIMEOUT_S)
        if result.status != 0:
            raise HostError(
                host.name,
                f"the fixes were applied, and cannot be recorded in {RECORD}: {result.error_text.strip()}",
                hint="free space on the controller; `shoal doctor` shows the state of the cluster",
            )
