"""The ring alone, in one process: order, wrap-around, fragments, cursors, torn bytes."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_mem.errors import RingError
from shared_mem.ring import RingReader, RingWriter
from shared_mem.ring_layout import ALIGNMENT, MIN_CAPACITY, ReaderState, RingHeader, ring_size


def make_ring(capacity: int = MIN_CAPACITY, num_readers: int = 1) -> memoryview:
    buffer = memoryview(bytearray(ring_size(capacity, num_readers)))
    RingHeader.initialise(buffer, capacity, num_readers)
    return buffer


def payload(number: int, length: int) -> bytes:
    return bytes((number + i) % 251 for i in range(length))


def test_capacity_is_rounded_up_and_kept_in_the_header() -> None:
    writer = RingWriter(make_ring(1025, 2), "r")
    assert (writer.capacity, writer.num_readers) == (1152, 2)
    assert RingWriter(make_ring(1), "r").capacity == MIN_CAPACITY


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 223, 224, 225, 1000])
def test_every_length_survives_many_wraps(length: int) -> None:
    buffer = make_ring()
    writer, reader = RingWriter(buffer, "r"), RingReader(buffer, "r", 0)
    for number in range(200):
        data = payload(number, length)
        received = None
        while not writer.try_write(data):
            received = received or reader.try_read()
        assert (received or reader.try_read()) == data
        assert reader.try_read() is None


def test_full_ring_refuses_and_goes_on_after_a_read() -> None:
    buffer = make_ring()
    writer, reader = RingWriter(buffer, "r"), RingReader(buffer, "r", 0)
    written = 0
    while writer.try_write(payload(written, 96)):
        written += 1
    assert written == MIN_CAPACITY // 128
    assert not writer.try_write(payload(written, 96))
    assert reader.try_read() == payload(0, 96)
    assert writer.try_write(payload(written, 96))
    assert [reader.try_read() for _ in range(written)] == [payload(i, 96) for i in range(1, written + 1)]


@settings(max_examples=60, deadline=None)
@given(
    num_readers=st.integers(1, 3),
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 2600)), st.tuples(st.just("read"), st.integers(0, 2))
        ),
        max_size=120,
    ),
)
def test_any_interleaving_gives_every_reader_every_message_in_order(
    num_readers: int, actions: list[tuple[str, int]]
) -> None:
    buffer = make_ring(num_readers=num_readers)
    writer = RingWriter(buffer, "r")
    readers = [RingReader(buffer, "r", i) for i in range(num_readers)]
    expected: list[deque[bytes]] = [deque() for _ in readers]
    waiting: deque[bytes] = deque()

    def write() -> None:
        while waiting and writer.try_write(waiting[0]):
            data = waiting.popleft()
            for queue in expected:
                queue.append(data)

    def read(index: int) -> bool:
        data = readers[index].try_read()
        if data is not None:
            assert data == expected[index].popleft()
        return data is not None

    for number, (action, value) in enumerate(actions):
        if action == "write":
            waiting.append(payload(number, value))
            write()
        else:
            read(value % num_readers)
    while waiting or any(expected):
        write()
        for index in range(num_readers):
            while read(index):
                pass
    assert [reader.try_read() for reader in readers] == [None] * num_readers


def test_oversize_message_given_up_is_discarded_whole() -> None:
    buffer = make_ring()
    writer, reader = RingWriter(buffer, "r"), RingReader(buffer, "r", 0)
    huge = payload(1, 5000)
    assert not writer.try_write(huge)
    assert reader.try_read() is None  # took the frames that were there
    assert writer.try_write(b"next")
    assert reader.try_read() == b"next"
    assert reader.try_read() is None


def test_oversize_message_goes_on_where_it_stopped() -> None:
    buffer = make_ring()
    writer, reader = RingWriter(buffer, "r"), RingReader(buffer, "r", 0)
    huge = payload(3, 5000)
    tries = 0
    while not writer.try_write(huge):
        assert reader.try_read() is None
        tries += 1
    assert tries == 5
    assert reader.try_read() == huge


def test_the_slowest_reader_holds_the_writer_until_it_reads_or_leaves() -> None:
    buffer = make_ring(num_readers=3)
    writer = RingWriter(buffer, "r")
    quick, slow = RingReader(buffer, "r", 0), RingReader(buffer, "r", 1)
    written = 0
    while writer.try_write(payload(written, 96)):
        assert quick.try_read() == payload(written, 96)
        written += 1
    held = f"has {MIN_CAPACITY} of {MIN_CAPACITY} bytes unread"
    header = RingHeader(buffer, "r")
    assert writer.slow_readers() == {
        1: f"reader 1 (pid {header.pid(1)}) {held}",
        2: f"reader 2 (never attached) {held}",
    }
    # A reader that attaches late misses nothing.
    late = RingReader(buffer, "r", 2)
    assert [late.try_read() for _ in range(written)] == [payload(i, 96) for i in range(written)]
    assert list(writer.slow_readers()) == [1]
    assert not writer.try_write(b"")
    assert slow.detach() is False
    assert header.state(1) is ReaderState.DETACHED
    assert writer.try_write(b"free")
    assert quick.try_read() == late.try_read() == b"free"


def test_writer_with_no_reader_left_never_blocks() -> None:
    buffer = make_ring()
    writer = RingWriter(buffer, "r")
    RingReader(buffer, "r", 0).detach()
    assert all(writer.try_write(payload(i, 2000)) for i in range(20))


def test_readers_are_rung_once_per_arming() -> None:
    buffer = make_ring(num_readers=2)
    writer, reader = RingWriter(buffer, "r"), RingReader(buffer, "r", 0)
    writer.try_write(b"a")
    assert writer.take_armed_readers() == [0, 1]  # armed from the start, attached or not
    writer.try_write(b"b")
    assert writer.take_armed_readers() == []
    assert reader.arm() is True
    assert (reader.try_read(), reader.try_read()) == (b"a", b"b")
    assert reader.arm() is False
    assert writer.take_armed_readers() == [0]
    reader.arm()
    reader.detach()
    assert writer.take_armed_readers() == []


def test_space_is_reported_once_per_wait_and_only_when_there_is_enough() -> None:
    buffer = make_ring()
    writer, reader = RingWriter(buffer, "r"), RingReader(buffer, "r", 0)
    while writer.try_write(bytes(96)):
        pass
    assert reader.take_space_report() is False
    writer.want_space()
    reports = []
    for _ in range(4):
        reader.try_read()
        reports.append(reader.take_space_report())
    assert reports == [False, True, False, False]  # frames of 128 bytes; a quarter of the ring is 256
    assert reader.detach() is True
    writer.stop_wanting_space()
    assert reader.detach() is False


def test_places_are_given_once() -> None:
    buffer = make_ring(num_readers=2)
    RingWriter(buffer, "r")
    reader = RingReader(buffer, "r", 1)
    with pytest.raises(RingError, match="already writes"):
        RingWriter(buffer, "r")
    with pytest.raises(RingError, match="reader 1 is attached"):
        RingReader(buffer, "r", 1)
    reader.detach()
    with pytest.raises(RingError, match="reader 1 is detached"):
        RingReader(buffer, "r", 1)
    for index in (-1, 2):
        with pytest.raises(RingError, match=f"no reader {index}, it has 2"):
            RingReader(buffer, "r", index)


def test_foreign_memory_is_refused() -> None:
    with pytest.raises(RingError, match="no ring here"):
        RingWriter(memoryview(bytearray(4096)), "r")
    with pytest.raises(RingError, match="too small"):
        RingReader(memoryview(bytearray(64)), "r", 0)
    buffer = make_ring()
    with pytest.raises(RingError, match="do not fit"):
        RingReader(buffer[:-ALIGNMENT], "r", 0)
    buffer.cast("Q")[1] = 99
    with pytest.raises(RingError, match="layout version 99, this process speaks 1"):
        RingReader(buffer, "r", 0)


@pytest.mark.parametrize(
    ("offset", "what"),
    [
        (0, "sequence number"),  # of the second frame
        (16, "length"),
        (20, "checksum"),  # flags
        (24, "checksum"),  # the checksum itself
        (32, "checksum"),  # first byte of the payload
        (131, "checksum"),  # last byte of the payload
    ],
)
def test_torn_bytes_are_never_returned(offset: int, what: str) -> None:
    buffer = make_ring()
    writer, reader = RingWriter(buffer, "r"), RingReader(buffer, "r", 0)
    writer.try_write(bytes(32))
    writer.try_write(bytes(100))
    second = RingHeader(buffer, "r").data_offset + 2 * ALIGNMENT
    buffer[second + offset] ^= 0x80
    if offset == 16:
        buffer[second + offset + 3] = 0xFF
    assert reader.try_read() == bytes(32)
    for _ in range(2):
        with pytest.raises(RingError, match=rf"ring r, reader 0: frame 1 at byte 64 is torn: .*{what}"):
            reader.try_read()


def test_a_frame_from_an_earlier_lap_is_torn() -> None:
    """A cursor that is published before its bytes: the place still holds what was written a lap ago."""
    buffer = make_ring()
    writer, reader = RingWriter(buffer, "r"), RingReader(buffer, "r", 0)
    for i in range(MIN_CAPACITY // 128):
        writer.try_write(payload(i, 96))
        reader.try_read()
    RingHeader(buffer, "r").head += 128
    with pytest.raises(RingError, match="sequence number is 0"):
        reader.try_read()
