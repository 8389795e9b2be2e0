"""The inbox holds a program back while nobody reads, and never while somebody waits."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConnectionLost
from shoal.hosts.pipes import HIGH_WATER, Inbox, Tail


def recorded() -> tuple[Inbox, list[str]]:
    events: list[str] = []
    return Inbox(lambda: events.append("pause"), lambda: events.append("resume")), events


async def test_output_nobody_reads_holds_the_program_back() -> None:
    inbox, events = recorded()
    inbox.feed(b"x" * HIGH_WATER + b"\n")
    inbox.feed(b"short\n")
    assert events == ["pause"]
    await inbox.readline()
    assert events == ["pause", "resume"]
    assert await inbox.readline() == b"short\n"


async def test_a_line_longer_than_the_mark_still_comes_whole() -> None:
    inbox, events = recorded()
    inbox.feed(b"x" * (HIGH_WATER + 1))
    reading = asyncio.create_task(inbox.readline())
    await asyncio.sleep(0)
    assert events == ["pause", "resume"]
    inbox.feed(b"x" * HIGH_WATER)
    inbox.feed(b"\n")
    assert len(await reading) == 2 * HIGH_WATER + 2
    assert events == ["pause", "resume"]


async def test_data_delivered_while_resuming_is_not_slept_over() -> None:
    held = [b"a" * HIGH_WATER, b"\n"]

    def deliver() -> None:
        while held:
            inbox.feed(held.pop(0))

    inbox = Inbox(lambda: None, deliver)
    inbox.feed(b"a" * (HIGH_WATER + 1))
    assert len(await asyncio.wait_for(inbox.readline(), 5)) == 2 * HIGH_WATER + 2


async def test_an_error_comes_after_the_lines_that_came_before_it() -> None:
    inbox, _ = recorded()
    inbox.feed(b"one\nhalf")
    inbox.end(ConnectionLost("n1", "gone"))
    inbox.end()
    assert await inbox.readline() == b"one\n"
    with pytest.raises(ConnectionLost):
        await inbox.readline()
    with pytest.raises(ConnectionLost):
        await inbox.rest()


@given(st.binary(), st.lists(st.integers(1, 7), min_size=1))
def test_however_output_is_cut_the_lines_are_the_same(data: bytes, cuts: list[int]) -> None:
    async def read() -> list[bytes]:
        inbox, _ = recorded()
        position, turn = 0, 0
        while position < len(data):
            inbox.feed(data[position : position + cuts[turn % len(cuts)]])
            position += cuts[turn % len(cuts)]
            turn += 1
        inbox.end()
        lines = []
        while line := await inbox.readline():
            lines.append(line)
        return lines

    expected = [line + b"\n" for line in data.split(b"\n")]
    expected[-1] = expected[-1][:-1]
    assert asyncio.run(read()) == [line for line in expected if line]


@given(st.lists(st.binary(max_size=50)))
def test_a_tail_keeps_the_last_bytes(chunks: list[bytes]) -> None:
    tail, whole = Tail(16), Tail(None)
    for chunk in chunks:
        tail.feed(chunk)
        whole.feed(chunk)
    assert tail.value() == b"".join(chunks)[-16:]
    assert whole.value() == b"".join(chunks)
