"""A share that the file moves to another host: its data would stay behind, so `up` stops before any change."""

from dataclasses import replace

import pytest
from tests.support.cases import cases
from tests.support.fake_world import LAB, World, lab

from shoal.agent.facts import FileFact
from shoal.errors import ShoalError
from shoal.plan.apply import ApplyTimeouts
from shoal.roles.shares import RECORD
from shoal.verbs.context import Context
from shoal.verbs.up import plan, up

KEPT = LAB + "storage: {/data: {kind: sshfs, host: n1}}\n"
AT_ONCE = ApplyTimeouts(nodes_s=0, drain_s=0)
FIX = (
    "its files do not move by themselves: delete the share from the file and run `shoal up`, copy the files, "
    "then add it again"
)


async def brought(text: str, world: World | None = None) -> World:
    """The lab after `up` with this file, or an error; hosts then have the record that was written."""
    made = lab(text)
    if world:
        for name, agent in world.agents.items():
            made.agents[name].facts = agent.facts
    await up(Context(made.spec, connector=made.connector, registry=tuple), AT_ONCE)
    for agent in made.agents.values():
        written = agent.items.get(f"file {RECORD}", {}).get("content")
        agent.facts = replace(agent.facts, files={**agent.facts.files, RECORD: FileFact(text=written)})
    return made


@cases(
    "share, told",
    ("{kind: sshfs, host: n2}", "the file has /data of n2"),
    ("{kind: sshfs, host: n1, path: /srv/data}", "the file has /srv/data of n1"),
)
async def test_moved_share_is_rejected_before_any_change(share: str, told: str) -> None:
    world = await brought(KEPT)
    moved = lab(LAB + f"storage: {{/data: {share}}}\n")
    for name, agent in world.agents.items():
        moved.agents[name].facts = agent.facts
    context = Context(moved.spec, connector=moved.connector, registry=tuple)
    with pytest.raises(ShoalError) as caught:
        await up(context, AT_ONCE)
    what = f"n1: /data is in /data here, and {told}"
    assert str(caught.value) == f"{what}; nothing was changed\n  fix: {FIX}"
    assert moved.applied() == []
    assert f"{what}, {FIX}" in [str(finding) for finding in (await plan(context)).findings]


async def test_removed_share_can_return_on_another_host() -> None:
    without = await brought(LAB, await brought(KEPT))
    there = await brought(KEPT.replace("host: n1", "host: n2"), without)
    record = there.agents["n2"].items[f"file {RECORD}"]["content"]
    assert "keeps /data /data" in record.splitlines()
