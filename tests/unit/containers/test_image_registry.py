"""Registries: what skopeo's messages mean, where logins are kept, and the cluster's own registry."""

import json
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of
from tests.unit.containers.test_image_store import ask, kept

from shoal.agent.document import File, Secret, SecretRef, Service
from shoal.agent.facts import FileFact
from shoal.containers import registry
from shoal.remote import image_registry, image_store
from shoal.remote.image_registry import explain
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Stage
from shoal.roles.image_registry import ImageRegistryComponent

SPEC = """
cluster: reef
controller: {host: {name: c1, address: 10.0.0.1}}
nodesets: {lab: {hosts: [{name: n1, address: 10.0.0.11}]}}
users: {ann: {uid: 2001}}
containers: {engine: oci, registry: {port: 5001}}
"""


@cases(
    "message, meaning",
    ("dial tcp 10.0.0.1:5000: connect: connection refused", "the registry is down or cannot be reached"),
    ("dial tcp: lookup registry.invalid: no such host", "the registry's name is not known"),
    ("Get https://r/v2/: context deadline exceeded", "the registry does not answer"),
    ("http: server gave HTTP response to HTTPS client", "the registry has no TLS"),
    ("tls: failed to verify: x509: certificate signed by unknown authority", "do not trust the registry's"),
    ("reading manifest 2: received unexpected HTTP status: 503 Service Unavailable", "the registry is down"),
    ("unauthorized: authentication required", "log in with `shoal image login REGISTRY`"),
    ("reading manifest 2 in r/lab/x: manifest unknown", "the registry has no such image or tag"),
    ("toomanyrequests: You have reached your pull rate limit", "the registry wants fewer requests"),
    ("Digest did not match, expected sha256:1, got sha256:2", "the registry returned wrong data"),
    ("invalid character '<' looking for beginning of value", "the registry returned wrong data"),
    ("write /x: no space left on device", "the disk is full"),
)
def test_message_of_skopeo_is_explained(message: str, meaning: str) -> None:
    line = f'time="2026-11-17T21:51:43Z" level=fatal msg="Error: {message}"'
    text = explain("skopeo", f"noise\n{line}\n", "r/lab/x:2", 1)
    assert text.startswith("r/lab/x:2: ") and meaning in text and message in text and "level=fatal" not in text
    assert explain("umoci", "broken\n", "", 1) == "umoci: broken"


def test_size_of_what_is_pulled_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(image_registry, "PROGRESS_INTERVAL_S", 0.01)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "one").write_bytes(bytes(2_500_000))
    shown = ""
    with image_registry.growth_shown(str(tmp_path)):
        while "\n" not in shown:
            shown += capsys.readouterr().out
    assert json.loads(shown.splitlines()[0]) == {"progress": "2 MB"}


def test_amount_that_is_sent_is_what_our_programs_have_written() -> None:
    before = image_registry.bytes_written()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as program:
        program.stdin.write(bytes(2_500_000))
        program.stdin.flush()
        while image_registry.bytes_written() < before + 2_400_000:
            time.sleep(0.01)
        program.stdin.close()


def test_logins_are_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "address").write_text("c1:5000\n")
    monkeypatch.setattr(image_registry, "OWN_REGISTRY", str(tmp_path / "address"))
    monkeypatch.setattr(image_registry, "OWN_LOGINS", str(tmp_path))
    assert image_registry.auth_options(str(tmp_path)) == []
    name = image_registry.pwd.getpwuid(image_registry.os.getuid()).pw_name
    (tmp_path / name).write_text("secret\n")
    image_registry.write_private(str(tmp_path / "auth.json"), {"auths": {"other": {"auth": "eA=="}}})
    assert image_registry.auth_options(str(tmp_path)) == ["--authfile", str(tmp_path / "auth.json")]
    assert sorted(json.loads((tmp_path / "auth.json").read_text())["auths"]) == ["c1:5000", "other"]
    assert stat.S_IMODE((tmp_path / "auth.json").stat().st_mode) == 0o600
    image_registry.logout(str(tmp_path), "other")
    assert list(json.loads((tmp_path / "auth.json").read_text())["auths"]) == ["c1:5000"]
    assert "you have no login of your own at other" in ask("logout", str(tmp_path), "other", status=3)


def test_prune_keeps_the_logins(tmp_path: Path) -> None:
    (tmp_path / "auth.json").touch()
    os.utime(tmp_path / "auth.json", (0, 0))
    ask("prune", str(tmp_path))
    assert (tmp_path / "auth.json").exists()


def cluster_of(text: str = SPEC, certificate: str = "CERT\n") -> Cluster:
    made = {registry.CA: FileFact(text=certificate), registry.ADDRESS: FileFact(there=True)} if certificate else {}
    facts = {"c1": host_facts("c1", "10.0.0.1", files=made), "n1": host_facts("n1", "10.0.0.11")}
    return assemble(spec_of(text), facts, {"c1": "10.0.0.1", "n1": "10.0.0.11"})


def test_every_host_trusts_the_registry_and_has_the_users_login() -> None:
    cluster, component = cluster_of(), ImageRegistryComponent()
    c1, n1 = cluster.members
    for member in (c1, n1):
        items = component.documents(cluster, member)[Stage.SERVICES]
        files = {item.path: item for item in items if isinstance(item, File)}
        assert files[registry.TRUSTED].content == "CERT\n" and files[registry.ADDRESS].content == "c1:5001\n"
        login = files[f"{registry.LOGINS}/ann"]
        assert (login.owner, login.mode, login.content) == ("ann", 0o400, "@PASSWORD@\n")
    server, node = (component.documents(cluster, member)[Stage.SERVICES] for member in (c1, n1))
    for service in (Service(registry.SERVICE), Service(registry.PROXY)):
        assert service in server and service not in node
    assert Secret(f"{registry.PASSWORDS}/ann", digits=48) in server
    assert [item.content for item in node if isinstance(item, File) and item.path == f"{registry.PASSWORDS}/ann"] == [
        SecretRef("registry-user-ann")
    ]
    assert component.ports(cluster.spec, c1) == ("5001",) and component.ports(cluster.spec, n1) == ()
    assert component.prepare(cluster.spec, c1, cluster.facts["c1"]) == ()
    assert component.prepare(cluster.spec, n1, cluster.facts["n1"]) == ()


def test_certificate_is_made_first() -> None:
    cluster, component = cluster_of(certificate=""), ImageRegistryComponent()
    assert component.prepare(cluster.spec, cluster.members[0], cluster.facts["c1"])


def test_registry_that_the_file_no_longer_has_is_removed() -> None:
    cluster = cluster_of(SPEC.replace("{engine: oci, registry: {port: 5001}}", "oci"))
    component = ImageRegistryComponent()
    assert component.documents(cluster, cluster.members[0]) == {Stage.SERVICES: component.removal()}
    assert component.documents(cluster, cluster.members[1]) == {}


def test_certificate_is_for_one_name(tmp_path: Path) -> None:
    make = ["sh", "-c", registry.MAKE_CERTIFICATE, "sh", "c1", str(tmp_path)]
    fits = ["sh", "-c", registry.CERTIFICATE_FITS, "sh", "c1", str(tmp_path), "1000"]
    assert subprocess.run(fits, capture_output=True).returncode != 0
    subprocess.run(make, check=True, capture_output=True)
    assert subprocess.run(fits, capture_output=True).returncode == 0
    assert subprocess.run([*fits[:4], "c2", *fits[5:]], capture_output=True).returncode != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.crt", "server.crt", "server.key"]
    text = subprocess.run(["openssl", "x509", "-in", tmp_path / "ca.crt", "-noout", "-text"], capture_output=True)
    assert b"Permitted" in text.stdout and b"CA:TRUE" in text.stdout
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600


def test_registry_is_behind_a_socket_and_deletes_nothing() -> None:
    settings = yaml.safe_load(registry.registry_config("/srv/images"))
    assert (settings["http"]["net"], settings["http"]["addr"]) == ("unix", f"{registry.SOCKET_DIRECTORY}/socket")
    assert settings["storage"]["filesystem"] == {"rootdirectory": "/srv/images"}
    assert "delete" not in settings["storage"]
    assert "RuntimeDirectory=shoal-registry\nRuntimeDirectoryMode=0700\n" in registry.drop_in()


def test_proxy_wants_a_login_and_for_writes_a_path_below_it() -> None:
    text = registry.proxy_config("c1", 5001)
    assert "\nListen 5001\n" in text and f"AuthUserFile {registry.HTPASSWD}\n" in text
    rights = [line.strip() for line in text.splitlines() if "Require" in line]
    assert rights == [
        *("<RequireAll>", "Require valid-user", "<RequireAny>", "Require method GET HEAD"),
        'Require expr "%{REQUEST_URI} =~ m#^/v2/([^/]+)/# && $1 == %{REMOTE_USER}"',
        *("</RequireAny>", "</RequireAll>"),
    ]
    unit = registry.proxy_unit()
    assert "User=docker-registry\n" in unit and f"apache2 -f {registry.PROXY_CONFIG} -DFOREGROUND\n" in unit


def test_push_below_the_name_of_another_user_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store/names").mkdir(parents=True)
    kept(tmp_path / "store", "mini")
    (tmp_path / "address").write_text("c1:5000\n")
    monkeypatch.setattr(image_registry, "OWN_REGISTRY", str(tmp_path / "address"))
    name = image_registry.own_name()
    with pytest.raises(image_registry.Problem, match=f"below your own name, such as c1:5000/{name}/{name}x/mini:2"):
        image_store.push(str(tmp_path / "store"), "mini", f"c1:5000/{name}x/mini:2")
