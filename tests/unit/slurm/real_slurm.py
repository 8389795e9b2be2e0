"""A real Slurm of a given release, started on given configuration in namespaces that leave nothing behind."""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

INSIDE = Path(__file__).parent / "inside.sh"
PACKAGES = "munge,slurmctld,slurmd,slurm-client,slurm-wlm-basic-plugins,iproute2,procps"
SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "sid"}
NAMESPACES = ("unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child")


def missing() -> str:
    """What this machine lacks to run one; empty when nothing."""
    if os.geteuid() != 0:
        return "needs root"
    return next((f"needs {program}" for program in ("mmdebstrap", "unshare") if shutil.which(program) is None), "")


def image(release: str) -> Path:
    """A root file system with that Slurm, made once (half a minute) and kept in the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal-tests"
    made = cache / f"slurm-{release}-{os.uname().machine}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"slurm-{release}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests that run in parallel use the same one
        if not made.exists():
            fresh = cache / f"slurm-{release}.{os.getpid()}"
            # sid's index may be past its date on a machine that is.
            options = ["--variant=minbase", f"--include={PACKAGES}", '--aptopt=Acquire::Check-Valid-Until "false"']
            command = ["mmdebstrap", *options, SUITES[release], str(fresh)]
            subprocess.run(command, check=True, capture_output=True, timeout=900)
            fresh.rename(made)
    return made


def run(
    release: str, files: Mapping[str, str], script: str, scratch: Path, *, slurmd: bool = True, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Start slurmctld (and a slurmd as node n1) on these files, then run a shell script beside them."""
    for name, text in files.items():
        (scratch / name).write_text(text)
    (scratch / "script").write_text(script)
    return subprocess.run(
        [*NAMESPACES, str(INSIDE), str(image(release)), str(scratch), str(scratch / "script")],
        env={**os.environ, "NO_SLURMD": "" if slurmd else "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
