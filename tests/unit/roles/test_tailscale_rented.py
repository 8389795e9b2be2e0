"""How rented machines join the tailnet: what the controller holds for them, and what they get."""

from dataclasses import replace

from tests.support.fake_world import host_facts, spec_of
from tests.unit.network.test_tailscale_status import STATUS

from shoal.agent.document import File, SecretRef
from shoal.agent.facts import Facts, FileFact, Package
from shoal.roles.assembly import assemble
from shoal.roles.component import SharedSecret, Stage
from shoal.roles.documents import documents
from shoal.roles.registry import component_files, component_findings, preparation, shared_secrets, user_secrets
from shoal.roles.tailscale import (
    CONTROL_SERVER,
    CONTROLLER_KEY,
    KEY,
    KEYRING,
    KEYRING_COPY,
    SOURCE,
    controller_spec,
    rented_machines,
)
from shoal.spec.members import members, rented_members
from shoal.spec.model import Spec

TEXT = """
cluster: reef
network: {kind: tailscale, auth_key: env:TS_AUTHKEY, tags: [slurm]}
controller: {host: c1}
nodesets:
  cloud: {provider: lambda, type: gpu_1x_a10, max: 2, image: debian-12}
  pods: {provider: runpod, type: NVIDIA A40, max: 2, cpus: 2, memory: 8G, gpus: 1}
providers: {lambda: {key: env:K}, runpod: {key: env:R}}
"""
SPEC = spec_of(TEXT)
ONLY_MACHINES = spec_of(
    TEXT.replace("  pods: {provider: runpod, type: NVIDIA A40, max: 2, cpus: 2, memory: 8G, gpus: 1}\n", "")
)
OUR_SOURCE = f"deb [signed-by={KEYRING}] https://packages.example.org/stable/debian bookworm main\n"
CONTROLLER = replace(
    host_facts("c1", "10.0.0.1", tun=True),
    tailscale=STATUS,
    files={SOURCE: FileFact(text=OUR_SOURCE)},
    os_codename="bookworm",
)


def machine(**changes: object) -> Facts:
    """A machine that has booted from its provider's image."""
    found = replace(
        host_facts("cloud1", "10.0.0.21", tun=True), os_id="ubuntu", os_version="22.04", os_codename="jammy"
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def prepared(facts: Facts, controller: Facts = CONTROLLER, spec: Spec = SPEC) -> dict[str, object]:
    everyone = {"c1": controller, "cloud1": facts}
    return {item.key: item for item in preparation(spec, rented_members(spec)[0], facts, everyone)}


def key_on_controller(spec: Spec) -> File:
    cluster = assemble(spec, {"c1": CONTROLLER}, {})
    [found] = [i for i in documents(cluster, cluster.controller)[Stage.SERVICES] if i.key == f"file {CONTROLLER_KEY}"]
    return found


def test_auth_key_file_on_the_controller_is_readable_only_by_root() -> None:
    file = key_on_controller(SPEC)
    assert (file.content, file.mode, file.owner) == (SecretRef("network.auth_key"), 0o600, "root")
    none_rented = spec_of(
        "cluster: reef\nnetwork: {kind: tailscale, auth_key: env:TS_AUTHKEY}\ncontroller: {host: c1, compute: true}\n"
    )
    assert key_on_controller(none_rented).content is None


def test_auth_key_is_removed_from_the_controller_after_leaving_the_tailnet() -> None:
    lan = spec_of(TEXT.replace("network: {kind: tailscale, auth_key: env:TS_AUTHKEY, tags: [slurm]}\n", ""))
    there = replace(CONTROLLER, files={CONTROLLER_KEY: FileFact(there=True)})
    cluster = assemble(lan, {"c1": there}, {"c1": "10.0.0.1"})
    assert File(CONTROLLER_KEY) in documents(cluster, cluster.controller)[Stage.SERVICES]


def test_rental_service_reads_the_auth_key_from_the_controller() -> None:
    there = controller_spec(SPEC)
    assert user_secrets(there)["network.auth_key"] == f"file:{CONTROLLER_KEY}"
    assert there.nodesets == SPEC.nodesets and there.network.tags == ("tag:slurm",)
    lan = spec_of(TEXT.replace("network: {kind: tailscale, auth_key: env:TS_AUTHKEY, tags: [slurm]}\n", ""))
    assert controller_spec(lan) is lan


def test_machine_gets_the_package_source_of_the_controller_for_its_own_release() -> None:
    assert component_files(SPEC)[SOURCE] == "text"
    items = prepared(machine())
    assert list(items)[:3] == [f"file {KEYRING}", f"file {SOURCE}", "packages tailscale"]
    source, keyring = items[f"file {SOURCE}"], items[f"file {KEYRING}"]
    assert source.content == OUR_SOURCE.replace("debian bookworm", "ubuntu jammy")
    assert keyring.content == SecretRef(KEYRING_COPY)
    assert shared_secrets(SPEC)[KEYRING_COPY] == SharedSecret("c1", KEYRING, 0, text=False), "nobody makes one"


def test_machine_with_the_program_or_a_candidate_gets_no_source() -> None:
    assert f"file {SOURCE}" not in prepared(machine(packages={"tailscale": Package(candidate="1.80.2")}))
    assert f"file {SOURCE}" not in prepared(machine(tailscale={**STATUS, "BackendState": "NeedsLogin"}))
    without = prepared(machine(), replace(CONTROLLER, files={}))
    assert f"file {SOURCE}" not in without
    package = without["packages tailscale"]
    assert package.fix.startswith("add Tailscale's package source to the host")


def test_machine_joins_as_ephemeral_without_the_key_in_an_argument() -> None:
    items = prepared(machine())
    join = items["command join the tailnet"]
    assert join.argv[6:9] == (CONTROL_SERVER, KEY, "true")
    assert "--hostname=reef-cloud1" in join.argv and "--advertise-tags=tag:slurm" in join.argv
    assert prepared(machine(tailscale=STATUS)) == {}, "it is in already"


def test_containers_do_not_join_and_need_no_key() -> None:
    assert rented_machines(SPEC) == ("cloud1", "cloud2")
    pods = spec_of(
        TEXT.replace("  cloud: {provider: lambda, type: gpu_1x_a10, max: 2, image: debian-12}\n", "").replace(
            ", auth_key: env:TS_AUTHKEY", ""
        )
    )
    assert rented_machines(pods) == ()
    assert not [one for one in component_findings(assemble(pods, {"c1": CONTROLLER}, {})) if one.level == "error"]


def test_machines_without_a_key_or_without_tun_are_errors() -> None:
    keyless = spec_of(TEXT.replace(", auth_key: env:TS_AUTHKEY", ""))
    [told] = [one for one in component_findings(assemble(keyless, {"c1": CONTROLLER}, {})) if one.level == "error"]
    assert (told.what, told.found) == ("rented machines cannot join the tailnet without an auth key", "cloud[1-2]")
    userspace = machine(tailscale={**STATUS, "TUN": False, "TailscaleIPs": ["100.64.0.3"]})
    cluster = assemble(SPEC, {"c1": CONTROLLER, "cloud1": userspace}, {})
    assert "cloud1" in {
        one.host for one in component_findings(cluster) if one.level == "error" and "no TUN" in one.what
    }


def test_rented_machine_is_a_member_by_its_tailnet_address() -> None:
    there = machine(tailscale={**STATUS, "TailscaleIPs": ["100.64.0.3"]})
    cluster = assemble(ONLY_MACHINES, {"c1": CONTROLLER, "cloud1": there}, {"cloud1": "203.0.113.9"})
    assert cluster.addresses == {"c1": "100.64.0.1", "cloud1": "100.64.0.3"} and cluster.conf.one_address
    own = documents(cluster, next(member for member in cluster.members if member.name == "cloud1"))
    texts = {item.path: str(item.content) for part in own.values() for item in part if isinstance(item, File)}
    assert "100.64.0.1, 100.64.0.3" in texts["/etc/shoal/firewall.nft"]
    assert "address show to 100.64.0.3 " in texts["/etc/systemd/system/slurmd.service.d/shoal-address.conf"]
    assert members(ONLY_MACHINES)[0].name == "c1"
