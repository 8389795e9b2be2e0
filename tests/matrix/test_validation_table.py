"""`shoal validate` by a user on two nodes, quick and in full, with Slurm 22.05 and 24.11. What it prints is kept.

    scripts/test -m matrix tests/matrix/test_validation_table.py -s
    SHOAL_SAVE_TABLE=1 ...      also writes bench/results/validate.txt

All rows run with the real tools. The machine is shared: how fast it is says nothing of the next run, and findings that
something is slow are no failure here. tests/e2e/test_validate.py does the same between sites, over WireGuard.
"""

import os
import time
from collections.abc import Iterator

import pytest
from tests.documents import ROOT
from tests.e2e.cluster import ON_DEBIAN_12, login_keys, running
from tests.e2e.test_lab import joined_clients
from tests.e2e.torch_env import give_torch

COVERS = "validation verbs/validate remote/validation"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, ON_DEBIAN_12]

TABLE = ROOT / "bench/results/validate.txt"
SPEC = """\
cluster: j-table
controller: {provider: sandbox, memory: 1G}
nodesets:
  fish: {provider: sandbox, count: 2, memory: 2G}
accounting: true
mpi: openmpi
storage:
  /data: {kind: nfs}
users:
  alice: {uid: 2001, keys: ["file:KEYS/alice.pub"]}
SLURM
"""
TREE = "slurm: {from: shoal}"
ALL_ROWS = {
    *(("srun", test) for test in ("cpu", "mpirun", "all-reduce gloo", "links", "hpl", "stream")),
    *(("srun", test) for test in ("fio /data", "fio /shared", "fio scratch")),
    *(("torchrun", test) for test in ("cpu", "all-reduce gloo")),
    *(("srun --mpi=pmix", test) for test in ("cpu", "mpi all-reduce", "mpi ping-pong")),
    *(("mpirun", test) for test in ("cpu", "all-reduce gloo", "mpi all-reduce", "mpi ping-pong")),
}


@pytest.fixture(scope="module")
def screens() -> Iterator[list[str]]:
    """What the runs printed; saved if asked for."""
    texts = [
        f"{time.strftime('%Y-%m-%d')}: `shoal validate` by an ordinary user on two sandbox nodes.",
        "Both share the two CPUs of one machine with other work.",
    ]
    yield texts
    if os.environ.get("SHOAL_SAVE_TABLE"):
        TABLE.write_text("\n".join(texts))


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("slurm", ["", TREE], ids=["packages", "tree"])
def test_all_rows_pass_quick_and_in_full(
    tmp_path_factory: pytest.TempPathFactory, screens: list[str], slurm: str
) -> None:
    place = tmp_path_factory.mktemp("table")
    with (
        login_keys("alice") as keys,
        running(place, SPEC.replace("KEYS", str(keys)).replace("SLURM\n", f"{slurm}\n")) as cluster,
    ):
        alice = joined_clients(cluster, keys, "alice")[0]
        export = ("--export", f"PYTHONPATH={give_torch(cluster.name)}")
        version = cluster.on("controller", "sinfo", "-V").split()[1]
        for words in (("--quick", *export), export):
            began = time.monotonic()
            printed = alice.shoal("validate", *words, status=None)
            seconds = time.monotonic() - began
            name = f"shoal validate {words[0]}".removesuffix("--export").strip()
            text = "\n".join(line.rstrip() for line in printed.stdout.splitlines())
            screens.append(f"\n## Slurm {version}: `{name}`, {seconds:.0f} s, status {printed.returncode}\n\n{text}\n")
            print(screens[-1], printed.stderr[-2000:], flush=True)
            result = alice.json("validate", "--since", "1d")["runs"][-1]
            statuses = {(row["launcher"], row["test"]): row["status"] for row in result["rows"]}
            assert {key: status for key, status in statuses.items() if status != "passed"} == {}, result["rows"]
            assert set(statuses) == ALL_ROWS
            assert all("slow" in finding["what"] for finding in result["findings"]), result["findings"]
