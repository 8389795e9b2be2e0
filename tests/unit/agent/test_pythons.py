"""The program on the Pythons that hosts have: every version that this machine has, old ones too."""
# ruff: noqa: ASYNC240 - a test has nothing else to wait for

import shutil
from pathlib import Path

import pytest
from agent_place import Place, WithPython
from tests.support.cases import cases

from shoal.agent.client import AgentSession, FactsRequest
from shoal.agent.document import Block, Command, SecretRef
from shoal.errors import AgentFailed

TOO_OLD = ("3.6", "3.7")
GOOD = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14")


def interpreter(version: str) -> str:
    """Where this Python is: on the PATH, or among those that pyenv keeps."""
    kept = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python{version}"))
    found = shutil.which(f"python{version}", path="/usr/bin:/usr/local/bin") or next(map(str, kept), "")
    return found or pytest.skip(f"no python{version} here")


@cases("version", *GOOD)
async def test_document_converges_and_facts_are_reported(tmp_path: Path, version: str) -> None:
    async with await AgentSession.open(WithPython([interpreter(version)]), state=f"{tmp_path}/state") as session:
        place = Place(tmp_path, session)
        ask = FactsRequest(
            packages=("dpkg",), users=("root", "nobody-at-all"), files={"/etc/hostname": "hash"}, services=("x",)
        )
        facts = await session.facts(ask)
        assert facts.python.startswith(f"{version}.") and facts.users["root"].id == 0 and facts.addresses
        Path(place.path("hosts")).write_text("old\n")
        items = (
            place.directory("etc"),
            place.file("etc/conf", "väl=1\n", reloads=("command copy",)),
            place.file("etc/key", SecretRef("key"), mode=0o400),
            Block(place.path("hosts"), "members", "10.0.0.1 a\n"),
            Command("copy", ("cp", place.path("etc/conf"), place.path("copy")), on_change=True),
            Command("guarded", ("touch", place.path("there")), unless=("test", "-e", place.path("there"))),
        )
        planned = await place.check(*items)
        assert {item.status for item in planned} == {"change"}
        assert "+väl=1" in planned[1].diff and planned[2].diff == "(secret)"
        assert {item.status for item in await place.apply(*items, key=b"abc")} == {"changed"}
        assert {item.status for item in await place.apply(*items, key=b"abc")} == {"ok"}
        assert Path(place.path("copy")).read_text() == "väl=1\n" and Path(place.path("etc/key")).read_bytes() == b"abc"
        failed, skipped = await place.apply(Command("bad", ("sh", "-c", "echo no; exit 3")), place.file("x", "x"))
        assert (failed.detail, skipped.status) == ("bad ended with status 3\nno", "skipped")


@cases("version", *TOO_OLD)
async def test_older_python_is_rejected_with_its_version(tmp_path: Path, version: str) -> None:
    with pytest.raises(AgentFailed) as caught:
        async with await AgentSession.open(WithPython([interpreter(version)]), state=f"{tmp_path}/state") as session:
            await session.facts()
    assert f"its python3 is version {version}, and Shoal needs 3.8 or newer" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
