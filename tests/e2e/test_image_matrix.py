"""Jobs in images, what takes longer: builds, registries, other tools' bundles, validation, removal; on two nodes.

The tests share one cluster and run in the order of this file; tests/e2e/test_image_jobs.py has the daily ones.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator

import pytest
from tests.documents import ROOT
from tests.e2e.cluster import Cluster
from tests.e2e.image_files import HERE, debian_layer, training_root, write_archive
from tests.e2e.image_users import User, image_cluster, lines, shared, user_with_image, write_image
from tests.e2e.torch_env import give_torch
from tests.small_wheels import small_wheel

from shoal.containers.registry import MAKE_CERTIFICATE, TRUSTED
from shoal.remote.runner.unpacked_image import IMAGES, LIMIT_FILE
from shoal.roles.images import LIMIT

COVERS = (
    "containers verbs/images verbs/image_build roles/containers roles/images roles/image_registry remote/runner "
    "remote/image_store.py remote/image_bundles.py remote/image_registry.py"
)
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, pytest.mark.timeout(1200)]

SPEC = """\
cluster: st-image-matrix
network: wireguard
controller: {provider: sandbox, memory: 1G}
nodesets:
  n: {provider: sandbox, count: 2, memory: 2G, cgroups: true}
users:
  ann: {uid: 2001, keys: ["file:KEYS/ann.pub"]}
  bob: {uid: 2002, keys: ["file:KEYS/bob.pub"]}
mpi: openmpi
containers: {engine: oci, registry: true}
"""
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
ASK_REGISTRY = """\
import base64, http.client, json, sys
login = base64.b64encode(b"bob:" + open("/etc/shoal/registry/logins/bob", "rb").read().strip()).decode()
for method, path in json.loads(sys.argv[1]):
    connection = http.client.HTTPSConnection("controller", 5001)
    connection.request(method, path, b"{}", {"Authorization": "Basic " + login})
    print(connection.getresponse().status)
"""
"""Asks the registry as bob, and prints its answers."""
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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with image_cluster(tmp_path_factory.mktemp("images"), SPEC) as made:
        yield made


@pytest.fixture(scope="module")
def ann(cluster: Cluster) -> User:
    return user_with_image(cluster, "ann")


def test_image_is_built_in_a_job_from_a_containerfile(ann: User, cluster: Cluster) -> None:
    ann.do("mkdir -p context/sub && echo below > context/sub/file")
    steps = "COPY sub /opt/sub\nRUN id -u > /opt/builder && chown 5:5 /opt/builder\nENV GREETING=built\n"
    ann.do(f"printf %s {shlex.quote('FROM mini' + chr(10) + steps)} > context/Containerfile")
    made = ann.json("image build made context -p main -c 2 --mem 500M --time 30")
    assert made["architecture"] == HERE and made["digest"].startswith("sha256:")
    [words] = lines(ann.run("-w n1 --image made"))
    assert words[4:7] == ["built", "2001", "one"]
    bundle = ann.do("shoal image bundle made").strip()
    assert ann.do(f"srun -w n1 {bundle}/run cat /opt/sub/file /opt/builder").split() == ["below", "0"]
    ann.do("shoal image pull /shared/one.tar --name r.example.org/lab/mini:2")
    ann.do("printf 'ARG BASE=\"mini:2\"\\nFROM r.example.org/lab/${BASE}\\n' > context/Containerfile")
    ann.json("image build again context")
    for text, message in {
        "FROM mini\nRUN echo because >&2; exit 7\n": "because",
        "FROM nothing\n": "you have no image nothing to build from; yours are: ",
        "FROM mini\nCOPY absent /\n": "absent",
    }.items():
        ann.do(f"printf %s {shlex.quote(text)} > context/Containerfile")
        assert message in ann.do("shoal image build broken context", status=2)
    for node in ("n1", "n2"):
        assert "build" not in cluster.on(node, "ls", f"{IMAGES}/ann", status=None)  # a node may have run none
    assert "broken" not in ann.do("shoal image list")


def test_interrupted_build_cancels_its_job_and_leaves_nothing(ann: User, cluster: Cluster) -> None:
    ann.do("mkdir -p slow && printf 'FROM mini\\nRUN chown 5:5 /opt && sleep 4712\\n' > slow/Containerfile")
    for number in ("INT", "KILL"):
        ann.do("(setsid shoal image build slow slow --node n1 > slow.log 2>&1 < /dev/null & echo $! > slow.pid)")
        cluster.wait("it runs", lambda: cluster.on("n1", "pgrep", "-x", "-f", "sleep 4712", status=None) != "")
        assert "shoal-image-build-" in ann.do("squeue --me -h -o '%j %l'")
        ann.do(f"kill -{number} -$(cat slow.pid)")
        cluster.wait("its job is gone", lambda: ann.do("squeue --me -h") == "")
        assert "build" not in cluster.on("n1", "ls", f"{IMAGES}/ann", status=None)
        assert cluster.on("n1", "pgrep", "-u", "ann", status=None) == ""
        assert ".new" not in ann.do("ls -A /shared/shoal-jobs/ann/images")


def test_image_is_built_of_a_list_of_packages(ann: User, cluster: Cluster) -> None:
    index = shared(cluster) / "index"
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


def test_image_used_longest_ago_makes_room_below_the_limit(ann: User, cluster: Cluster) -> None:
    """Each is 160 MB on the node, and three times the 50 MB that it is packed must be left to unpack it."""
    for name in ("two", "three"):
        write_image(cluster, name)
    cluster.edit("registry: true}", "registry: true, disk: 400M}")
    cluster.json("up")
    assert int(cluster.on("n2", "cat", LIMIT_FILE)) == 400 << 20
    cluster.on("n2", "sh", "-c", f"rm -rf {IMAGES}/ann")
    for name, count in (("one", 1), ("two", 2), ("three", 2)):
        seen = ann.run(f"-w n2 --image /shared/{name}.tar")
        assert lines(seen)[0][6] == name and ("shoal: removed image" in seen) == (name == "three")
        assert int(cluster.on("n2", "sh", "-c", f"ls -d {IMAGES}/ann/*/rootfs | wc -l")) == count
    cluster.edit("registry: true, disk: 400M}", "registry: true}")
    cluster.json("up")
    assert cluster.on("n2", "ls", LIMIT_FILE, status=None) == ""


def pull_base(ann: User, cluster: Cluster) -> None:
    """A Debian with apt, as `base`."""
    write_archive(shared(cluster) / "base.tar", debian_layer("apt"))
    ann.do("shoal image pull /shared/base.tar --name base")


def test_image_with_mpi_of_the_examples_runs_on_two_nodes(ann: User, cluster: Cluster) -> None:
    pull_base(ann, cluster)
    shutil.copytree(ROOT / "examples/mpi-image", shared(cluster) / "mpi-image")
    ann.do("shoal image build mpi /shared/mpi-image --from base")
    seen = ann.do("srun -N2 --mpi=pmix $(shoal image bundle mpi)/run all_reduce")
    assert lines(seen, "all_reduce") == [f"rank {rank} of 2: 1, right".split() for rank in (0, 1)]


def test_container_is_saved_from_its_node_after_the_job(ann: User) -> None:
    assert lines(ann.run("-w n1 --image mini --container-name kept --export NOTE=1"), "note") == [["x"]]
    assert "there is no container nothing of yours here" in ann.do("shoal image save x nothing --node n1", status=2)
    assert "each node has containers of its own" in ann.do("shoal image save x kept", status=2)
    assert ann.json("image save again kept --node n1")["bytes"] > 0
    assert lines(ann.run("-w n1 --container-name kept --image mini --export NOTE=1"), "note") == [["xx"]]


def test_registry_of_the_cluster_takes_and_gives_images(ann: User, cluster: Cluster) -> None:
    pushed = ann.json("image push mini")
    assert pushed["reference"] == "controller:5001/ann/mini" and pushed["digest"].startswith("sha256:")
    bob = User(cluster, "bob")
    pulled = bob.json("image pull controller:5001/ann/mini:latest --name back")
    assert pulled["digest"] == pushed["digest"]
    assert lines(bob.run("-w n2 --image back"))[0][6] == "one"
    assert "you write below your own name" in bob.do("shoal image push back controller:5001/ann/mini", status=2)
    own, places = (
        "/v2/bob/mini/manifests/latest",
        ("/v2/ann/mini/manifests/latest", "/v2/bob/../ann/mini/manifests/latest"),
    )
    asked = [(method, path) for method in ("PUT", "DELETE") for path in (own, *places)]
    answers = bob.do(f"python3 -c {shlex.quote(ASK_REGISTRY)} {shlex.quote(json.dumps(asked))}")
    assert answers.split() == ["400", "401", "401", "405", "401", "401"]
    assert bob.json("image pull controller:5001/ann/mini:latest --name back")["digest"] == pushed["digest"]
    connect = "import socket; socket.socket(socket.AF_UNIX).connect('/run/shoal-registry/socket')"
    assert "Permission denied" in bob.do(f"python3 -c {shlex.quote(connect)}", status=1)
    place = "/etc/shoal/registry/logins"
    assert cluster.on("n1", "stat", "-c", "%U %a", f"{place}/ann") == "ann 400\n"
    assert "Permission denied" in bob.do(f"cat {place}/ann", status=1)
    assert bob.do("stat -c '%U %a' /shared/shoal-jobs/bob/images/auth.json") == "bob 600\n"
    fetch = "import ssl, urllib.request as r; r.urlopen('https://controller:5001/v2/')"
    assert "401" in cluster.on("n1", "sh", "-c", f"python3 -c {shlex.quote(fetch)} 2>&1", status=1)
    login = "image login controller:5001 --user bob --password"
    assert "the registry rejects this name or password" in bob.do(f"WRONG=no shoal {login} env:WRONG", status=2)
    assert "--password is not" in bob.do(f"shoal {login} secret", status=2)
    unknown = bob.do("shoal image pull controller:5001/ann/maxi", status=2)
    assert "controller:5001/ann/maxi: the registry has no such image or tag" in unknown


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
    """With the line of the documentation."""
    place = "/shared/shoal-jobs/ann/ssh"
    ann.do(
        f"mkdir -m 700 {place} && cd {place} && for n in host_key key; do ssh-keygen -q -t ed25519 -N '' -f $n; done"
    )
    pull_base(ann, cluster)
    steps = "FROM base\nRUN apt-get update && apt-get install -y openssh-server && echo ssh > /mark\n"
    ann.do(f"mkdir sshd && printf %s {shlex.quote(steps)} > sshd/Containerfile && shoal image build train sshd")
    cluster.on("n1", "install", "-d", "-o", "ann", "-m", "700", "/home/ann/.ssh")
    cluster.on("n1", "install", "-o", "ann", f"{place}/key.pub", "/home/ann/.ssh/authorized_keys")
    text = (ROOT / "docs/containers.md").read_text()
    [line] = re.findall(r"^\$ (srun .*/usr/sbin/sshd .*)$", text, re.MULTILINE)
    ann.do(f"(setsid {line.replace('gpu01', 'n1').replace('/data', place)} > {place}/log 2>&1 < /dev/null &)")
    login = f"ssh -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -q -i {place}/key -p 2222"
    cluster.wait("sshd listens", lambda: ann.do(f"{login} n1 'cat /mark && id -u'").split() == ["ssh", "2001"])
    assert "/dev/pts/" in ann.do(f"{login} -tt n1 tty")
    ann.do("scancel --me --name run")
    cluster.wait("sshd has ended", lambda: cluster.on("n1", "pgrep", "-u", "ann", "sshd", status=None) == "")


def test_validation_has_rows_in_an_image(ann: User, cluster: Cluster) -> None:
    """A gloo and an MPI all-reduce inside."""
    give_torch(cluster.name, cluster.env)
    training_root(shared(cluster), "openmpi-bin")
    print(ann.do("shoal validate --quick --launcher srun,mpirun --image /shared/train || true"))
    rows = ann.json("validate --since 1d")["runs"][-1]["rows"]
    inside = {(row["launcher"], row["test"]): row["status"] for row in rows if "image" in row["launcher"]}
    torch, mpi = ("cpu", "all-reduce gloo"), ("mpi all-reduce", "mpi ping-pong")
    wanted = {("srun, image", test) for test in torch} | {("mpirun, image", test) for test in (*torch, *mpi)}
    wanted |= {("srun --mpi=pmix, image", test) for test in ("cpu", *mpi)}
    assert inside == dict.fromkeys(wanted, "passed")


def test_script_is_proved_in_an_image(ann: User, cluster: Cluster) -> None:
    script = (ROOT / "tests/unit/proof/train.py").read_text()
    only_inside = script.replace("import torch\n", "import torch\n\nopen('/mark').close()\n", 1)
    (shared(cluster) / "prove.py").write_text(only_inside)
    options = "-n 2 -N2 --gpus-per-node 0 --parallel ddp --steps 3 --image /shared/train"
    prove = f"shoal prove --cluster {cluster.name} --json {options} prove.py"
    report = json.loads(ann.do(f"cd work && cp /shared/prove.py . && {prove}"))
    assert report["passed"] and report["steps"] == 3, report


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


def test_named_container_outlives_a_reboot(ann: User, cluster: Cluster) -> None:
    note = "-w n1 --container-name mine --export NOTE=1"
    assert lines(ann.run(f"--image mini {note}"), "note") == [["x"]]
    cluster.fault("reboot", "n1")
    cluster.wait("n1 is back", lambda: cluster.answers("n1") and "IDLE" in cluster.states()["n1"])
    assert lines(ann.run(note), "note") == [["xx"]]
    ann.do("shoal image remove mine --node n1")


def test_removed_section_removes_everything_but_what_a_job_runs_in(ann: User, cluster: Cluster) -> None:
    job = ann.start("-w n1 --image mini", "until.py")
    cluster.edit("containers: {engine: oci, registry: true}\n", "")
    cluster.json("up")
    for host in ("n1", "n2", "controller"):
        places = ["/etc/slurm/oci.conf", "/etc/shoal/registry", TRUSTED, "/etc/systemd/system/shoal-images.timer"]
        places += [IMAGES] if host != "n1" else []
        assert cluster.on(host, "ls", *places, status=None) == ""
    assert "no node of the cluster runs jobs in images" in ann.run("--image mini", status=2)
    assert cluster.on("n1", "ls", f"{IMAGES}/ann") != ""
    ann.do(f"touch $(find /shared/shoal-jobs/ann -maxdepth 2 -name {job})/end")
    cluster.wait("it ended", lambda: "COMPLETED" in ann.do(f"scontrol show job {job}"))
    assert "ended one" in ann.do(f"shoal logs {job}")
    cluster.json("up")
    assert cluster.on("n1", "ls", IMAGES, status=None) == ""
    assert cluster.json("up")["changed"] == []
