"""`auth: slurm`: the same keys on all hosts, hosts that cannot use it and why, and the cost of a switch."""

import json

import pytest
from tests.support.fake_world import host_facts, slurm_package, spec_of
from tests.support.role_items import items_of, text_of
from tests.support.specs import WITH_LOGIN

from shoal.agent.document import SecretRef
from shoal.agent.facts import FileFact
from shoal.errors import SpecError, VersionMismatch
from shoal.plan.diff import cluster_goal
from shoal.plan.observe import Observation
from shoal.roles.assembly import assemble
from shoal.roles.auth import KEY, NEXT_KEY, key_files
from shoal.roles.component import Cluster
from shoal.roles.registry import preparation, shared_secrets
from shoal.slurm.conf import JWKS, SigningKey, jwks, slurm_conf
from shoal.slurm.parsed_conf import loses_jobs
from shoal.spec.members import members

TEXT = WITH_LOGIN + "accounting: true\n"
SLURM = TEXT + "auth: slurm\n"
ADDRESSES = {"c1": "10.0.0.1", "door": "10.0.0.2", "n1": "10.0.0.11"}
DIGEST = "a" * 64


def cluster(text: str = SLURM, **files: FileFact) -> Cluster:
    found = {
        name: host_facts(name, at, packages=slurm_package("24.11.5"), files=files) for name, at in ADDRESSES.items()
    }
    return assemble(spec_of(text), found, ADDRESSES)


def with_key(text: str = SLURM, **more: FileFact) -> Cluster:
    return cluster(text, **{KEY: FileFact(DIGEST), JWKS: FileFact(there=True), **more})


def test_every_host_gets_the_key_by_digest_and_a_file_for_slurm() -> None:
    for name in ADDRESSES:
        found = items_of(with_key(), name)
        key, file = found[f"file {KEY}"], found[f"file {JWKS}"]
        assert key.content == SecretRef("slurm-key", DIGEST) and key.mode == 0o400
        assert (file.owner, file.mode, file.fills) == ("slurm", 0o600, (("@KEY@", KEY),))
        [entry] = json.loads(str(file.content))["keys"]
        assert entry == {"alg": "HS256", "kty": "oct", "kid": "shoal-" + "a" * 12, "k": "@KEY@", "use": "default"}


def test_unfinished_rotation_writes_both_keys_and_the_old_key_signs() -> None:
    file = items_of(with_key(**{NEXT_KEY: FileFact("b" * 64)}), "n1")[f"file {JWKS}"]
    old, new = json.loads(str(file.content))["keys"]
    assert (old["kid"], old.get("use")) == ("shoal-" + "a" * 12, "default")
    assert (new["kid"], new.get("use")) == ("shoal-" + "b" * 12, None)


def test_controller_generates_a_key_before_planning_and_keeps_the_key() -> None:
    spec = spec_of(SLURM)
    controller, door, _ = members(spec)
    fresh = host_facts("c1", "10.0.0.1", files={})
    assert [item.key for item in preparation(spec, controller, fresh)] == ["directory /etc/shoal", f"secret {KEY}"]
    assert preparation(spec, door, fresh) == ()
    assert preparation(spec, controller, host_facts("c1", "10.0.0.1", files={KEY: FileFact(DIGEST)})) == ()
    kept = {name: kept.host for name, kept in shared_secrets(spec).items()}
    assert kept == {"slurm-key": "c1", "slurm-key-next": "c1"}


def test_login_host_runs_sackd() -> None:
    assert "service sackd" in items_of(with_key(), "door") and "service sackd" not in items_of(with_key(), "n1")


def test_slurm_and_slurmdbd_accept_both_auth_types() -> None:
    both = "AuthType=auth/slurm\nAuthAltTypes=auth/munge\n"
    assert f"{both}CredType=cred/slurm\n" in text_of(with_key(), "c1", "/etc/slurm/slurm.conf")
    assert both in text_of(with_key(), "c1", "/etc/slurm/slurmdbd.conf")


def test_cluster_without_auth_slurm_has_no_key_and_removes_old_files() -> None:
    before = items_of(cluster(TEXT), "n1")
    assert not any("slurm.jwks" in key or "slurm.key" in key for key in before)
    assert items_of(with_key(TEXT), "n1")[f"file {JWKS}"].content is None


def test_change_to_auth_slurm_costs_no_job_and_the_return_does() -> None:
    old, new = slurm_conf(cluster(TEXT).conf), slurm_conf(with_key().conf)
    assert not loses_jobs(old, new) and loses_jobs(new, old)


def test_older_slurm_is_rejected_for_each_host() -> None:
    found = {
        name: host_facts(name, at, packages=slurm_package("22.05.8" if name != "c1" else "23.11.4"))
        for name, at in ADDRESSES.items()
    }
    with pytest.raises(VersionMismatch) as caught:
        cluster_goal(spec_of(SLURM), Observation(found), ADDRESSES)
    assert "n1: `auth: slurm` needs Slurm 24.05 or later, found Slurm 22.05.8" in str(caught.value)
    assert "delete `auth: slurm` from the file" in str(caught.value)


def test_unknown_auth_is_rejected() -> None:
    with pytest.raises(SpecError, match='unknown auth, found "kerberos", choose one of munge, slurm'):
        spec_of(TEXT + "auth: kerberos\n")


def test_only_the_chosen_key_signs() -> None:
    flipped = jwks(SigningKey("@A@", "a" * 64), SigningKey("@B@", "b" * 64, signs=True))
    assert [entry.get("use") for entry in json.loads(flipped)["keys"]] == [None, "default"]
    file = key_files("a" * 64, "b" * 64, flipped=True)[-1]
    assert [entry.get("use") for entry in json.loads(str(file.content))["keys"]] == [None, "default"]
