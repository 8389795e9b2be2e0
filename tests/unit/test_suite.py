"""scripts/test and scripts/matrix: which files a change touches, in which order they run, and their tables."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite
from scripts.suite import bytecode, changes, machine, matrix, table
from scripts.suite.run import SANDBOX_FILES, UNIT_FILES, Run, parse, run_parts, sandbox, units
from tests.conftest import order
from tests.documents import ROOT
from tests.timing import boot_seconds

FILES = {
    "src/shoal/__init__.py": "def __getattr__(name):\n    from shoal.verbs.job import Job\n    return Job\n",
    "src/shoal/errors.py": "",
    "src/shoal/verbs/job.py": "from shoal.errors import ShoalError\n",
    "src/shoal/jobs/ship.py": "if TYPE_CHECKING:\n    from shoal.verbs.job import Job\nRUNNER = 'runner.sh'\n",
    "src/shoal/cloud/__init__.py": "TABLE = {'aws': 'shoal.cloud.aws:Aws'}\n",
    "src/shoal/cloud/aws.py": "",
    "src/shoal/cloud/rent.py": "from shoal.cloud import TABLE\n",
    "src/shoal/remote/runner.sh": "",
    "pyproject.toml": "",
    "docs/page.md": "",
    "examples/toy/train.py": "",
    "tests/conftest.py": "",
    "tests/scene.py": "import shoal.jobs.ship\n",
    "tests/golden/roles/removal.txt": "",
    "tests/unit/test_errors.py": "from shoal import errors\n",
    "tests/unit/test_scene.py": "from tests.scene import thing\n",
    "tests/unit/test_job.py": "from shoal import Job\n",
    "tests/unit/test_rent.py": "from shoal.cloud.rent import rent\n",
    "tests/unit/test_registry.py": "from shoal.cloud import TABLE\n",
    "tests/unit/test_golden.py": "def check(name): assert_golden(f'roles/{name}.txt')\n",
    "tests/unit/test_docs.py": "PAGES = ROOT / 'docs'\n",
    "tests/unit/jobs/conftest.py": "",
    "tests/unit/jobs/test_nothing.py": "",
    "tests/e2e/cluster.py": "from shoal.verbs import job\n",
    "tests/e2e/test_toy.py": "from tests.e2e.cluster import up\nCOVERS = 'jobs examples/toy'\n",
    "tests/e2e/test_other.py": "from tests.e2e.cluster import up\nCOVERS = 'remote/runner.sh'\n",
    "tests/e2e/test_hand.py": "COVERS = 'jobs'\npytestmark = [pytest.mark.sandbox, pytest.mark.matrix]\n",
}
CHOSEN = {
    "src/shoal/errors.py": ["unit/test_errors.py", "unit/test_job.py"],
    "src/shoal/verbs/job.py": ["unit/test_job.py"],
    "src/shoal/jobs/ship.py": ["e2e/test_hand.py", "e2e/test_toy.py", "unit/test_scene.py"],
    "src/shoal/remote/runner.sh": ["e2e/test_other.py", "unit/test_scene.py"],
    "src/shoal/cloud/aws.py": ["unit/test_registry.py"],
    "tests/scene.py": ["unit/test_scene.py"],
    "tests/golden/roles/removal.txt": ["unit/test_golden.py"],
    "tests/unit/jobs/conftest.py": ["unit/jobs/test_nothing.py"],
    "tests/e2e/cluster.py": ["e2e/test_other.py", "e2e/test_toy.py"],
    "tests/e2e/test_toy.py": ["e2e/test_toy.py"],
    "examples/toy/train.py": ["e2e/test_toy.py"],
    "docs/page.md": ["unit/test_docs.py"],
    "CHANGELOG.md": [],
}


@pytest.fixture
def sources(tmp_path: Path) -> changes.Sources:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return changes.Sources(tmp_path, FILES)


@pytest.mark.parametrize("changed", CHOSEN)
def test_change_chooses_what_imports_names_or_covers_it(changed: str, sources: changes.Sources) -> None:
    choice = changes.choose_for("main", [changed], sources)
    assert sorted(choice.reasons) == [f"tests/{file}" for file in CHOSEN[changed]]


@pytest.mark.parametrize("changed", ["pyproject.toml", "tests/conftest.py"])
def test_change_of_what_all_tests_need_chooses_all_and_says_so(changed: str, sources: changes.Sources) -> None:
    choice = changes.choose_for("main", [changed], sources)
    assert len(choice.reasons) == sum(map(changes.is_test, FILES))
    assert choice.text.splitlines()[-2:] == [
        "8 of 8 unit and contract files: nearly all; scripts/test runs the rest too",
        "2 of 2 sandbox files: nearly all; scripts/test runs the rest too",
    ]


def test_choice_says_why_and_leaves_the_matrix_to_its_script(sources: changes.Sources) -> None:
    choice = changes.choose_for("main", ["src/shoal/jobs/ship.py", "CHANGELOG.md"], sources)
    assert (choice.units, choice.sandbox) == (["tests/unit/test_scene.py"], ["tests/e2e/test_toy.py"])
    assert choice.text == (
        "2 files differ from main\n"
        "  tests/e2e/test_toy.py: covers jobs: src/shoal/jobs/ship.py\n"
        "  tests/unit/test_scene.py: tests/scene.py > src/shoal/jobs/ship.py\n"
        "  CHANGELOG.md: no test names it\n"
        "1 of 8 unit and contract files\n"
        "1 of 2 sandbox files"
    )


def test_unknown_commit_is_an_error_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        changes.choose_or_exit("scripts/test", "no-such")
    assert re.match(r"scripts/test: cannot compare with no-such: .*\nfix: name a commit", capsys.readouterr().err)


def test_every_sandbox_file_names_what_it_covers() -> None:
    sources = changes.Sources(ROOT, changes.project_files())
    files = [file for file in sources.files if changes.is_test(file) and not changes.is_unit(file)]
    covers = {file: sources.covers(file) for file in files}
    assert [file for file, names in covers.items() if not names] == []
    assert [(file, name) for file, names in covers.items() for name, places in names.items() if not places] == []


def test_longest_group_comes_first_and_an_unknown_file_counts_as_long() -> None:
    groups = {f"tests/e2e/test_{name}.py": name for name in ("short", "long", "new")}
    groups |= {"tests/e2e/test_a.py": "reef", "tests/e2e/test_b.py": "reef"}
    saved = {f"tests/e2e/test_{name}.py": seconds for name, seconds in dict(short=1, long=9, a=4, b=6).items()}
    turns = order(groups, saved, "")
    assert [Path(file).stem[5:] for file in sorted(turns, key=lambda file: turns[file])] == [
        *("new", "b", "a", "long", "short")
    ]
    turned = order({**groups, "tests/unit/test_c.py": "c"}, saved, "reverse")
    assert [Path(file).stem[5:] for file in sorted(turned, key=lambda file: turned[file])] == [
        *("c", "short", "long", "a", "b", "new")
    ]


def test_files_of_a_group_run_in_one_process_and_the_others_beside_it(tmp_path: Path) -> None:
    for name, group in dict(a="reef", b="reef", c="lagoon").items():
        text = f'import os\nGROUP = "{group}"\n'
        text += "".join(f"def test_{at}(): print('in', __name__, os.getpid())\n" for at in range(4))
        (tmp_path / f"test_{name}.py").write_text(text)
    # The conftest of all tests, on files of our own: its root is theirs.
    loaded = f"import tests.conftest as own, pathlib; own.ROOT = pathlib.Path({str(tmp_path)!r})\n"
    (tmp_path / "conftest.py").write_text(loaded + "from tests.conftest import pytest_xdist_make_scheduler\n")
    line = [sys.executable, "-m", "pytest", "-q", "-n3", "--dist=loadgroup", "-rP", "-p", "no:cacheprovider"]
    env = {"PYTHONPATH": f"{ROOT}:{ROOT}/src", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([*line, "."], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = {tuple(words[1:]) for text in done.stdout.splitlines() if (words := text.split())[:1] == ["in"]}
    processes = {file: {process for name, process in seen if name == file} for file in ("test_a", "test_b", "test_c")}
    assert processes["test_a"] == processes["test_b"] and len(processes["test_a"] | processes["test_c"]) == 2


def record(kind: str, name: str, begin: float, end: float, **more: object) -> dict[str, object]:
    row = {"kind": kind, "name": name, "file": "tests/e2e/test_x.py", "process": "gw0-1", "outcome": "passed"}
    return {**row, "begin": begin, "end": end, "cpu": (end - begin) / 2, **more}


def test_table_adds_up_phases_files_and_hosts_and_compares_with_the_saved_one(tmp_path: Path) -> None:
    samples = machine.Samples(
        [(0, 0, 0), (50, 20, 100), (100, 60, 200)], [], {("a", "gw0-1"), ("b", "gw0-1"), ("c", "else")}, True
    )
    samples.hosts = [(15, "gw0-1", 3.0), (25, "gw0-1", 1.0), (26, "gw1-2", 7.0)]
    records = [
        record("collection", "", 0, 5, file=""),
        record("up", "reef", 11, 19, boot=3.0),
        record("test", "tests/e2e/test_x.py::test_a", 10, 20),
        record("down", "reef", 28, 29),
        record("test", "tests/e2e/test_x.py::test_b", 20, 30),
        record("test", "tests/unit/test_y.py::test_c", 0, 1, file="tests/unit/test_y.py", process="gw1-2"),
    ]
    spans = [table.Span("units", 0, 50), table.Span("sandbox", 50, 100)]
    saved = tmp_path / "tests.txt"
    saved.write_text(table.render("about", spans, records, samples, {}, whole=True))  # type: ignore[arg-type]
    seconds = table.saved_seconds(saved)
    assert seconds == {
        **{"units": 50, "sandbox": 50, "total": 100},
        **{"collection": 5, "boot": 3, "build-up": 5, "later-up": 0, "tests": 11, "down": 1},
        **{"tests/e2e/test_x.py": 20, "tests/unit/test_y.py": 1},
    }
    seconds["tests/e2e/test_x.py"] -= 2
    text = table.render("about", spans, records, samples, seconds, whole=False)  # type: ignore[arg-type]
    rows = [line.split() for line in text.splitlines()]
    assert ["sandbox", "50.0", "+0.0", "60.0", "40", "%"] in rows
    assert ["build-up", "1", "5.0", "+0.0", "4.0", "3.0"] in rows
    assert ["tests/e2e/test_x.py", "2", "20.0", "+2.0", "10.0", "4.0"] in rows
    assert "clusters built: 1; with those of benches and of the sandbox's own tests: 2" in text
    assert text.endswith("1 files below 3 s each\n")


def test_boot_lasts_from_the_first_start_until_the_last_host_is_ready(tmp_path: Path) -> None:
    times = {"earlier": (10, 20), "first": (100, 104), "last": (101, 109)}
    for host, (start, ready) in times.items():
        (tmp_path / "hosts" / host).mkdir(parents=True)
        for name, moment in (("launch", start), ("ready", ready)):
            (tmp_path / "hosts" / host / name).touch()
            os.utime(tmp_path / "hosts" / host / name, (moment, moment))
    (tmp_path / "hosts/failed").mkdir()
    assert boot_seconds(tmp_path, 99) == 9
    assert boot_seconds(tmp_path, 200) == 0


def test_half_a_line_of_a_killed_process_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "gw0.jsonl").write_text('{"kind": "test"}\n{"kind": "te')
    assert table.read_records(tmp_path) == [{"kind": "test"}]


def test_idle_and_busy_core_seconds_are_read() -> None:
    assert machine.core_seconds("cpu  100 0 100 600 200 0 0 0 0 0\ncpu0 1") == (8.0, 10.0)


def test_parts_choose_daily_tests_and_hand_out_files_or_groups() -> None:
    others, training = units()
    assert {"-m", "not matrix", "--dist=loadfile", "tests/unit", "tests/contract"} <= {*others.command()}
    assert "--ignore=tests/unit/train" in others.files and training.files == ["tests/unit/train"]
    assert {"-m", "not matrix", "--dist=loadgroup", "tests/e2e"} <= {*sandbox().command()}
    assert [part.name for part in units(["tests/unit/train/test_stop.py"])] == ["training"]
    assert [part.name for part in units(["tests/unit/jobs/test_runner.py"])] == ["units"]


class Program:
    """A program that has ended."""

    def __init__(self, status: int) -> None:
        self.status = status

    def wait(self, timeout: float | None = None) -> int:
        return self.status

    poll = wait


class FakeRun(Run):
    """Starts nothing: programs end at once, with a status by a word of their command line."""

    def __init__(self, directory: Path, **statuses: int) -> None:
        super().__init__(directory, 0.0)
        self.statuses, self.lines = statuses, list[str]()

    def prepare(self) -> None:
        self.lines.append("prepare")

    def start(self, command: Sequence[str | Path], log: Path | None = None, **env: str) -> Any:
        line = " ".join(map(str, command))
        self.lines.append(line)
        if log:
            log.write_text("what it said\n")
        return Program(next((status for word, status in self.statuses.items() if f"/{word}" in line), 0))

    @property
    def order(self) -> list[str]:
        words = ("prepare", "scripts/check", "scripts/build-slurm", "tests/contract", "tests/unit/train", "tests/e2e")
        return [next(word for word in words if word in line) for line in self.lines]


ORDER = ["prepare", "scripts/check", "scripts/build-slurm", "tests/contract", "tests/unit/train", "tests/e2e"]


def test_whole_run_has_the_checks_and_all_daily_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(tmp_path)
    assert run_parts(run, UNIT_FILES, SANDBOX_FILES, whole=True) == 0
    assert run.order == ORDER
    assert capsys.readouterr().out == "what it said\n\nwhat it said\n", "the training's, and that of the checks"
    assert [span.name for span in run.spans] == ["prepare", "units", "wait-for-build", "sandbox"]


def test_failed_check_ends_the_run_before_the_longer_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(tmp_path, check=1)
    assert run_parts(run, UNIT_FILES, SANDBOX_FILES, whole=True) == 1
    assert run.order == ORDER[:5]
    assert capsys.readouterr().out == "what it said\n\nwhat it said\nFAILED: scripts/check\n"


@pytest.mark.parametrize("part", ["unit", "e2e"])
def test_part_that_fails_fails_the_run(part: str, tmp_path: Path) -> None:
    run = FakeRun(tmp_path, **{part: 2})
    assert run_parts(run, UNIT_FILES, SANDBOX_FILES, whole=True) == 2
    assert run.order == ORDER


def test_build_that_fails_fails_the_run_and_says_what_was_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(tmp_path, **{"build-slurm": 1})
    assert run_parts(run, UNIT_FILES, SANDBOX_FILES, whole=True) == 1
    assert "FAILED: scripts/build-slurm, so tests of `slurm: {from: shoal}` were skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--list"], "--list goes with --changed"),
        (["--times", "tests/no_such.py"], "there is no tests/no_such.py"),
        (["--save", "--changed"], "not allowed with argument"),
    ],
)
def test_wrong_arguments_are_reported(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(arguments)
    assert error in capsys.readouterr().err


def test_wrong_order_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SHOAL_TEST_ORDER", "backwards")
    with pytest.raises(SystemExit, match="2"):
        parse([])
    assert "SHOAL_TEST_ORDER=backwards: the value may be `reverse`" in capsys.readouterr().err


def test_matrix_table_keeps_the_last_pass_of_a_file_that_fails(tmp_path: Path) -> None:
    kept = tmp_path / "matrix.txt"
    entry = matrix.Entry("tests/e2e/test_x.py", matrix.Needs({"SHOAL_TEST_KIND": "vm"}))
    passed = matrix.after(entry, "passed", 61.4, "abc1234", "2026-01-01 10:00")
    matrix.write_table(passed, kept)
    matrix.write_table(matrix.after(passed, "failed", 5.0, "def5678", "2026-01-02 10:00"), kept)
    name = "tests/e2e/test_x.py SHOAL_TEST_KIND=vm"
    last = "2026-01-02 10:00 failed"
    assert matrix.read_table(kept) == {name: ["2026-01-01 10:00", "abc1234", "61", last]}


def test_matrix_begins_with_what_has_not_run_for_longest(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name in "abcd":
        mark = "pytest.mark.matrix" if name != "d" else "pytest.mark.sandbox"
        (tmp_path / f"tests/test_{name}.py").write_text(f"pytestmark = {mark}\n")
    kept = tmp_path / "matrix.txt"
    for name, day in (("a", 3), ("b", 2)):
        entry = matrix.Entry(f"tests/test_{name}.py")
        matrix.write_table(matrix.after(entry, "failed", 1.0, "abc", f"2026-01-0{day} 10:00"), kept)
    assert [entry.file for entry in matrix.entries(tmp_path, kept)] == [f"tests/test_{name}.py" for name in "cba"]


def test_matrix_knows_files_that_exist() -> None:
    files = {entry.file for entry in matrix.entries(kept=Path("none"))}
    named = {*matrix.NEEDS, *(file for file, _ in matrix.VARIANTS)}
    assert {"tests/e2e/test_vm.py", "tests/matrix/test_frameworks.py"} <= files
    assert [file for file in named if not (ROOT / file).exists()] == []


def test_matrix_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH", raising=False)
    needs = matrix.Needs(given="NO_SUCH", note="a directory")
    assert matrix.Entry("x", needs).missing() == "set NO_SUCH: a directory"
    assert matrix.Entry("x", matrix.Needs(programs=("no-such",))).missing() == "not installed: no-such"


@pytest.mark.parametrize(
    ("status", "outcomes", "result"),
    [(0, ["passed", "skipped"], "passed"), (0, ["skipped"], "skipped"), (5, [], "skipped"), (1, ["passed"], "failed")],
)
def test_file_whose_tests_were_all_skipped_has_not_passed(status: int, outcomes: list[str], result: str) -> None:
    assert matrix.outcome_of(status, outcomes) == result


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("60m", 3600), ("2h", 7200)])
def test_durations_are_read(text: str, seconds: float) -> None:
    assert matrix.parse_duration(text) == seconds


def test_wrong_duration_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        matrix.parse(["--for", "1 hour"])
    assert "1 hour: write 90s, 60m or 2h" in capsys.readouterr().err


def test_compiled_test_is_what_pytest_reads(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text("def test_x():\n    assert 1 == 2\n")
    line = f"from pathlib import Path; from scripts.suite.bytecode import *; compile_tests([Path({str(file)!r})])"
    subprocess.run([sys.executable, "-c", line], cwd=ROOT, check=True, timeout=120)
    assert rewrite._read_pyc(file, bytecode.kept_for(file)) is not None
