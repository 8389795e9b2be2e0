"""Rented nodesets: the slurm.conf before any machine exists, and what the controller gets to rent them."""

import hashlib
import json
import os
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from tests.goldens import assert_golden
from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of
from tests.support.item_text import json_lines

from shoal.agent.document import Command, Directory, Document, File, SecretRef, Service
from shoal.agent.facts import Facts, FileFact
from shoal.cloud.providers.api import Offer
from shoal.cloud.providers.prices import catalog_prices, prices, store_prices
from shoal.network.addresses import hosts_block
from shoal.network.wireguard import PUBLIC_KEY
from shoal.plan.connections import Fleet
from shoal.plan.diff import cluster_goal
from shoal.plan.observe import Observation
from shoal.plan.secret_values import add_digests, fetch_secrets
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Stage
from shoal.roles.compute import slurmd_options
from shoal.roles.current_conf import CGROUP_CONF, HOSTS, SLURM_CONF, CurrentConf, read_current_conf
from shoal.roles.documents import documents, membership
from shoal.roles.elastic import (
    ACCOUNTS,
    KEYS,
    PRICES,
    SPEC,
    UNIT,
    WHEEL_SECRET,
    ElasticComponent,
    install_prefix,
    program_removal,
    service_removal,
)
from shoal.roles.rented import minimum_shape, rented_findings
from shoal.roles.wheel import build_wheel
from shoal.roles.wireguard import config_of
from shoal.slurm.conf import cgroup_conf, slurm_conf
from shoal.spec.members import rented_sets
from shoal.spec.rental import ProviderAccount
from shoal_simulators.fake_host import FakeConnector

REEF = """
cluster: reef
NETWORK
controller: {host: {name: c1, address: 10.0.0.1}}
nodesets:
  lab: {hosts: [{name: n1, address: 10.0.0.11}]}
  cloud: {provider: lambda, type: gpu_1x_a10, max: 3, image: debian-12, idle: 5m, features: [rented], weight: 10}
  any:
    max: 2
    offers:
      - {provider: lambda, type: gpu_1x_a10, region: us-west-1, image: debian-12}
      - {provider: gcp, type: a2-highgpu-1g, zone: us-central1-b, market: spot, image: debian-12}
partitions:
  main: {nodesets: [lab, cloud, any], default: true}
  cloud: {nodesets: [cloud]}
  lab: {nodesets: [lab]}
providers:
  lambda: {key: env:LAMBDA_API_KEY}
  gcp: {key: env:GCP_KEY, project: reef-1}
"""
SPEC_LAN = spec_of(REEF.replace("NETWORK", ""))
SPEC_WIREGUARD = spec_of(REEF.replace("NETWORK", "network: wireguard"))
ADDRESSES = {"c1": "10.0.0.1", "n1": "10.0.0.11"}
FACTS = {name: host_facts(name, address) for name, address in ADDRESSES.items()}


def controller_document(stage: Stage) -> Document:
    cluster = assemble(SPEC_LAN, FACTS, ADDRESSES)
    return ElasticComponent().documents(cluster, cluster.controller)[stage]


def in_force_of(cluster: Cluster) -> Facts:
    """The controller's facts once the cluster was applied."""
    hosts = f"# BEGIN shoal members\n{hosts_block(cluster.addresses)}# END shoal members\n"
    texts = {SLURM_CONF: slurm_conf(cluster.conf), CGROUP_CONF: cgroup_conf(cluster.conf), HOSTS: hosts}
    return replace(FACTS["c1"], files={path: FileFact(text=text) for path, text in texts.items()})


def test_slurm_conf_contains_nodes_that_do_not_exist_yet() -> None:
    cluster = assemble(SPEC_LAN, FACTS, ADDRESSES)
    nodes = {node.name: node for node in cluster.conf.nodes}
    assert list(nodes) == ["n1", "cloud1", "cloud2", "cloud3", "any1", "any2"]
    assert [name for name, node in nodes.items() if node.cloud] == ["cloud1", "cloud2", "cloud3", "any1", "any2"]
    assert nodes["cloud1"].features == ("cloud", "rented") and nodes["cloud1"].weight == 10
    assert {gpu.type for gpu in nodes["cloud1"].gpus} == {"a10"}
    assert {gpu.type for gpu in nodes["any1"].gpus} == {""}, "an A10 or an A100: nobody knows which"
    assert [member.name for member in cluster.members] == ["c1", "n1"] and set(cluster.addresses) == {"c1", "n1"}


def test_shape_is_the_minimum_of_the_offers_and_the_file_overrides() -> None:
    any_of = minimum_shape(SPEC_LAN, rented_sets(SPEC_LAN)["any"])
    a10 = minimum_shape(SPEC_LAN, rented_sets(SPEC_LAN)["cloud"])
    assert any_of.cpus <= a10.cpus and any_of.memory_mb <= a10.memory_mb
    said = spec_of(REEF.replace("NETWORK", "").replace("max: 3,", "max: 3, cpus: 2, memory: 3G, gpus: 4,"))
    shape = minimum_shape(said, rented_sets(said)["cloud"])
    assert (shape.cpus, shape.memory_mb, shape.gpus) == (2, 3072, 4)


def test_suspend_time_is_per_partition_and_permanent_nodes_are_excluded() -> None:
    conf = slurm_conf(assemble(SPEC_LAN, FACTS, ADDRESSES).conf)
    lines = {line.split()[0]: line for line in conf.splitlines() if line.startswith("PartitionName=")}
    assert " SuspendTime=600 " in lines["PartitionName=main"]
    assert " SuspendTime=300 " in lines["PartitionName=cloud"]
    assert "SuspendTime" not in lines["PartitionName=lab"] and "SuspendExcNodes=n1\n" in conf
    assert "ResumeTimeout=1800\n" in conf, "as long as the slowest provider may take"


def test_findings_cover_unknown_shapes_and_different_idle_times() -> None:
    spec = spec_of(REEF.replace("NETWORK", "").replace("type: gpu_1x_a10, max", "type: gpu_9x_new, max"))
    assert [str(finding) for finding in rented_findings(spec)] == [
        "nodesets.cloud: nodeset `cloud`: the shape of this machine is not known, so Slurm counts on very little, "
        "found gpu_9x_new of lambda, set its minimum: `cpus: 8`, `memory: 60G`, `gpus: 1`",
        "partitions.main: partition `main`: Slurm has one idle time for a partition, so all nodes wait as long as any, "
        "found cloud 300 s, any 600 s, give them the same `idle`, or a partition each",
    ]


REAL_TYPES = {
    "lambda": ("gpu_1x_a100", "gpu_2x_h100_sxm5", "gpu_1x_a6000"),
    "runpod": ("NVIDIA L40", "NVIDIA A40", "NVIDIA L4", "NVIDIA GeForce RTX 5090"),
    "gcp": ("a3-edgegpu-8g", "a2-megagpu-16g", "n1-standard-8+nvidia-tesla-t4:2"),
    "paperspace": ("P4000", "A100"),
}
"""These are not in the table."""


@cases(
    "provider, type, told",
    ("lambda", "gpu_1x_a10", ""),
    ("lambda", "gpu_1x_a1O", "found gpu_1x_a1O of acme, did you mean `gpu_1x_a10`? `shoal offers --provider acme`"),
    ("lambda", "gpu-8x-h100-sxm5", "did you mean `gpu_8x_h100_sxm5`?"),
    ("lambda", "zzz", ""),
    ("runpod", "8x NVIDIA H200", ""),
    ("runpod", "8x NVIDIA H20O", "did you mean `NVIDIA H200`?"),
    ("runpod", "8x NVIDA H100 NVL", "did you mean `NVIDIA H100 NVL`?"),
    ("gcp", "a2-higgpu-1g", "did you mean `a2-highgpu-1g`?"),
    *((provider, type, "") for provider, types in REAL_TYPES.items() for type in types),
    ("gcp", "a2-highgpu-1g+nvidia-tesla-t4:2", ""),
    ("sandbox", "whatever", ""),
)
def test_probably_misspelled_type_is_reported_and_unknown_type_is_not(provider: str, type: str, told: str) -> None:
    nodeset = f"cloud: {{provider: acme, type: '{type}', max: 3, cpus: 2, memory: 3G}}"
    project = ", project: p" if provider == "gcp" else ""
    text = (
        f"cluster: reef\nnetwork: wireguard\ncontroller: {{host: {{name: c1, address: 10.0.0.1}}}}\n"
        f"nodesets:\n  {nodeset}\npartitions:\n  main: {{nodesets: [cloud], default: true}}\n"
        f"providers: {{acme: {{kind: {provider}, key: env:K, url: 'http://10.0.0.1:1'{project}}}}}\n"
    )
    found = [str(finding) for finding in rented_findings(spec_of(text)) if "every order fails" in finding.what]
    assert len(found) == bool(told) and told in "".join(found)


def test_rented_node_does_not_count_as_leaving() -> None:
    first = assemble(SPEC_LAN, FACTS, ADDRESSES)
    facts = {**FACTS, "c1": in_force_of(first)}
    goal = cluster_goal(SPEC_LAN, Observation(facts), ADDRESSES)
    assert (goal.leaving, goal.left, goal.later) == ((), (), None)
    fewer = spec_of(REEF.replace("NETWORK", "").replace("max: 3", "max: 2"))
    assert cluster_goal(fewer, Observation(facts), ADDRESSES).leaving == ("cloud3",)


def test_joining_node_does_not_change_slurm_conf() -> None:
    before = assemble(SPEC_LAN, FACTS, ADDRESSES)
    here = {"c1": in_force_of(before), "cloud2": host_facts("ip-10-1-2-3", "10.0.0.99")}
    after = assemble(SPEC_LAN, here, {"cloud2": "10.0.0.99"}, read_current_conf(here["c1"]))
    assert slurm_conf(after.conf) == slurm_conf(before.conf)
    assert after.addresses == {"c1": "10.0.0.1", "n1": "10.0.0.11", "cloud2": "10.0.0.99"}
    member = next(member for member in after.members if member.name == "cloud2")
    assert slurmd_options(after, member) == ("--conf-server", "10.0.0.1:6817", "-b", "-N", "cloud2")
    told = membership(after, after.controller)
    assert any("10.0.0.99" in getattr(item, "content", "") for item in told)
    assert Stage.CONTROLLER not in documents(after, member)


def test_wireguard_addresses_of_rented_nodes_are_reserved() -> None:
    keys = {"c1": "K" * 43 + "=", "n1": "L" * 43 + "="}
    facts = {
        name: replace(
            fact,
            files={PUBLIC_KEY: FileFact(text=keys[name])},
            reaches={other: address for other, address in ADDRESSES.items() if other != name},
        )
        for name, fact in FACTS.items()
    }
    cluster = assemble(SPEC_WIREGUARD, facts, ADDRESSES)
    rented = [cluster.addresses[name] for name in ("cloud1", "cloud2", "cloud3", "any1", "any2")]
    assert len(set(cluster.addresses.values())) == 7
    [hub] = config_of(cluster, "n1").peers
    assert (hub.name, hub.allowed[1:]) == ("c1", tuple(rented))
    assert [peer.name for peer in config_of(cluster, "c1").peers] == ["n1"], "no machine, no key, no peer"
    again = assemble(SPEC_WIREGUARD, {"c1": facts["c1"]}, ADDRESSES, CurrentConf(addresses=cluster.addresses))
    assert again.addresses == cluster.addresses


def test_rented_node_reaches_permanent_hosts_through_the_hub() -> None:
    keys = {"c1": "K" * 43 + "=", "cloud1": "M" * 43 + "="}
    facts = {
        "c1": replace(FACTS["c1"], files={PUBLIC_KEY: FileFact(text=keys["c1"])}, reaches={"cloud1": "198.51.100.7"}),
        "cloud1": replace(
            host_facts("cloud1", "172.16.0.4"),
            files={PUBLIC_KEY: FileFact(text=keys["cloud1"])},
            reaches={"c1": "10.0.0.1"},
        ),
    }
    before = CurrentConf(addresses=assemble(SPEC_WIREGUARD, FACTS, ADDRESSES).addresses)
    cluster = assemble(SPEC_WIREGUARD, facts, {}, before)
    [hub] = config_of(cluster, "cloud1").peers
    assert (hub.name, hub.endpoint) == ("c1", "10.0.0.1:51820") and hub.allowed[1:] == (cluster.addresses["n1"],)
    assert [peer.name for peer in config_of(cluster, "c1").peers] == ["cloud1"]


# What the controller gets


def test_service_document_matches_its_golden() -> None:
    document = (*controller_document(Stage.SERVICES), *controller_document(Stage.CONTROLLER))
    wheel, lines = build_wheel().mark, []
    for item in document:
        owner = f" {item.owner}:{item.group} {item.mode:04o}" if isinstance(item, File | Directory) else ""
        lines.append(item.key.replace(wheel, "VERSION") + owner)
        if isinstance(item, File) and isinstance(item.content, str) and item.path in (UNIT, ACCOUNTS, SPEC):
            text = item.content.replace(wheel, "VERSION")
            lines += [f"   {line}" for line in (text.splitlines() if item.path == UNIT else json_lines(text))]
        if isinstance(item, File) and isinstance(item.content, SecretRef):
            lines.append(f"   secret {item.content.name}")
    assert_golden("roles/elastic.txt", "\n".join(lines) + "\n")


def test_provider_keys_are_only_in_files_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMBDA_API_KEY", "secret_abcdef")
    monkeypatch.delenv("GCP_KEY", raising=False)
    given = ElasticComponent().user_secrets(SPEC_LAN)
    assert given["providers.lambda.key"] == "env:LAMBDA_API_KEY"
    document = add_digests(controller_document(Stage.SERVICES), given)
    assert "secret_abcdef" not in repr(document)
    keys = {item.path: item for item in document if isinstance(item, File) and item.path.startswith(KEYS)}
    assert {item.mode for item in keys.values()} == {0o600}
    lambda_key, gcp_key = keys[f"{KEYS}/lambda"].content, keys[f"{KEYS}/gcp"].content
    assert lambda_key == SecretRef("providers.lambda.key", hashlib.sha256(b"secret_abcdef").hexdigest())
    assert gcp_key == SecretRef("providers.gcp.key"), "it cannot be looked up here: what the host has stays"
    [folder] = [item for item in document if isinstance(item, Directory) and item.path == KEYS]
    assert folder.mode == 0o700


def test_cluster_without_rentals_gets_no_service_and_removes_an_old_service() -> None:
    spec = spec_of("cluster: reef\ncontroller: {host: c1}\nnodesets: {lab: {hosts: [n1]}}\n")
    cluster = assemble(spec, FACTS, ADDRESSES)
    assert cluster.conf.power is None and ElasticComponent().documents(cluster, cluster.controller) == {}
    assert ElasticComponent().user_secrets(spec) == {}
    assert ElasticComponent().packages(spec, cluster.controller, None) == ()
    facts = {**FACTS, "c1": replace(FACTS["c1"], files={UNIT: FileFact(there=True)})}
    left = assemble(spec, facts, ADDRESSES)
    assert ElasticComponent().documents(left, left.controller) == {
        Stage.SERVICES: service_removal(),
        Stage.NODES: program_removal(),
    }
    assert Service("shoal-elastic", enabled=False, running=False) in service_removal()


@cases("python, refused", ("3.10.12", True), ("3.11.2", False), ("3.13.5", False), ("", False))
def test_old_python_on_the_controller_is_reported(python: str, refused: bool) -> None:
    facts = {**FACTS, "c1": replace(FACTS["c1"], python=python)}
    findings = ElasticComponent().findings(assemble(SPEC_LAN, facts, ADDRESSES))
    told = [
        f"c1: the rental service needs Python 3.11 or newer, found Python {python}, "
        "use a controller with Debian 12, Ubuntu 24.04 or newer"
    ]
    assert [str(finding) for finding in findings] == (told if refused else [])


def test_programs_of_slurmctld_exist_before_slurmctld_starts() -> None:
    paths = [item.path for item in controller_document(Stage.SERVICES) if isinstance(item, File)]
    conf = slurm_conf(assemble(SPEC_LAN, FACTS, ADDRESSES).conf)
    started = [line.partition("=")[2] for line in conf.splitlines() if "=/usr/local/lib/shoal/elastic/" in line]
    assert len(started) == 4 and set(started) <= set(paths)


# Shoal itself


def test_wheel_is_reproducible() -> None:
    build_wheel.cache_clear()
    first = build_wheel()
    build_wheel.cache_clear()
    assert build_wheel() == first
    with zipfile.ZipFile(BytesIO(first.content)) as archive:
        names = archive.namelist()
        metadata = archive.read(f"shoal-{first.version}.dist-info/METADATA").decode()
        record = archive.read(f"shoal-{first.version}.dist-info/RECORD").decode()
    assert {"shoal/elastic.py", "shoal/remote/power_request.py", "shoal/cloud/providers/prices.csv"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]
    assert "Requires-Dist: httpx>=0.27\n" in metadata and "Provides-Extra: gcp\n" in metadata
    assert len(record.splitlines()) == len(names)


async def test_wheel_is_sent_from_memory_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    given = {WHEEL_SECRET: ElasticComponent().user_secrets(SPEC_LAN)[WHEEL_SECRET]}
    async with Fleet({}, FakeConnector()) as fleet:
        sent = await fetch_secrets([controller_document(Stage.SERVICES)], {}, given, fleet)
    assert sent == {WHEEL_SECRET: build_wheel().content} and os.listdir(tmp_path) == []


def test_installation_is_named_by_its_content_and_made_once() -> None:
    document = controller_document(Stage.SERVICES)
    [install] = [item for item in document if isinstance(item, Command) and item.name == "install Shoal"]
    place = install_prefix(SPEC_LAN)
    assert build_wheel().sha256[:12] in place and place in install.argv
    assert install.unless == ("test", "-e", f"{place}/.complete")
    [sent] = [i for i in document if isinstance(i, File) and i.content == SecretRef(WHEEL_SECRET, build_wheel().sha256)]
    assert install.argv[-1] == f"{sent.path}[gcp]"


def test_clients_with_packages_of_their_own_are_extras() -> None:
    account = ProviderAccount(kind="nebius", key="env:KEY")
    spec = SPEC_LAN.model_copy(update={"providers": {**SPEC_LAN.providers, "lab": account}})
    cluster = assemble(spec, FACTS, ADDRESSES)
    document = ElasticComponent().documents(cluster, cluster.controller)[Stage.SERVICES]
    [install] = [item for item in document if isinstance(item, Command) and item.name == "install Shoal"]
    assert install.argv[-1].endswith(".whl[gcp,nebius]") and install_prefix(spec) != install_prefix(SPEC_LAN)


def test_service_gets_prices_of_catalogs_for_the_types_it_rents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))

    def sent() -> File:
        [file] = [
            item for item in controller_document(Stage.SERVICES) if isinstance(item, File) and item.path == PRICES
        ]
        return file

    assert sent().content is None
    dear = Offer("gcp", "a2-highgpu-1g", "us-central1", market="spot", usd_hour=1.7)
    elsewhere = replace(dear, type="g2-standard-8")
    store_prices("gcp", [dear, elsewhere], "2026-11-01", catalog="gpuhunt catalog 20261101")
    store_prices("lambda", [Offer("lambda", "gpu_1x_a10", "us-west-1", usd_hour=9.9)], "2026-11-01")
    content = sent().content
    assert not sent().restarts and len(content.splitlines()) == 2 and "gpuhunt catalog 20261101" in content
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "prices.csv").write_text(content)
    found = prices(tmp_path / "service").find("gcp", "a2-highgpu-1g", "us-central1", "spot")
    assert found is not None and (found.usd_hour, found.as_of) == (1.7, "2026-11-01")


def test_price_of_a_catalog_that_the_table_has_too_is_not_sent(tmp_path: Path) -> None:
    same = prices(tmp_path).find("gcp", "a2-highgpu-1g", "us-central1", "on-demand")
    assert same is not None
    store_prices("gcp", [replace(same, as_of="")], "2026-11-01", tmp_path, catalog="gpuhunt catalog 20261101")
    assert catalog_prices({("gcp", "a2-highgpu-1g")}, tmp_path) == ""


def test_service_spec_round_trips() -> None:
    [file] = [item for item in controller_document(Stage.SERVICES) if isinstance(item, File) and item.path == SPEC]
    assert type(SPEC_LAN).model_validate(json.loads(file.content)) == SPEC_LAN
