"""`slurm: {from: shoal}`: cgroups, training, logins to nodes, MPI, a SPANK plugin and new keys, as a user sees them.

The first tests share one cluster, and run in the order of this file.
"""

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.documents import ROOT
from tests.e2e.cluster import ON_DEBIAN_12, Cluster, running
from tests.e2e.torch_env import give_torch

from shoal.roles.slurm_tree import find_trees
from shoal.sandbox.layout import Layout

COVERS = "roles/slurm_tree roles/auth roles/plugins roles/node_logins remote/node_login.sh scripts/build-slurm"
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(900),
    ON_DEBIAN_12,
    pytest.mark.skipif(not find_trees(), reason="no Slurm in the cache: build it with scripts/build-slurm"),
]

MATRIX = pytest.mark.matrix  # minutes; with packages the same is tested daily
SPEC = """\
cluster: x-treejobs
controller: {provider: sandbox, memory: 1G}
nodesets:
  lab: {provider: sandbox, count: 2, gpus: 2, memory: 2G, cgroups: true}
users:
  ann: {uid: 2001}
slurm: {from: shoal}
"""
SPEC_DEBIAN_13 = """\
cluster: x-treempi
controller: {provider: sandbox, memory: 512M}
nodesets:
  lab: {provider: sandbox, count: 2, memory: 768M, image: debian13}
users:
  ann: {uid: 2001}
slurm: {from: shoal}
"""
HOSTS = ("controller", "lab1", "lab2")
OPEN_BOTH = "for n in 0 1; do : < /dev/nvidia$n && echo open $n; done; true"
TAKE = "import sys; sys.stdout.write(str(len(bytearray(150 << 20))))"
SPANK = Path(__file__).with_name("spank_example.c").read_text()
FILES = "files: {/opt/site/example.so: example.so, /etc/slurm/plugstack.conf: plugstack.conf}\n"
SUM = """\
#include <mpi.h>
#include <stdio.h>
int main(int argc, char **argv) {
    int rank, size, sum, length;
    char name[MPI_MAX_PROCESSOR_NAME];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Get_processor_name(name, &length);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    printf("rank %d of %d on %s, sum %d\\n", rank, size, name, sum);
    return MPI_Finalize();
}
"""
RUNS = 5
PMIX = "-I$(dirname $(find /usr/lib -name pmix.h)) -L$(dirname $(find /usr/lib -name libpmix.so | head -1)) -lpmix"
FENCES = """\
#include <pmix.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
int main(void) {
    pmix_proc_t me;
    pmix_info_t info;
    if (PMIx_Init(&me, NULL, 0)) return 1;
    srand(me.rank + 1);
    for (int i = 0; i < 10; i++) {
        bool collect = i % 2;
        usleep(rand() % 50000);
        PMIX_INFO_LOAD(&info, PMIX_COLLECT_DATA, &collect, PMIX_BOOL);
        double entered = now();
        if (PMIx_Fence(NULL, 0, &info, 1)) return 1;
        printf("fence %d %.6f %.6f\\n", i, entered, now());
    }
    return PMIx_Finalize(NULL, 0);
}
"""
"""Barriers with and without data; hosts of the sandbox have one clock."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("treejobs"), SPEC) as made:
        yield made


def as_ann(cluster: Cluster, line: str, status: int | None = 0) -> str:
    return cluster.on("controller", "runuser", "-u", "ann", "--", "sh", "-c", f"cd /tmp; {line} 2>&1", status=status)


def compile_on(cluster: Cluster, host: str, source: str, command: str) -> None:
    cluster.on(host, "sh", "-c", f'printf %s "$0" > /shared/source.c && {command}', source)


def check_mpi(cluster: Cluster) -> None:
    cluster.install({"lab1": "openmpi-bin libopenmpi-dev libpmix-dev gcc libc6-dev", "lab2": "openmpi-bin"})
    compile_on(cluster, "lab1", SUM, "mpicc -o /shared/sum /shared/source.c")
    for _ in range(RUNS):
        output = as_ann(cluster, "srun -N2 --ntasks-per-node=2 --mem=200M --mpi=pmix /shared/sum")
        ranks = sorted(line for line in output.splitlines() if line.startswith("rank"))
        assert ranks == [f"rank {rank} of 4 on lab{1 + rank // 2}, sum 6" for rank in range(4)], output
    print(cluster.on("lab1", "sh", "-c", "mpirun --version | head -1").strip(), "under srun --mpi=pmix:", *ranks[:1])


def check_fences(cluster: Cluster) -> None:
    compile_on(cluster, "lab1", FENCES, f"gcc -o /shared/fences /shared/source.c {PMIX}")
    output = as_ann(cluster, "srun -N2 --ntasks-per-node=2 --mem=200M --mpi=pmix /shared/fences")
    times = [line.split()[1:] for line in output.splitlines() if line.startswith("fence")]
    assert len(times) == 4 * 10, output
    for number in range(10):
        entered, left = zip(*((float(a), float(b)) for n, a, b in times if int(n) == number), strict=True)
        assert max(entered) <= min(left), f"fence {number}: a rank left it before another entered\n{output}"


def test_job_has_its_memory_and_its_gpu(cluster: Cluster) -> None:
    assert "proctrack/cgroup" in cluster.on("controller", "scontrol", "show", "config")
    output = as_ann(cluster, f"srun --gpus=1 bash -c '{OPEN_BOTH}'")
    assert "open 0" in output and "open 1" not in output and "Operation not permitted" in output, output
    assert as_ann(cluster, f"srun --mem=250M python3 -c '{TAKE}'") == str(150 << 20)
    killed = as_ann(cluster, f"srun --mem=60M python3 -c '{TAKE}'", status=None)
    assert "Out Of Memory" in killed or "oom" in killed.lower(), killed


def test_user_trains_on_two_nodes(cluster: Cluster) -> None:
    packages = give_torch(cluster.name, cluster.env)
    shutil.copytree(ROOT / "examples/toy", Layout(cluster.provider.cache, cluster.name).shared / "toy")
    cluster.on("controller", "sh", "-c", "chown -R ann /shared/toy; install -d -o ann /shared/jobs")
    exports = f"--export PYTHONPATH={packages} --export OMP_NUM_THREADS=1"
    run = f"shoal run --job job.yaml --launcher torchrun {exports} --json"
    job = json.loads(as_ann(cluster, f"cd /shared/toy; {run} train.py --epochs 2"))["id"]
    log = as_ann(cluster, f"shoal logs --follow {job}", status=None)
    assert "JobState=COMPLETED" in cluster.on("controller", "scontrol", "show", "job", str(job)), log
    tracked = as_ann(cluster, f"cat /shared/jobs/{job}/tracking/metrics.jsonl")
    losses = [
        line["metrics"]["loss"] for line in map(json.loads, tracked.splitlines()) if "loss" in line.get("metrics", ())
    ]
    assert len(losses) > 2 and losses[-1] < losses[0], tracked


@MATRIX
def test_processes_in_the_background_end_with_their_job(cluster: Cluster) -> None:
    as_ann(cluster, "srun -w lab1 sh -c 'setsid sleep 31415 >/dev/null 2>&1 &'")
    cluster.wait("it ends", lambda: cluster.on("lab1", "pgrep", "-f", "sleep 31415", status=None) == "")


@MATRIX
def test_login_needs_a_job_and_becomes_part_of_it(cluster: Cluster) -> None:
    login = "ssh -o BatchMode=yes lab1 cat /proc/self/cgroup"
    denied = as_ann(cluster, login, status=255)
    assert "pam_slurm_adopt" in denied, denied
    job = as_ann(cluster, "sbatch --parsable -w lab1 --output=/dev/null --wrap 'sleep 9999'").strip()
    try:
        cluster.wait("it runs", lambda: "RUNNING" in cluster.on("controller", "squeue", "-h", "-o", "%T"))
        assert f"job_{job}/" in as_ann(cluster, login)
        assert as_ann(cluster, "ssh -o BatchMode=yes lab1 sinfo --version").startswith("slurm 24.11")
    finally:
        as_ann(cluster, f"scancel {job}")


@MATRIX
def test_open_mpi_of_debian_12_runs_over_pmix(cluster: Cluster) -> None:
    check_mpi(cluster)


@MATRIX
def test_plugin_that_was_built_with_the_headers_of_the_tree_is_loaded(cluster: Cluster) -> None:
    [tree] = find_trees().values()
    compile_on(cluster, "lab1", SPANK, f"gcc -shared -fPIC -w -I{tree.prefix}/include -o /run/x.so /shared/source.c")
    directory = cluster.file.parent
    (directory / "example.so").write_bytes(base64.b64decode(cluster.on("lab1", "base64", "/run/x.so")))
    (directory / "plugstack.conf").write_text("required /opt/site/example.so site\n")
    cluster.file.write_text(cluster.file.read_text() + FILES)
    assert cluster.json("up")["whole"]
    run = "srun -N2 --container-image=alpine sh -c 'echo $EXAMPLE_IMAGE $EXAMPLE_SCOPE'"
    assert as_ann(cluster, run).splitlines() == ["alpine site"] * 2


@MATRIX
def test_keys_rotate_while_a_job_runs(cluster: Cluster) -> None:
    def digests() -> set[str]:
        return {cluster.on(host, "sha256sum", "/etc/slurm/slurm.jwks").split()[0] for host in HOSTS}

    wait = "while [ ! -e /shared/go ]; do sleep 0.2; done; srun -N2 true"
    job = as_ann(cluster, f"sbatch --parsable -N2 --mem=20M --output=/dev/null --wrap '{wait}'").strip()
    state = ("sh", "-c", f"scontrol show job {job} | grep -o 'JobState=[A-Z]*'")
    cluster.wait("it runs", lambda: "RUNNING" in cluster.on("controller", *state))
    [before] = digests()
    [report] = cluster.json("keys", "rotate", "slurm")["rotated"]
    print(f"keys rotated: Slurm failed for {report['failed_seconds']} s of {report['asked']} questions")
    assert len(digests()) == 1 and before not in digests()
    cluster.on("controller", "touch", "/shared/go")
    cluster.wait("it ends well", lambda: "COMPLETED" in cluster.on("controller", *state))
    for host in HOSTS:
        assert set(cluster.on(host, "srun", "-N2", "--mem=20M", "hostname").split()) == {"lab1", "lab2"}
    assert cluster.json("up")["unchanged"]


@MATRIX
def test_open_mpi_of_debian_13_runs_over_pmix(tmp_path: Path) -> None:
    with running(tmp_path, SPEC_DEBIAN_13) as made:
        check_mpi(made)
        check_fences(made)
