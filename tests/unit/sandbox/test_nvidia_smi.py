"""The sandbox's nvidia-smi, run as a program."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.cases import cases

from shoal.remote import nvidia_smi

GPUS = "0, GPU-aa, Simulated GPU, 16384\n1, GPU-bb, Simulated GPU, 16384\n"


def ask(tmp_path: Path, *arguments: str, gpus: str = GPUS) -> subprocess.CompletedProcess[str]:
    (tmp_path / "gpus").write_text(gpus)
    return subprocess.run(
        [sys.executable, "-I", str(nvidia_smi.__file__), *arguments],
        env={**os.environ, "SHOAL_GPUS": str(tmp_path / "gpus")},
        capture_output=True,
        text=True,
    )


def test_gpus_are_listed_in_the_nvidia_format(tmp_path: Path) -> None:
    assert ask(tmp_path, "-L").stdout == "GPU 0: Simulated GPU (UUID: GPU-aa)\nGPU 1: Simulated GPU (UUID: GPU-bb)\n"


@cases(
    "query, form, expected",
    ("index,uuid,name,memory.total", "csv,noheader,nounits", "0, GPU-aa, Simulated GPU, 16384"),
    ("uuid,index", "csv,noheader", "GPU-aa, 0"),
    ("memory.total", "csv,noheader", "16384 MiB"),
    ("index, memory.total", "csv", "index, memory.total [MiB]"),
)
def test_query_answers_in_field_order(tmp_path: Path, query: str, form: str, expected: str) -> None:
    done = ask(tmp_path, f"--query-gpu={query}", f"--format={form}")
    assert done.returncode == 0 and done.stdout.splitlines()[0] == expected


def test_unknown_field_is_rejected(tmp_path: Path) -> None:
    done = ask(tmp_path, "--query-gpu=index,colour", "--format=csv")
    assert (done.returncode, done.stdout) == (2, 'Field "colour" is not a valid field to query.\n')


def test_other_options_are_rejected(tmp_path: Path) -> None:
    done = ask(tmp_path, "--reset")
    assert done.returncode == 2 and "knows -L and --query-gpu" in done.stderr


def test_host_without_gpus_lists_none(tmp_path: Path) -> None:
    done = ask(tmp_path, "-L", gpus="")
    assert (done.returncode, done.stdout) == (6, "No devices were found\n")


def test_driver_is_recent_unless_configured(tmp_path: Path) -> None:
    gpus = "0, GPU-1, Simulated GPU, 1\n1, GPU-2, Simulated GPU, 1, 470.42.01\n"
    done = ask(tmp_path, "--query-gpu=driver_version", "--format=csv,noheader", gpus=gpus)
    assert done.stdout.split() == [nvidia_smi.DRIVER, "470.42.01"]
