"""The program that builds an environment, run for real on wheels of a few bytes."""

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.small_wheels import small_wheel, torch_like, uv_wheel
from tests.support.cases import cases

from shoal.environments.store import (
    added_files,
    list_command,
    parse_listing,
    remove_command,
    sweep_command,
    unpack_command,
)
from shoal.remote import environment_builder as builder
from shoal.remote import program_text


class Place:
    """A directory that stands for a host, one for the share and one for an index."""

    def __init__(self, root: Path, local: Path) -> None:
        self.shared, self.local, self.index = root / "shared", local, root / "index"
        small_wheel(self.index, "herring", "1.0", needs="sprat")
        small_wheel(self.index, "herring", "1.1", needs="sprat")
        small_wheel(self.index, "sprat", "2.0")
        torch_like(self.index, "9.1+cu130", "13.0")
        uv_wheel(self.index)

    def build(self, *lines: str, **more: Any) -> dict[str, Any]:
        """The last event that the program reports."""
        request = {
            "requirements": "\n".join((f"--no-index\n--find-links {self.index}", *lines)) + "\n",
            **{"constraints": "", "locked": False, "python": sys.executable, "place": "shared", "proxy": {}},
            "for_python": "",
            **{"directory": str(self.shared), "local": str(self.local)},
            **{"shoal": "0.1.0", "files": added_files(), "git_fix": "install it"},
            "finish": program_text("environment_files"),
            **more,
        }
        line = [sys.executable, "-I", "-c", Path(builder.__file__).read_text()]
        env = request.pop("env", None)
        done = subprocess.run(
            line, env=env, input=json.dumps(request) + "\n", capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        events = [json.loads(text) for text in done.stdout.splitlines()]
        return dict(events[-1])

    def run(self, command: list[str]) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, local: Path) -> Place:
    return Place(tmp_path_factory.mktemp("environments"), local)


def says(path: str) -> str:
    return subprocess.run([f"{path}/bin/herring-says"], capture_output=True, text=True, check=True).stdout.strip()


def test_environment_has_the_named_packages_and_their_dependencies(place: Place) -> None:
    made = place.build("herring==1.0")
    assert made["event"] == "done" and made["made"], made
    assert made["packages"] == ["herring==1.0", "sprat==2.0"]
    assert made["path"] == f"{place.shared}/{made['id']}" and says(made["path"]) == "herring 1.0"
    assert not list(Path(made["path"]).glob("lib/python*/site-packages/pip"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_directory_owned_by_another_user_is_rejected(place: Place, tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    planted = tmp_path / "environments"
    planted.mkdir()
    os.chown(planted, 2001, 2001)
    event = place.build("herring==1.0", directory=str(planted))
    assert event["what"] == f"{planted} belongs to user 2001, who could change what jobs run from it"
    assert event["fix"] == "move it away, or set another `directory`" and not list(planted.iterdir())


def test_equal_packages_give_the_same_environment_and_another_version_another(place: Place) -> None:
    first, again = place.build("herring==1.0"), place.build("herring==1.0", "sprat")
    assert (first["id"], again["made"]) == (again["id"], False) and first["source"] != again["source"]
    new = place.build("herring==1.1")
    assert first["id"] != new["id"] and (says(first["path"]), says(new["path"])) == ("herring 1.0", "herring 1.1")


def test_temporary_files_are_not_in_tmp(place: Place, tmp_path: Path) -> None:
    place.build("herring==1.0")
    request = {"requirements": "", "local": str(place.local), "proxy": {}}
    uv = builder.Uv(request, str(tmp_path / "cache"))
    write = f"import pathlib, tempfile; pathlib.Path('{tmp_path}/path').write_text(tempfile.gettempdir())"
    assert uv._execute([sys.executable, "-c", write]) == (0, [])
    assert (tmp_path / "path").read_text() == f"{place.local}/.tmp" and not (place.local / ".tmp").exists()


@contextmanager
def http_index(directory: Path) -> Iterator[str]:
    """A package index with two wheels in a directory; its address."""
    small_wheel(directory, "perch", "1.0", needs="tench")
    small_wheel(directory, "tench", "1.0")
    simple = directory / "simple"
    for wheel in directory.glob("*.whl"):
        page = simple / wheel.name.partition("-")[0] / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        with page.open("a") as file:
            file.write(f'<a href="/{wheel.name}">{wheel.name}</a>\n')
    handler = partial(SimpleHTTPRequestHandler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()
        thread.join()


@pytest.fixture
def index_url(tmp_path: Path) -> Iterator[str]:
    with http_index(tmp_path / "index") as url:
        yield url


def test_packages_are_downloaded_once(place: Place, tmp_path: Path) -> None:
    with http_index(tmp_path) as url:
        requirements = f"--index-url {url}\nperch\n"
        made = place.build(requirements=requirements)
    assert made["event"] == "done", made
    Path(made["path"], builder.MARK).unlink()
    again = place.build(requirements=requirements)
    assert (again["event"], again["made"], again["id"]) == ("done", True, made["id"])


@cases("setting", "index-url", "extra-index-url")
def test_pip_configuration_of_the_host_applies(
    place: Place, tmp_path: Path, index_url: str, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {index_url}\n[install]\n{setting} = {index_url}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    made = place.build(requirements="perch\n", directory=str(tmp_path / "shared"))
    assert made["packages"] == ["perch==1.0", "tench==1.0"], made


def test_pip_settings_reach_uv(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[global]\nindex-url = https://a/simple\nextra-index-url =\n    https://b/simple\n    https://c/simple\n"
    text += "trusted-host = b c\nfind-links = /one\n    /two\nproxy = http://p:1\ncert = /ca.pem\ntimeout = 60\n"
    (tmp_path / "pip.conf").write_text(text + "[install]\nno-index = true\n")
    for name in ("FIND_LINKS", "CERT", "INDEX_URL", "EXTRA_INDEX_URL"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    place.build("herring==1.0")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_TIMEOUT", "90")
    request = {"requirements": "herring\n", "local": str(place.local), "proxy": {}}
    uv = builder.Uv(request, "/cache")
    assert uv.no_index
    settings = {name: value for name, value in uv.variables.items() if name in builder.PIP_SETTINGS.values()}
    assert settings == {
        "UV_DEFAULT_INDEX": "https://a/simple",
        "UV_INDEX": "https://b/simple https://c/simple",
        "UV_FIND_LINKS": "/one,/two",
        "UV_INSECURE_HOST": "b c",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_HTTP_TIMEOUT": "90",
        "ALL_PROXY": "http://p:1",
    }
    request["requirements"] = "--index-url https://d/simple\nherring\n"
    assert "UV_DEFAULT_INDEX" not in builder.Uv(request, "/cache").variables


def test_incomplete_build_is_rebuilt(place: Place) -> None:
    made = place.build("herring==1.1")
    Path(made["path"], builder.MARK).unlink()
    Path(made["path"], "bin", "herring-says").write_text("half of it")
    (place.shared / "wheels" / made["source"] / "resolved.txt").unlink()
    assert place.build("herring==1.1")["made"] and says(made["path"]) == "herring 1.1"


def test_cuda_version_of_torch_is_read_without_an_import(place: Place) -> None:
    made = place.build("torch")
    assert (made["torch"], made["cuda"]) == ("9.1+cu130", "13.0") and place.build("herring==1.0")["torch"] is None


def test_copy_is_unpacked_from_an_archive(place: Place, tmp_path: Path) -> None:
    made = place.build("herring==1.0", place="local")
    archive = place.shared / "archives" / f"{made['id']}.tar"
    assert made["path"] == f"{place.local}/{made['id']}" and archive.exists()
    for path in (made["path"], f"{tmp_path}/copies/{made['id']}"):
        place.run(["rm", "-rf", path])
        place.run(unpack_command(path, str(archive)))
        assert says(path) == "herring 1.0"
        assert [name.name for name in Path(path).parent.iterdir() if ".new" in name.name] == []


def test_copy_uses_the_python_of_its_host_at_another_path(place: Place, tmp_path: Path) -> None:
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
    path, env = f"{tmp_path}/copies/{made['id']}", {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    subprocess.run(unpack_command(path, f"{tmp_path}/archive.tar"), env=env, check=True, timeout=600)
    assert Path(path, "bin", link.name).readlink() == elsewhere and says(path) == "herring 1.0"
    assert f"home = {elsewhere.parent}\n" in Path(path, "pyvenv.cfg").read_text()


def test_lock_adds_nothing_and_must_be_complete(place: Place) -> None:
    event = place.build("herring==1.0", locked=True)
    assert event["event"] == "failed"
    assert event["what"] == "packages are incompatible: The package `herring` requires `sprat`, but it's not installed"


@cases("locked", True, False)
def test_package_with_a_wrong_hash_is_rejected(place: Place, locked: bool) -> None:
    event = place.build(f"sprat==2.0 --hash=sha256:{'0' * 64}", locked=locked)
    assert event["event"] == "failed" and "sprat==2.0" in event["what"], event
    assert event["fix"] == "make a new lock"


def test_missing_package_or_python_is_named(place: Place) -> None:
    event = place.build("mackerel")
    assert event["event"] == "failed"
    assert event["what"].startswith("uv cannot resolve the packages: No solution found") and "mackerel" in event["what"]
    assert event["fix"] == "correct the list of packages"
    event = place.build("herring", python="python3.99")
    assert (event["event"], event["what"]) == ("failed", "there is no python3.99 on this host")


def test_unsupported_python_is_rejected(place: Place) -> None:
    event = place.build("herring", for_python=">=4")
    assert event["event"] == "failed"
    assert event["what"] == f"it requires Python >=4, and this is {platform.python_version()}"
    assert event["fix"] == "set another `python`"
    assert place.build("herring==1.0", for_python=">=3.8,<4")["event"] == "done"


def test_missing_uv_is_reported_with_the_fix(place: Place, tmp_path: Path) -> None:
    lines = f"--no-index\n--find-links {tmp_path}\nherring\n"
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    event = place.build(requirements=lines, local=str(tmp_path / "local"), env=env)
    assert event["event"] == "failed" and "pip cannot install uv: ERROR: " in event["what"], event
    assert "put a wheel of uv where `--find-links` points" in event["fix"]


FETCH = """\
Resolved 1 package in 2ms
error: Request failed after 3 retries in 9.6s
  cause: Failed to fetch: http://127.0.0.1:9/simple/six/
  cause: error sending request for url (http://127.0.0.1:9/simple/six/)
  cause: client error (Connect)
  cause: Connection refused (os error 111)"""
OPERATOR = """\
error: Couldn't parse requirement in `r.txt` at position 0
  cause: no such comparison operator "="
         six=1"""


@cases(
    "output, reason",
    (FETCH, "no answer from the package index: Connection refused (os error 111)"),
    (OPERATOR, 'Couldn\'t parse requirement in `r.txt` at position 0\nno such comparison operator "="\n         six=1'),
    ("killed", "killed"),
)
def test_uv_error_is_shown_without_earlier_output(output: str, reason: str) -> None:
    assert builder.reason(output) == reason
    assert builder.redact("https://me:hunter2@x.org/simple no") == "https://...@x.org/simple no"


@cases(
    "output, proxy, fix",
    (FETCH, {}, "let this host reach a package index: see `proxy`"),
    (FETCH, {"https_proxy": "http://p:1"}, "check that the proxy http://p:1 answers on this host"),
    ("  cause: Hash mismatch for `six`", {}, "make a new lock"),
    (
        "error: Failed to build `psutil==1.0`",
        {},
        "choose a version that has a wheel, or install the build tools on this host",
    ),
    ("No space left on device (os error 28)", {}, "free some space"),
)
def test_uv_error_has_a_fix(output: str, proxy: dict[str, str], fix: str) -> None:
    assert builder.remedy(output, proxy) == fix


def test_missing_venv_on_debian_is_reported_with_the_fix(tmp_path: Path) -> None:
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
    with pytest.raises(builder.BuildError) as error:
        builder.make_venv(str(python), str(tmp_path / "venv"))
    assert (error.value.what, error.value.fix) == (
        f"{python} has no venv",
        "let the operator run `shoal up`, which installs python3-venv",
    )


def test_removing_an_environment_removes_its_package_cache(place: Place) -> None:
    made, other = place.build("herring==1.1"), place.build("herring==1.0")
    kept = {one.id: one for one in parse_listing(place.run(list_command(str(place.shared))))}
    assert made["id"] in kept and not kept[made["id"]].busy
    place.run(remove_command(str(place.shared), [made["id"]]))
    place.run(sweep_command(str(place.shared), [other["source"]], []))
    assert not Path(made["path"]).exists() and Path(other["path"]).exists()
    assert [name.name for name in (place.shared / "wheels").iterdir()] == [other["source"]]


def test_sweep_removes_unused_archives_but_nothing_during_a_build(tmp_path: Path, place: Place) -> None:
    there = ("archives/ab12.tar", "archives/cd34.tar", "archives/cd34.tar.new", "wheels/s1/a.whl", "wheels/s2.new/b")
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


def test_environment_used_by_a_process_is_busy(place: Place) -> None:
    made = place.build("herring==1.0")
    line = [f"{made['path']}/bin/python", "-c", "import sys; print(1, flush=True); sys.stdin.read()"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        kept = {one.id: one for one in parse_listing(place.run(list_command(str(place.shared))))}
        assert kept[made["id"]].busy
        process.communicate()


def test_listing_does_not_count_as_use(place: Place, tmp_path: Path) -> None:
    assert parse_listing(place.run(list_command(str(tmp_path)))) == []
    (tmp_path / "ab12").mkdir()
    (tmp_path / "ab12" / builder.MARK).write_text("{}")
    for _ in range(20):
        [kept] = parse_listing(place.run(list_command(str(tmp_path))))
        assert (kept.id, kept.busy) == ("ab12", False)
