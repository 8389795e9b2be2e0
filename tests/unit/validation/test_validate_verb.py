"""`shoal validate` over a cluster in memory: its jobs, its nodes, its history, its screen and its exit status."""

import asyncio
import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console
from tests.support.cases import cases
from tests.unit.jobs.test_job_verbs import NODE, SPEC, Reef
from typer.testing import CliRunner

from shoal.cli.app import make_app
from shoal.cli.session import Session
from shoal.cli.validate_command import finish_history, finish_validation, parse_exports
from shoal.errors import SpecError, UsageError
from shoal.hosts.api import Result
from shoal.roles.registry import component_packages
from shoal.slurm.state import NodeState, parse_nodes
from shoal.spec.finding import Finding
from shoal.spec.loader import load_text
from shoal.spec.members import members
from shoal.validation.compare import launcher_findings, mpirun_findings
from shoal.validation.types import MpirunProgram, PairSpeed, SizeSpeed, StepEnvironment, ValidationResult, ValidationRow
from shoal.verbs.validate import (
    ValidationHistory,
    ValidationSettings,
    choose_nodes,
    default_partition,
    job_spec,
    parse_history,
    plan_jobs,
    validate,
    validation_history,
)
from shoal_simulators.fake_host import Call

ROW = ValidationRow("srun", "cpu", "n[1-2]", "passed")
RESULT = ValidationResult("reef", 1_800_000_000.0, True, ("n1", "n2"), (ROW,))


def node(name: str, **more: str) -> NodeState:
    text = NODE.format(name)
    for key, value in more.items():
        text = " ".join(f"{key}={value}" if word.startswith(f"{key}=") else word for word in text.split())
    return parse_nodes(text)[0]


def test_every_launcher_has_a_job_and_each_node_is_tested_alone() -> None:
    jobs = plan_jobs(ValidationSettings(), [node("n1", Gres="(null)"), node("n2", Gres="(null)")])
    assert [(job.title, job.launcher, job.tests, job.ranks_per_node) for job in jobs] == [
        ("srun", "srun", ("cpu", "mpirun", "torch"), 1),
        ("torchrun", "torchrun", ("cpu", "torch"), 1),
        ("srun --mpi=pmix", "pmix", ("cpu", "mpi"), 1),
        ("mpirun", "mpirun", ("cpu", "torch", "mpi"), 1),
        ("srun", "srun", ("links", "hpcc", "fio"), 1),
    ]
    assert all(job.nodes == ("n1", "n2") and job.cpus == (4 if "cpu" in job.tests else 1) for job in jobs)


def test_nodes_with_as_many_gpus_are_tested_together() -> None:
    nodes = [node("n1"), node("n2", Gres="(null)"), node("n3")]
    jobs = plan_jobs(ValidationSettings(launchers=("srun",), image="debian"), nodes)
    assert [(job.title, job.nodes, job.gpus, "gpu" in job.tests) for job in jobs] == [
        ("srun", ("n1", "n3"), 2, True),
        ("srun, image", ("n1", "n3"), 2, True),
        ("srun", ("n2",), 0, False),
        ("srun, image", ("n2",), 0, False),
        ("srun", ("n1", "n2", "n3"), 0, False),
    ]
    assert jobs[0].world_size == 4 and jobs[0].cpus == 2
    assert "links" not in plan_jobs(ValidationSettings(launchers=()), nodes[:1])[0].tests


def test_image_has_rows_under_each_launcher_that_starts_its_ranks() -> None:
    jobs = plan_jobs(ValidationSettings(image="debian"), [node("n1")])
    inside = {job.title: (job.launcher, job.tests) for job in jobs if job.image}
    assert inside == {
        "srun, image": ("srun", ("cpu", "gpu", "torch")),
        "srun --mpi=pmix, image": ("pmix", ("cpu", "mpi")),
        "mpirun, image": ("mpirun", ("cpu", "gpu", "torch", "mpi")),
    }
    assert {job.image for job in jobs} == {"debian", ""}


def test_nodes_that_take_no_jobs_are_findings_and_rented_ones_are_left_alone() -> None:
    nodes = [node("n1"), node("n2", State="IDLE+DRAIN"), node("n3", State="IDLE+CLOUD")]
    chosen, findings = choose_nodes(ValidationSettings(), nodes, "main")
    assert [each.name for each in chosen] == ["n1"]
    assert [(finding.host, finding.found) for finding in findings] == [("n2", "IDLE+DRAIN")]
    chosen, findings = choose_nodes(ValidationSettings(nodelist="n[1,3]"), nodes, "main")
    assert [each.name for each in chosen] == ["n1", "n3"] and not findings
    with pytest.raises(UsageError, match="partition main has no node n9"):
        choose_nodes(ValidationSettings(nodelist="n9"), nodes, "main")
    with pytest.raises(UsageError, match="partition main has no node that takes jobs"):
        choose_nodes(ValidationSettings(), nodes[1:], "main")
    with pytest.raises(UsageError, match="no default partition"):
        default_partition(ValidationSettings(), "PartitionName=main Default=NO Nodes=n1 State=UP\n")


def test_job_has_its_nodes_for_itself_and_is_not_requeued() -> None:
    settings = ValidationSettings(quick=True, options={"time": "5", "environment": "torch"})
    jobs = plan_jobs(settings, [node("n1"), node("n2")])
    spec = job_spec(Reef().context, settings, jobs[0])
    assert (spec.launcher, spec.nodelist, spec.nodes, spec.gpus_per_node) == ("srun", "n[1-2]", 2, 2)
    assert (spec.exclusive, spec.requeue, spec.time, spec.environment) == (True, False, "5", "torch")
    assert spec.switches == 2, "nodes of several sites"
    options = json.loads(spec.args[1])
    assert spec.args[0] == "cpu,gpu,mpirun,torch" and options["gpus"] == 2 and options["sizes"][-1] == 1 << 22
    full = job_spec(Reef().context, replace(settings, quick=False), jobs[0])
    assert json.loads(full.args[1])["sizes"][-1] == 4 << 30, "published limits are of large messages"
    with pytest.raises(SpecError):
        job_spec(Reef().context, replace(settings, options={"time": "soon"}), jobs[0])


class Kept(Reef):
    """A cluster that keeps results."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[bytes] = []
        self.problem = b""
        shell = self._shell

        def answer(call: Call) -> bytes | Result:
            if "validate" not in call.argv[2]:
                return shell(call)
            assert not call.root and call.argv[4] == "reef"
            if call.stdin is None or call.stdin == b"":
                return b"".join(self.kept)
            if self.problem:
                return Result(1, stderr=self.problem)
            self.kept.append(call.stdin)
            return b""

        self.controller.answers = {**self.controller.answers, ("sh",): answer}


async def test_jobs_without_results_fail_every_row_and_the_result_is_kept() -> None:
    reef = Kept()
    reef.states = ["COMPLETED"]
    settings = ValidationSettings(quick=True, launchers=("srun",))
    result = await validate(reef.context, settings)
    assert [row.test for row in result.rows] == ["cpu", "gpu", "all-reduce", "links", "hpl", "stream", "fio"]
    assert {row.status for row in result.rows} == {"failed"} and not result.passed
    [again] = (await validation_history(reef.context, "7d")).runs
    assert [row.test for row in again.rows] == [row.test for row in result.rows]
    assert (await validation_history(reef.context, "2999-01-01")).runs == ()
    reef.problem = b"No space left on device\n"
    finding = (await validate(reef.context, settings)).findings[-1]
    assert (finding.what, finding.found) == ("the result was not kept", "No space left on device")


async def test_stopped_validation_leaves_no_job() -> None:
    reef = Kept()
    reef.states = ["RUNNING"]
    queued, scontrol = asyncio.Event(), reef._scontrol

    def asked(call: Call) -> bytes | Result:
        if call.argv[-1] == "job":
            queued.set()
        return scontrol(call)

    reef.controller.answers = {**reef.controller.answers, ("scontrol",): asked}
    task = asyncio.create_task(validate(reef.context, ValidationSettings(quick=True, launchers=("srun",))))
    await queued.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert any(argv[0] == "scancel" and "17" in argv for argv in reef.controller.argvs)
    assert reef.kept == []


def test_damaged_lines_of_the_history_are_left_out() -> None:
    good = json.dumps(asdict(RESULT))
    assert [result.rows for result in parse_history([good[:-9], "[]", "{}", good])] == [(ROW,)]


@pytest.fixture
def screen() -> Session:
    """A session that records what is shown."""
    session = Session(json=False)
    session.console = Console(record=True, width=160, force_terminal=False)
    return session


@cases(
    "rows, findings, status",
    ([ROW], [], 0),
    ([ROW, replace(ROW, status="not run", package="fio")], [], 3),
    ([ROW, replace(ROW, status="failed"), replace(ROW, status="not run")], [], 1),
    ([ROW], [Finding("warning", "slower than its peers", host="n1")], 1),
)
def test_exit_status(screen: Session, rows: list[ValidationRow], findings: list[Finding], status: int) -> None:
    finish_validation(screen, replace(RESULT, rows=tuple(rows), findings=tuple(findings)))
    assert screen.status == status


def test_screen_has_the_table_sizes_programs_and_fixes(screen: Session) -> None:
    sizes = (SizeSpeed(1024, 256, 10.0, 0.1, 0.1, 0), SizeSpeed(4194304, 1048576, 3000.5, 1.4, 1.4, 0))
    pairs = tuple(PairSpeed("n1", other, 0.5) for other in ("n2", "n3"))
    gloo = replace(ROW, test="all-reduce gloo", value=1.4, unit="GB/s", sizes=sizes, ranks=2, pairs=pairs)
    fio = replace(ROW, test="fio", status="not run", detail="fio is not installed on n1", fix="install it")
    rows = (ROW, replace(gloo, version="torch 2.13"), replace(fio, package="fio"))
    mpiruns = tuple(MpirunProgram(name, "/usr/bin/mpirun", "mpirun (Open MPI) 4.1.4", "ext3x") for name in ("n1", "n2"))
    environments = (
        StepEnvironment("srun", "n1", 4, "3.11", "unlimited", {"NCCL_NET": "Socket"}),
        StepEnvironment("mpirun", "n1", 1, "3.11", "65536", {}),
    )
    findings = [finding for finding in launcher_findings([rows[1], replace(rows[1], launcher="mpirun", value=0.1)])]
    findings += mpirun_findings([replace(program, others=("/opt/mpirun",)) for program in mpiruns])
    result = replace(RESULT, rows=rows, mpiruns=mpiruns, environments=environments, findings=tuple(findings))
    finish_validation(screen, result)
    text = screen.console.export_text()
    for part in (
        "– not run",
        "    fix: install it",
        "#       size         count      time   algbw   busbw  #wrong",
        "     4194304       1048576    3000.5    1.40    1.40       0",
        "slowest of 2 pairs: n1–n2 0.5 GB/s",
        "mpirun on n[1-2]: /usr/bin/mpirun, mpirun (Open MPI) 4.1.4, PMIx: ext3x",
        "mpirun on n1: 1 CPUs, locked memory 65536",
        "NCCL_NET differs between launchers",
        "warning n[1-2]: mpirun is far slower than srun: all-reduce gloo, found 0.1 GB/s and 1.4",
        "warning n[1-2]: /usr/bin/mpirun comes before /opt/mpirun",
        "reef, n[1-2]: 2 passed, 1 not run, 3 findings",
    ):
        assert part in text, text


@cases(
    "words, message",
    (["--launcher", "spawn"], "--launcher names spawn"),
    (["--env", "torch", "--python", "python3"], "--env brings its own Python"),
    (["--export", "PATH"], "--export PATH has no value"),
)
def test_wrong_command_line(words: list[str], message: str) -> None:
    done = CliRunner().invoke(make_app("validate"), ["validate", "--json", *words])
    assert done.exit_code == 2 and message in done.output
    assert parse_exports(["A=b=c", "D="]) == {"A": "b=c", "D": ""}


def test_history_shows_what_failed_and_the_values(screen: Session) -> None:
    failed = replace(ROW, test="links", status="failed", detail="n2 was not measured")
    value = replace(ROW, test="hpl", value=41.5, unit="Gflop/s")
    for runs, text in (
        ((), "no result since"),
        ((replace(RESULT, rows=(failed, value)),), "quick, n[1-2]: 1 passed, 1 failed"),
    ):
        finish_history(screen, ValidationHistory("reef", 0.0, runs))
        assert text in screen.console.export_text().replace("\n", " ")


TOOLS = {"openmpi-bin", "hpcc", "libopenblas0-pthread", "fio"}


@cases("line, packages", ("", set()), ("mpi: openmpi\n", TOOLS))
def test_file_installs_open_mpi_and_the_tools_on_nodes_alone(line: str, packages: set[str]) -> None:
    spec = load_text(SPEC + line, "shoal.yaml")
    needed = {member.name: {*component_packages(spec, member)} & TOOLS for member in members(spec)}
    assert needed == {"c1": set(), "n1": packages, "n2": packages}
    with pytest.raises(SpecError, match="only `openmpi` is supported"):
        load_text(SPEC + "mpi: mpich\n", "shoal.yaml")
