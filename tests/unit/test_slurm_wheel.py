"""scripts/slurm_wheel.py: the wheel with Slurm's tree, its tag and its licences."""

import base64
import hashlib
import importlib.util
import io
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from tests.documents import ROOT
from tests.support.cases import cases

TAG = "manylinux_2_31_x86_64"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slurm_wheel", ROOT / "scripts/slurm_wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A tree as Slurm's installation leaves it."""
    tree = tmp_path / "slurm-24.11.5-1"
    for name in ("bin/srun", "lib/slurm/auth_slurm.so", "lib/slurm/auth_slurm.la", "include/slurm/spank.h"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(b"\x7fELF" if name in ("bin/srun", "lib/slurm/auth_slurm.so") else b"text")
    (tree / "bin/srun").chmod(0o775)
    (tree / "lib/libslurm.so").symlink_to("slurm/auth_slurm.so")
    return tree


def test_tree_without_files_of_the_compiler_keeps_the_spank_headers(prefix: Path) -> None:
    SCRIPT.prune(prefix)
    assert not (prefix / "lib/slurm/auth_slurm.la").exists()
    assert (prefix / "include/slurm/spank.h").exists()
    assert SCRIPT.elf_files(prefix) == [prefix / "bin/srun", prefix / "lib/slurm/auth_slurm.so"]
    assert prefix / "lib/libslurm.so" in SCRIPT.elf_files(prefix, links=True)


def test_archive_keeps_links_and_programs_and_is_the_same_whoever_built_it(prefix: Path) -> None:
    packed = SCRIPT.archive(prefix)
    os.utime(prefix / "bin/srun", (1, 1))
    (prefix / "bin/srun").chmod(0o755)
    assert SCRIPT.archive(prefix) == packed
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert archive.getmember("slurm-24.11.5-1/lib/libslurm.so").linkname == "slurm/auth_slurm.so"
        program = archive.getmember("slurm-24.11.5-1/bin/srun")
        assert (program.mode, program.uid, program.uname, program.mtime) == (0o755, 0, "root", 0)


def test_wheel_has_the_archive_its_digest_the_licences_and_a_valid_record(prefix: Path) -> None:
    tree = SCRIPT.archive(prefix)
    content = SCRIPT.wheel("24.11.5-1", TAG, tree, {"SOURCES": b"where\n"})
    with zipfile.ZipFile(io.BytesIO(content)) as wheel:
        assert wheel.read("shoal_slurm/slurm-24.11.5-1-x86_64.tar.gz") == tree
        assert f'SHA256 = "{hashlib.sha256(tree).hexdigest()}"' in wheel.read("shoal_slurm/__init__.py").decode()
        info = "shoal_slurm-24.11.5.post1.dist-info"
        assert wheel.read(f"{info}/licenses/SOURCES") == b"where\n"
        assert f"Tag: py3-none-{TAG}\n" in wheel.read(f"{info}/WHEEL").decode()
        for line in wheel.read(f"{info}/RECORD").decode().splitlines()[:-1]:
            name, digest, size = line.rsplit(",", 2)
            data = wheel.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={expected}", str(len(data)))


def test_tag_is_that_of_the_audited_wheel_and_never_that_of_one_machine() -> None:
    assert SCRIPT.platform_tag(f"shoal_slurm-24.11.5.post1-py3-none-{TAG}.whl") == TAG
    with pytest.raises(SystemExit, match="fits only this machine: linux_x86_64"):
        SCRIPT.platform_tag("shoal_slurm-24.11.5.post1-py3-none-linux_x86_64.whl")
    assert SCRIPT.architecture("manylinux_2_31_aarch64") == "aarch64"


@cases("name", "libc.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libpam.so.0")
def test_libraries_of_the_c_library_and_pam_stay_those_of_the_host(name: str) -> None:
    assert SCRIPT.HOST_LIBRARIES.fullmatch(name)


@cases("name", "libcrypto.so.1.1", "libmariadb.so.3", "libcurl.so.4", "libmunge.so.2")
def test_every_other_library_is_in_the_tree(name: str) -> None:
    assert not SCRIPT.HOST_LIBRARIES.fullmatch(name)


def test_offer_of_sources_names_everything_that_is_in_the_tree() -> None:
    text = SCRIPT.offer("24.11.5-1", "pmix-4.2.2", ["  debian: openssl 1.1.1w-0+deb11u3"])
    for words in ("Slurm 24.11.5, build 1", "pmix-4.2.2", "openssl 1.1.1w-0+deb11u3", "three years"):
        assert words in text


def test_built_wheel_is_not_built_again(tmp_path: Path) -> None:
    """The cache answers before anything needs root or a network."""

    def build(*arguments: str) -> str:
        command = [ROOT / "scripts/build-slurm", *arguments]
        env = {**os.environ, "SHOAL_CACHE": str(tmp_path)}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env, timeout=60).stdout

    arch = os.uname().machine
    (tmp_path / "slurm").mkdir()
    wheel = tmp_path / "slurm" / f"shoal_slurm-24.11.5.post1-py3-none-manylinux_2_31_{arch}.whl"
    wheel.touch()
    (tmp_path / "slurm" / f"recipe-{arch}").write_text(build("--recipe"))
    assert build() == f"{wheel}\n"
