"""The buffer blocks a program while its output is not read, and never while a reader waits."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConnectionLost
from shoal.hosts.process import HIGH_WATER, OutputBuffer, OutputTail


def recorded() -> tuple[OutputBuffer, list[str]]:
    events: list[str] = []
    return OutputBuffer(lambda: events.append("pause"), lambda: events.append("resume")), events


async def test_unread_output_pauses_the_program() -> None:
    buffer, events = recorded()
    buffer.feed(b"x" * HIGH_WATER + b"\n")
    buffer.feed(b"short\n")
    assert events == ["pause"]
    await buffer.readline()
    assert events == ["pause", "resume"] and await buffer.readline() == b"short\n"


async def test_line_longer_than_the_high_water_mark_is_read_whole() -> None:
    buffer, events = recorded()
    buffer.feed(b"x" * (HIGH_WATER + 1))
    reading = asyncio.create_task(buffer.readline())
    await asyncio.sleep(0)
    assert events == ["pause", "resume"]
    buffer.feed(b"x" * HIGH_WATER)
    buffer.feed(b"\n")
    assert len(await reading) == 2 * HIGH_WATER + 2 and events == ["pause", "resume"]


async def test_data_delivered_during_resume_is_read() -> None:
    held = [b"a" * HIGH_WATER, b"\n"]

    def deliver() -> None:
        while held:
            buffer.feed(held.pop(0))

    buffer = OutputBuffer(lambda: None, deliver)
    buffer.feed(b"a" * (HIGH_WATER + 1))
    assert len(await asyncio.wait_for(buffer.readline(), 5)) == 2 * HIGH_WATER + 2


async def test_error_is_raised_after_earlier_lines() -> None:
    buffer, _ = recorded()
    buffer.feed(b"one\nhalf")
    buffer.end(ConnectionLost("n1", "gone"))
    buffer.end()
    assert await buffer.readline() == b"one\n"
    with pytest.raises(ConnectionLost):
        await buffer.readline()
    with pytest.raises(ConnectionLost):
        await buffer.rest()


@given(st.binary(), st.lists(st.integers(1, 7), min_size=1))
def test_lines_do_not_depend_on_the_chunks(data: bytes, cuts: list[int]) -> None:
    async def read() -> list[bytes]:
        buffer, _ = recorded()
        position, turn = 0, 0
        while position < len(data):
            buffer.feed(data[position : position + cuts[turn % len(cuts)]])
            position += cuts[turn % len(cuts)]
            turn += 1
        buffer.end()
        lines = []
        while line := await buffer.readline():
            lines.append(line)
        return lines

    expected = [line + b"\n" for line in data.split(b"\n")]
    expected[-1] = expected[-1][:-1]
    assert asyncio.run(read()) == [line for line in expected if line]


@given(st.lists(st.binary(max_size=50)))
def test_tail_keeps_the_last_bytes(chunks: list[bytes]) -> None:
    tail, whole = OutputTail(16), OutputTail(None)
    for chunk in chunks:
        tail.feed(chunk)
        whole.feed(chunk)
    assert tail.value() == b"".join(chunks)[-16:] and whole.value() == b"".join(chunks)
