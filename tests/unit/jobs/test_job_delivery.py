"""The code of a job in its batch script: each node takes it as the job's user, and only what was sent runs."""

import base64
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.goldens import assert_golden
from tests.support.cases import cases
from tests.unit.jobs.job_clusters import SHIPPED, resolved

from shoal.errors import UsageError
from shoal.jobs.bundle import Bundle, runtime, working_tree
from shoal.jobs.delivery import MARK, MAX_SCRIPT_BYTES, encode_code, receive_lines
from shoal.jobs.model import JobPaths
from shoal.jobs.script import sbatch_script

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can have files of two users")
USER, OTHER = 65534, 65533
CARRIED = replace(SHIPPED, root="/var/lib/shoal/user-jobs/alice", carried=True)


@cases("name, nodes, staged", ("carried", 1, False), ("carried-far", 2, True))
def test_script_matches_its_golden(name: str, nodes: int, staged: bool) -> None:
    text = sbatch_script(resolved(nodes=nodes), replace(CARRIED, staged=staged))
    assert_golden(f"jobs/{name}.sbatch", text)


class Node:
    """A directory of a user's, and the part of a batch script that fills it."""

    def __init__(self, place: Path, tree: Bundle) -> None:
        self.root, self.script, self.tree, self.lib = place / "jobs/nobody", place / "slurm_script", tree, runtime()
        (place / "jobs").mkdir(mode=0o755)
        self.root.mkdir(mode=0o700)
        os.chown(self.root, USER, USER)

    def start(self, code: str = "") -> subprocess.CompletedProcess[str]:
        shipped = JobPaths("reef", str(self.root), self.tree.hash, self.lib.hash, carried=True)
        lines = [*receive_lines(shipped, 1), "echo started", "exit 0", code or encode_code(self.tree, self.lib)]
        self.script.write_text("\n".join(lines))
        self.script.chmod(0o644)
        line = ["bash", str(self.script)]
        env = {"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "gpu1"}
        return subprocess.run(
            line, capture_output=True, text=True, user=USER, group=USER, extra_groups=[], env=env, cwd="/"
        )


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    (tmp_path / "train.py").write_text("print('here')\n")
    with tempfile.TemporaryDirectory() as name:  # not below pytest's, which root alone may enter
        Path(name).chmod(0o755)
        yield Node(Path(name), working_tree(tmp_path, "train.py"))


@as_root
def test_node_takes_the_code_as_the_user_and_again_for_the_next_job(node: Node) -> None:
    for _ in range(2):
        done = node.start()
        assert (done.stdout, done.stderr) == ("started\n", "")
        assert (node.root / f"code/{node.tree.hash}.tar").read_bytes() == node.tree.data
        assert (node.root / f"lib/{node.lib.hash}/programs/start.py").exists()
        assert {path.stat().st_uid for path in node.root.rglob("*")} == {USER}
    assert sorted(path.name for path in (node.root / "lib").iterdir()) == [node.lib.hash]


@as_root
def test_what_was_changed_on_the_node_is_replaced(node: Node) -> None:
    node.start()
    code, program = node.root / f"code/{node.tree.hash}.tar", node.root / f"lib/{node.lib.hash}/programs/start.py"
    right = program.read_bytes()
    code.write_bytes(b"other")
    program.write_text("raise SystemExit('other')\n")
    assert node.start().stdout == "started\n"
    assert (code.read_bytes(), program.read_bytes()) == (node.tree.data, right)


@as_root
@cases("kind", "content", "cut", "owner")
def test_nothing_starts_with_other_code_or_in_a_place_of_somebody_else(node: Node, kind: str) -> None:
    code = encode_code(node.tree, node.lib)
    if kind == "content":
        code = encode_code(replace(node.tree, data=node.tree.data.replace(b"here", b"evil")), node.lib)
    elif kind == "cut":
        packed = base64.b64decode(code.removeprefix(MARK))
        code = f"{MARK}\n{base64.encodebytes(packed[:-2000]).decode()}"
    else:
        os.chown(node.root.parent, OTHER, OTHER)
    done = node.start(code)
    assert done.returncode != 0 and "started" not in done.stdout
    expected = {"content": "code.tar of the job is not what was sent", "cut": "", "owner": f"belongs to user {OTHER}"}
    assert expected[kind] in done.stderr and not list(node.root.glob("code/*"))


def test_tree_that_slurm_would_not_take_is_rejected_before_it_is_queued(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "data").write_bytes(os.urandom(MAX_SCRIPT_BYTES))
    with pytest.raises(UsageError, match=r"the working tree is 5\.\d MiB as Slurm carries it, and it carries 3\.9 MiB"):
        encode_code(working_tree(tmp_path, "train.py"), runtime())
