"""Images where a user logs in: names, archives, removal. Layouts are made by hand; the e2e tests have real ones."""

import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.waiting import wait_for

from shoal.containers.images import StoredImage, parse_containers, parse_image, parse_images, store_command
from shoal.remote import image_archives, image_store
from shoal.remote.image_archives import require_archive, stamp
from shoal.remote.image_facts import directory_architecture
from shoal.remote.image_registry import Problem, repository
from shoal.remote.image_store import find, keep, new_place


def make_layout(place: Path, text: str = "one", architecture: str = "arm64") -> Path:
    """An OCI layout as skopeo leaves it."""
    blobs = place / "blobs/sha256"
    blobs.mkdir(parents=True)

    def write(content: object) -> str:
        data = json.dumps(content).encode()
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        return f"sha256:{name}"

    config = write({"architecture": architecture, "config": {"Env": [f"TEXT={text}"]}})
    (place / "index.json").write_text(json.dumps({"manifests": [{"digest": write({"config": {"digest": config}})}]}))
    return place


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store/names").mkdir(parents=True)
    return tmp_path / "store"


def kept(store: Path, name: str, text: str = "one", **values: Any) -> dict[str, Any]:
    return keep(str(store), str(make_layout(store / f".new.{text}", text)), name, name, "", **values)


def ask(*words: str, status: int = 0) -> str:
    line = [sys.executable, *store_command(words[0], *words[1:])[1:]]
    its_input, ours = os.pipe()
    try:
        done = subprocess.run(line, stdin=its_input, capture_output=True, text=True, timeout=60)
    finally:
        os.close(its_input)
        os.close(ours)  # not before: a job ends with its reader's input
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def test_image_is_found_by_its_name_with_digest_and_cpu_type(store: Path) -> None:
    made = kept(store, "registry:5000/lab/mini:2")
    image = parse_image(ask("find", str(store), "registry:5000/lab/mini:2"))
    assert image == StoredImage.of(made)
    assert image.architecture == "arm64" and image.digest == f"sha256:{image.id}" and image.bytes > 0
    assert image.layout == str(store / image.id) and parse_image(ask("find", str(store), "mini")) is None
    assert parse_images(ask("list", str(store))) == [image]


@cases("architecture", "arm64\n#SBATCH --exclusive", "arm64|big", "\x1b[2J")
def test_cpu_type_of_an_image_is_a_word(store: Path, architecture: str) -> None:
    made = keep(str(store), str(make_layout(store / ".new.x", architecture=architecture)), "x", "x", "")
    assert made["architecture"] == ""


def test_same_content_is_stored_once_and_goes_with_its_last_name(store: Path) -> None:
    assert kept(store, "a")["id"] == kept(store, "b")["id"] and json.loads(ask("remove", str(store), "a")) == []
    [image] = parse_images(ask("list", str(store)))
    assert image.name == "b" and json.loads(ask("remove", str(store), "b")) == [image.id]
    assert not Path(image.layout).exists()


def test_prune_removes_what_a_later_pull_replaced_and_half_a_pull(store: Path) -> None:
    before, after = kept(store, "a", "one")["id"], kept(store, "a", "two")["id"]
    for name in (".new.killed.lock", "auth.json.17", "names/b.json.17"):  # of programs that were killed
        (store / name).touch()
    (store / ".new.killed").mkdir()
    os.utime(store / "auth.json.17", (0, 0))
    (store / "auth.json.18").touch()  # it is being written
    assert json.loads(ask("prune", str(store))) == [before]
    assert sorted(path.name for path in store.iterdir()) == sorted([".lock", after, "auth.json.18", "names"])
    assert [path.name for path in (store / "names").iterdir()] == ["a.json"]


def test_file_that_is_renamed_meanwhile_does_not_stop_prune(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    id, listdir = kept(store, "mini")["id"], os.listdir
    (store / "names/mini.json").unlink()
    monkeypatch.setattr(os, "listdir", lambda path: [*(["auth.json.17"] if path == str(store) else []), *listdir(path)])
    assert image_store.prune(str(store)) == [id]


@cases("verb", "remove", "prune")
def test_removal_waits_for_no_pull_and_leaves_its_files(store: Path, verb: str) -> None:
    kept(store, "mini")
    with new_place(str(store)) as new:
        Path(new, "blob").touch()
        ask(verb, str(store), *(["mini"] if verb == "remove" else []))
        ask("sweep", str(store))
        assert Path(new, "blob").exists()
        kept(store, "maxi", "two")
    assert sorted(path.name for path in store.iterdir() if path.name.startswith(".new")) == []
    assert [image.name for image in parse_images(ask("list", str(store)))] == ["maxi", "mini"][: 2 - (verb == "remove")]


def test_next_pull_removes_what_a_killed_one_left(store: Path) -> None:
    (store / ".new.killed").mkdir()
    (store / ".new.killed.lock").touch()
    ask("pull", str(store), "/nowhere.tar", "x", status=3)
    assert sorted(path.name for path in store.iterdir()) == [".lock", "names"]


def test_containers_are_listed_with_their_nodes(store: Path) -> None:
    assert parse_containers(ask("containers", str(store))) == []
    for name, node in (("mine", "n2"), ("mine", "n1"), ("gone", "")):
        (store / "containers" / name).mkdir(parents=True, exist_ok=True)
        if node:
            (store / "containers" / name / node).write_text("mini")
    [one] = parse_containers(ask("containers", str(store)))
    assert (one.name, one.image, one.nodes) == ("mine", "mini", ("n1", "n2")) and one.made_at > 0
    ask("prune", str(store))
    assert (store / "containers/mine/n1").exists()
    said = ask("remove", str(store), "mine", status=3)
    assert said.endswith("yours are: none; it is a container of n1, n2: name the node with --node\n")


def test_unknown_name_is_an_error_that_lists_the_others(store: Path) -> None:
    kept(store, "mini")
    assert ask("remove", str(store), "maxi", status=3) == "you have no image maxi; yours are: mini\n"


def test_archive_that_changed_is_read_again(store: Path, tmp_path: Path) -> None:
    archive = tmp_path / "x.tar"
    write_tar(archive, "manifest.json")
    kept(store, str(archive), stamp=stamp(str(archive)))
    assert find(str(store), str(archive)) is not None
    write_tar(archive, "manifest.json", "more")
    assert find(str(store), str(archive)) is None


def write_tar(path: Path, *names: str) -> None:
    with tarfile.open(path, "w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())


def test_archive_gives_the_files_of_a_layout_and_no_others(tmp_path: Path) -> None:
    blob = f"blobs/sha256/{hashlib.sha256().hexdigest()}"
    write_tar(tmp_path / "x.tar", "./oci-layout", "index.json", blob, "../outside", "/tmp/outside", "blobs/sha256/../x")
    with tarfile.open(tmp_path / "x.tar") as tar:
        image_archives.write_files(tar, str(tmp_path / "new"))
    files = [str(path.relative_to(tmp_path / "new")) for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert sorted(files) == [blob, "index.json", "oci-layout"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "x.tar"]


@cases("kind", "gz", "xz", "bz2", "")
@cases("there", 0.01, 0.8)
def test_archive_that_is_cut_is_named_and_leaves_nothing(store: Path, tmp_path: Path, kind: str, there: float) -> None:
    path, data = tmp_path / "x.tar", random.Random(1).randbytes(100000)
    with tarfile.open(path, f"w:{kind}") as tar:
        for name in ("oci-layout", f"blobs/sha256/{hashlib.sha256(data).hexdigest()}"):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * there)])
    said = ask("pull", str(store), str(path), "x", status=3)
    assert said.startswith(str(path)) and ("is damaged" in said or "is no archive" in said) and said.count("\n") == 1
    assert sorted(path.name for path in store.iterdir()) == [".lock", "names"]


def test_layout_that_the_reader_rejects_is_named(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "skopeo").write_text("#!/bin/sh\necho 'unexpected end of JSON input' >&2\nexit 1\n")
    (tmp_path / "skopeo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout/oci-layout").touch()
    said = ask("pull", str(store), str(tmp_path / "layout"), "x", status=3)
    assert said == f"{tmp_path}/layout: skopeo: unexpected end of JSON input\n"


@cases("index", "{", "[]", "{}", '{"manifests": []}', '{"manifests": [{"digest": "../../x"}]}')
def test_layout_of_a_job_that_is_none_is_an_error(store: Path, tmp_path: Path, index: str) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, data in (("oci-layout", b"{}"), ("index.json", index.encode())):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert "the image is damaged" in ask("receive", str(store), "x", "0", "cat", str(tmp_path / "x.tar"), status=3)
    assert sorted(path.name for path in store.iterdir()) == [".lock", "names"]


def test_kinds_of_archives_are_told_apart(tmp_path: Path) -> None:
    write_tar(tmp_path / "docker.tar", "manifest.json")
    write_tar(tmp_path / "oci.tar", "./index.json", "./oci-layout")
    write_tar(tmp_path / "plain.tar", "etc/passwd")
    (tmp_path / "x.sqsh").write_bytes(b"hsqs....")
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout/oci-layout").touch()
    kinds = {"docker.tar": "docker-archive", "oci.tar": "oci-archive", "layout": "oci"}
    assert {name: require_archive(str(tmp_path / name)) for name in kinds} == kinds
    with pytest.raises(
        Problem, match=r"x\.sqsh is a squashfs file, which this engine does not take: run `unsquashfs -d"
    ):
        require_archive(str(tmp_path / "x.sqsh"))
    with pytest.raises(Problem, match="is no archive of an image; unpack it, then `shoal image build"):
        require_archive(str(tmp_path / "plain.tar"))


def test_directory_is_used_as_it_is(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/bash").write_bytes(b"\x7fELF" + bytes(14) + (62).to_bytes(2, "little"))
    image = find(str(store), str(root))
    assert image is not None and (image["directory"], image["architecture"], image["id"]) == (str(root), "amd64", "")
    assert directory_architecture(str(tmp_path)) == ""


@cases(
    "reference, name",
    ("debian:12", "debian"),
    ("host:5000/lab/mini:2", "host:5000/lab/mini"),
    ("host:5000/mini", "host:5000/mini"),
    ("a/b@sha256:00", "a/b"),
)
def test_reference_without_its_tag(reference: str, name: str) -> None:
    assert repository(reference) == name


def test_missing_program_names_what_installs_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Problem, match="skopeo is not installed; the operator adds `containers:` to the file"):
        image_store.pull(str(store), "debian:12", "debian")


def test_job_is_told_to_end_when_its_reader_is_killed(store: Path, tmp_path: Path) -> None:
    """With the whole session of the reader, as the end of a connection does: srun cancels its job at SIGTERM."""
    started, ended = tmp_path / "started", tmp_path / "ended"
    script = f"trap 'touch {ended}; exit' TERM; touch {started}; while :; do sleep 0.1; done"
    line = [sys.executable, *store_command("receive", str(store), "x", "0", "sh", "-c", script)[1:]]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, start_new_session=True, stdin=pipe, stdout=subprocess.DEVNULL) as reader:
        wait_for(started.exists)
        os.killpg(reader.pid, signal.SIGKILL)
    wait_for(ended.exists)


def test_end_of_the_input_cancels_the_job_that_still_removes_its_files(store: Path, tmp_path: Path) -> None:
    """As when a person is gone with the connection. SIGTERM for srun would kill the job at once."""
    scancel = tmp_path / "bin/scancel"
    scancel.parent.mkdir()
    scancel.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scancel.chmod(0o755)
    script = f"head -c 3 > {tmp_path}/read; until [ -e {tmp_path}/asked ]; do sleep 0.1; done; touch {tmp_path}/removed"
    words = ("receive", str(store), "x", "3", "sh", "-c", script, "--job-name=shoal-image-build-0a")
    line = [sys.executable, *store_command(*words)[1:]]
    variables = {**os.environ, "PATH": f"{scancel.parent}:{os.environ['PATH']}"}
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, env=variables) as reader:
        reader.stdin.write(b"abc")
        reader.stdin.flush()
        wait_for((tmp_path / "read").exists)
        assert not (tmp_path / "asked").exists()
        reader.communicate(timeout=60)
    assert reader.returncode == 3 and (tmp_path / "removed").exists()
    assert (tmp_path / "asked").read_text().splitlines()[0] == "--name=shoal-image-build-0a"
    assert (tmp_path / "read").read_bytes() == b"abc"
    assert [path.name for path in store.iterdir() if path.name.startswith(".new")] == []


STEP = "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-19T01:30:00"


@cases(
    "lines, cause",
    ([f"{STEP} DUE TO TIME LIMIT ***", "shoal: error: n1: killed"], "Slurm ended its job: time limit"),
    ([f"{STEP} DUE TO PREEMPTION ***", "srun: error: n1: task 0: Terminated"], "Slurm ended its job: preemption"),
    ([f"{STEP} ***", "srun: error: n1: task 0: Terminated"], "its job was cancelled"),
    (["srun: Force Terminated job 9"], "its job was cancelled"),
    (["slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some", "x"], "its job used up its memory"),
    (["STEP 1/2: RUN ./x", "Out of memory", "shoal: error: n1: Out of memory", "srun: y"], "n1: Out of memory"),
    (["srun: error: invalid partition specified: x"], "invalid partition specified: x"),
    ([], "srun failed"),
)
def test_end_of_a_job_has_its_cause(lines: list[str], cause: str) -> None:
    assert image_store.job_failure(lines) == cause


def test_layer_has_all_files_of_a_directory_of_somebody_else(tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "etc").mkdir(parents=True)
    (image / "etc/mark").write_text("one")
    (image / "etc/link").symlink_to("/nowhere")
    os.chown(image / "etc", 4242, 4242)
    image_archives.write_layer(str(image), str(tmp_path / "layer"))
    with tarfile.open(tmp_path / "layer") as tar:
        assert sorted(tar.getnames()) == [".", "./etc", "./etc/link", "./etc/mark"]
        assert {(member.uid, member.gid) for member in tar} == {(0, 0)}


def test_files_that_the_user_cannot_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, programs = tmp_path / "image", tmp_path / "bin"
    (image / "etc/keys").mkdir(parents=True)
    (image / "etc/shadow").touch(0o640)
    (image / "etc/keys").chmod(0o700)
    programs.mkdir()
    # root can read everything, so tar runs as another user.
    (programs / "tar").write_text(
        '#!/bin/sh\nexec setpriv --reuid=65534 --regid=65534 --clear-groups /usr/bin/env -u PATH tar "$@"\n'
    )
    (programs / "tar").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    tmp_path.chmod(0o777)
    for path in tmp_path.parents:
        path.chmod(path.stat().st_mode | 0o011)
    with pytest.raises(Problem, match=f"you cannot read etc/keys and 1 more in {image}; `--image {image}` uses"):
        image_archives.write_layer(str(image), str(tmp_path / "layer"))
