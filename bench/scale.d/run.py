"""Renders the configuration of 10,000 nodes of many kinds, beside a Jinja2 template, and starts a real slurmctld on it.

slurmctld has no option that only checks its configuration, so it is started, in namespaces of its own.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from harness import BenchError, bench_parser, describe_machine, peer_environment, report, run_bench
from tests.unit.slurm import real_slurm

from shoal.slurm.conf import cgroup_conf, gres_conf, slurm_conf, topology_conf
from shoal.slurm.model import ClusterConf, Confinement, Node, NodeGpu, PartitionConf, Switch
from shoal.slurm.versions import Version

ROUNDS = 5
TARGET_S = 2.0
VERSIONS = {"22.05": "22.05.8", "24.11": "24.11.5", "26.05": "26.05.5"}

# As in the templates of an Ansible role: one line a node, no checks.
TEMPLATES = {
    "slurm.conf": """ClusterName={{ c.name }}
SlurmctldHost={{ c.controller }}({{ c.controller_address }})
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ProctrackType=proctrack/linuxproc
GresTypes=gpu
{% for n in c.nodes %}
NodeName={{ n.name }} NodeAddr={{ n.address }} CPUs={{ n.cpus }} Sockets={{ n.sockets }}\
 CoresPerSocket={{ n.cores_per_socket }} ThreadsPerCore={{ n.threads_per_core }}\
 RealMemory={{ (n.memory_mb * 0.95) | int }}{% if n.gpus %} Gres=\
{% for kind, group in n.gpus | groupby('type') %}gpu:{{ kind }}:{{ group | length }}{{ ',' if not loop.last }}\
{% endfor %}{% endif %}{% if n.features %} Feature={{ n.features | join(',') }}{% endif %} Weight={{ n.weight }}
{% endfor %}
{% for p in c.partitions %}
PartitionName={{ p.name }} Nodes={{ p.nodes | join(',') }} Default={{ 'YES' if p.default else 'NO' }} MaxTime=UNLIMITED
{% endfor %}
""",
    "gres.conf": """{% for n in c.nodes %}{% for g in n.gpus %}
NodeName={{ n.name }} Name=gpu Type={{ g.type }} File={{ g.device }}
{% endfor %}{% endfor %}
""",
    "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
}

PEER = """
import json, sys, time
from jinja2 import Environment
data = json.load(sys.stdin)
environment = Environment(trim_blocks=True, lstrip_blocks=True)
seconds = []
for _ in range(data["rounds"]):
    start = time.process_time()
    texts = {name: environment.from_string(text).render(c=data["cluster"]) for name, text in data["templates"].items()}
    seconds.append(time.process_time() - start)
json.dump({"seconds": min(seconds), "texts": texts}, sys.stdout)
"""


def main() -> None:
    parser = bench_parser("scale", __doc__)
    parser.add_argument("nodes", type=int, nargs="?", default=10_000)
    parser.add_argument("releases", nargs="*", default=["22.05"], help="of 22.05, 24.11 and 26.05")
    options = parser.parse_args()
    if options.small:
        options.nodes = 200
    lines = [
        describe_machine(options),
        f"{options.nodes} nodes, no two neighbours alike. Rendering: CPU seconds, best of {ROUNDS}.",
        "Start: wall-clock seconds until slurmctld has listed all its nodes; they grow with the load of the machine.",
    ]
    shoal_seconds, texts = _render(_cluster(options.nodes, "22.05"))
    peer_seconds, peer_texts = _render_with_jinja(_cluster(options.nodes, "22.05"))
    lines += [
        f"{'':28}{'seconds':>10}{'ratio':>8}{'lines':>10}{'bytes':>12}",
        _row("shoal", shoal_seconds, 1.0, texts),
        _row("jinja2 template", peer_seconds, peer_seconds / shoal_seconds, peer_texts),
    ]
    for release in options.releases:
        texts = _render(_cluster(options.nodes, release), 1)[1]
        lines.append(_start(f"slurmctld {release} on shoal's", release, texts, options.nodes))
    lines.append(_start("slurmctld 22.05 on jinja2's", "22.05", peer_texts, options.nodes))
    report("scale", options, "\n".join(lines) + "\n")
    if shoal_seconds >= TARGET_S:
        raise BenchError(f"rendering took {shoal_seconds:.2f} s, more than {TARGET_S:g} s")


def _cluster(count: int, release: str) -> ClusterConf:
    """Nodes of many kinds, with names, addresses, memory and GPUs as from a dozen providers."""
    generator = random.Random(7)
    addresses = generator.sample(range(1, 2**22), count)
    shapes = [(8, 1, 4, 2), (64, 2, 16, 2), (96, 2, 48, 1), (128, 2, 64, 1), (192, 2, 96, 1), (4, 1, 4, 1)]
    kinds = ["h100", "a100", "rtx_4090", "l40s", "v100", "t4"]
    nodes = []
    for number, offset in enumerate(addresses):
        cpus, sockets, cores, threads = generator.choice(shapes)
        kind = generator.choice(kinds)
        gpus = tuple(NodeGpu(kind, f"/dev/nvidia{index}") for index in range(generator.choice((0, 1, 2, 4, 8))))
        site = generator.choice(("lab", "lambda", "gcp", "runpod", "home"))
        name = f"{site}-{number:05}" if generator.random() < 0.9 else f"{site}-{generator.getrandbits(32):08x}-{number}"
        address = f"10.{64 + (offset >> 16)}.{offset >> 8 & 255}.{offset & 255}"
        memory = generator.choice((16, 64, 128, 512, 1024)) * 1000 + generator.randrange(500)
        nodes.append(
            Node(name, name, address, cpus, sockets, cores, threads, memory, gpus, (site,), generator.randint(1, 9))
        )
    names = [node.name for node in nodes]
    sites = {
        site: tuple(n.name for n in nodes if site in n.features) for site in ("lab", "lambda", "gcp", "runpod", "home")
    }
    partitions = [
        PartitionConf("all", tuple(names), default=True),
        *(PartitionConf(s, members) for s, members in sites.items()),
    ]
    partitions += [PartitionConf(f"mix{i}", tuple(generator.sample(names, count // 3))) for i in range(4)]
    return ClusterConf(
        name="reef",
        controller="ctl",
        controller_address="10.77.0.1",
        versions=(Version.parse(VERSIONS[release]),),
        nodes=tuple(nodes),
        partitions=tuple(partitions),
        switches=tuple(Switch(site, members) for site, members in sites.items()),
        confinement=Confinement(plugin="disabled"),
    )


def _render(cluster: ClusterConf, rounds: int = ROUNDS) -> tuple[float, dict[str, str]]:
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        texts = {
            "slurm.conf": slurm_conf(cluster),
            "gres.conf": gres_conf(cluster),
            "cgroup.conf": cgroup_conf(cluster),
            "topology.conf": topology_conf(cluster),
        }
        seconds.append(time.process_time() - start)
    return min(seconds), texts


def _render_with_jinja(cluster: ClusterConf) -> tuple[float, dict[str, str]]:
    """The same cluster through the templates, in the environment of the peers."""
    python = peer_environment("scale", "jinja2") / "python"
    request = json.dumps({"rounds": ROUNDS, "cluster": asdict(cluster), "templates": TEMPLATES})
    done = subprocess.run([python, "-c", PEER], input=request, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    return answer["seconds"], answer["texts"]


def _row(name: str, seconds: float, ratio: float, texts: dict[str, str]) -> str:
    lines = sum(text.count("\n") for text in texts.values())
    size = sum(len(text) for text in texts.values())
    return f"{name:28}{seconds:>10.3f}{ratio:>8.2f}{lines:>10,}{size:>12,}"


def _start(name: str, release: str, texts: dict[str, str], count: int) -> str:
    """Start a real slurmctld on the texts: the time until it answers, and how many nodes it has."""
    if reason := real_slurm.missing():
        raise BenchError(f"cannot start slurmctld: {reason}")
    script = 'echo "$(scontrol -o show node | grep -c ^NodeName=) $(scontrol -o show partition | wc -l)"\n'
    real_slurm.image(release)
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        done = real_slurm.run(release, texts, script, Path(scratch), slurmd=False, timeout=300)
        seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise BenchError(f"{name}: slurmctld rejected the configuration\n{done.stderr[-2000:]}")
    nodes, partitions = done.stdout.split()
    if int(nodes) != count:
        raise BenchError(f"{name}: slurmctld has {nodes} nodes, not {count}")
    return f"{name:28}{seconds:>10.3f}  started, answers with {nodes} nodes and {partitions} partitions"


if __name__ == "__main__":
    run_bench("scale", main)
