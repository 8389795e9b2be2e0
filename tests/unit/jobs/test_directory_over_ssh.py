"""The directory of a job on storage that keeps no locks between nodes, such as a home that is mounted over SSH."""

import os
import subprocess
import sys
from pathlib import Path

ROUNDS, NODES = 10, 4

NODE = """\
import fcntl, os, sys
from shoal.remote.runner import node
fcntl.flock = lambda *_: None  # over SSH a lock holds on its own node only
place, name, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
for number in range(rounds):
    directory = os.path.join(place, str(number))
    print("ready", flush=True)
    sys.stdin.readline()
    node.own_directory(directory, "here")
    open(os.path.join(directory, name + ".log"), "w").close()
    os.path.join(node.working_tree(directory), "train.py")
"""


def test_nodes_that_come_at_once_share_the_directory_and_lose_nothing(tmp_path: Path) -> None:
    code = tmp_path / "code.tar"
    (tmp_path / "train.py").write_text("print('here')\n")
    subprocess.run(["tar", "-c", "-f", code, "-C", tmp_path, "train.py"], check=True)
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    for number in range(0, ROUNDS, 2):  # of an earlier job with this number
        (jobs / str(number)).mkdir()
        (jobs / str(number) / "submission").write_text("earlier")
    env = {**os.environ, "SHOAL_CODE": str(code), "SHOAL_CODE_HASH": ""}
    names = [f"node{number}" for number in range(NODES)]
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", NODE, str(jobs), name, str(ROUNDS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )
        for name in names
    ]  # fmt: skip
    for _ in range(ROUNDS):
        for node in nodes:
            assert node.stdout.readline() == "ready\n"
        for node in nodes:
            node.stdin.write("\n")
            node.stdin.flush()
    for node in nodes:
        node.communicate(timeout=60)
        assert node.returncode == 0

    files = ["submission", "tree", "tree.lock", *(f"{name}.log" for name in names)]
    for number in range(ROUNDS):
        assert sorted(path.name for path in (jobs / str(number)).iterdir()) == sorted(files)
    earlier = {path.name: (path / "submission").read_text() for path in jobs.glob("*.before-*")}
    assert earlier == {f"{number}.before-here": "earlier" for number in range(0, ROUNDS, 2)}
