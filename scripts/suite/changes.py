"""Which test files a change touches: unit files by what they import, sandbox files by what they say that they cover.

Read from the sources alone, so a module that is imported by a name made at run time is not seen: that is enough while
working, and not before a merge.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
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


def choose_or_exit(program: str, commit: str) -> Choice:
    """The same for a program, which ends with status 2 where it cannot compare."""
    try:
        return choose(commit)
    except ChangesError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


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
    by_hand = frozenset(test for test in tests if not is_unit(test) and sources.is_by_hand(test))
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
        self._scans: dict[str, Scan] = {}

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
        lines = [ast.unparse(node) for node in self._tree(test).body if isinstance(node, ast.Assign)]
        return any(re.match(r"pytestmark = .*(mark\.matrix|VM_BY_HAND)", line) for line in lines)

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
            scan = self._scan(file)
            package = file.endswith("/__init__.py")
            for module in scan.at_once if package else scan.modules:
                yield from self._module_files(module, directory)
            for text in () if package else scan.strings:
                yield from self._by_name(text, file)
            for prefix in scan.prefixes:
                yield from (golden for golden in self.files if golden.startswith(f"tests/golden/{prefix}"))

    def _scan(self, file: str) -> Scan:
        if file not in self._scans:
            self._scans[file] = scan_source((self.root / file).read_bytes())
        return self._scans[file]

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
                for lazy in self._scan(found[-1]).modules:
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


@dataclass(frozen=True)
class Scan:
    """What a source names."""

    modules: set[str]
    """Those that it imports, or that a registry in it names: "shoal.cloud.providers.aws:Aws"."""
    at_once: set[str]
    """Those that it imports when it is imported itself."""
    strings: set[str]
    prefixes: set[str]
    """How names with a variable part begin: a golden's f"roles/{name}.txt"."""


def scan_source(source: bytes) -> Scan:
    scan = Scan(set(), set(), set(), set())
    waiting: deque[tuple[ast.AST, bool]] = deque([(ast.parse(source), True)])
    while waiting:
        node, at_once = waiting.popleft()
        modules: list[str] = []
        below = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            below = list(node.orelse)  # the rest is never run
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            scan.strings.add(node.value)
            scan.modules.update(re.findall(r"\A((?:shoal|tests)[\w.]*\.\w+)(?::\w+)?\Z", node.value))
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            scan.prefixes.update(re.findall(r"\A\w+/[\w/-]*\Z", str(node.values[0].value)))
        scan.modules.update(modules)
        scan.at_once.update(modules if at_once else ())
        at_once = at_once and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        waiting.extend((child, at_once) for child in below)
    return scan
