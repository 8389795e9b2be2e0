"""Steps of plain srun in an image, a command that enters a running one, and what a container is saved as."""

import json
import os
import pwd
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.waiting import wait_for
from tests.unit.containers.test_image_runner import ALLOWED, OTHER, SETTINGS, START, root
from tests.unit.containers.test_image_store import ask, store

from shoal.containers.images import JobImage, StoredImage, bundle_name
from shoal.jobs import script
from shoal.remote import python_command
from shoal.remote.runner.bundle import SLURM_SCRIPT
from shoal.remote.runner.variables import expand, meeting_variables, tasks_per_node, vpn_variables

__all__ = ["root", "store"]
needs_namespaces = pytest.mark.skipif(not ALLOWED, reason="needs user namespaces")
STEP = {
    **{
        "PATH": "/usr/bin",
        "HOME": "/home/someone",
        "SLURMD_NODENAME": "n2",
        "SLURM_JOB_ID": "21000",
        "PWD": "/nowhere",
    },
    **{"SLURM_STEP_ID": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"},
    **{"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NODELIST": "localhost"},
}
SHOW = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $NODE_RANK $MASTER_ADDR $MASTER_PORT $SHOAL_CONTAINER; pwd"


def run_bundle(place: Path, root: Path, *command: str, mounts: list[dict[str, Any]] | None = None) -> str:
    """What Slurm runs, after it has put the step's command and variables into the bundle."""
    settings = json.dumps({**SETTINGS, "directory": str(root), "name": "tiny"})
    bundle = Path(json.loads(ask("bundle", str(place), "tiny", settings, str(START)))["path"])
    assert bundle.name == "tiny" and (bundle / "rootfs").is_dir()
    config = json.loads((bundle / "config.json").read_text())
    config["process"].update(args=command, env=[f"{name}={value}" for name, value in STEP.items()])
    (bundle / "config.json").write_text(json.dumps({**config, "mounts": mounts or []}))
    line = [sys.executable, "-I", "-S", str(START), "bundle", str(bundle), "n2.someone.7.3.0", "--"]
    done = subprocess.run(line, capture_output=True, text=True, env={"PATH": "/usr/bin"}, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bundle_of_other_settings_has_another_name() -> None:
    image = JobImage(StoredImage("lab/x", id="ab" * 32, layout="/images/ab"))
    images = (image, replace(image, mounts=("/data:/data",)), replace(image, home=True), replace(image, workdir="/a"))
    names = [bundle_name("lab/x", entry.as_json(())) for entry in (*images, *images[:2])]
    assert len(set(names)) == 4 and names[4:] == names[:2]
    assert all(re.fullmatch("lab_x-[0-9a-f]{8}", name) for name in names)
    assert bundle_name("lab_x", image.as_json(())) not in names
    assert bundle_name("docker.io/library/debian:12", "").startswith("docker.io_library_debian_12-")
    assert bundle_name("/data/" + "x" * 300, "").startswith("xxx") and len(bundle_name("x" * 300, "")) == 89


def test_bundle_is_never_half_written(store: Path) -> None:
    """A job may read `run` while the same bundle is written again."""
    path = Path(json.loads(ask("bundle", str(store), "x", "{}", "/start.py"))["path"])
    with (path / "run").open() as before:
        ask("bundle", str(store), "x", "{}", "/other.py")
        assert before.read().endswith(f' /start.py step {path} -- "$@"\n')
    assert "/other.py" in (path / "run").read_text() and os.access(path / "run", os.X_OK)
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "rootfs", "run"]


def test_bundle_outlives_its_image_for_those_who_wait(store: Path) -> None:
    settings = {**SETTINGS, "layout": str(store / "gone"), "directory": ""}
    there = {**settings, "directory": str(store)}
    named = {**settings, "layout": "", "container": "mine"}
    old, young, used, container = (
        Path(json.loads(ask("bundle", str(store), name, json.dumps(values), "p"))["path"])
        for name, values in (("old", settings), ("young", settings), ("used", there), ("container", named))
    )
    for path in (old, used, container):
        os.utime(path / "config.json", (0, 0))
    ask("prune", str(store))
    assert [path.exists() for path in (old, young, used, container)] == [False, True, True, True]


@needs_namespaces
def test_task_of_plain_srun_has_the_variables_of_torch(store: Path, root: Path) -> None:
    assert run_bundle(store, root, "sh", "-c", SHOW).splitlines()[0] == "2 3 0 1 1 127.0.0.1 20444 tiny"


def meeting_port(monkeypatch: pytest.MonkeyPatch, job: int, step: int | None) -> int:
    for name in ("SLURM_STEP_ID", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", str(job))
    if step is not None:
        monkeypatch.setenv("SLURM_STEP_ID", str(step))
    meeting_variables([], 1)
    return int(os.environ["MASTER_PORT"])


def test_jobs_of_near_ids_and_their_steps_meet_at_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    runs = [(job, step) for job in range(19980, 20010) for step in (None, *range(100))]
    ports = {meeting_port(monkeypatch, *run) for run in runs}
    assert len(ports) == len(runs) and min(ports) >= 10000 and max(ports) < 30000
    assert meeting_port(monkeypatch, 21000, None) == 11000  # as in the batch script of `shoal run`


@needs_namespaces
def test_step_has_its_own_ranks_in_the_environment_of_another(
    store: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that runs srun hands its variables on. Those that the user sets for a step are kept."""
    outer = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "5"}
    outer |= {"MASTER_ADDR": "n9", "MASTER_PORT": "5"}
    for name, value in {**outer, "TORCHELASTIC_RUN_ID": "x", "SHOAL_RANKS_OF": "21000.0"}.items():
        monkeypatch.setitem(STEP, name, value)
    show = f"{SHOW}; echo $SHOAL_RANKS_OF $TORCHELASTIC_RUN_ID"
    own = ["2 3 0 1 1 127.0.0.1 20444 tiny", "21000.3"]
    assert run_bundle(store, root, "sh", "-c", show).splitlines()[::2] == own
    monkeypatch.delitem(STEP, "SHOAL_RANKS_OF")
    assert run_bundle(store, root, "sh", "-c", show).splitlines()[0] == "7 8 3 4 5 n9 5 tiny"


@needs_namespaces
def test_rank_is_known_where_slurm_does_not_tell_it(store: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.delitem(STEP, name)
    monkeypatch.setitem(STEP, "SLURM_STEP_NODELIST", "localhost,n[2-3]")
    monkeypatch.setitem(STEP, "SLURM_STEP_TASKS_PER_NODE", "1(x3)")
    assert run_bundle(store, root, "sh", "-c", SHOW).startswith("1 3 0 1 1 127.0.0.1 ")


@needs_namespaces
def test_rank_is_not_that_of_the_batch_script(store: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
    for name, value in {**script, "SLURMD_NODENAME": "localhost"}.items():
        monkeypatch.setitem(STEP, name, value)
    monkeypatch.setitem(STEP, "SLURM_STEP_NODELIST", "localhost,n[2-3]")
    monkeypatch.setitem(STEP, "SLURM_STEP_TASKS_PER_NODE", "1(x3)")
    output = run_bundle(store, root, "sh", "-c", f"echo $SLURM_PROCID $SLURM_NODEID $SLURMD_NODENAME; {SHOW}")
    assert output.startswith("1 1 n2\n1 3 0 1 1 127.0.0.1 ")


@needs_namespaces
def test_program_of_the_bundle_runs_a_command_in_its_image(store: Path, root: Path) -> None:
    run_bundle(store, root, "sh", "-c", SHOW)
    line = [str(store / "bundles/tiny/run"), "sh", "-c", f"{SHOW}; exit 3"]
    done = subprocess.run(line, capture_output=True, text=True, env=STEP, timeout=60)
    assert (done.stdout.splitlines()[0], done.returncode) == ("2 3 0 1 1 127.0.0.1 20444 tiny", 3), done.stderr
    alone = {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"}
    done = subprocess.run(line, capture_output=True, text=True, env=alone, timeout=60)
    assert done.stdout.startswith("0 1 0 1 0 ")


def test_step_on_a_node_of_another_cpu_type_says_so(store: Path) -> None:
    settings = json.dumps({**SETTINGS, "architecture": OTHER})
    bundle = Path(json.loads(ask("bundle", str(store), "tiny", settings, str(START)))["path"])
    done = subprocess.run([bundle / "run", "true"], capture_output=True, text=True, env=STEP, timeout=60)
    assert f"n2: image tiny is for {OTHER}, and this node is" in done.stderr and done.returncode == 125


@needs_namespaces
def test_batch_script_is_one_rank_and_lies_where_no_other_user_can_write(
    store: Path, root: Path, tmp_path: Path
) -> None:
    file = tmp_path / "slurm_script"
    file.write_text(f"#!/bin/sh\necho $0; {SHOW}\n")
    file.chmod(0o755)
    mounts = [{"source": str(file), "destination": SLURM_SCRIPT, "options": ["bind", "ro"]}]
    lines = run_bundle(store, root, SLURM_SCRIPT, mounts=mounts).splitlines()
    assert lines[0] == "/run/slurm/startup" and lines[1].startswith("0 1 0 1 0 ")
    assert not Path(SLURM_SCRIPT).exists()


@needs_namespaces
def test_bundle_of_another_tool_is_run_by_crun(store: Path, tmp_path: Path) -> None:
    crun = tmp_path / "crun"
    crun.write_text('#!/bin/sh\necho "$@"\n')
    crun.chmod(0o755)
    (tmp_path / "config.json").write_text(json.dumps({"process": {"args": ["true"], "env": []}}))
    own = f"import sys; sys.path.insert(0, {str(START.parent)!r}); from runner import bundle as b, main; "
    own += f"b.own_store = lambda: {str(tmp_path / 'own')!r}; sys.exit(main(sys.argv[1:]))"
    user = pwd.getpwuid(os.getuid()).pw_name
    cases = {
        f"bundle {tmp_path} n1.{user}.7.0.0": f"run --no-new-keyring --bundle {tmp_path}",
        f"crun state {user} n1.{user}.7.0.0": "state",
        f"crun kill {user} n1.{user}.7.0.0": "kill -a",
        f"crun delete {user} n1.{user}.7.0.0": "delete --force",
    }
    for words, expected in cases.items():
        line = [sys.executable, "-I", "-S", "-c", own, *words.split(), "--"]
        variables = {"PATH": f"{tmp_path}:/usr/bin"}
        done = subprocess.run(line, capture_output=True, text=True, env=variables, timeout=60)
        assert done.stdout == f"--rootless=true --root={tmp_path}/own/crun {expected} n1.{user}.7.0.0\n", done.stderr


@cases("text, tasks", ("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2", [1, 2]), ("", [1]))
def test_tasks_of_each_node(text: str, tasks: list[int]) -> None:
    assert tasks_per_node(text) == tasks


@cases(
    "nodes, names",
    ("n1", ["n1"]),
    ("n[1-2]", ["n1", "n2"]),
    ("gpu[007,9-10]-ib,x", ["gpu007-ib", "gpu9-ib", "gpu10-ib", "x"]),
    ("a,b[1-2]", ["a", "b1", "b2"]),
    ("", []),
)
def test_nodes_of_a_hostlist(nodes: str, names: list[str]) -> None:
    assert expand(nodes) == names


def test_plain_steps_have_the_same_settings_over_a_vpn_as_other_jobs() -> None:
    text = "\n".join(script._OVER_A_VPN).replace("$SHOAL_VPN", "shoal0").replace('"', "")
    pairs = [pair for line in text.splitlines() if "export" in line for pair in re.findall(r"(\w+)=(\S+)", line)]
    assert dict(pairs) == vpn_variables("shoal0")


@pytest.fixture
def sleeper(root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of job 7 in an image."""
    settings = json.dumps({**SETTINGS, "directory": str(root), "workdir": "/srv"})
    variables = {"PATH": os.environ["PATH"], "HOME": "/home/someone", "SLURM_JOB_ID": "7", "SHOAL_IMAGE": settings}
    line = [sys.executable, "-I", "-S", str(START), "image", "--", "sh", "-c", "echo ready; sleep 600 & wait"]
    with subprocess.Popen(line, env=variables, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@needs_namespaces
def test_command_enters_the_image_of_its_job_alone(sleeper: subprocess.Popen[bytes], root: Path) -> None:
    (root / "mark").write_text("inside\n")
    line = [
        sys.executable,
        *python_command("job_container")[1:],
        "sh",
        "-c",
        "cat /mark; pwd; echo $SHOAL_CONTAINER $TERM",
    ]
    variables = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "TERM": "vt100"}
    done = subprocess.run(line, capture_output=True, text=True, env=variables, timeout=60)
    assert (done.stdout, done.returncode) == ("inside\n/srv\ntiny vt100\n", 0), done.stderr
    other = subprocess.run(line, capture_output=True, text=True, env={**variables, "SLURM_JOB_ID": "77"}, timeout=60)
    assert "/mark: No such file" in other.stderr


def export_program(place: Path) -> str:
    """Saves the container of this name in place/node."""
    return (
        f"import sys; sys.path.insert(0, {str(START.parent)!r}); from runner import image_export as e; "
        f"e.own_store = lambda: {str(place / 'node')!r}; sys.exit(e.export_container(sys.argv[1]))"
    )


def test_container_is_saved_as_an_image_of_one_layer(store: Path, tmp_path: Path) -> None:
    rootfs = tmp_path / "node/containers/mine/rootfs"
    rootfs.mkdir(parents=True)
    (rootfs / "note").write_text("kept")
    (rootfs.parent / "image.json").write_text(json.dumps({"Env": ["A=b"]}))
    node = (sys.executable, "-I", "-S", "-c", export_program(tmp_path))
    saved = json.loads(ask("receive", str(store), "tuned", "0", *node, "mine"))
    layout = Path(saved["layout"])
    index = json.loads((layout / "index.json").read_text())
    manifest = json.loads((layout / "blobs" / index["manifests"][0]["digest"].replace(":", "/")).read_text())
    [layer] = manifest["layers"]
    names = subprocess.run(
        ["tar", "-tvzf", layout / "blobs" / layer["digest"].replace(":", "/")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert " 0/0 " in names and "./note" in names
    config = json.loads((layout / "blobs" / manifest["config"]["digest"].replace(":", "/")).read_text())
    assert config["config"] == {"Env": ["A=b"]} and config["architecture"] == saved["architecture"] != ""
    noisy = ("sh", "-c", 'echo "slurmstepd: noise" >&2; exec "$0" "$@"', *node, "other")
    cause = ask("receive", str(store), "x", "0", *noisy, status=3)
    assert cause.endswith(": there is no container other of yours here\n") and "noise" not in cause
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["containers"]
    cut = ("sh", "-c", '"$@" | head -c 3000', "sh", *node, "mine")
    assert "not read whole" in ask("receive", str(store), "x", "0", *cut, status=3)
    assert [image["name"] for image in json.loads(ask("list", str(store)))] == ["tuned"]
    assert not [name for name in os.listdir(store) if name.startswith(".new")]


def test_save_that_is_cancelled_leaves_nothing_on_the_node(tmp_path: Path) -> None:
    rootfs = tmp_path / "node/containers/mine/rootfs"
    rootfs.mkdir(parents=True)
    (rootfs / "note").write_bytes(random.Random(1).randbytes(1 << 20))
    line = (sys.executable, "-I", "-S", "-c", export_program(tmp_path), "mine")
    # Nobody reads what it prints, so it does not come to its end.
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as node:
        wait_for(lambda: any((tmp_path / "node").glob("save.*/index.json")))
        node.terminate()
        assert b"saving container mine was cancelled" in node.communicate()[1] and node.returncode == 125
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["containers"]
