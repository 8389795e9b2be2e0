"""`environments`, `proxy`, `tracking` and `time`: valid values, and the findings about invalid ones."""

import pytest
from tests.support.cases import cases
from tests.support.errors import error_text

from shoal.errors import SpecError
from shoal.spec.loader import load_text
from shoal.spec.model import Spec

BASE = "cluster: reef\ncontroller: {host: desktop, compute: true}\n"


LAB = "nodesets: {lab: {hosts: [n1]}}\n"


def spec(text: str) -> Spec:
    return load_text(BASE + text, "shoal.yaml")


def said(text: str) -> str:
    return error_text(SpecError, spec, text)


def test_environment_has_its_defaults_and_a_version_selects_the_versioned_program() -> None:
    found = spec("environments: {torch: {requirements: reqs.txt}}").environments["torch"]
    assert (found.python, found.place, found.directory) == ("python3", "shared", None)
    assert spec('environments: {t: {lock: a.txt, python: "3.11"}}').environments["t"].python == "python3.11"
    assert spec("environments: {t: {lock: a.txt, python: /opt/p/bin/python3}}").environments["t"].python[0] == "/"


@cases(
    "text, words",
    ("environments: {torch: {}}", "nothing says what is in it, add one of `requirements`, `lock` and `pyproject`"),
    ("environments: {torch: {lock: a, pyproject: b}}", "both `lock` and `pyproject`, keep one, delete the other"),
    ("environments: {Torch: {lock: a}}", "not a name for an environment"),
    ("environments: {torch: {lock: a, place: there}}", "unknown place"),
    ("environments: {torch: {lock: a, python: 3.11}}", 'put it in quotes: "3.11"'),
    ("environments: {torch: {lock: a, python: rm -rf}}", "not a Python"),
    ("environments: {torch: {lock: a, directory: apps}}", "not a directory on the hosts"),
    ("environments: {torch: {lock: a, directory: /a/../b}}", "not a directory on the hosts"),
    ("proxy: {}", "neither `http` nor `https`"),
    ("proxy: {http: proxy:3128}", "not the address of a proxy"),
    ("proxy: {http: 'http://p:99999999'}", "not the address of a proxy"),
    ("proxy: {http: 'http://p:1', no_proxy: 'a b'}", "not a list of hosts"),
    ("tracking: wandb", "unknown tracking server"),
    ("tracking: [mlflow]", "not a tracking server"),
    ("tracking: {database: oracle}", "unknown database"),
    ("tracking: {url: ftp://x}", "not the address of a tracking server"),
    ("tracking: {url: https://x.org, database: postgresql}", "`database` for a server that is there already"),
    ("tracking: {host: desktp}", 'the server\'s host is not in the cluster, found "desktp", did you mean `desktop`?'),
    (
        LAB + "storage: {/apps: {host: n1, read_only: true}}\ntracking: {artifacts: /apps/mlflow}",
        '/apps is read-only on the server\'s host, found "/apps/mlflow", name another directory, or `host: n1`',
    ),
    (
        LAB + "storage: {/data: {kind: stage}}\ntracking: {host: n1, artifacts: /data}",
        '/data is a copy on the server\'s host, found "/data", name another directory, or `host: desktop`',
    ),
    ("time: ntp", "unknown time service"),
)
def test_invalid_value_is_reported_with_the_fix(text: str, words: str) -> None:
    assert words in said(text)


@cases("text", "proxy: {http: 'http://me:hunter2@p:1'}", "tracking: {url: 'https://me:hunter2@t.org'}")
def test_password_is_rejected_and_not_shown(text: str) -> None:
    words = said(text)
    assert "password" in words and "hunter2" not in words


def test_https_proxy_defaults_to_the_http_proxy() -> None:
    proxy = spec("proxy: {http: 'http://p.org:3128', no_proxy: [localhost, 10.0.0.0/8]}").proxy
    assert proxy and proxy.variables == {
        "http_proxy": "http://p.org:3128",
        "https_proxy": "http://p.org:3128",
        "no_proxy": "localhost,10.0.0.0/8",
    }


def test_tracking_is_a_string_or_a_mapping() -> None:
    word = spec("tracking: mlflow").tracking
    assert word and (word.kind, word.host, word.database, word.port, word.url) == ("mlflow", None, "sqlite", 5000, None)
    given = spec("tracking: {host: desktop, database: postgresql, artifacts: /shared/mlflow}").tracking
    assert given and (given.host, given.database, given.artifacts) == ("desktop", "postgresql", "/shared/mlflow")
    there = spec("tracking: {url: https://tracking.example.org/}").tracking
    assert there and there.url == "https://tracking.example.org"


def test_registry_and_mlflow_have_different_ports() -> None:
    both = "tracking: mlflow\ncontainers: {registry: true}"
    made = spec(both)
    assert made.tracking and made.containers and made.containers.registry
    assert made.containers.registry.port != made.tracking.port
    same = "containers: {registry: {port: 5000}}"
    with pytest.raises(SpecError, match="the registry and MLflow both have port 5000 of the controller"):
        spec(f"tracking: mlflow\n{same}")
    assert spec(f"tracking: {{url: https://tracking.example.org}}\n{same}").containers
