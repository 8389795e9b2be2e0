"""The program that makes an environment, run for real on wheels of a few bytes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.small_wheels import small_wheel, torch_like

from shoal.environments import builder, relocatable
from shoal.environments.place import kept_command, parse_kept, remove_command, sweep_command, unpack_command


class Place:
    """A directory that stands for a host, and one for the share."""

    def __init__(self, root: Path) -> None:
        self.shared, self.local, self.index = root / "shared", root / "local", root / "index"
        small_wheel(self.index, "herring", "1.0", needs="sprat")
        small_wheel(self.index, "herring", "1.1", needs="sprat")
        small_wheel(self.index, "sprat", "2.0")
        torch_like(self.index, "9.1+cu130", "13.0")

    def build(self, *lines: str, **more: Any) -> dict[str, Any]:
        """What the program says at its end."""
        asked = {
            "requirements": "\n".join((f"--no-index\n--find-links {self.index}", *lines)) + "\n",
            **{"constraints": "", "locked": False, "python": sys.executable, "place": "shared", "proxy": {}},
            "for_python": "",
            "relocatable": Path(relocatable.__file__).read_text(),
            **{"directory": str(self.shared), "local": str(self.local)},
            **more,
        }
        line = [sys.executable, "-I", "-c", Path(builder.__file__).read_text()]
        done = subprocess.run(line, input=json.dumps(asked) + "\n", capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        events = [json.loads(text) for text in done.stdout.splitlines()]
        return dict(events[-1])

    def run(self, command: list[str]) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("environments"))


def says(path: str) -> str:
    return subprocess.run([f"{path}/bin/herring-says"], capture_output=True, text=True, check=True).stdout.strip()


def test_an_environment_has_what_is_named_and_what_that_needs(place: Place) -> None:
    made = place.build("herring==1.0")
    assert made["event"] == "done" and made["made"], made
    assert made["packages"] == ["herring==1.0", "sprat==2.0"]
    assert made["path"] == f"{place.shared}/{made['id']}"
    assert says(made["path"]) == "herring 1.0"
    assert not list(Path(made["path"]).glob("lib/python*/site-packages/pip"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_nothing_is_built_in_a_directory_that_somebody_else_put_in_the_way(place: Place, tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    planted = tmp_path / "environments"
    planted.mkdir()
    os.chown(planted, 2001, 2001)
    told = place.build("herring==1.0", directory=str(planted))
    assert told["what"] == f"{planted} is user 2001's, and so would be all that jobs run from it"
    assert told["fix"] == "move it away, or name another `directory`" and not list(planted.iterdir())


def test_the_same_packages_are_the_same_environment_however_they_are_written(place: Place) -> None:
    first, again = place.build("herring==1.0"), place.build("herring==1.0", "sprat")
    assert (first["id"], first["made"]) == (again["id"], False)
    assert first["source"] != again["source"]


def test_another_version_is_another_environment_and_the_first_one_stays(place: Place) -> None:
    old, new = place.build("herring==1.0"), place.build("herring==1.1")
    assert old["id"] != new["id"]
    assert (says(old["path"]), says(new["path"])) == ("herring 1.0", "herring 1.1")


def test_pip_unpacks_beside_the_environments_for_tmp_may_be_small(tmp_path: Path) -> None:
    where = f"import pathlib, tempfile; pathlib.Path('{tmp_path}/told').write_text(tempfile.gettempdir())"
    builder.pip({"local": str(tmp_path), "proxy": {}}, [sys.executable, "-c", where], "do it")
    assert (tmp_path / "told").read_text() == f"{tmp_path}/.pip"
    assert not (tmp_path / ".pip").exists()


def test_wheels_are_gathered_once(place: Place) -> None:
    made = place.build("herring==1.1")
    Path(made["path"], builder.MARK).unlink()
    (place.index / "herring-1.1-py3-none-any.whl").rename(place.index / "away")
    try:
        again = place.build("herring==1.1")
    finally:
        (place.index / "away").rename(place.index / "herring-1.1-py3-none-any.whl")
    assert (again["event"], again["made"], again["id"]) == ("done", True, made["id"])


def test_what_a_killed_run_left_is_made_anew(place: Place) -> None:
    made = place.build("herring==1.1")
    Path(made["path"], builder.MARK).unlink()
    Path(made["path"], "bin", "herring-says").write_text("half of it")
    half = place.shared / "wheels" / f"{made['source']}.new"
    half.mkdir()
    assert place.build("herring==1.1")["made"]
    assert says(made["path"]) == "herring 1.1"


def test_torch_is_asked_for_its_cuda_without_being_imported(place: Place) -> None:
    made = place.build("torch")
    assert (made["torch"], made["cuda"]) == ("9.1+cu130", "13.0")
    assert place.build("herring==1.0")["torch"] is None


def test_a_copy_is_unpacked_from_one_file(place: Place, tmp_path: Path) -> None:
    made = place.build("herring==1.0", place="local")
    archive = place.shared / "archives" / f"{made['id']}.tar"
    assert made["path"] == f"{place.local}/{made['id']}" and archive.exists()
    for path in (made["path"], f"{tmp_path}/copies/{made['id']}"):
        place.run(["rm", "-rf", path])
        place.run(unpack_command(path, str(archive)))
        assert says(path) == "herring 1.0"
        assert [name.name for name in Path(path).parent.iterdir() if ".new" in name.name] == []


def test_a_copy_is_led_to_the_python_of_its_host_where_that_is_somewhere_else(place: Place, tmp_path: Path) -> None:
    made = place.build("herring==1.0", place="local")
    name = f"python{made['python']}"
    elsewhere = tmp_path / "bin" / name
    elsewhere.parent.mkdir()
    elsewhere.symlink_to(Path(made["path"], "bin/python").resolve())
    shutil.copytree(made["path"], tmp_path / made["id"], symlinks=True)
    links = [path for path in Path(tmp_path, made["id"], "bin").iterdir() if path.is_symlink()]
    [link] = [path for path in links if path.readlink().is_absolute()]
    link.unlink()
    link.symlink_to(f"/nowhere/{name}")
    place.run(["tar", "-c", "-f", f"{tmp_path}/archive.tar", "-C", str(tmp_path), made["id"]])
    path = f"{tmp_path}/copies/{made['id']}"
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    subprocess.run(unpack_command(path, f"{tmp_path}/archive.tar"), env=env, check=True, timeout=600)
    assert Path(path, "bin", link.name).readlink() == elsewhere and says(path) == "herring 1.0"
    assert f"home = {elsewhere.parent}\n" in Path(path, "pyvenv.cfg").read_text()


def test_a_lock_adds_nothing_and_must_be_whole(place: Place) -> None:
    told = place.build("herring==1.0", locked=True)
    assert told["event"] == "failed"
    assert "the packages do not fit together: herring 1.0 requires sprat, which is not installed" in told["what"]


def test_a_package_that_nobody_has_is_told_as_pip_tells_it(place: Place) -> None:
    told = place.build("mackerel")
    assert told["event"] == "failed"
    assert "pip could not gather the packages" in told["what"] and "mackerel" in told["what"]
    assert told["fix"] == "correct the list of packages"


def test_a_python_that_is_not_there_is_named(place: Place) -> None:
    told = place.build("herring", python="python3.99")
    assert (told["event"], told["what"]) == ("failed", "there is no python3.99 here")


def test_a_python_that_the_project_is_not_for_is_refused(place: Place) -> None:
    told = place.build("herring", for_python=">=4")
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert (told["event"], told["what"]) == ("failed", f"it is for Python >=4, and this is {here}")
    assert told["fix"] == "name another with `python`"
    assert place.build("herring==1.0", for_python=">=3.8,<4")["event"] == "done"


RETRYING = "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by '%s': /simple/six/"
NONE = "ERROR: Could not find a version that satisfies the requirement six (from versions: none)"
REFUSED = "NewConnectionError('<pip.HTTPSConnection object at 0x7f>: Failed: [Errno 111] Connection refused')"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([RETRYING % REFUSED, NONE], "no package index answers: Connection refused"),
        (
            [RETRYING % "ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed: 403 No'))", NONE],
            "no package index answers: 403 No",
        ),
        (
            [RETRYING % """ReadTimeoutError("Pool(host='x', port=443): Read timed out. (read timeout=15)")""", NONE],
            "no package index answers: Read timed out. (read timeout=15)",
        ),
        ([RETRYING % REFUSED, "ERROR: Invalid requirement: 'six='"], "ERROR: Invalid requirement: 'six='"),
        (
            ["ERROR: Invalid requirement: 'six=1' (from line 1 of /shared/wheels/ab.new/requirements.txt)"],
            "ERROR: Invalid requirement: 'six=1'",
        ),
        (["ERROR: THESE PACKAGES DO NOT MATCH", "    six==1"], "ERROR: THESE PACKAGES DO NOT MATCH\n    six==1"),
        (
            [
                "  error: subprocess-exited-with-error",
                "      error: [Errno 2] No such file or directory: 'gcc'",
                "      [end of output]",
                "  ERROR: Failed building wheel for psutil",
            ],
            "error: [Errno 2] No such file or directory: 'gcc'\nERROR: Failed building wheel for psutil",
        ),
        (["killed"], "killed"),
    ],
)
def test_what_pip_says_is_told_from_where_it_matters(said: list[str], reason: str) -> None:
    assert builder.reason(said) == reason


@pytest.mark.parametrize(
    ("said", "proxy", "fix"),
    [
        (RETRYING, {}, "this host needs a way to a package index: see `proxy`"),
        (RETRYING, {"https_proxy": "http://p:1"}, "does the proxy http://p:1 answer on this host?"),
        ("DO NOT MATCH THE HASHES", {}, "make a new lock"),
        (
            "error: subprocess-exited-with-error",
            {},
            "choose a version that there is a wheel of, or install on this host what it is built with",
        ),
    ],
)
def test_what_to_do_about_it_is_told_too(said: str, proxy: dict[str, str], fix: str) -> None:
    assert builder.remedy(said, proxy) == fix


def test_a_debian_without_venv_is_told_what_installs_it(place: Place, tmp_path: Path) -> None:
    debian = (
        "The virtual environment was not created successfully because ensurepip is not\n"
        "available.  On Debian/Ubuntu systems, you need to install the python3-venv\n"
        "package using the following command.\n\n    apt install python3.11-venv\n\n"
        "You may need to use sudo with that command.  After installing the python3-venv\n"
        "package, recreate your virtual environment.\n\nFailing command: python3"
    )
    python = tmp_path / "python3"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *"-m venv"*) echo "{debian}"; exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    told = place.build("herring", python=str(python), local=str(tmp_path / "local"), directory=str(tmp_path / "shared"))
    assert (told["event"], told["what"]) == ("failed", f"{python} has no venv")
    assert told["fix"] == "run `shoal up`, which installs python3-venv"


def test_passwords_of_pips_own_configuration_are_not_told() -> None:
    assert builder.hidden("https://me:hunter2@x.org/simple no") == "https://...@x.org/simple no"


def test_what_is_removed_is_gone_whole_and_its_wheels_with_it(place: Place) -> None:
    made, other = place.build("herring==1.1"), place.build("herring==1.0")
    kept = {one.id: one for one in parse_kept(place.run(kept_command(str(place.shared))))}
    assert made["id"] in kept and not kept[made["id"]].busy
    place.run(remove_command(str(place.shared), [made["id"]]))
    place.run(sweep_command(str(place.shared), [other["source"]], []))
    assert not Path(made["path"]).exists() and Path(other["path"]).exists()
    assert [name.name for name in (place.shared / "wheels").iterdir()] == [other["source"]]


def test_an_archive_goes_with_its_environment_and_nothing_while_somebody_builds(tmp_path: Path, place: Place) -> None:
    there = (
        "archives/ab12.tar",
        "archives/cd34.tar",
        "archives/cd34.tar.new",
        "wheels/s1/a.whl",
        "wheels/s2.new/b.whl",
    )
    for name in there:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def left() -> list[str]:
        files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
        return sorted(str(path.relative_to(tmp_path)) for path in files)

    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        place.run(sweep_command(str(tmp_path), ["s1"], ["ab12"]))
        assert left() == sorted(there)
    for _ in range(2):
        place.run(sweep_command(str(tmp_path), ["s1"], ["ab12"]))
        assert left() == ["archives/ab12.tar", "wheels/s1/a.whl"]
    place.run(sweep_command(str(tmp_path), [], []))
    assert left() == []
    place.run(sweep_command(str(tmp_path / "nowhere"), [], []))


def test_an_environment_that_a_process_uses_is_busy(place: Place) -> None:
    made = place.build("herring==1.0")
    line = [f"{made['path']}/bin/python", "-c", "import sys; print(1, flush=True); sys.stdin.read()"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        kept = {one.id: one for one in parse_kept(place.run(kept_command(str(place.shared))))}
        assert kept[made["id"]].busy
        process.communicate()


def test_who_looks_is_not_taken_for_one_who_uses_it(place: Place, tmp_path: Path) -> None:
    (tmp_path / "ab12").mkdir()
    (tmp_path / "ab12" / builder.MARK).write_text("{}")
    for _ in range(20):
        [kept] = parse_kept(place.run(kept_command(str(tmp_path))))
        assert (kept.id, kept.busy) == ("ab12", False)


def test_a_directory_without_environments_has_none(place: Place, tmp_path: Path) -> None:
    assert parse_kept(place.run(kept_command(str(tmp_path)))) == []
