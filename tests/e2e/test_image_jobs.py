"""Jobs in images: two nodes on Slurm 22.05 over WireGuard, ordinary users who log in to the controller.

The tests run in the order of this file; tests/e2e/test_image_matrix.py has the longer ones.
"""

import random
import re
import shlex
from collections.abc import Iterator

import pytest
from tests.e2e.cluster import WITH_CGROUPS, Cluster
from tests.e2e.image_files import BROKEN, HERE, OTHER, file, hostile_files, layer_of, write_archive
from tests.e2e.image_users import User, lines, shared, user_with_image, write_image
from tests.e2e.standing import Standing
from tests.e2e.torch_env import PYTHONPATH

from shoal.remote.runner.unpacked_image import IMAGES

COVERS = (
    "containers verbs/images verbs/image_build roles/containers roles/images jobs/script remote/runner "
    "remote/image_store.py remote/image_archives.py remote/job_container.py"
)
GROUP = "lagoon"
pytestmark = pytest.mark.sandbox

INTERRUPT = """\
import signal, subprocess, sys, time
program = subprocess.Popen(sys.argv[1:])
while program.poll() is None and not subprocess.run(["squeue", "-h", "--me"], capture_output=True).stdout:
    time.sleep(0.2)
program.send_signal(signal.SIGINT)
sys.exit(program.wait())
"""
"""Runs a command, as a person who presses Ctrl-C when Slurm has a job of it."""


REGISTRY = "/var/lib/docker-registry"
ARCHIVES = ("one", "hostile", "tiny", "other", "cuda", *BROKEN)


@pytest.fixture(scope="module")
def cluster(standing: Standing) -> Iterator[Cluster]:
    made = standing.cluster
    place = shared(made)
    write_image(made, "one")
    write_image(made, "hostile", *hostile_files())
    write_archive(place / "tiny.tar", layer_of([file("mark", random.Random(1).randbytes(1 << 20).hex())]))
    write_archive(place / "other.tar", layer_of([file("mark", "other")]), architecture=OTHER)
    cuda = layer_of([file("mark", "cuda")])
    write_archive(place / "cuda.tar", cuda, env=["NVIDIA_REQUIRE_CUDA=cuda>=99.1"])
    for name, write in BROKEN.items():
        write(place / f"{name}.tar")
    yield made
    for name in ARCHIVES:
        (place / f"{name}.tar").unlink()
    for user in ("ann", "bob"):
        made.on("controller", "sh", "-c", f"rm -rf /home/{user}/work /shared/shoal-jobs/{user}/*")
        for node in ("fish1", "fish2"):
            made.on(node, "rm", "-rf", f"{IMAGES}/{user}")


@pytest.fixture(scope="module")
def ann(cluster: Cluster) -> User:
    return user_with_image(cluster, "ann")


@pytest.fixture(scope="module")
def bob(cluster: Cluster) -> User:
    return User(cluster, "bob")


def test_job_runs_in_an_image_on_two_nodes_as_its_user(ann: User) -> None:
    [pulled] = ann.json("image list")["images"]
    assert (pulled["name"], pulled["architecture"]) == ("mini", HERE) and pulled["digest"].startswith("sha256:")
    seen = lines(ann.run("-N2 --image mini"))
    assert [words[:3] for words in seen] == [["0", "2", "0"], ["1", "2", "0"]]
    assert {tuple(words[4:]) for words in seen} == {("hello", "2001", "one", "0", "tree")}
    assert seen[0][3] == seen[1][3] and seen[0][3].startswith("10.77.")
    stored = ann.cluster.on("fish1", "ls", "/var/lib/shoal/images/ann").split()
    assert stored == sorted(["containers", pulled["id"], f"{pulled['id']}.lock"])
    assert ann.cluster.on("fish1", "stat", "-c", "%U %a", "/var/lib/shoal/images/ann") == "ann 700\n"


def test_mounts_home_and_working_directory(ann: User) -> None:
    ann.do("mkdir -p /shared/shoal-jobs/ann/data && echo there > /shared/shoal-jobs/ann/data/mark")
    options = "--launcher python --image mini --home on --workdir /opt"
    mounted = ann.run(f"{options} --mount /shared/shoal-jobs/ann/data/mark:/mark:ro")
    [words] = lines(mounted)
    assert words[:3] == ["0", "1", "0"] and words[6] == "there" and words[8] == "opt" and int(words[7]) >= 0
    assert "--mount: there is no /nowhere" in ann.run("--image mini --mount /nowhere:/data", status=1)


def test_image_that_cannot_run_is_rejected_before_the_job_starts(ann: User) -> None:
    other = ann.run("--image /shared/other.tar", status=2)
    assert f"is for {OTHER}, and the nodes are {HERE}" in other
    assert "you have no image maxi" in ann.run("--image maxi", status=2)
    newer = ann.run("--gpus-per-node 1 --image /shared/cuda.tar", status=2)
    assert "needs CUDA 99.1, and the drivers of fish[1-2] are for 13.0 or older" in newer
    assert ann.do("squeue -h -u ann") == ""


def test_users_have_images_of_one_name_and_a_hostile_one_is_harmless(bob: User, cluster: Cluster) -> None:
    bob.json("image pull /shared/hostile.tar --name mini")  # ann has another mini
    cluster.on("fish1", "install", "-D", "-m", "4755", "/usr/bin/id", "/var/tmp/setuid/become-root")
    assert cluster.on("fish1", "runuser", "-u", "bob", "--", "/var/tmp/setuid/become-root", "-u") == "0\n"
    shown = lines(bob.run("-w fish1 --image mini --mount /var/tmp/setuid:/opt/setuid", "show.sh"), "shown")
    assert shown == [["2002", "hostile", "2002", "2002", "NoNewPrivs:", "1"]]
    cluster.on("fish1", "rm", "-r", "/var/tmp/setuid")
    assert cluster.on("fish1", "sh", "-c", "ls /etc/shoal-was-here /tmp/shoal-was-here 2> /dev/null; true") == ""
    assert cluster.on("fish1", "sh", "-c", f"find {IMAGES}/bob ! -user bob -o -type b -o -type c") == ""
    bob.json("image pull /shared/tiny.tar --name mini")
    assert len(bob.json("image prune")["removed"]) == 1
    bob.json("image remove mini")
    assert bob.json("image list")["images"] == []


def test_broken_image_is_named_and_leaves_nothing(ann: User, cluster: Cluster) -> None:
    asked = {
        "cut": "cut.tar is damaged: unexpected end of data",
        "changed": "has other content than its digest says",
        "text": "text.tar is no archive of an image",
    }
    for name, message in asked.items():
        assert message in ann.do(f"shoal image pull /shared/{name}.tar --name broken", status=2)
    assert "broken" not in ann.do("shoal image list")
    # Its archive is whole: a node sees what a layer is worth when it unpacks it.
    assert "cannot get image /shared/layer.tar: umoci" in ann.run("-w fish1 --image /shared/layer.tar", status=1)
    assert ".new" not in cluster.on("fish1", "ls", "-A", f"{IMAGES}/ann")


@WITH_CGROUPS
def test_limits_of_the_job_hold_in_an_image(ann: User, cluster: Cluster) -> None:
    seen = ann.run("-w fish1 --gpus-per-node 1 --mem 250M --image mini", "limits.py 100")
    assert re.findall(r"(?:opened|denied) \d", seen) == ["opened 0", "denied 1"]
    assert f"took {100 << 20}" in seen
    seen = ann.run("-w fish1 --gpus-per-node 2 --ntasks-per-node 1 --mem 60M --image mini", "limits.py 150", status=1)
    assert re.findall(r"(?:opened|denied) \d", seen) == ["opened 0", "opened 1"]
    assert "took" not in seen and "the memory was used up" in seen


def test_plain_srun_and_sbatch_run_in_a_bundle_of_an_image(ann: User, cluster: Cluster) -> None:
    place = "/shared/shoal-jobs/ann/plain"
    ann.do(f"mkdir -p {place} && cp work/plain.py {place} && chmod +x {place}/plain.py")
    bundle = ann.do(f"shoal image bundle mini --mount {place}:/code --workdir /code").strip()
    assert ann.do("shoal image bundle mini").strip() != bundle  # it does not replace what jobs in the queue will use
    inside = ["hello", "mini", "2001", "one", "/code"]
    text = ann.do(f"srun -N2 -C images --container={bundle} python3 plain.py")
    assert lines(text, "plain") == [[str(rank), "2", "0", "1", str(rank), *inside] for rank in (0, 1)]
    text = ann.do(f"srun -N2 -n3 -C images {bundle}/run python3 plain.py")  # Slurm 22.05 has one container a node
    ranks = [["0", "3", "0", "2", "0"], ["1", "3", "1", "2", "0"], ["2", "3", "0", "1", "1"]]
    assert lines(text, "plain") == [[*rank, *inside] for rank in ranks]
    assert len({tuple(words) for words in lines(text, "meet")}) == 1
    [address, port, interface] = lines(text, "meet")[0]
    assert address.startswith("10.77.") and 10000 <= int(port) < 30000 and interface == "shoal0"
    ann.do(f"cd {place} && sbatch --wait -N1 -C images --container={bundle} --output=out plain.py")
    output = ann.do(f"cat {place}/out")
    assert lines(output, "plain") == [["0", "1", "0", "1", "0", *inside]] and "RunTimeQuery" not in output
    ended = ann.do(f"srun -w fish1 --container={bundle} sh -c 'exit 7'", status=7)
    assert ended == "srun: error: fish1: task 0: Exited with exit code 7\n"
    terminal = ann.do(
        f"script -qec 'srun --pty -w fish1 --container={bundle} sh -c \"tty; cat /mark; sleep 1\"' /dev/null"
    )
    assert "/dev/pts/" in terminal and "one" in terminal
    ann.do(f"(setsid srun -w fish1 --container={bundle} sleep 600 > /dev/null 2>&1 < /dev/null &)")
    cluster.wait("a job without `-C images` is entered", lambda: "one" in ann.do("shoal exec -- cat /mark || true"))
    ann.do("scancel --me")


def test_running_container_is_entered_saved_warned_and_cancelled(ann: User, cluster: Cluster) -> None:
    job = ann.start("-w fish1 --image mini --container-name live", "wait.py")
    group = cluster.on("fish1", "sh", "-c", "cat /proc/$(pgrep -x -f 'python3 wait.py')/cgroup")
    assert f"/job_{job}/" in group
    assert ann.do(f"shoal exec --job {job} -- sh -c 'cat /mark; id -u; echo saved > /opt/live; pwd'").count("one") == 1
    assert "2001" in ann.do(f"shoal ssh --job {job} fish1 'cat /mark && id -u'")
    assert "No such file" in ann.do(f"shoal exec --outside --job {job} -- cat /mark", status=1)
    saved = ann.json(f"image save tuned live --job {job}")
    assert saved["architecture"] == HERE and saved["digest"].startswith("sha256:")
    ann.do(f"scancel --batch --signal=USR1 {job}")
    cluster.wait("it was warned", lambda: "warned" in ann.do(f"shoal logs {job}"))
    ann.do(f"shoal cancel {job}")
    cluster.wait("nothing is left", lambda: cluster.on("fish1", "pgrep", "-u", "ann", status=None) == "")
    assert "saved hello" in ann.run("-w fish2 --image tuned", "saved.sh")


def test_array_and_preemption_in_an_image(ann: User, torch: str, cluster: Cluster) -> None:
    """The training that is preempted saves a checkpoint with `shoal.train`, and goes on from it."""
    job = ann.start(f"-w fish1 --exclusive --image mini {torch}", "resume.py")
    array = ann.run("-w fish1 -p urgent --array 0-1 --image mini")
    assert len(re.findall(r"job \d+_[01]: completed", array)) == 2
    cluster.wait("it may start", lambda: cluster.starts_soon(job))
    cluster.wait("it resumed", lambda: "resumed True one" in ann.do(f"shoal logs {job}"))


@pytest.fixture(scope="module")
def torch() -> str:
    """torch where Python of the image looks for packages, as an option."""
    return f"--mount {PYTHONPATH}:/usr/lib/python3/dist-packages:ro"


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "spawn"])
def test_ranks_in_images_train_together(ann: User, torch: str, launcher: str) -> None:
    text = ann.run(f"-N2 --launcher {launcher} --image mini {torch}", "gloo.py")
    assert lines(text, "sum") == [["3.0", "one"], ["3.0", "one"]]


def test_registry_that_is_down_or_returns_wrong_data(ann: User, cluster: Cluster) -> None:
    ann.do("shoal image pull /shared/tiny.tar --name tiny")
    assert ann.json("image push tiny")["reference"] == "controller:5001/ann/tiny"
    damage = "dd if=/dev/zero of={} bs=1 count=64 seek=4096 conv=notrunc"
    find = f"find {REGISTRY}/docker/registry/v2/blobs -name data -size +1000k -exec {damage} ';' 2>&1"
    cluster.on("controller", "sh", "-c", find)
    pull = "shoal image pull controller:5001/ann/tiny --name damaged"
    try:
        assert "the registry returned wrong data" in ann.do(pull, status=2)
        cluster.on("controller", "systemctl", "stop", "docker-registry")
        assert "the registry is down or cannot be reached" in ann.do(pull, status=2)
    finally:
        cluster.on("controller", "sh", "-c", f"rm -rf {REGISTRY}/docker; systemctl restart docker-registry")
    assert "damaged" not in ann.do("shoal image list")
    assert "the registry's name is not known" in ann.do("shoal image pull registry.invalid/x", status=2)


def test_full_disk_leaves_no_part_of_the_image(ann: User, cluster: Cluster) -> None:
    mount = ("mount", "-t", "tmpfs", "tmpfs", IMAGES, "-o")
    cluster.on("fish2", *mount, "mode=1777,size=60m")
    try:
        for words, larger in (
            ("MB are free", "size=900m,nr_inodes=500"),
            ("no space left on device", "nr_inodes=50000"),
        ):
            assert words in ann.run("-w fish2 --image mini", status=1)
            left = cluster.on("fish2", "ls", "-A", f"{IMAGES}/ann").split()
            assert [name for name in left if not name.endswith(".lock")] == ["containers"]
            cluster.on("fish2", *mount, f"remount,{larger}")
        assert lines(ann.run("-w fish2 --image mini"))[0][6] == "one"
    finally:
        cluster.on("fish2", "umount", IMAGES)


def test_named_container_keeps_what_jobs_change(ann: User, cluster: Cluster) -> None:
    assert "Read-only file system" in ann.run("--image mini --export NOTE=1", status=1)
    note = "-w fish1 --container-name mine --export NOTE=1"
    assert lines(ann.run(f"--image mini {note}"), "note") == [["x"]]
    assert lines(ann.run(note), "note") == [["xx"]]
    bundle = ann.do("shoal image bundle --container-name mine").strip()
    assert ann.do(f"srun --quiet -w fish1 {bundle}/run cat /opt/note") == "xx"
    kept = {entry["name"]: entry for entry in ann.json("image list")["containers"]}
    assert (kept["mine"]["image"], kept["mine"]["nodes"]) == ("mini", ["fish1"])
    assert "mine" in ann.do("shoal image list")
    cluster.on("controller", "scontrol", "update", "NodeName=fish1", "State=DRAIN", "Reason=test")
    for command in ("save late mine", "remove mine"):  # their jobs wait for the node
        ann.do(f"python3 -c {shlex.quote(INTERRUPT)} shoal image {command} --node fish1", status=130)
        cluster.wait("Slurm has no job of it", lambda: ann.do("squeue -h -u ann") == "")
    cluster.on("controller", "scontrol", "update", "NodeName=fish1", "State=RESUME")
    missing = ann.do("shoal image remove mine --node fish2", status=2)
    assert "cannot remove container mine: fish2: there is no container mine of yours here" in missing
    ann.do("shoal image remove mine --node fish1")
    assert "mine" not in {entry["name"] for entry in ann.json("image list")["containers"]}
    assert "there is no container mine here; give --image once" in ann.run(note, status=1)


def test_images_of_a_user_who_does_not_come_back_go_after_a_month(ann: User, cluster: Cluster) -> None:
    [mini] = [image["id"] for image in ann.json("image list")["images"] if image["name"] == "mini"]
    assert cluster.on("fish1", "systemctl", "is-active", "shoal-images.timer") == "active\n"
    for age, is_left in (("29", True), ("31", False)):
        cluster.on("fish1", "touch", "-d", f"{age} days ago", f"{IMAGES}/ann/{mini}.lock")
        cluster.on("fish1", "systemctl", "start", "shoal-images.service")
        assert (mini in cluster.on("fish1", "ls", f"{IMAGES}/ann").split()) == is_left
