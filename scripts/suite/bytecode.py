"""Compiles the project and its tests once, on all cores: otherwise each process of pytest compiles them all."""

from __future__ import annotations

import compileall
import os
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from _pytest.assertion import rewrite
from _pytest.config import Config, get_config

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ("src", "tests", "scripts/suite")


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    for place in PLAIN:
        compileall.compile_dir(ROOT / place, rx=re.compile("/test_"), quiet=2, workers=cores)
    # pytest compiles tests with its own assertions, into files of their own.
    files = [file for pattern in ("test_*.py", "conftest.py") for file in sorted((ROOT / "tests").rglob(pattern))]
    with ProcessPoolExecutor(cores) as pool:
        list(pool.map(compile_tests, [files[at::cores] for at in range(cores)]))


def compile_tests(files: list[Path]) -> None:
    config = get_config()
    config.parse([f"--rootdir={ROOT}", "-p", "no:cacheprovider", str(ROOT / "scripts")])
    for file in files:
        compile_test(file, config)


def compile_test(file: Path, config: Config) -> None:
    """With pytest's own functions: nothing public does this without running the file."""
    kept = kept_for(file)
    if rewrite._read_pyc(file, kept) is None:
        kept.parent.mkdir(exist_ok=True)
        version, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, version, kept)


def kept_for(file: Path) -> Path:
    """Where pytest looks for the bytecode of a test."""
    return rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"


if __name__ == "__main__":
    main()
