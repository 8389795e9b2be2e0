"""Which test files a change touches: unit files by what they import, sandbox files by what they say that they cover.

Read from the sources alone, so a module that is imported by a name made at run time is not seen: that is enough while
working, and not before a merge.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = ("pyproject.toml", "scripts/setup.sh", "scripts/test", "tests/conftest.py", "tests/timing.py")
"""Each test depends on these."""
SETTINGS = "tests/unit/conftest.py"
"""It prepares modules that most unit tests do not use: what it imports does not count."""
NEARLY_ALL = 0.8
COVERS = "COVERS"
NAMED_DIRECTORIES = ("bench", "docs", "examples")
"""Who names one of their directories depends on its files."""
SOURCE_ROOTS = ("src", "", "bench")


class ChangesError(Exception):
    """What cannot be compared, for the terminal."""


@dataclass(frozen=True)
class Choice:
    """Test files to run: why each, in words."""

    base: str
    changed: list[str]
    reasons: dict[str, str]
    all_units: int
    all_sandbox: int
    by_hand: frozenset[str]
    """Files of the matrix alone, which scripts/matrix runs."""
    without_tests: list[str] = field(default_factory=list)

    @property
    def units(self) -> list[str]:
        return [file for file in self.reasons if is_unit(file)]

    @property
    def sandbox(self) -> list[str]:
        return [file for file in self.reasons if not is_unit(file) and file not in self.by_hand]

    @property
    def text(self) -> str:
        lines = [f"{len(self.changed)} files differ from {self.base}"]
        lines += [f"  {file}: {reason}" for file, reason in self.reasons.items() if file not in self.by_hand]
        lines += [f"  {file}: no test names it" for file in self.without_tests]
        for title, chosen, total in (
            ("unit and contract", len(self.units), self.all_units),
            ("sandbox", len(self.sandbox), self.all_sandbox),
        ):
            nearly = ": nearly all; scripts/test runs the rest too" if chosen > NEARLY_ALL * total else ""
            lines.append(f"{chosen} of {total} {title} files{nearly}")
        return "\n".join(lines)


def is_unit(file: str) -> bool:
    return file.startswith(("tests/unit/", "tests/contract/"))


def is_test(file: str) -> bool:
    return file.startswith("tests/") and Path(file).name.startswith("test_") and file.endswith(".py")


def choose(commit: str) -> Choice:
    """What to run for the difference between a commit and the files as they are now."""
    return choose_for(commit, changed_files(commit), Sources(ROOT, project_files()))


def changed_files(commit: str) -> list[str]:
    """Files that differ from where this branch left `commit`; uncommitted and untracked ones are among them."""
    try:
        base = _git("merge-base", commit, "HEAD")[0]
    except ChangesError as error:
        raise ChangesError(f"cannot compare with {commit}: {error}\nfix: name a commit: --changed COMMIT") from None
    changed = _git("diff", "--name-only", "--no-renames", base)
    return sorted({*changed, *_git("ls-files", "--others", "--exclude-standard")})


def project_files() -> list[str]:
    return [file for file in _git("ls-files", "--cached", "--others", "--exclude-standard") if (ROOT / file).is_file()]


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ChangesError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "git failed")
    return done.stdout.splitlines()


def choose_for(base: str, changed: list[str], sources: Sources) -> Choice:
    tests = [file for file in sources.files if is_test(file)]
    reasons: dict[str, str] = {}
    for test in tests:
        if reason := _reason(test, changed, sources):
            reasons[test] = reason
    by_hand = frozenset(test for test in tests if sources.is_by_hand(test))
    return Choice(
        base,
        changed,
        reasons,
        sum(map(is_unit, tests)),
        sum(not is_unit(test) and test not in by_hand for test in tests),
        by_hand,
        [file for file in changed if not any(file in reason for reason in reasons.values())] if reasons else changed,
    )


def _reason(test: str, changed: list[str], sources: Sources) -> str:
    if everything := [file for file in changed if file in EVERYTHING]:
        return everything[0]
    if test in changed:
        return f"{test} itself"
    covered = None if is_unit(test) else sources.covers(test)
    if covered is not None:
        for file in changed:
            for name, places in covered.items():
                if any(file == place or file.startswith(f"{place}/") for place in places):
                    return f"covers {name}: {file}"
    if covered is None:
        return sources.chain(test, changed)
    # Programs are driven, not imported: what such a test imports of them says little.
    return sources.chain(test, [file for file in changed if file.startswith("tests/")], within="tests/")


class Sources:
    """The files of a project and how they depend on each other."""

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.root = root
        self.files = sorted(files)
        self._needs: dict[str, list[str]] = {}

    def chain(self, file: str, changed: Sequence[str], within: str = "") -> str:
        """The shortest way by which a file depends on a changed one, as `a.py > b.py`; empty without one."""
        ways = {file: ""}
        waiting = deque([file])
        while waiting:
            at = waiting.popleft()
            for need in self.needs(at):
                if need in ways:
                    continue
                ways[need] = f"{ways[at]} > {need}".removeprefix(" > ")
                if need in changed:
                    return ways[need]
                if need.startswith(within):
                    waiting.append(need)
        return ""

    def needs(self, file: str) -> list[str]:
        if file not in self._needs:
            self._needs[file] = sorted({need for need in self._read(file) if need != file})
        return self._needs[file]

    def covers(self, test: str) -> dict[str, list[str]]:
        """What a sandbox file says that it covers: each name with the paths that it stands for."""
        for node in self._tree(test).body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [COVERS]:
                return {name: self.places(name) for name in ast.literal_eval(node.value).split()}
        return {}

    def is_by_hand(self, test: str) -> bool:
        """Whether all tests of the file have the mark matrix."""
        marks = [node for node in self._tree(test).body if ast.unparse(node).startswith("pytestmark = ")]
        return any(re.search(r"mark\.matrix|VM_BY_HAND", ast.unparse(node)) for node in marks)

    def places(self, name: str) -> list[str]:
        """The paths that a name in COVERS stands for: a package or module of Shoal, or any file or directory."""
        possible = (f"src/shoal/{name}", f"src/shoal/{name}.py", name)
        return [path for path in possible if (self.root / path).exists()]

    def _read(self, file: str) -> Iterator[str]:
        """Files that this one imports or names.

        Every module below a package runs its __init__.py. There, only imports at once count: what it offers lazily
        counts for those who import from the package itself.
        """
        directory = Path(file).parent
        if is_test(file):
            above = [str(place / "conftest.py") for place in (directory, *directory.parents)]
            yield from (conftest for conftest in above if conftest in self._known)
        if file.endswith(".py") and file != SETTINGS:
            at_once = file.endswith("/__init__.py")
            for module in self._modules(file, at_once):
                yield from self._module_files(module, directory)
            if not at_once:
                yield from self._named_files(file)

    def _modules(self, file: str, at_once: bool) -> Iterator[str]:
        """The modules that a file imports, or that a registry in it names: "shoal.cloud.providers.aws:Aws"."""
        for node in _run_nodes(self._tree(file), at_once):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not at_once:
                yield from re.findall(r"\A((?:shoal|tests)[\w.]*\.\w+)(?::\w+)?\Z", node.value)

    def _named_files(self, file: str) -> Iterator[str]:
        """Files that strings name. A golden's name may have a variable part: f"roles/{name}.txt"."""
        for node in ast.walk(self._tree(file)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from self._by_name(node.value, file)
            elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                first = str(node.values[0].value)
                if re.fullmatch(r"\w+/[\w/-]*", first):
                    yield from (golden for golden in self.files if golden.startswith(f"tests/golden/{first}"))

    def _by_name(self, name: str, asker: str) -> list[str]:
        if name in self._known:
            return [name]
        found = self._tails.get(name, [])
        # In the code, a word is more often a word than a directory.
        return [file for file in found if file.startswith("src/")] if asker.startswith("src/") else found

    def _module_files(self, name: str, directory: Path) -> Iterator[str]:
        """The file of a module, and of the packages above it. The last part of a name may be one of its members."""
        parts = name.split(".")
        for root in (*SOURCE_ROOTS, str(directory)):
            paths = [str(Path(root, *parts[:length])) for length in range(1, len(parts) + 1)]
            found = [file for path in paths for file in (f"{path}.py", f"{path}/__init__.py") if file in self._known]
            yield from found
            if found and found[-1].endswith("/__init__.py"):
                for lazy in self._modules(found[-1], at_once=False):
                    # What is asked for; a test that imports a registry gets all that it names.
                    registry = len(parts) > 2 and directory.parts[0] == "tests"
                    if lazy != name and (registry or lazy.rpartition(".")[2] == parts[-1]):
                        yield from self._module_files(lazy, directory)

    def _tree(self, file: str) -> ast.Module:
        return ast.parse((self.root / file).read_bytes())

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.files)

    @cached_property
    def _tails(self) -> Mapping[str, list[str]]:
        """Files by how a string may name them: `job.yaml`, `toy/train.py`, `examples/toy`. A common name names none."""
        tails: dict[str, list[str]] = {}
        for file in self.files:
            parts = Path(file).parts
            for at in range(len(parts)):
                tails.setdefault("/".join(parts[at:]), []).append(file)
                if parts[0] in NAMED_DIRECTORIES:
                    tails.setdefault("/".join(parts[: at + 1]), []).append(file)
        return {name: files for name, files in tails.items() if len(files) == 1 or name.startswith(NAMED_DIRECTORIES)}


def _run_nodes(tree: ast.AST, at_once: bool) -> Iterator[ast.AST]:
    """All nodes but those for type checkers alone; with `at_once`, what runs when the file is imported."""
    waiting = deque([tree])
    while waiting:
        node = waiting.popleft()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
        elif not (at_once and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield node
            waiting.extend(ast.iter_child_nodes(node))
