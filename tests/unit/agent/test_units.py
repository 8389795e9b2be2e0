"""How often systemd is queried: once for the facts and the dry run after them, again before any change.

The program runs in its own mount namespace, with a script in place of systemctl.
"""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_place import Apart, Place

from shoal.agent.client import AgentSession, FactsRequest
from shoal.agent.document import File, Service

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("systemctl"), reason="needs root and systemctl")

SETUP = """
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system && cd /run/systemd/system || exit 1
touch a.service b.service c.service
mount -t tmpfs tmpfs /etc/systemd/system || exit 1
mount --bind "$1/systemctl" "$(command -v systemctl)" || exit 1
shift
exec "$@"
"""
SYSTEMCTL = """#!/bin/sh
cd "{folder}" || exit 9
if [ "$1" = show ]; then
    while [ "$1" != -- ]; do shift; done; shift
fi
echo "$*" >> calls
[ "$1" != daemon-reload ] || exit 0
for name; do
    reload=$(grep -qs "$name" old && echo yes || echo no)
    load=$(grep -qs "$name" unread && echo error || echo loaded)
    printf 'Id=%s\\nFragmentPath=/etc/systemd/system/%s\\n' "$name" "$name"
    printf 'LoadState=%s\\nActiveState=%s\\nUnitFileState=enabled\\n' "$load" "$(cat state)"
    printf 'NeedDaemonReload=%s\\n\\n' "$reload"
done
"""


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    (tmp_path / "systemctl").write_text(SYSTEMCTL.format(folder=tmp_path))
    (tmp_path / "systemctl").chmod(0o755)
    (tmp_path / "state").write_text("active")
    async with await AgentSession.open(Apart(tmp_path, SETUP), state=str(tmp_path / "kept")) as opened:
        yield Place(tmp_path, opened)


def calls(place: Place) -> list[str]:
    return (place.folder / "calls").read_text().splitlines()


async def test_dry_run_reuses_the_states_of_the_facts_before(place: Place) -> None:
    facts = await place.session.facts(FactsRequest(services=("a", "b")))
    assert facts.services == {"a": "active", "b": "active"}
    assert [item.status for item in await place.check(Service("a"), Service("b"))] == ["ok", "ok"]
    assert calls(place) == ["a b"]
    assert [item.status for item in await place.check(Service("b"), Service("c"), Service("a"))] == ["ok"] * 3
    assert calls(place) == ["a b", "b c a"]


async def test_facts_and_changes_read_the_current_state(place: Place) -> None:
    await place.session.facts(FactsRequest(services=("a",)))
    (place.folder / "state").write_text("failed")
    assert (await place.session.facts(FactsRequest(services=("a",)))).services == {"a": "failed"}
    (place.folder / "state").write_text("active")
    assert (await place.apply(Service("a")))[0].status == "ok" and calls(place) == ["a", "a", "a"]


async def test_systemd_is_not_asked_for_units_that_no_file_describes(place: Place) -> None:
    facts = await place.session.facts(FactsRequest(services=("a", "nothing", "x.timer")))
    assert facts.services == {"a": "active", "nothing": "missing", "x.timer": "missing"} and calls(place) == ["a"]


async def test_systemd_reads_all_units_again_only_where_it_has_an_older_one(place: Place) -> None:
    (place.folder / "state").write_text("inactive")
    unit = "/etc/systemd/system/new.service"
    assert (await place.apply(File(unit, "[Service]\n")))[0].status == "changed" and calls(place) == ["new.service"]
    (place.folder / "old").write_text("new.service\n")
    assert (await place.apply(File(f"{unit}.d/more.conf", "[Service]\n")))[0].status == "changed"
    assert calls(place)[1:] == ["daemon-reload"]


async def test_systemd_reads_again_what_ran_on_while_it_had_no_file(place: Place) -> None:
    """Of a unit whose file came back while its last run went on, systemd 252 says `error`: no timer of it starts."""
    (place.folder / "state").write_text("inactive")
    (place.folder / "unread").write_text("again.service\n")
    assert (await place.apply(File("/etc/systemd/system/again.service", "[Service]\n")))[0].status == "changed"
    assert "daemon-reload" in calls(place)
