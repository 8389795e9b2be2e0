"""Secrets of the user: needed once for each host, not at every `shoal up`, and checked before any change."""

import hashlib

import pytest
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_clusters import AT_ONCE, Sandbox, context_of
from tests.support.fake_world import LAB, World, lab

from shoal.errors import UsageError
from shoal.roles.elastic import KEYS
from shoal.spec.model import Spec
from shoal.verbs.check import check
from shoal.verbs.context import Context
from shoal.verbs.up import plan, up

KEY = "secret_abcdef0123"
CLOUD = "  cloud: {provider: lambda, type: gpu_1x_a10, max: 3, image: debian-12}\n"
PROVIDERS = "providers: {lambda: {key: env:LAMBDA_API_KEY}}\n"
RENTING = LAB.replace("partitions:", CLOUD + "partitions:") + PROVIDERS
CHANGED = RENTING.replace("default: true", "default: true, max_time: 60")
NOT_SET = "providers.lambda.key is env:LAMBDA_API_KEY, and LAMBDA_API_KEY is not set"
WIREGUARD = "network: wireguard\n"


def key_of(world: World) -> str:
    """The digest of the key that the controller has."""
    return str(world.agents["c1"].items[f"file {KEYS}/lambda"]["sha256"])


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def up_with_the_key(monkeypatch: pytest.MonkeyPatch) -> World:
    """A cluster that was brought up with the key in the environment, where it no longer is."""
    monkeypatch.setenv("LAMBDA_API_KEY", KEY)
    world = lab(RENTING)
    assert (await up(context_of(world), AT_ONCE)).whole
    world.look_again()
    assert key_of(world) == digest(KEY)
    monkeypatch.delenv("LAMBDA_API_KEY")
    return world


async def test_host_keeps_a_secret_that_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    world = await up_with_the_key(monkeypatch)
    assert (await up(context_of(world), AT_ONCE)).unchanged
    result = await up(context_of(world, CHANGED), AT_ONCE)
    assert result.whole and "c1" in result.changed
    assert "MaxTime=60 " in world.slurm.conf
    assert key_of(world) == digest(KEY)
    world.look_again()
    monkeypatch.setenv("LAMBDA_API_KEY", "secret_another")
    assert (await up(context_of(world, CHANGED), AT_ONCE)).changed == ("c1",)
    assert key_of(world) == digest("secret_another")


@cases("network", "", WIREGUARD)
async def test_missing_secret_is_reported_before_any_change(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAMBDA_API_KEY", raising=False)
    kernel = {"tun": True, "modules": ("wireguard",)}
    world = lab(RENTING + network, c1=kernel, n1=kernel, n2=kernel)
    assert await error_of(UsageError, up(context_of(world), AT_ONCE)) == (
        f"{NOT_SET}\nno host has it yet; nothing was changed\n  fix: export LAMBDA_API_KEY=..."
    )
    assert world.applied() == world.applied("secret") == []


async def test_plan_and_check_report_a_missing_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAMBDA_API_KEY", raising=False)
    told = f"{NOT_SET}; no host has it yet, export LAMBDA_API_KEY=..."
    world = lab(RENTING)
    assert [str(finding) for finding in (await plan(context_of(world))).findings] == [told]
    assert ("error", told) in [(finding.level, str(finding)) for finding in await check(context_of(world))]


async def test_no_host_is_created_without_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAMBDA_API_KEY", raising=False)
    sandbox = Sandbox()
    base = sandbox.context()
    renting = base.spec.model_dump(exclude_defaults=True, mode="json")
    renting["nodesets"]["cloud"] = {"provider": "lambda", "type": "gpu_1x_a10", "max": 3}
    renting["providers"] = {"lambda": {"key": "env:LAMBDA_API_KEY"}}
    spec = Spec.model_validate(renting)
    context = Context(spec, connector=sandbox.world.connector, providers=lambda name: sandbox.provider)
    with pytest.raises(UsageError, match="LAMBDA_API_KEY is not set\nno host has it yet; nothing was changed"):
        await up(context, AT_ONCE)
    assert sandbox.provider.clusters == {}
