"""The buffer between events and a caller: bounded, ordered per sample, nothing lost."""

from __future__ import annotations

import asyncio

import pytest

from scheduler_svc.frontend.generation_stream import OutputBuffer
from scheduler_svc.frontend.sample_output import SampleDelta, SampleItem, SampleStarted


async def read_all(buffer: OutputBuffer) -> list[tuple[int, SampleItem]]:
    items = []
    while (item := await buffer.get()) is not None:
        items.append(item)
    return items


async def test_a_reader_that_keeps_up_gets_every_delta() -> None:
    buffer = OutputBuffer(limit=2)
    reader = asyncio.create_task(read_all(buffer))
    for number in range(5):
        buffer.put(0, SampleDelta(str(number), [number]))
        await asyncio.sleep(0)
    buffer.end()
    assert await reader == [(0, SampleDelta(str(number), [number])) for number in range(5)]


async def test_short_deltas_that_wait_are_joined() -> None:
    buffer = OutputBuffer()
    for number in range(600):
        buffer.put(0, SampleDelta(f"{number % 10}", [number]))
    buffer.end()
    deltas = [item for _, item in await read_all(buffer) if isinstance(item, SampleDelta)]
    assert "".join(delta.text for delta in deltas) == "0123456789" * 60
    assert [len(delta.token_ids) for delta in deltas] == [256, 256, 88]  # 4 bytes each, up to 1,024


async def test_past_the_limit_deltas_join_those_of_their_sample() -> None:
    buffer = OutputBuffer(limit=3)
    for index in (0, 1):
        buffer.put(index, SampleStarted(1, 0, None))
    for number in range(100):
        for index in (0, 1):
            buffer.put(index, SampleDelta(str(number), [number]))
    assert len(buffer) == 4
    buffer.end()
    items = await read_all(buffer)
    for index in (0, 1):
        deltas = [item for sample, item in items if sample == index and isinstance(item, SampleDelta)]
        assert [token_id for delta in deltas for token_id in delta.token_ids] == list(range(100))
        assert "".join(delta.text for delta in deltas) == "".join(map(str, range(100)))


async def test_a_delta_that_was_read_is_never_changed() -> None:
    buffer = OutputBuffer(limit=1)
    buffer.put(0, SampleDelta("a"))
    buffer.put(1, SampleDelta("x"))
    taken = await buffer.get()
    buffer.put(0, SampleDelta("b"))
    assert taken == (0, SampleDelta("a"))
    assert await buffer.get() == (1, SampleDelta("x"))
    assert await buffer.get() == (0, SampleDelta("b"))


async def test_an_error_comes_behind_what_waits_and_the_first_end_counts() -> None:
    buffer = OutputBuffer()
    buffer.put(0, SampleDelta("a"))
    buffer.end(ValueError("lost"))
    buffer.end()
    assert await buffer.get() == (0, SampleDelta("a"))
    with pytest.raises(ValueError, match="lost"):
        await buffer.get()
