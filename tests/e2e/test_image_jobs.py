"""Jobs in images: two nodes on Slurm 22.05 over WireGuard, ordinary users who log in to the controller.

The tests share one cluster and run in the order of this file.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.cluster import ON_DEBIAN_12, Cluster, login_keys, running
from tests.e2e.image_files import (
    BROKEN,
    HERE,
    HOSTILE,
    OTHER,
    debian_layer,
    file,
    layer_of,
    training_root,
    write_archive,
)
from tests.e2e.torch_env import give_torch
from tests.small_wheels import small_wheel

from shoal.containers.registry import MAKE_CERTIFICATE, TRUSTED
from shoal.remote.runner.unpacked_image import IMAGES
from shoal.roles.images import LIMIT

pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]  # hosts install the engine's packages, and unpack images

SPEC = """\
cluster: st-images
network: wireguard
controller: {provider: sandbox, memory: 1G}
nodesets:
  n: {provider: sandbox, count: 2, memory: 2G, cgroups: true}
  g: {provider: sandbox, count: 1, gpus: 2, memory: 1G, cgroups: true}
users:
  ann: {uid: 2001, keys: ["file:KEYS/ann.pub"]}
  bob: {uid: 2002, keys: ["file:KEYS/bob.pub"]}
partitions:
  main: {nodesets: [n], default: true}
  urgent: {nodesets: [n], priority: 10}
  gpu: {nodesets: [g]}
mpi: openmpi
containers: {engine: oci, registry: true}
"""
SCRIPT = """\
import os, pathlib, shoal.contract
home, mark = os.path.expanduser("~"), pathlib.Path("/mark").read_text().strip()
words = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "GREETING")]
print("seen", *words, os.getuid(), mark, len(os.listdir(home)), os.getcwd().rpartition("/")[2], flush=True)
if os.environ.get("NOTE"):
    path = pathlib.Path("/opt/note")
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    print("note", path.read_text())
"""
GLOO = """\
import os, torch, torch.distributed as dist
import shoal.train
run = shoal.train.init()
value = torch.ones(1) * (run.env.rank + 1)
dist.all_reduce(value)
print("sum", value.item(), open("/mark").read().strip(), flush=True)
"""
WAIT = """\
import pathlib, signal, subprocess, sys, time
subprocess.Popen(["setsid", "sleep", "4242"])
signal.signal(signal.SIGUSR1, lambda *_: (print("warned", flush=True), sys.exit(0)))
print("ready", flush=True)
time.sleep(600)
"""
RESUME = """\
import os, pathlib, signal, sys, time, shoal.contract
state = pathlib.Path(os.environ["SHOAL_JOB_DIR"], "state")
if state.exists():
    print("resumed", state.read_text(), open("/mark").read(), os.environ["SLURM_RESTART_COUNT"], flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR1, lambda *_: (state.write_text("saved"), sys.exit(shoal.contract.EXIT_REQUEUE)))
print("ready", flush=True)
time.sleep(600)
"""
UNTIL = """\
import os, pathlib, time
print("ready", flush=True)
while not pathlib.Path(os.environ["SHOAL_JOB_DIR"], "end").exists():
    time.sleep(0.2)
print("ended", pathlib.Path("/mark").read_text(), flush=True)
"""
LIMITS = """\
import sys
for number in (0, 1):
    try:
        open(f"/dev/nvidia{number}").close()
        print("opened", number, flush=True)
    except PermissionError:
        print("denied", number, flush=True)
print("took", len(bytearray(int(sys.argv[1]) << 20)), flush=True)
"""
PLAIN = """\
#!/usr/bin/env python3
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GREETING", "SHOAL_CONTAINER")
print("plain", *(os.environ[name] for name in names), os.getuid(), open("/mark").read(), os.getcwd(), flush=True)
print("meet", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
"""
FILES = {
    "train.py": SCRIPT,
    "gloo.py": GLOO,
    "wait.py": WAIT,
    "resume.py": RESUME,
    "until.py": UNTIL,
    "limits.py": LIMITS,
    "plain.py": PLAIN,
    "show.sh": "#!/bin/sh\nid -u; ls -ld /escape /dev-sda\n",
}
FILES["saved.sh"] = "#!/bin/sh\necho $(cat /opt/live) $GREETING\n"


PROXY = """\
import socket, socketserver, threading
def copy(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)
class Connection(socketserver.BaseRequestHandler):
    def handle(self):
        head = b""
        while b"\\r\\n\\r\\n" not in head:
            head += self.request.recv(1024)
        place = head.split()[1].decode()
        with open("/run/proxy.log", "a") as log:
            log.write(place + "\\n")
        server = socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2])))
        self.request.sendall(b"HTTP/1.1 200 Connected\\r\\n\\r\\n")
        threading.Thread(target=copy, args=(server, self.request), daemon=True).start()
        copy(self.request, server)
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer(("", 3128), Connection).serve_forever()
"""
"""Leads to the port of this host, whatever the name is: what a request is for is in the log."""
PRIVATE_REGISTRY = """\
set -e
mkdir -p /var/tmp/private /var/tmp/private-images && cd /var/tmp/private
sh -c "$1" sh registry.example.org /var/tmp/private
cp ca.crt /usr/local/share/ca-certificates/private.crt && update-ca-certificates > /dev/null 2>&1
echo salmon | htpasswd -iBc htpasswd lab 2> /dev/null
cat > config.yml << END
version: 0.1
storage: {filesystem: {rootdirectory: /var/tmp/private-images}}
http: {addr: ":5443", tls: {certificate: /var/tmp/private/server.crt, key: /var/tmp/private/server.key}}
auth: {htpasswd: {realm: lab, path: /var/tmp/private/htpasswd}}
END
printf %s "$2" > proxy.py
for command in "docker-registry serve config.yml" "python3 proxy.py"; do
    setsid $command > /dev/null 2>&1 < /dev/null &
done
sleep 1
"""


class User:
    """A user who is logged in to the controller."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        write = "".join(f"printf %s {shlex.quote(text)} > {name}; " for name, text in FILES.items())
        self.do(f"mkdir -p work && cd work && {write} chmod +x *.sh")

    def do(self, command: str, status: int = 0) -> str:
        done = self.cluster.ssh("controller", shlex.join(("runuser", "-l", self.name, "-c", command)))
        assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def run(self, options: str, script: str = "train.py", status: int = 0) -> str:
        return self.do(f"cd work && shoal run --wait {options} {script}", status)

    def start(self, options: str, script: str) -> str:
        """The number of a job that prints that it is ready."""
        job: str = json.loads(self.do(f"cd work && shoal run --json {options} {script}"))["id"]
        self.cluster.wait("it is ready", lambda: "ready" in self.do(f"shoal logs {job}"))
        return job

    def json(self, command: str) -> Any:
        return json.loads(self.do(f"shoal {command} --json"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with login_keys("ann", "bob") as keys:
        text = SPEC.replace("KEYS", str(keys))
        with running(tmp_path_factory.mktemp("images"), text) as made:
            shared = made.provider.cache / "sandbox" / made.name / "shared"
            debian, env = debian_layer(), ["GREETING=hello"]
            for mark in ("one", "two"):
                write_archive(shared / f"{mark}.tar", debian, layer_of([file("mark", mark)]), env=env)
            write_archive(shared / "hostile.tar", debian, layer_of([file("mark", "hostile"), *HOSTILE]), env=env)
            write_archive(shared / "other.tar", layer_of([file("mark", "other")]), architecture=OTHER)
            for name, write in BROKEN.items():
                write(shared / f"{name}.tar")
            yield made


@pytest.fixture(scope="module")
def ann(cluster: Cluster) -> User:
    user = User(cluster, "ann")
    user.do("shoal image pull /shared/one.tar --name mini")
    return user


def lines(text: str, word: str = "seen") -> list[list[str]]:
    """What ranks printed behind a word, by rank."""
    return sorted(match.split() for match in re.findall(rf"\b{word} (.*)", text))


def test_job_runs_in_an_image_on_two_nodes_as_its_user(ann: User) -> None:
    [pulled] = ann.json("image list")["images"]
    assert (pulled["name"], pulled["architecture"]) == ("mini", HERE) and pulled["digest"].startswith("sha256:")
    seen = lines(ann.run("-N2 --image mini"))
    assert [words[:3] for words in seen] == [["0", "2", "0"], ["1", "2", "0"]]
    assert {tuple(words[4:]) for words in seen} == {("hello", "2001", "one", "0", "tree")}
    assert seen[0][3] == seen[1][3] and seen[0][3].startswith("10.77.")
    stored = ann.cluster.on("n1", "ls", "/var/lib/shoal/images/ann").split()
    assert stored == sorted(["containers", pulled["id"], f"{pulled['id']}.lock"])
    assert ann.cluster.on("n1", "stat", "-c", "%U %a", "/var/lib/shoal/images/ann") == "ann 700\n"


def test_mounts_home_and_working_directory(ann: User) -> None:
    ann.do("mkdir -p /shared/shoal-jobs/ann/data && echo there > /shared/shoal-jobs/ann/data/mark")
    mounted = ann.run("--image mini --mount /shared/shoal-jobs/ann/data/mark:/mark:ro --home on --workdir /opt")
    [words] = lines(mounted)
    assert words[6] == "there" and words[8] == "opt" and int(words[7]) >= 0
    assert "--mount: there is no /nowhere" in ann.run("--image mini --mount /nowhere:/data", status=1)


def test_named_container_keeps_what_jobs_change(ann: User) -> None:
    for number, image in enumerate(("--image mini", "", "--image mini"), 1):
        text = ann.run(f"-w n1 {image} --container-name mine --export NOTE=1")
        assert lines(text, "note") == [["x" * number]]
    assert "Read-only file system" in ann.run("--image mini --export NOTE=1", status=1)
    [kept] = ann.json("image list")["containers"]
    assert (kept["name"], kept["image"], kept["nodes"]) == ("mine", "mini", ["n1"])
    assert "mine" in ann.do("shoal image list")
    missing = ann.do("shoal image remove mine --node n2", status=2)
    assert "cannot remove container mine: n2: there is no container mine of yours here" in missing
    ann.do("shoal image remove mine --node n1")
    assert ann.json("image list")["containers"] == []
    assert "there is no container mine here; give --image once" in ann.run("-w n1 --container-name mine", status=1)


def test_image_that_cannot_run_is_rejected_before_the_job_starts(ann: User) -> None:
    other = ann.run("--image /shared/other.tar", status=2)
    assert f"is for {OTHER}, and the nodes are {HERE}" in other
    assert "you have no image maxi" in ann.run("--image maxi", status=2)
    assert ann.do("squeue -h -u ann") == ""


def test_hostile_image_is_harmless(ann: User) -> None:
    shown = ann.run("-w n1 --image /shared/hostile.tar", "show.sh")
    assert "2001" in shown
    assert lines(ann.run("-w n1 --image /shared/hostile.tar"))[0][6] == "hostile"
    left = "ls /etc/shoal-was-here /tmp/shoal-was-here 2> /dev/null; true"
    assert ann.cluster.on("n1", "sh", "-c", left) == ""
    find = "find /var/lib/shoal/images/ann ! -user ann -o -type b -o -type c"
    assert ann.cluster.on("n1", "sh", "-c", find) == ""


def test_broken_image_is_named_and_leaves_nothing(ann: User, cluster: Cluster) -> None:
    asked = {
        "cut": "cut.tar is no archive of an image",
        "changed": "has other content than its digest says",
        "text": "text.tar is no archive of an image",
    }
    for name, message in asked.items():
        assert message in ann.do(f"shoal image pull /shared/{name}.tar --name broken", status=2)
    assert "broken" not in ann.do("shoal image list")
    # Its archive is whole: a node sees what a layer is worth when it unpacks it.
    assert "cannot get image /shared/layer.tar: umoci" in ann.run("-w n1 --image /shared/layer.tar", status=1)
    assert ".new" not in cluster.on("n1", "ls", "-A", f"{IMAGES}/ann")


@ON_DEBIAN_12
def test_limits_of_the_job_hold_in_an_image(ann: User, cluster: Cluster) -> None:
    seen = ann.run("-p gpu --gpus-per-node 1 --mem 250M --image mini", "limits.py 100")
    assert re.findall(r"(?:opened|denied) \d", seen) == ["opened 0", "denied 1"]
    assert f"took {100 << 20}" in seen
    seen = ann.run("-p gpu --gpus-per-node 2 --ntasks-per-node 1 --mem 60M --image mini", "limits.py 150", status=1)
    assert re.findall(r"(?:opened|denied) \d", seen) == ["opened 0", "opened 1"]
    assert "took" not in seen and "the memory was used up" in seen


def test_two_users_have_different_images_of_one_name(ann: User, cluster: Cluster) -> None:
    bob = User(cluster, "bob")
    bob.json("image pull /shared/two.tar --name mini")
    assert lines(bob.run("-w n1 --image mini"))[0][6] == "two"
    assert lines(ann.run("-w n1 --image mini"))[0][6] == "one"
    bob.json("image pull /shared/one.tar --name mini")
    assert len(bob.json("image prune")["removed"]) == 1
    bob.json("image remove mini")
    assert bob.json("image list")["images"] == []


def test_warning_reaches_the_script_and_cancel_leaves_nothing(ann: User, cluster: Cluster) -> None:
    job = ann.start("--image mini -w n1", "wait.py")
    group = cluster.on("n1", "sh", "-c", "cat /proc/$(pgrep -x -f 'python3 wait.py')/cgroup")
    assert f"/job_{job}/" in group
    ann.do(f"scancel --batch --signal=USR1 {job}")
    cluster.wait("it was warned", lambda: "warned" in ann.do(f"shoal logs {job}"))
    job = ann.start("--image mini -w n1", "wait.py")
    ann.do(f"shoal cancel {job}")
    cluster.wait("nothing is left", lambda: cluster.on("n1", "pgrep", "-u", "ann", status=None) == "")


def test_plain_srun_and_sbatch_run_in_a_bundle_of_an_image(ann: User) -> None:
    place = "/shared/shoal-jobs/ann/plain"
    ann.do(f"mkdir -p {place} && cp work/plain.py {place} && chmod +x {place}/plain.py")
    bundle = ann.do(f"shoal image bundle mini --mount {place}:/code --workdir /code").strip()
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
    ended = ann.do(f"srun -w n1 --container={bundle} sh -c 'exit 7'", status=7)
    assert ended == "srun: error: n1: task 0: Exited with exit code 7\n"
    terminal = ann.do(
        f"script -qec 'srun --pty -w n1 --container={bundle} sh -c \"tty; cat /mark; sleep 1\"' /dev/null"
    )
    assert "/dev/pts/" in terminal and "one" in terminal


def test_running_container_is_entered_and_saved_by_its_user(ann: User, cluster: Cluster) -> None:
    job = ann.start("-w n1 --image mini --container-name live", "wait.py")
    assert ann.do(f"shoal exec --job {job} -- sh -c 'cat /mark; id -u; echo saved > /opt/live; pwd'").count("one") == 1
    assert "2001" in ann.do(f"shoal ssh --job {job} n1 'cat /mark && id -u'")
    assert "No such file" in ann.do(f"shoal exec --outside --job {job} -- cat /mark", status=1)
    saved = ann.json(f"image save tuned live --job {job}")
    assert saved["architecture"] == HERE and saved["digest"].startswith("sha256:")
    ann.do(f"shoal cancel {job}")
    assert "saved hello" in ann.run("-w n2 --image tuned", "saved.sh")
    assert "there is no container nothing of yours here" in ann.do("shoal image save x nothing --node n1", status=2)
    assert "each node has containers of its own" in ann.do("shoal image save x live", status=2)
    assert ann.json("image save again live --node n1")["bytes"] > 0
    cluster.wait("nothing is left", lambda: cluster.on("n1", "pgrep", "-u", "ann", status=None) == "")


def test_image_is_built_in_a_job_from_a_containerfile(ann: User, cluster: Cluster) -> None:
    ann.do("mkdir -p context/sub && echo below > context/sub/file")
    steps = "COPY sub /opt/sub\nRUN id -u > /opt/builder && chown 5:5 /opt/builder\nENV GREETING=built\n"
    ann.do(f"printf %s {shlex.quote('FROM mini' + chr(10) + steps)} > context/Containerfile")
    made = ann.json("image build made context")
    assert made["architecture"] == HERE and made["digest"].startswith("sha256:")
    [words] = lines(ann.run("-w n1 --image made"))
    assert words[4:7] == ["built", "2001", "one"]
    bundle = ann.do("shoal image bundle made").strip()
    assert ann.do(f"srun -w n1 {bundle}/run cat /opt/sub/file /opt/builder").split() == ["below", "0"]
    for text, message in {
        "FROM mini\nRUN echo because >&2; exit 7\n": "because",
        "FROM nothing\n": "you have no image nothing to build from; yours are: ",
        "FROM mini\nCOPY absent /\n": "absent",
    }.items():
        ann.do(f"printf %s {shlex.quote(text)} > context/Containerfile")
        assert message in ann.do("shoal image build broken context", status=2)
    for node in ("n1", "n2"):
        assert "build" not in cluster.on(node, "ls", f"{IMAGES}/ann")
    assert "broken" not in ann.do("shoal image list")


def test_image_is_built_of_a_list_of_packages(ann: User, cluster: Cluster) -> None:
    index = cluster.provider.cache / "sandbox" / cluster.name / "shared" / "index"
    small_wheel(index, "herring", "1.0", needs="sprat")
    small_wheel(index, "sprat", "1.0")
    serve = "cd /shared/index && (setsid python3 -m http.server 8099 > /dev/null 2>&1 &)"
    cluster.on("controller", "sh", "-c", serve)
    source = "--no-index\n--trusted-host controller\n--find-links http://controller:8099/\nherring\n"
    ann.do(f"printf %s {shlex.quote(source)} > requirements.txt")
    assert "an image needs a base" in ann.do("shoal image build fish requirements.txt", status=2)
    ann.do("shoal image build fish requirements.txt --from mini")
    bundle = ann.do("shoal image bundle fish").strip()
    assert "herring" in ann.do(f"srun -w n1 {bundle}/run python3 -c 'import herring; print(herring.__name__)'")


def test_registry_of_the_cluster_takes_and_gives_images(ann: User, cluster: Cluster) -> None:
    pushed = ann.json("image push mini")
    assert pushed["reference"] == "controller:5000/ann/mini" and pushed["digest"].startswith("sha256:")
    bob = User(cluster, "bob")
    pulled = bob.json("image pull controller:5000/ann/mini:latest --name back")
    assert pulled["digest"] == pushed["digest"]
    assert lines(bob.run("-w n2 --image back"))[0][6] == "one"
    place = "/etc/shoal/registry/logins"
    assert cluster.on("n1", "stat", "-c", "%U %a", f"{place}/ann") == "ann 400\n"
    assert "Permission denied" in bob.do(f"cat {place}/ann", status=1)
    assert bob.do("stat -c '%U %a' /shared/shoal-jobs/bob/images/auth.json") == "bob 600\n"
    fetch = "import ssl, urllib.request as r; r.urlopen('https://controller:5000/v2/')"
    assert "401" in cluster.on("n1", "sh", "-c", f"python3 -c {shlex.quote(fetch)} 2>&1", status=1)
    login = "image login controller:5000 --user bob --password"
    assert "the registry rejects this name or password" in bob.do(f"WRONG=no shoal {login} env:WRONG", status=2)
    assert "--password is not" in bob.do(f"shoal {login} secret", status=2)
    unknown = bob.do("shoal image pull controller:5000/ann/maxi", status=2)
    assert "controller:5000/ann/maxi: the registry has no such image or tag" in unknown


def test_private_registry_behind_the_proxy_of_the_cluster(ann: User, cluster: Cluster) -> None:
    """Its name is known to the proxy alone, and every request to it needs a login."""
    cluster.on("controller", "sh", "-c", PRIVATE_REGISTRY, "sh", MAKE_CERTIFICATE, PROXY)
    line = "proxy: {https: 'http://controller:3128', no_proxy: [controller]}\n"
    cluster.file.write_text(cluster.file.read_text() + line)
    try:
        cluster.json("up")
        image, password = "registry.example.org:5443/lab/mini", "file:/shared/shoal-jobs/ann/password"
        assert "log in with `shoal image login" in ann.do(f"shoal image push mini {image}", status=2)
        ann.do("umask 077 && echo salmon > /shared/shoal-jobs/ann/password")
        login = f"shoal image login registry.example.org:5443 --user lab --password {password}"
        ann.do(login)
        pushed = ann.json(f"image push mini {image}")
        pulled = ann.json(f"image pull {image} --name private")
        assert pulled["digest"] == pushed["digest"]
        assert lines(ann.run("-w n1 --image private"))[0][6] == "one"
        assert "registry.example.org:5443" in cluster.on("controller", "cat", "/run/proxy.log").split()
        ann.do("shoal image logout registry.example.org:5443")
        assert "log in with" in ann.do(f"shoal image pull {image} --name private", status=2)
        assert "salmon" not in ann.do("cat /shared/shoal-jobs/ann/images/auth.json")
    finally:
        cluster.edit(line, "")
        cluster.json("up")
    assert "the registry's name is not known" in ann.do(f"shoal image pull {image}", status=2)


def test_registry_that_is_down_or_returns_wrong_data(ann: User, cluster: Cluster) -> None:
    storage = "/var/lib/docker-registry/docker/registry/v2/blobs"
    damage = (
        f"find {storage} -name data -size +1000k -exec dd if=/dev/zero of={{}} bs=1 count=64 seek=4096 conv=notrunc ';'"
    )
    cluster.on("controller", "sh", "-c", f"{damage} 2>&1")
    pull = "shoal image pull controller:5000/ann/mini --name damaged"
    assert "the registry returned wrong data" in ann.do(pull, status=2)
    cluster.on("controller", "systemctl", "stop", "docker-registry")
    assert "the registry is down or cannot be reached" in ann.do(pull, status=2)
    assert "damaged" not in ann.do("shoal image list")
    assert "the registry's name is not known" in ann.do("shoal image pull registry.invalid/x", status=2)


def test_bundle_of_another_tool_runs_with_crun(ann: User, cluster: Cluster) -> None:
    place = "/shared/shoal-jobs/ann/plain-bundle"
    copy = "ldd $p | grep -o '/[^ ]*' | while read f; do mkdir -p rootfs$(dirname $f); cp -L $f rootfs$f; done"
    make = f"mkdir -p {place}/rootfs/bin {place}/rootfs/proc {place}/rootfs/dev {place}/rootfs/sys && cd {place}"
    ann.do(f"{make} && for p in /bin/sh /bin/sleep; do cp -L $p rootfs/bin; {copy}; done")
    ann.do(
        f'cd {place} && srun -w n1 crun spec --rootless && sed -i \'s/"terminal": true/"terminal": false/\' config.json'
    )
    cluster.on("n1", "sh", "-c", "mkdir -p -m 700 /tmp/oci-ann && chown bob /tmp/oci-ann")  # another user's
    assert "0" in ann.do(f"srun -w n1 --container={place} /bin/sh -c 'echo $((1 - 1)); exit 0'")
    assert cluster.on("n1", "stat", "-c", "%U %a", f"{IMAGES}/ann/crun") == "ann 700\n"
    ann.do(f"cd {place} && srun -w n1 --container={place} /bin/sleep 4711 > /dev/null 2>&1 & sleep 3; scancel --me")
    cluster.wait("nothing is left", lambda: cluster.on("n1", "pgrep", "-f", "sleep 4711", status=None) == "")


def test_sshd_runs_in_an_image_as_the_user(ann: User, cluster: Cluster) -> None:
    place = "/shared/shoal-jobs/ann/ssh"
    ann.do(f"mkdir -m 700 {place} && cd {place} && for n in host key; do ssh-keygen -q -t ed25519 -N '' -f $n; done")
    mounts = f"--mount {place}:{place} --mount /usr/sbin:/usr/sbin:ro --mount /usr/lib:/usr/lib:ro"  # the node's sshd
    bundle = ann.do(f"shoal image bundle mini --name sshd {mounts}").strip()
    options = f"-o UsePAM=no -o StrictModes=no -o PidFile=none -o AuthorizedKeysFile={place}/key.pub"
    server = f"/usr/sbin/sshd -f /dev/null -D -e -p 2222 -h {place}/host {options}"
    ann.do(f"cd {place} && (setsid srun -w n1 {bundle}/run {server} > log 2>&1 < /dev/null &)")
    cluster.wait("sshd listens", lambda: "listening" in ann.do(f"cat {place}/log"))
    login = f"ssh -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -q -i {place}/key -p 2222"
    assert ann.do(f"{login} n1 'cat /mark && id -u'").split() == ["one2001"]
    assert "/dev/pts/" in ann.do(f"{login} -tt n1 tty")
    ann.do("scancel --me --name run")
    cluster.wait("sshd has ended", lambda: cluster.on("n1", "pgrep", "-u", "ann", "sshd", status=None) == "")


def test_array_and_preemption_in_an_image(ann: User, cluster: Cluster) -> None:
    job = ann.start("-w n1 --exclusive --image mini", "resume.py")
    array = ann.run("-w n1 -p urgent --array 0-1 --image mini")
    assert len(re.findall(r"job \d+_[01]: completed", array)) == 2
    cluster.wait("it resumed", lambda: "resumed saved one 1" in ann.do(f"shoal logs {job}"))


@pytest.fixture(scope="module")
def train_image(cluster: Cluster) -> str:
    """An image with torch and Open MPI: a directory that the nodes see."""
    give_torch(cluster.name, cluster.env)
    training_root(cluster.provider.cache / "sandbox" / cluster.name / "shared")
    return "/shared/train"


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "spawn"])
def test_ranks_in_images_train_together(ann: User, train_image: str, launcher: str) -> None:
    text = ann.run(f"-N2 --launcher {launcher} --image {train_image}", "gloo.py")
    assert lines(text, "sum") == [["3.0", "train"], ["3.0", "train"]]


def test_validation_has_rows_in_an_image(ann: User, train_image: str) -> None:
    """A gloo and an MPI all-reduce inside."""
    print(ann.do(f"shoal validate --quick --launcher srun,mpirun --image {train_image} || true"))
    rows = ann.json("validate --since 1d")["runs"][-1]["rows"]
    inside = {(row["launcher"], row["test"]): row["status"] for row in rows if "image" in row["launcher"]}
    wanted = {("srun, image", test) for test in ("cpu", "all-reduce gloo")}
    wanted |= {("srun --mpi=pmix, image", test) for test in ("cpu", "mpi all-reduce", "mpi ping-pong")}
    assert inside == dict.fromkeys(wanted, "passed")


def test_named_container_survives_a_reboot_of_its_node(ann: User, cluster: Cluster) -> None:
    note = "-w n1 --container-name kept --export NOTE=1"
    assert lines(ann.run(f"--image mini {note}"), "note") == [["x"]]
    cluster.fault("reboot", "n1")
    cluster.wait("n1 is back", lambda: "IDLE" in cluster.states()["n1"] and cluster.answers("n1"))
    assert lines(ann.run(note), "note") == [["xx"]]


@pytest.mark.parametrize(
    ("limit", "words"), [("size=60m", "MB are free"), ("nr_inodes=500", "no space left on device")]
)
def test_full_disk_leaves_no_part_of_the_image(ann: User, cluster: Cluster, limit: str, words: str) -> None:
    cluster.on("n2", "mount", "-t", "tmpfs", "-o", f"mode=1777,{limit}", "tmpfs", IMAGES)
    try:
        assert words in ann.run("-w n2 --image mini", status=1)
        left = cluster.on("n2", "ls", "-A", f"{IMAGES}/ann").split()
        assert [name for name in left if not name.endswith(".lock")] == ["containers"]
    finally:
        cluster.on("n2", "umount", IMAGES)
    assert lines(ann.run("-w n2 --image mini"))[0][6] == "one"


def test_host_without_user_namespaces_gets_no_such_jobs(ann: User, cluster: Cluster) -> None:
    # The kernel's own setting is that of this whole machine.
    cluster.on("n2", "sh", "-c", f"echo 0 > /run/zero && mount --bind /run/zero {LIMIT}")
    try:
        [finding] = [found for found in cluster.json("check", status=None)["findings"] if "images" in found["what"]]
        assert finding["host"] == "n2"
        cluster.json("up")
        assert "images" not in cluster.on("controller", "scontrol", "show", "node", "n2")
        assert "has the features" in ann.run("-w n2 --image mini", status=2)
    finally:
        cluster.on("n2", "umount", LIMIT)


def test_removed_section_removes_everything_but_what_a_job_runs_in(ann: User, cluster: Cluster) -> None:
    job = ann.start("-w n1 --image mini", "until.py")
    cluster.edit("containers: {engine: oci, registry: true}\n", "")
    cluster.json("up")
    for host in ("n1", "n2", "controller"):
        places = ("/etc/slurm/oci.conf", "/etc/shoal/registry", TRUSTED, *([IMAGES] if host != "n1" else []))
        assert cluster.on(host, "ls", *places, status=None) == ""
    assert "no node of the cluster runs jobs in images" in ann.run("--image mini", status=2)
    assert cluster.on("n1", "ls", f"{IMAGES}/ann") != ""
    ann.do(f"touch $(find /shared/shoal-jobs/ann -maxdepth 2 -name {job})/end")
    cluster.wait("it ended", lambda: "COMPLETED" in ann.do(f"scontrol show job {job}"))
    assert "ended one" in ann.do(f"shoal logs {job}")
    cluster.json("up")
    assert cluster.on("n1", "ls", IMAGES, status=None) == ""
    assert cluster.json("up")["changed"] == []
