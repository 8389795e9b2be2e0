"""The driver's files in an image. The driver is simulated: a library that knows its version, compiled here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.unit.containers.test_image_runner import ALLOWED, SETTINGS, START, root

from shoal.remote.runner import driver_files
from shoal.remote.runner.driver_files import driver_mounts, driver_problem, driver_variables, is_met

__all__ = ["root"]
OF_CUDA_IMAGE = "cuda>=12.4 brand=tesla,driver>=470,driver<471 brand=nvidia,driver>=535,driver<536"


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A directory with the libraries of driver 570.86 for CUDA 12.8, and others that are none of its."""
    place = tmp_path / "driver"
    place.mkdir()
    code = "int cuDriverGetVersion(int *version) { *version = 12080; return 0; }"
    library = place / "libcuda.so.570.86"
    line = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(line, input=code, text=True, check=True)
    (place / "libcuda.so.1").symlink_to(library)
    (place / "libnvidia-ml.so.1").write_text("ml")
    (place / "libnvidia-nvvm.so.4").symlink_to("/nowhere")
    (place / "libc.so.6").write_text("never")
    (place / "nvidia-smi").write_text("#!/bin/sh\necho one GPU\n")
    (place / "nvidia-smi").chmod(0o755)
    (place / "nvidiactl").touch()
    return place


@pytest.fixture
def installed(driver: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in constants(driver).items():
        monkeypatch.setattr(driver_files, name, value)
    return driver


def constants(driver: Path) -> dict[str, object]:
    return {
        **{"DEVICE": str(driver / "nvidiactl"), "DIRECTORIES": ("/nowhere", str(driver))},
        **{"PROGRAMS": (str(driver / "nvidia-smi"), "/bin/true")},
    }


def test_node_without_gpus_adds_nothing() -> None:
    if Path(driver_files.DEVICE).exists():
        pytest.skip("this machine has a GPU")
    assert driver_mounts() == []


def test_libraries_of_the_driver_are_mounted_under_all_their_names(installed: Path) -> None:
    library = str(installed / "libcuda.so.570.86")
    assert driver_mounts() == [
        (library, "/run/nvidia/lib/libcuda.so.1", True),
        (library, "/run/nvidia/lib/libcuda.so.570.86", True),
        (str(installed / "libnvidia-ml.so.1"), "/run/nvidia/lib/libnvidia-ml.so.1", True),
        (str(installed / "nvidia-smi"), "/run/nvidia/bin/nvidia-smi", True),
    ]


def test_variables_of_the_image_come_first() -> None:
    assert driver_variables({"LD_LIBRARY_PATH": "/opt/lib", "PATH": "/bin"}) == {
        "LD_LIBRARY_PATH": "/opt/lib:/run/nvidia/lib",
        "PATH": "/bin:/run/nvidia/bin",
    }
    assert driver_variables({})["LD_LIBRARY_PATH"] == "/run/nvidia/lib"


@cases(
    "needed, cuda, driver, met",
    ("cuda>=12.4", "12.8", "570.86.15", True),
    ("cuda>=13.0", "12.8", "570.86.15", False),
    ("cuda>=12.10", "12.8", "570.86.15", False),
    (OF_CUDA_IMAGE, "12.2", "535.183.01", True),
    (OF_CUDA_IMAGE, "12.2", "545.23", False),
    ("driver=535", "12.2", "535.183.01", True),
    ("driver!=535", "12.2", "535.183.01", False),
    ("brand=tesla", "11.0", "450.80", True),
)
def test_requirement_holds_where_one_alternative_does(needed: str, cuda: str, driver: str, met: bool) -> None:
    assert is_met(needed, {"cuda": cuda, "driver": driver}) is met


def test_image_for_a_newer_cuda_is_rejected_with_the_versions(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = driver_mounts()
    assert driver_problem({"NVIDIA_REQUIRE_CUDA": "cuda>=12.4"}, mounts) == ""
    assert driver_problem({"NVIDIA_REQUIRE_CUDA": "nonsense"}, mounts) == ""
    newer = {"NVIDIA_REQUIRE_CUDA": "cuda>=13.1"}
    assert driver_problem(newer, mounts) == (
        "needs CUDA 13.1, and driver 570.86 has 12.8; take an image for CUDA 12.8 or older, or install a newer driver"
    )
    assert driver_problem(newer, []) == ""
    monkeypatch.setenv("NVIDIA_DISABLE_REQUIRE", "1")
    assert driver_problem(newer, mounts) == ""


@pytest.mark.skipif(not ALLOWED, reason="needs user namespaces")
def test_command_in_an_image_finds_the_driver(root: Path, driver: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(START.parent)!r}); from runner import driver_files, image\n"
        f"vars(driver_files).update({constants(driver)!r})\n"
        f"image.find_root = lambda settings: ({str(root)!r}, False)\n"  # as if it were unpacked
        "sys.exit(image.run_in_image(sys.argv[1:]))"
    )
    settings = SETTINGS
    command = ["sh", "-c", "echo $LD_LIBRARY_PATH; ls /run/nvidia/lib; nvidia-smi; touch /run/nvidia/lib/libcuda.so.1"]

    def run(cwd: str = "/tmp") -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "HOME": "/root", "SHOAL_IMAGE": json.dumps(settings)}
        line = [sys.executable, "-I", "-S", "-c", program, *command]
        return subprocess.run(line, capture_output=True, text=True, env=environment, cwd=cwd, timeout=60)

    done = run()
    names = ["libcuda.so.1", "libcuda.so.570.86", "libnvidia-ml.so.1"]
    assert done.stdout.splitlines() == ["/run/nvidia/lib", *names, "one GPU"], done.stderr
    assert "Read-only file system" in done.stderr
    (root.parent / "image.json").write_text(json.dumps({"Env": ["NVIDIA_REQUIRE_CUDA=cuda>=13.1"]}))
    done = run()
    assert done.stdout == "" and "image tiny needs CUDA 13.1, and driver 570.86 has 12.8" in done.stderr
    (root.parent / "image.json").write_text(json.dumps({"WorkingDir": "/srv"}))
    (root / "srv").mkdir(exist_ok=True)
    command[:] = ["sh", "-c", "pwd"]
    assert run("/opt").stdout == "/srv\n", "the image's directory, where the job's is not in it"
