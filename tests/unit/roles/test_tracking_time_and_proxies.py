"""The documents for tracking, time and packages, and what is removed with them."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.goldens import assert_golden
from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of
from tests.support.specs import ONE_NODE

from shoal.agent.document import Command, Document, File, SecretRef, Service
from shoal.agent.facts import Facts, FileFact
from shoal.roles.assembly import assemble
from shoal.roles.clock import CONF, DROP_IN, ClockComponent
from shoal.roles.component import Cluster, Stage
from shoal.roles.environments import APT_PROXY, EnvironmentsComponent, apt_proxy, builder_of, directory_of
from shoal.roles.tracking import OWN_DISK, RECORD, TrackingComponent
from shoal.tracking import login, mlflow

REEF = ONE_NODE
CONTAINER = {"/run/systemd/container": FileFact(there=True)}


def cluster_of(more: str = "", **changes: dict[str, Any]) -> Cluster:
    addresses = {"c1": "10.0.0.1", "n1": "10.0.0.11"}
    facts = {name: replace(host_facts(name, at), **changes.get(name, {})) for name, at in addresses.items()}
    return assemble(spec_of(REEF + more), facts, addresses)


def asked(part: Any, cluster: Cluster, name: str, stage: Stage = Stage.SERVICES) -> Document:
    member = next(member for member in cluster.members if member.name == name)
    return part.documents(cluster, member).get(stage, ())


def keys(document: Document) -> list[str]:
    return [item.key for item in document]


def file(document: Document, path: str) -> File:
    [found] = [item for item in document if isinstance(item, File) and item.path == path]
    return found


# Tracking


def test_server_is_on_the_controller_and_its_port_is_firewalled() -> None:
    part, cluster = TrackingComponent(), cluster_of("tracking: mlflow\n")
    controller, node = cluster.members
    assert part.ports(cluster.spec, controller) == ("5000",) and part.ports(cluster.spec, node) == ()
    assert part.packages(cluster.spec, controller, None) == ("python3-venv",) and asked(part, cluster, "n1") == ()


@cases("database", "sqlite", "postgresql")
def test_service_document_matches_its_golden(database: str) -> None:
    document = asked(TrackingComponent(), cluster_of(f"tracking: {{database: {database}}}\n"), "c1")
    files = [item for item in document if isinstance(item, File) and isinstance(item.content, str)]
    text = "".join(f"==== {item.path} {item.owner}:{item.group} {item.mode:04o}\n{item.content}" for item in files)
    unlike = "tracking/sqlite.txt" if database == "postgresql" else ""
    assert_golden(f"tracking/{database}.txt", "\n".join(keys(document)) + "\n" + text, unlike)


def test_server_listens_only_on_the_cluster_address_and_allows_its_names() -> None:
    text = file(asked(TrackingComponent(), cluster_of("tracking: {port: 5050}\n"), "c1"), mlflow.UNIT).content
    assert "--host 10.0.0.1 --port 5050 " in text
    assert "--allowed-hosts 10.0.0.1:5050,c1:5050,localhost:*,127.0.0.1:*\n" in text


def test_passwords_are_generated_and_inserted_on_the_host() -> None:
    document = asked(TrackingComponent(), cluster_of("tracking: mlflow\n"), "c1")
    for path, word, source in (
        (mlflow.AUTH, "@PASSWORD@", login.ADMIN_PASSWORD),
        (mlflow.VARIABLES, "@KEY@", mlflow.SESSION_KEY),
    ):
        found = file(document, path)
        assert found.fills == ((word, source),) and word in str(found.content) and not found.mode & 0o007
    assert [key for key in keys(document) if key.startswith("secret ")] == [
        f"secret {path}" for path in (login.ADMIN_PASSWORD, login.JOBS_PASSWORD, mlflow.SESSION_KEY)
    ]


def test_controller_gets_only_the_job_password_of_a_server_on_another_host() -> None:
    known = {login.JOBS_PASSWORD: FileFact(sha256="ab")}
    part, cluster = TrackingComponent(), cluster_of("tracking: {host: n1}\n", n1={"files": known})
    document = asked(part, cluster, "c1")
    assert file(document, login.JOBS_PASSWORD).content == SecretRef("mlflow-jobs", "ab")
    assert file(document, login.JOBS_PASSWORD).mode == 0o400
    assert file(document, login.ADDRESS).content == '{"uri": "http://10.0.0.11:5000", "username": "jobs"}\n'
    assert part.shared_secrets(cluster.spec)["mlflow-jobs"].host == "n1"
    assert f"service {mlflow.SERVICE}" in keys(asked(part, cluster, "n1"))
    assert f"service {mlflow.SERVICE}" not in keys(document)


def test_artifacts_on_a_remote_share_wait_for_the_mount_and_use_the_server_user() -> None:
    """NFS maps root to nobody, and the mount would hide files that were made before it."""
    share = "storage: {/data: {host: n1}}\n"
    part, cluster = TrackingComponent(), cluster_of(share + "tracking: {artifacts: /data/mlflow}\n")
    assert not any("mlflow" in key for key in keys(asked(part, cluster, "c1")))
    later = asked(part, cluster, "c1", Stage.NODES)
    assert "directory /data/mlflow" not in keys(later) and f"service {mlflow.SERVICE}" in keys(later)
    [make] = [item for item in later if item.key == "command make /data/mlflow"]
    assert make.argv == ("runuser", "-u", "shoal-mlflow", "--", "mkdir", "-p", "-m", "0700", "/data/mlflow")
    assert make.fix == "make /data on n1 writable for all, or run the server there: `host: n1`"
    near = cluster_of(share + "tracking: {host: n1, artifacts: /data/mlflow}\n")
    assert "directory /data/mlflow" in keys(asked(part, near, "n1"))


SHARES = """
storage:
  /home: {}
  /apps: {read_only: true}
  /near: {kind: sshfs}
  /far: {host: n1}
  /data: {path: /srv/data}
"""
ON_THE_SHARE = "/srv/data/shoal-mlflow"


def artifacts(cluster: Cluster, host: str = "c1") -> str:
    """The server gets the directory for files; the directory is made, and its name is recorded."""
    document = asked(TrackingComponent(), cluster, host)
    [path] = str(file(document, RECORD).content).splitlines()
    assert f"directory {path}" in keys(document)
    assert f" --artifacts-destination {path} " in str(file(document, mlflow.UNIT).content)
    return path


@cases(
    "more, host, expected",
    ("tracking: mlflow\n", "c1", OWN_DISK),
    ("tracking: mlflow\n" + SHARES, "c1", ON_THE_SHARE),
    ("tracking: {host: n1}\n" + SHARES, "n1", "/far/shoal-mlflow"),
    ("tracking: {artifacts: /disk/files}\n" + SHARES, "c1", "/disk/files"),
    ("tracking: mlflow\nstorage: {/home: {}, /far: {host: n1}}\n", "c1", OWN_DISK),
)
def test_artifacts_of_a_new_server_use_the_first_local_writable_share(more: str, host: str, expected: str) -> None:
    cluster = cluster_of(more)
    assert artifacts(cluster, host) == expected and TrackingComponent().findings(cluster) == ()


@cases(
    "files, expected",
    ({OWN_DISK: FileFact(there=True)}, OWN_DISK),
    ({OWN_DISK: FileFact(there=True), RECORD: FileFact(text=f"{OWN_DISK}\n")}, OWN_DISK),
    ({OWN_DISK: FileFact(there=True), RECORD: FileFact(text="/old/files\n")}, "/old/files"),
    ({OWN_DISK: FileFact(there=False), RECORD: FileFact()}, ON_THE_SHARE),
)
def test_artifacts_stay_in_place_when_a_share_is_added(files: dict[str, FileFact], expected: str) -> None:
    assert artifacts(cluster_of("tracking: mlflow\n" + SHARES, c1={"files": files})) == expected


def test_artifacts_outside_a_share_are_reported_with_the_setting() -> None:
    cluster = cluster_of("tracking: mlflow\n" + SHARES, c1={"files": {OWN_DISK: FileFact(there=True)}})
    [finding] = TrackingComponent().findings(cluster)
    assert (finding.level, str(finding)) == (
        "info",
        "c1 tracking: files of runs stay on the disk of c1: they are older than the share, found "
        "/var/lib/shoal-mlflow/artifacts, set `artifacts: /srv/data/shoal-mlflow` to store them on the share",
    )


def test_changed_artifact_directory_is_a_warning_with_the_copy_command() -> None:
    before = {RECORD: FileFact(text="/old/files\n")}
    cluster = cluster_of("tracking: {artifacts: /new/files}\n", c1={"files": before})
    assert artifacts(cluster) == "/new/files"
    [finding] = TrackingComponent().findings(cluster)
    assert (finding.level, str(finding)) == (
        "warning",
        "c1 tracking.artifacts: files of earlier runs stay in /old/files, where the server does not find them, found "
        "`artifacts: /new/files`, copy them: `shoal ssh c1 cp -a /old/files/. /new/files/`",
    )


def test_external_server_has_no_artifact_findings() -> None:
    cluster = cluster_of("tracking: {url: https://t.example.org}\n" + SHARES)
    assert TrackingComponent().findings(cluster) == ()
    assert RECORD not in " ".join(keys(asked(TrackingComponent(), cluster, "c1")))


def test_external_server_only_sets_the_address_for_jobs() -> None:
    document = asked(TrackingComponent(), cluster_of("tracking: {url: https://t.example.org}\n"), "c1")
    assert file(document, login.ADDRESS).content == '{"uri": "https://t.example.org"}\n'
    assert keys(document) == ["directory /etc/shoal", f"file {login.ADDRESS}"]


def test_removed_server_is_stopped_and_its_data_stays() -> None:
    there = {mlflow.UNIT: FileFact(there=True), login.ADDRESS: FileFact(there=True)}
    document = asked(TrackingComponent(), cluster_of(c1={"files": there}), "c1")
    assert document == (Service(mlflow.SERVICE, enabled=False, running=False), File(mlflow.UNIT), File(login.ADDRESS))


def test_packages_are_installed_through_the_proxy() -> None:
    cluster = cluster_of("tracking: mlflow\nproxy: {http: 'http://p.example.org:3128'}\n")
    [install] = [
        item
        for item in asked(TrackingComponent(), cluster, "c1")
        if isinstance(item, Command) and item.name.startswith("install")
    ]
    assert install.argv[:3] == ("env", "http_proxy=http://p.example.org:3128", "https_proxy=http://p.example.org:3128")
    assert install.argv[-1] == f"mlflow[auth]=={mlflow.VERSION}"


# Time


@cases("name", "c1", "n1")
def test_container_runs_no_time_service(name: str) -> None:
    cluster = cluster_of(**{name: {"files": CONTAINER}})
    assert asked(ClockComponent(), cluster, name, Stage.BASE) == ()
    other = "n1" if name == "c1" else "c1"
    assert keys(asked(ClockComponent(), cluster, other, Stage.BASE))[0] == "packages chrony"


def test_host_without_systemd_counts_as_a_container() -> None:
    assert asked(ClockComponent(), cluster_of(n1={"init": "none"}), "n1", Stage.BASE) == ()


@cases("daemon", "ntpsec", "ntp", "openntpd")
def test_existing_time_daemon_is_kept_and_reported(daemon: str) -> None:
    cluster = cluster_of(n1={"services": {daemon: "active"}})
    assert asked(ClockComponent(), cluster, "n1", Stage.BASE) == ()
    [finding] = ClockComponent().findings(cluster)
    assert (finding.level, finding.host) == ("info", "n1") and daemon in finding.what


def test_disabled_time_service_removes_the_shoal_files() -> None:
    ours = {CONF: FileFact(sha256="ab")}
    assert asked(ClockComponent(), cluster_of("time: none\n"), "n1", Stage.BASE) == ()
    assert keys(asked(ClockComponent(), cluster_of("time: none\n", n1={"files": ours}), "n1", Stage.BASE)) == [
        f"file {CONF}",
        f"file {DROP_IN}",
    ]


# Packages


def prepared(more: str, facts: Facts) -> Document:
    spec = spec_of(REEF + more)
    return EnvironmentsComponent().prepare(spec, cluster_of().members[1], facts)


def test_apt_gets_its_proxy_before_any_package() -> None:
    [item] = prepared("proxy: {http: 'http://p:1', no_proxy: [deb.local, 10.0.0.0/8]}\n", Facts())
    assert (item.path, item.content) == (
        APT_PROXY,
        "# Written by shoal; changes here are lost.\n"
        'Acquire::http::Proxy "http://p:1";\n'
        'Acquire::http::Proxy::deb.local "DIRECT";\n'
        'Acquire::https::Proxy "http://p:1";\n'
        'Acquire::https::Proxy::deb.local "DIRECT";\n',
    )
    there = Facts(files={APT_PROXY: FileFact(text=item.content)})
    assert prepared("proxy: {http: 'http://p:1', no_proxy: [deb.local, 10.0.0.0/8]}\n", there) == ()


def test_apt_accepts_the_proxy_settings(tmp_path: Path) -> None:
    proxy = spec_of(REEF + "proxy: {http: 'http://p:1', https: 'http://q:2', no_proxy: [deb.local]}\n").proxy
    assert proxy
    (tmp_path / "apt.conf").write_text(apt_proxy(proxy))
    read = {**os.environ, "APT_CONFIG": str(tmp_path / "apt.conf")}
    said = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True, env=read).stdout
    for line in ('http::Proxy "http://p:1"', 'https::Proxy "http://q:2"', 'http::Proxy::deb.local "DIRECT"'):
        assert f"Acquire::{line};\n" in said


def test_removed_proxy_is_deleted_and_an_absent_proxy_costs_nothing() -> None:
    assert prepared("", Facts()) == () and prepared("", Facts(files={APT_PROXY: FileFact()})) == ()
    assert prepared("", Facts(files={APT_PROXY: FileFact(text="old")})) == (File(APT_PROXY),)


def test_only_the_controller_of_a_cluster_with_environments_needs_venv() -> None:
    spec = spec_of(REEF + "environments: {torch: {requirements: r.txt}}\n")
    controller, node = cluster_of().members
    assert EnvironmentsComponent().packages(spec, controller, None) == ("python3-venv",)
    assert EnvironmentsComponent().packages(spec, node, None) == ()
    assert EnvironmentsComponent().packages(spec_of(REEF), controller, None) == ()
    users = spec_of(REEF + "users: {ann: {}}\n")
    assert EnvironmentsComponent().packages(users, controller, None) == ("python3-venv",), "for their own"
    assert EnvironmentsComponent().packages(users, node, None) == ()
    needy = {name: entry.with_git() for name, entry in spec.environments.items()}
    with_git = spec.model_copy(update={"environments": needy})
    assert EnvironmentsComponent().packages(with_git, controller, None) == ("python3-venv", "git")
    assert EnvironmentsComponent().packages(with_git, node, None) == ()


@cases(
    "storage, directory, builder",
    ("", "/shared/environments", "c1"),
    ("storage: {/apps: {read_only: true}}\n", "/apps/environments", "c1"),
    ("storage: {/home: {}, /scratch: {kind: stage}, /apps: {host: n1}}\n", "/apps/environments", "n1"),
    ("storage: {/home: {}}\n", "/shared/environments", "c1"),
)
def test_environment_is_on_the_first_share_and_built_by_its_host(storage: str, directory: str, builder: str) -> None:
    spec = spec_of(REEF + "environments: {torch: {requirements: r.txt}}\n" + storage)
    entry = spec.environments["torch"]
    assert (directory_of(spec, entry), builder_of(spec, entry)) == (directory, builder)
    needs = [one.name for one in cluster_of().members if EnvironmentsComponent().packages(spec, one, None)]
    assert needs == [builder]


def test_configured_directory_is_used_and_built_by_its_host() -> None:
    more = (
        "environments: {torch: {requirements: r.txt, directory: /data/envs}}\nstorage: {/apps: {}, /data: {host: n1}}\n"
    )
    spec = spec_of(REEF + more)
    entry = spec.environments["torch"]
    assert (directory_of(spec, entry), builder_of(spec, entry)) == ("/data/envs", "n1")
