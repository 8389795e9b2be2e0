"""The documentation is correct: its commands run, its examples load, its links resolve."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import typer
from scripts.suite.run import SANDBOX_FILES, UNIT_FILES
from tests.documents import COMMANDS, DOCUMENTS, ROOT, TRAINING, commands, examples
from tests.support.cases import cases
from typer.main import get_command

import shoal
import shoal.errors
from shoal.cli.app import make_app
from shoal.cli.help import EXAMPLES, named_commands
from shoal.cli.session import ClickUsageError
from shoal.spec.loader import load_text_all

COMMAND: Any = get_command(make_app())


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def test_every_documented_command_is_run_by_a_test() -> None:
    shown = {command for document in DOCUMENTS for block in commands(document) for command in block}
    assert shown - set(COMMANDS) == set(), "say in tests/documents.py how these are run"
    assert set(COMMANDS) - shown == set(), "no document shows these any more"


@cases("document", *DOCUMENTS, ids=name_of)
def test_documents_use_only_expected_block_kinds(document: Path) -> None:
    fences = re.findall(r"^```(.*)$", document.read_text(), re.MULTILINE)
    # The scripts of these pages are run by tests/unit/train/test_training_page.py and tests/unit/test_provider_page.py.
    scripts = {TRAINING.name: {"python", "diff"}, "adding-a-provider.md": {"python", "toml"}}.get(document.name, set())
    assert set(fences[::2]) <= {"yaml", "console"} | scripts
    assert set(fences[1::2]) <= {""}


@cases("document", *DOCUMENTS, ids=name_of)
def test_every_example_loads_without_a_finding(document: Path) -> None:
    for text in examples(document):
        assert load_text_all(text, name_of(document))[1] == []


@cases("script", "elastic", "signals")
def test_matrix_script_starts(script: str) -> None:
    """Their files have no suffix, so neither ruff nor pytest reads them."""
    subprocess.run([sys.executable, ROOT / "tests/matrix" / script, "--help"], check=True, stdout=subprocess.DEVNULL)


def test_readme_example_has_at_most_15_lines() -> None:
    [text] = examples(ROOT / "README.md")
    assert len(text.splitlines()) <= 15


@cases("name", "network", "tailscale", "storage", "environments", "accounting", "tracking", "keys")
def test_service_page_starts_with_at_most_five_lines_of_yaml(name: str) -> None:
    document = ROOT / "docs" / f"{name}.md"
    title, _, fence, *rest = document.read_text().splitlines()
    assert title.startswith("# ") and fence == "```yaml"
    assert rest.index("```") <= 5


@cases("document", *DOCUMENTS, ids=name_of)
def test_every_documented_command_line_is_valid(document: Path) -> None:
    for line in (*said(document.read_text()), *(line for block in commands(document) for line in block)):
        assert complaint(line) == "", line


def test_every_command_line_in_a_message_is_valid() -> None:
    wrong = {}
    for file in (ROOT / "src/shoal").rglob("*.py"):
        whole = re.sub(r'"\s*\n\s*f?"', "", file.read_text())  # texts that go on on the next line
        wrong |= {(name_of(file), line): found for line in said(whole) if (found := complaint(line))}
    assert wrong == {}


@cases("name", *EXAMPLES)
def test_every_example_of_the_help_is_valid(name: str) -> None:
    for line in EXAMPLES[name]:
        assert line.startswith(f"shoal {name}")
        assert complaint(line) == "", line


def test_every_command_has_an_example() -> None:
    assert set(EXAMPLES) == {name for name, _ in named_commands(make_app())}


@cases(
    "line, expected",
    ("shoal up --leave-rented", ""),
    ("shoal statsu", "there is no statsu"),
    ("shoal up --bogus", "No such option: --bogus"),
    ("shoal env biuld", "there is no biuld"),
    ("up --leave-rentd", "No such option: --leave-rentd"),
    ("ls --all", ""),
)
def test_invalid_command_line_is_detected(line: str, expected: str) -> None:
    assert complaint(line).startswith(expected)
    assert bool(complaint(line)) == bool(expected)


def said(text: str) -> list[str]:
    """What a text shows in backquotes that calls Shoal, or one of its commands with an option."""
    quoted = [" ".join(span.split()) for span in re.findall(r"`([^`]{1,200})`", text)]
    return [span for span in quoted if re.match(r"shoal [a-z]", span) or re.match(r"[a-z]+ .*--[a-z]", span)]


def complaint(line: str) -> str:
    """What is wrong with a command line of Shoal's; nothing with those of other programs."""
    words = re.split(r" (?:[|>;]|&&) ", line)[0].split()
    command = COMMAND
    ours = words[0].endswith("shoal")
    if not ours and words[0] not in command.commands:
        return ""
    words = words[1:] if ours else words
    while hasattr(command, "commands"):
        if not words or not re.fullmatch(r"[a-z]+", words[0]):
            return ""  # the group as a whole, or "shoal COMMAND"
        if words[0] not in command.commands:
            return f"there is no {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    try:
        command.make_parser(typer.Context(command, **command.context_settings)).parse_args(args=words)
    except ClickUsageError as error:
        found = str(error.format_message())
        return "" if found.endswith("requires an argument.") else found  # prose names an option without a value
    return ""


@cases("document", *DOCUMENTS, ids=name_of)
def test_every_link_and_path_leads_to_a_file(document: Path) -> None:
    text = document.read_text()
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert link.startswith("https://") or (document.parent / link).exists(), link
    for path in re.findall(r"`((?:src|tests|scripts|bench|docs)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:agent|cli|hosts|plan|providers|roles|slurm|spec|verbs)/[\w./-]*)`", text):
        assert (ROOT / "src/shoal" / path).exists(), path


def test_messages_on_the_troubleshooting_page_exist_in_the_code() -> None:
    source = "".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in (ROOT / "src/shoal").rglob("*.py"))
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    # What stands between values that vary: `the job asks for 5 nodes; partition main has 2`.
    pieces = [
        max(re.split(r"\S*[^a-z ,]\S*|desktop|reef|controller|main|on its", span), key=len).strip(" ,")
        for span in quoted
    ]
    checked = [piece for piece in pieces if len(piece.split()) > 2]
    assert len(checked) > 12
    assert [piece for piece in checked if piece not in source] == []


def test_index_lists_every_page() -> None:
    named = set(re.findall(r"\]\(([a-z-]+\.md)\)", (ROOT / "docs/README.md").read_text()))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


@cases("document", *DOCUMENTS, ids=name_of)
def test_every_anchor_leads_to_a_heading(document: Path) -> None:
    for page, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
        text = (document.parent / page if page else document).read_text()
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}, anchor


def test_version_is_equal_everywhere() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == stated == shoal.__version__


def test_ci_runs_the_checks_and_the_tests() -> None:
    assert "exec scripts/test\n" in (ROOT / ".ci/run").read_text()
    # tests/unit/test_suite.py has what this does without arguments.
    assert 'exec "$venv/bin/python" -m scripts.suite.run "$@"' in (ROOT / "scripts/test").read_text()
    assert (*UNIT_FILES, *SANDBOX_FILES) == ("tests/unit", "tests/contract", "tests/e2e")


def test_documented_exit_codes_match_the_errors() -> None:
    text = (ROOT / "docs/how-it-works.md").read_text().replace("\n", " ")
    codes = {error.__name__: error.exit_code for error in _errors(shoal.errors.ShoalError)}
    assert codes["ShoalError"] == 1 and "1 failed" in text
    assert codes["SpecError"] == codes["UsageError"] == 2 and "2 the file or the command line is wrong" in text
    assert codes["PartialFailure"] == 3 and "3 partly done" in text
    assert codes["Interrupted"] == 130 and "130 stopped" in text
    assert "70 a bug in Shoal" in text


def _errors(kind: type[shoal.errors.ShoalError]) -> list[type[shoal.errors.ShoalError]]:
    return [kind, *(found for below in kind.__subclasses__() for found in _errors(below))]


def test_documented_packages_match_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [set(layer.replace(".", "/").split(" | ")) for layer in contracts[0]["layers"]]
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", (ROOT / "docs/how-it-works.md").read_text(), re.MULTILINE)
    listed: dict[int, set[str]] = {}
    for number, packages in rows:
        listed.setdefault(int(number), set()).update(re.findall(r"`([^`]+)`", packages))
    assert list(listed) == sorted(listed)
    assert [package for number in sorted(listed) for package in sorted(listed[number])] == [
        package for layer in _joined(layers) for package in sorted(layer)
    ]


def _joined(layers: list[set[str]]) -> list[set[str]]:
    """The layers as the page has them: single modules that stand next to each other share a row."""
    joined: list[set[str]] = []
    for layer in layers:
        if joined and {*layer, *joined[-1]} in ({"cloud/status_file", "cloud/rental"}, {"registry", *layers[-1]}):
            joined[-1] |= layer
        else:
            joined.append(set(layer))
    return joined


def test_names_of_test_files_are_unique() -> None:
    """pytest imports them by name: two of one name cannot be collected in one run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
