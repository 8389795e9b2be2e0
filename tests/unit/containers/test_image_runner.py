"""A command in an image, in real namespaces on this machine: what it sees, what it cannot change, how it ends."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases

import shoal.remote
from shoal.remote.runner import image_space, unpacked_image
from shoal.remote.runner.image import EXIT_WITH_CAUSE, variables
from shoal.remote.runner.image_space import remove_container
from shoal.remote.runner.unpacked_image import Problem, find_container, own_store, unpacked
from shoal.roles.rented import WATCHDOG

START = Path(shoal.remote.__file__).with_name("start.py")
PROGRAMS = ("sh", "ls", "cat", "id", "touch", "sleep")
SETTINGS: dict[str, Any] = {
    **{"name": "tiny", "directory": "", "container": "", "id": "", "layout": "", "source": "", "proxy": {}},
    **{"home": False, "keep": [], "workdir": "", "script": "train.sh", "binds": [], "mounts": []},
}
HERE = unpacked_image.ARCHITECTURES[os.uname().machine]
OTHER = next(name for name in unpacked_image.ARCHITECTURES.values() if name != HERE)
ALLOWED = subprocess.run(["unshare", "--user", "--mount", "true"], capture_output=True).returncode == 0
pytestmark = pytest.mark.skipif(not ALLOWED, reason="needs user namespaces")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A root file system with a shell, a few programs, and traps: links that lead outside."""
    place = tmp_path / "bundle" / "rootfs"
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program is not None
        libraries = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        files = [program, *(word for word in libraries.split() if word.startswith("/"))]
        for file in files:
            target = place / ("bin" if file == program else os.path.dirname(file)[1:]) / os.path.basename(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    (place / "etc").mkdir()
    (place / "etc/group").write_text("root:x:0:\ntty:x:5:\n")
    (place / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nsshd:x:77:77::/:/bin/sh\n")
    (place / "srv").mkdir()
    (place / "outward").symlink_to("/srv")
    (place / "up").symlink_to("../../../../../..")
    yield place


def run(root: Path, *command: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    environment = {
        **{"PATH": os.environ["PATH"], "HOME": "/home/someone", "SLURMD_NODENAME": "n1", "RANK": "3"},
        **settings.pop("variables", {}),
        "SHOAL_IMAGE": json.dumps({**SETTINGS, "directory": str(root), **settings}),
    }
    line = [sys.executable, "-I", "-S", str(START), "image", "--", *command]
    return subprocess.run(line, capture_output=True, text=True, env=environment, cwd="/tmp", timeout=60)


def test_command_is_the_user_and_ends_with_its_own_status(root: Path) -> None:
    done = run(root, "sh", "-c", "id -u; echo $RANK $HOME; test -z $SHOAL_IMAGE && exit 7")
    assert run(root, "sh", "-c", "exit 4", architecture=HERE).returncode == 4
    assert (done.stdout, done.stderr, done.returncode) == (f"{os.getuid()}\n3 /home/someone\n", "", 7)
    assert run(root, "sh", "-c", "kill -USR1 $$").returncode == -signal.SIGUSR1
    assert run(root, "cat", "/etc/passwd").stdout.count("sshd:x:77") == 1
    assert "tty:" not in run(root, "cat", "/etc/group").stdout  # sshd would give terminals to it


def test_image_is_read_only_and_its_links_lead_inside(root: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "file").write_text("hello")
    mounts = [[str(data), "/data", True], [str(data), "/outward/in", False], [str(data), "/up/also", False]]
    done = run(root, "sh", "-c", "cat /data/file; ls /also; touch /data/x; touch /x; touch /also/y", mounts=mounts)
    assert done.stdout == "hellofile\n" and done.stderr.count("Read-only file system") == 2
    assert sorted(path.name for path in data.iterdir()) == ["file", "y"]
    assert not Path("/srv/in").exists() and not Path("/also").exists()


def test_files_of_the_host_are_not_inside(root: Path, tmp_path: Path) -> None:
    secret = tmp_path.parent / "secret"
    secret.write_text("x")
    for path in ("/root", "/var", "/usr/bin", "/home"):
        assert run(root, "sh", "-c", f"ls {path}").stdout in ("", "someone\n"), path


def test_variables_of_the_job_are_over_those_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ["PATH=/bin", "NCCL_SOCKET_IFNAME=en", "GREETING=hello", "LD_LIBRARY_PATH=/opt/lib", "PYTHONPATH=/opt/py"]
    job = {"NCCL_SOCKET_IFNAME": "shoal0", "LD_LIBRARY_PATH": "/usr/cuda", "PYTHONPATH": "/jobs/lib"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    seen = variables(SETTINGS, {"Env": env}, [])
    assert [seen[name] for name in ("PATH", "NCCL_SOCKET_IFNAME", "GREETING")] == ["/bin", "shoal0", "hello"]
    assert (seen["LD_LIBRARY_PATH"], seen["PYTHONPATH"]) == ("/opt/lib", "/jobs/lib:/opt/py")
    assert variables({**SETTINGS, "keep": ["LD_LIBRARY_PATH"]}, {"Env": env}, [])["LD_LIBRARY_PATH"] == "/usr/cuda"


def test_file_beside_a_directory_says_nothing_of_it(root: Path) -> None:
    """Anybody may write beside a directory on a share."""
    (root.parent / "image.json").write_text(json.dumps({"Env": ["LD_PRELOAD=/tmp/x.so"], "WorkingDir": "/srv"}))
    assert run(root, "sh", "-c", "echo $LD_PRELOAD; pwd").stdout == "\n/tmp\n"


@cases(
    "settings, words",
    ({"mounts": [["/nowhere", "/data", False]]}, "--mount: there is no /nowhere"),
    ({"mounts": [["/etc", "/etc/passwd", False]]}, "/etc/passwd is a file in the image"),
    ({"workdir": "/nowhere"}, "--workdir: image tiny has no directory /nowhere"),
    ({"workdir": "/etc/passwd"}, "--workdir: image tiny has no directory /etc/passwd"),
    ({"home": True}, "--home on: there is no /home/someone"),
    ({"architecture": OTHER}, f"image tiny is for {OTHER}, and this node is {HERE}; use `-C images-{OTHER}`"),
    ({"architecture": "riscv64"}, f"image tiny is for riscv64, and this node is {HERE}; use an image for {HERE}"),
    ({"directory": "/nowhere"}, "there is no directory /nowhere; name one on a share"),
)
def test_failure_names_the_node_and_the_cause(root: Path, settings: dict[str, Any], words: str) -> None:
    done = run(root, "sh", "-c", "echo ran", **settings)
    assert (done.returncode, done.stdout) == (EXIT_WITH_CAUSE, "") and f"shoal: error: n1: {words}" in done.stderr


def test_program_that_the_image_lacks_is_named(root: Path) -> None:
    done = run(root, "python3", "train.py")
    assert done.stderr.endswith(
        "n1: image tiny has no python3; name its own with --python, or add one with `shoal image build`\n"
    )
    assert run(root, "/srv/none").stderr.endswith("n1: image tiny has no /srv/none\n")


@cases(
    "text, mode, words",
    ("#!/bin/bash -e\n", 0o755, "lacks what /s/script starts with: /bin/bash -e"),
    ("#!/bin/sh\n", 0o644, "cannot start /s/script: Permission denied; chmod +x /s/script"),
    ("echo\n", 0o755, "cannot start /s/script: Exec format error; begin a script with a line such as #!/bin/sh"),
)
def test_script_that_the_image_cannot_start_says_why(
    root: Path, tmp_path: Path, text: str, mode: int, words: str
) -> None:
    place = tmp_path / "with space"
    place.mkdir()
    (place / "script").write_text(text)
    (place / "script").chmod(mode)
    done = run(root, "/s/script", mounts=[[str(place), "/s", True]])
    assert (done.stderr, done.returncode) == (f"shoal: error: n1: image tiny {words}\n", EXIT_WITH_CAUSE)


def test_mount_may_lie_over_directories_that_every_image_has(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("/etc", "/run", "/tmp"):
        assert run(root, "ls", place, mounts=[[str(tmp_path), place, True]]).stdout == "bundle\nfile\n"


NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@pytest.fixture
def shared(root: Path) -> Iterator[Path]:
    """The programs and the root where another user can enter: pytest's directories are root's alone."""
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(START.parent, f"{name}/remote")
        shutil.copytree(root, f"{name}/root", symlinks=True)
        subprocess.run(["chmod", "-R", "a+rX", name], check=True)
        yield Path(name)


def run_as_nobody(shared: Path, *command: str, **more: Any) -> subprocess.CompletedProcess[str]:
    settings = {**SETTINGS, "directory": str(shared / "root"), **more}
    line = [*NOBODY, sys.executable, "-I", "-S", str(shared / "remote/start.py"), "image", "--", *command]
    environment = {"PATH": os.environ["PATH"], "HOME": "/home/someone", "SHOAL_IMAGE": json.dumps(settings)}
    return subprocess.run(line, capture_output=True, text=True, env=environment, cwd="/tmp", timeout=60)


@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
def test_mount_that_the_user_cannot_reach_says_so(shared: Path) -> None:
    (shared / "closed").mkdir(mode=0o700)
    (shared / "closed/data").mkdir()
    done = run_as_nobody(shared, "ls", mounts=[[f"{shared}/closed/data", "/data", True]])
    assert f"--mount: {shared}/closed/data: Permission denied" in done.stderr


def test_script_is_found_from_another_working_directory(root: Path) -> None:
    script = Path("/tmp") / f"train-{os.getpid()}.sh"
    script.write_text("#!/bin/sh\ncat ./hosts > /dev/null && echo ok\n")
    script.chmod(0o755)
    try:
        done = run(root, f"./{script.name}", workdir="/etc", script=script.name)
        assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr
    finally:
        script.unlink()


@pytest.fixture
def store(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of an image whose unpacking is a copy of the root: umoci is on the hosts of a cluster only."""

    def run_line(line: list[str], image: str, proxy: dict[str, str] | None = None, growing: str = "") -> None:
        assert growing == line[-1]
        if line[0] == "umoci":
            shutil.copytree(root, Path(line[-1]) / "rootfs", symlinks=True)
            (Path(line[-1]) / "rootfs/closed").mkdir(mode=0o500)
        else:
            subprocess.run(line, check=True)

    layout = tmp_path / "layout"
    (layout / "blobs/sha256").mkdir(parents=True)
    for name, content in {"m": {"config": {"digest": "sha256:c"}}, "c": {"config": {"Env": ["A=b"]}}}.items():
        (layout / "blobs/sha256" / name).write_text(json.dumps(content))
    (layout / "index.json").write_text(json.dumps({"manifests": [{"digest": "sha256:m"}]}))
    monkeypatch.setattr(unpacked_image, "run", run_line)
    (tmp_path / "store/containers").mkdir(parents=True)
    return {**SETTINGS, "id": "ab" * 32, "layout": str(layout), "place": str(tmp_path / "store")}


def test_unpacked_image_is_whole_or_absent(store: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(store["place"])
    half = place / f"{store['id']}.new" / "bundle"
    half.mkdir(parents=True)  # of a run that was killed
    root = Path(unpacked(str(place), store))
    assert root == place / store["id"] / "rootfs" and (root / "bin/sh").exists()
    assert json.loads((root.parent / "image.json").read_text()) == {"Env": ["A=b"]}
    assert not half.exists() and os.stat(root / "closed").st_mode & 0o700 == 0o700

    def fail(line: list[str], image: str, growing: str) -> None:
        Path(line[-1]).mkdir(parents=True)
        raise Problem("no space left on device")

    monkeypatch.setattr(unpacked_image, "run", fail)
    with pytest.raises(Problem, match="no space left"):
        unpacked(str(place), {**store, "id": "cd" * 32})
    assert sorted(path.name for path in place.iterdir() if path.suffix != ".lock") == [store["id"], "containers"]
    assert unpacked(str(place), store) == str(root)  # from the cache


@cases("container", "", "mine")
def test_image_that_is_removed_while_its_lock_changes_is_made_again(
    store: dict[str, Any], monkeypatch: pytest.MonkeyPatch, container: str
) -> None:
    """Linux gives up a lock before it gives another."""
    place, flock = Path(store["place"]), fcntl.flock
    path, removed = place / (f"containers/{container}" if container else store["id"]), []

    def change_lock(lock: int, how: int) -> None:
        if how == fcntl.LOCK_SH and path.exists() and not removed:
            removed.append(path.rename(place / "gone"))
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", change_lock)
    find = find_container if container else unpacked
    assert Path(find(str(place), {**store, "container": container})) == path / "rootfs"
    assert removed and path.exists()


def test_image_that_the_disk_has_no_room_for_is_not_unpacked(store: dict[str, Any]) -> None:
    unpacked(store["place"], store)
    blob = Path(store["layout"]) / "blobs/sha256/large"
    with blob.open("wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(Problem, match=r"image tiny needs about \d+ MB in .*, and \d+ MB are free"):
        unpacked(store["place"], {**store, "id": "cd" * 32})
    assert (Path(store["place"]) / store["id"]).exists()  # removing it would not have been enough


def test_image_used_longest_ago_makes_room_for_another_below_the_limit(
    store: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, limit = Path(store["place"]), tmp_path / "disk"
    monkeypatch.setattr(image_space, "LIMIT_FILE", str(limit))
    with (Path(store["layout"]) / "blobs/sha256/large").open("wb") as file:
        file.truncate(1 << 20)
    names = ["ab" * 32, "cd" * 32, "ef" * 32]
    for age, name in enumerate(names):
        in_another_process(unpacked, str(place), {**store, "id": name})
        os.utime(place / f"{name}.lock", (time.time() - 3600 + age, time.time() - 3600 + age))
    one = image_space.size_of(str(place / names[0]))
    limit.write_text(f"{image_space.size_of(str(place)) + (3 << 20) - one // 2}\n")
    running = unpacked(str(place), {**store, "id": names[0]})  # this process runs in it from now on
    os.utime(place / f"{names[0]}.lock", (0, 0))
    unpacked(str(place), {**store, "id": "01" * 32})
    assert "removed image cdcdcdcdcdcd here, for image tiny" in capsys.readouterr().err
    left = [name for name in names if (place / name).exists()]
    assert left == [names[0], names[2]] and Path(running).exists()
    limit.write_text("2000000\n")
    with pytest.raises(
        Problem, match=r"image tiny needs about 3 MB in .*, and \d MB of your 2 MB are left; ask the op"
    ):
        unpacked(str(place), {**store, "id": "02" * 32})
    assert (place / names[2]).exists()


def in_another_process(function: Callable[..., object], *arguments: object) -> None:
    """A process that runs in an image holds it until the process ends."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function(*arguments)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_container_is_a_copy_of_its_own_under_its_name(store: dict[str, Any]) -> None:
    place = Path(store["place"])
    root = Path(find_container(str(place), {**store, "container": "mine"}))
    (root / "note").write_text("kept")
    assert not (place / store["id"] / "rootfs/note").exists()
    again = find_container(str(place), {**store, "container": "mine", "id": ""})
    assert (Path(again) / "note").read_text() == "kept"
    with pytest.raises(Problem, match="container mine was made of another image"):
        find_container(str(place), {**store, "container": "mine", "id": "ef" * 32})
    with pytest.raises(Problem, match="there is no container other here; give --image once"):
        find_container(str(place), {**store, "container": "other", "id": ""})


@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
def test_program_with_the_setuid_bit_of_root_runs_as_the_user(shared: Path) -> None:
    program = shared / "root/bin/become-root"
    shutil.copy(shared / "root/bin/id", program)
    program.chmod(0o4755)
    outside = subprocess.run([*NOBODY, program, "-u"], capture_output=True, text=True)
    if outside.stdout != "0\n":
        pytest.skip("/tmp gives nobody the rights of a program with the setuid bit")
    done = run_as_nobody(shared, "sh", "-c", "become-root -u; cat /proc/self/status")
    assert done.stdout.startswith("65534\n") and "\nNoNewPrivs:\t1\n" in done.stdout, done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
def test_directory_of_another_user_gets_places_for_mounts(shared: Path) -> None:
    (shared / "root/linked").symlink_to("srv")
    mounts = [["/etc/hostname", f"/{name}/new/file", True] for name in ("etc", "linked/..", "deep/er")]
    script = "id -u; cat /etc/new/file /deep/er/new/file; cat /etc/group; touch /x"
    done = run_as_nobody(shared, "sh", "-c", script, mounts=mounts)
    host = Path("/etc/hostname").read_text()
    assert done.stdout.startswith(f"65534\n{host}{host}") and "root:x:0:" in done.stdout, done.stderr
    assert "Read-only file system" in done.stderr
    assert sorted(path.name for path in (shared / "root/etc").iterdir()) == ["group", "passwd"]


def test_container_on_a_rented_machine_is_not_recorded(
    store: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert unpacked_image.RENTED_MARK == WATCHDOG
    monkeypatch.setenv("SLURMD_NODENAME", "burst1")
    monkeypatch.setattr(unpacked_image, "RENTED_MARK", str(tmp_path))
    find_container(store["place"], {**store, "container": "mine"})
    assert not (Path(store["layout"]).parent / "containers/mine").exists()


def test_container_is_recorded_beside_the_images_until_it_is_removed(
    store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    place = Path(store["place"])
    monkeypatch.setattr(image_space, "own_store", lambda: str(place))
    root = find_container(str(place), {**store, "container": "mine"})
    record = Path(store["layout"]).parent / "containers/mine/n1"
    assert record.read_text() == "tiny"
    lock = unpacked_image.hold(str(place / "containers/mine"), fcntl.LOCK_SH)
    with pytest.raises(Problem, match="a job runs in container mine; cancel it first"):
        remove_container("mine")
    # The process of find_container still holds its own lock: descriptors end with the process.
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").endswith("mine.lock"):
                os.close(int(number))
    assert lock > 0 and remove_container("mine") == 0 and not record.exists() and not Path(root).exists()
    with pytest.raises(Problem, match="there is no container mine of yours here"):
        remove_container("mine")


def test_image_that_no_job_used_for_long_is_removed_and_a_named_container_stays(store: dict[str, Any]) -> None:
    place, other = Path(store["place"]), "cd" * 32
    unpacked(str(place), store)  # this process runs in it from now on
    in_another_process(unpacked, str(place), {**store, "id": other})
    in_another_process(find_container, str(place), {**store, "container": "mine"})
    for lock in (store["id"], other, "containers/mine"):
        os.utime(place / f"{lock}.lock", (0, 0))
    image_space.evict(str(place))
    assert [(place / name).exists() for name in (store["id"], other, "containers/mine")] == [True, False, True]


def test_what_was_killed_before_it_was_whole_goes_with_the_next_image(store: dict[str, Any]) -> None:
    place = Path(store["place"])
    left = ("cd" * 32 + ".new", "containers/mine.new", "save.7", "containers/other.new")
    for name in left:
        (place / name / "rootfs").mkdir(parents=True)
    (place / "save.7.lock").touch()
    with (place / "containers/other.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it is being made
        in_another_process(unpacked, str(place), store)
    assert [name for name in left if (place / name).exists()] == ["containers/other.new"]


@pytest.mark.skipif(os.getuid() != 0, reason="makes files of another user: run it as root")
def test_images_of_all_users_go_after_a_month_and_root_touches_nothing_of_users(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    images, old, young = Path(tempfile.mkdtemp()), "ab" * 32, "cd" * 32
    outside = images / "outside"
    monkeypatch.setattr(image_space, "IMAGES", str(images / "images"))
    try:
        images.chmod(0o755)
        outside.mkdir(mode=0o700)
        for name, owner in {"ann": 12345, "-": 12346, "closed": 12347, "moved": 0}.items():
            for image in (old, young, "containers/mine"):
                (images / "images" / name / image / "rootfs").mkdir(parents=True)
                (images / "images" / name / f"{image}.lock").touch()
            # As root this would remove what is root's.
            (images / "images" / name / old / "record").write_text(f"{outside}/file")
            for path in (images / "images" / name, *(images / "images" / name).rglob("*")):
                os.chown(path, owner, owner)
        (outside / "file").touch()
        for path in (images / "images").glob("*/*.lock"):
            os.utime(path, (0, 0) if path.name.startswith(old) else None)
        (images / "images/moved").chmod(0o777)  # of root's, and anybody may move it here
        (images / "images/link").symlink_to(outside)
        (images / "images/closed").chmod(0)
        assert image_space.evict_all() == 1, "one could not be looked through"
        assert f"not all of {images}/images/closed" in capfd.readouterr().err
        left = {path.name: (path / old).exists() for path in (images / "images").iterdir() if not path.is_symlink()}
        assert left == {"ann": False, "-": False, "closed": True, "moved": True}
        assert all((images / "images" / name / young).exists() for name in left)
        assert (images / "images/ann/containers/mine").exists() and (outside / "file").exists()
    finally:
        shutil.rmtree(images)


def test_image_larger_than_expected_is_held_to_the_limit(
    store: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_space, "LIMIT_FILE", str(tmp_path / "disk"))
    (tmp_path / "disk").write_text("50000\n")
    with pytest.raises(Problem, match=r"image tiny needs about \d+ MB in .*, and \d MB of your 0 MB are left"):
        unpacked(store["place"], store)
    assert not (Path(store["place"]) / store["id"]).exists() and not list(Path(store["place"]).glob("*.new"))


def test_node_says_how_much_of_an_image_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unpacked_image, "PROGRESS_INTERVAL_S", 0.01)
    (tmp_path / "blob").write_bytes(bytes(2_500_000))
    said, ended = "", tmp_path / "ended"
    with ThreadPoolExecutor() as pool:
        line = ["sh", "-c", f"until [ -e {ended} ]; do sleep 0.01; done"]
        running = pool.submit(unpacked_image.run, line, "tiny", None, str(tmp_path))
        while "shoal: 2 MB of image tiny are here\n" not in said:
            said += capsys.readouterr().err
        ended.touch()
        running.result()


def test_image_that_is_not_there_says_whether_it_was_removed(store: dict[str, Any], tmp_path: Path) -> None:
    removed, elsewhere = (str(tmp_path / name) for name in ("gone", "nowhere/images/gone"))
    with pytest.raises(Problem, match=f"image tiny was removed since: there is no {removed} any more; make or pull it"):
        unpacked_image.pull({**store, "layout": removed}, "")
    with pytest.raises(Problem, match="which this node does not have; put the jobs' directory on a share"):
        unpacked_image.pull({**store, "layout": elsewhere}, "")


def test_private_image_says_that_nodes_have_no_logins() -> None:
    line = ["sh", "-c", "echo 'msg=\"reading manifest: unauthorized: authentication required\"'; exit 1"]
    with pytest.raises(Problem, match=r"cannot get image tiny: sh: .*; nodes have none of your logins: pull it where"):
        unpacked_image.run(line, "tiny")


def test_place_of_a_build_is_no_image(store: dict[str, Any]) -> None:
    place = Path(store["place"])
    for name in ("build.7", "build.8"):
        (place / name / "storage").mkdir(parents=True)
        (place / f"{name}.lock").touch()
        os.utime(place / f"{name}.lock", (0, 0))
    with (place / "build.8.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it is being built
        in_another_process(unpacked, str(place), store)
        assert image_space.images_by_use(str(place)).keys() == {str(place / store["id"])}
        assert sorted(path.name for path in place.glob("build.*")) == ["build.8", "build.8.lock"]


@pytest.mark.skipif(os.getuid() != 0, reason="makes files of another user: run it as root")
def test_what_cannot_be_removed_fails_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled build leaves directories of the user's other ids, which the user cannot enter."""
    place = Path(tempfile.mkdtemp())
    monkeypatch.setattr(unpacked_image, "unpack", lambda store, path, settings: os.makedirs(f"{path}/rootfs"))

    def run_job() -> None:
        os.setuid(65534)
        assert os.path.isdir(unpacked(str(place), {**SETTINGS, "id": "ab" * 32}))
        with pytest.raises(Problem, match="needs about"):
            image_space.make_space(str(place), 1 << 62, "image tiny")

    try:
        for name in ("build.7", "cd" * 32):
            (place / name / "inside").mkdir(parents=True)
            (place / f"{name}.lock").touch()
        for path in (place, *place.iterdir()):
            os.chown(path, 65534, 65534)
            os.utime(path, (0, 0))
        for path in place.glob("*/inside"):
            (path / "file").touch()
            path.chmod(0o700)
        in_another_process(run_job)
    finally:
        shutil.rmtree(place)


@pytest.mark.skipif(os.getuid() != 0, reason="makes files of another user: run it as root")
@cases("trap", "directory", "link")
def test_nobody_can_block_a_user_by_making_the_directory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    monkeypatch.setattr(unpacked_image, "IMAGES", str(tmp_path))
    assert own_store() == f"{tmp_path}/root", "the plain name where nobody has it"
    shutil.rmtree(tmp_path / "root")
    if trap == "directory":
        (tmp_path / "root").mkdir()
    else:
        (tmp_path / "root").symlink_to(tmp_path)
    (tmp_path / "root.1").mkdir()
    for path in (tmp_path / "root", tmp_path / "root.1"):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    store = own_store()
    assert store not in (f"{tmp_path}/root", f"{tmp_path}/root.1") and os.stat(store).st_mode & 0o777 == 0o700
    assert own_store() == store, "the next job finds it again"
