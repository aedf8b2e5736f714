"""Token events travel together for a few milliseconds; what somebody waits for does not wait."""

from __future__ import annotations

import pytest

from scheduler_svc.messages import AbortReply, Finished, Started, TokenEvent, TokenEvents
from scheduler_svc.scheduler.event_pacer import EventPacer
from scheduler_svc.scheduler.events import Outbound
from shared_mem.enums import FinishReason

A, B = b"frontend a", b"frontend b"


def tokens(frontend: bytes, *token_ids: int, request_id: str = "r") -> list[Outbound]:
    """One step of one request."""
    return [Outbound(frontend, TokenEvents((TokenEvent(request_id, 0, token_ids),)))]


def ids(outbound: list[Outbound]) -> list[tuple[bytes, list[int]]]:
    """(frontend, all of its tokens) of each message."""
    return [
        (item.frontend, [token for event in item.message.events for token in event.token_ids])
        for item in outbound
        if isinstance(item.message, TokenEvents)
    ]


def test_events_within_the_interval_go_out_as_one_message_per_frontend() -> None:
    pacer = EventPacer(0.02)
    assert ids(pacer.add(tokens(A, 1), 10.0)) == [(A, [1])]  # nothing went out lately
    assert pacer.due is None
    assert pacer.add(tokens(A, 2), 10.005) == []
    assert pacer.add(tokens(B, 3), 10.010) == []
    assert pacer.due == 10.02
    assert ids(pacer.add(tokens(A, 4, 5), 10.021)) == [(A, [2, 4, 5]), (B, [3])]
    assert pacer.add([], 10.03) == []


def test_what_is_held_goes_when_it_is_due_even_if_nothing_comes() -> None:
    pacer = EventPacer(0.02)
    pacer.add(tokens(A, 1), 10.0)
    pacer.add(tokens(A, 2), 10.001)
    assert pacer.add([], 10.019) == []
    assert ids(pacer.add([], 10.02)) == [(A, [2])]


def test_first_and_last_tokens_go_at_once_behind_those_of_their_own_request() -> None:
    pacer = EventPacer(0.02)
    pacer.add(tokens(A, 1), 10.0)
    pacer.add(tokens(A, 2), 10.001)
    started = TokenEvent("s", 0, (7,), started=Started(0, 1.0, None))
    assert ids(pacer.add([Outbound(A, TokenEvents((started,)))], 10.002)) == [(A, [7])]
    pacer.add([*tokens(A, 8, request_id="s"), *tokens(A, 3)], 10.003)
    finished = TokenEvent("r", 0, (4,), finished=Finished(FinishReason.LENGTH, None, 4, 0))
    assert ids(pacer.add([Outbound(A, TokenEvents((finished,)))], 10.004)) == [(A, [2, 3, 4])]
    assert ids(pacer.add([], 10.02)) == [(A, [8])]


def test_answers_go_at_once_behind_everything_that_is_held() -> None:
    pacer = EventPacer(0.02)
    pacer.add(tokens(A, 1), 10.0)
    pacer.add(tokens(A, 5), 10.005)
    reply = Outbound(A, AbortReply(1, ()))
    sent = pacer.add([reply, *tokens(A, 6)], 10.006)
    assert [type(item.message) for item in sent] == [TokenEvents, AbortReply]
    assert ids(sent) == [(A, [5])]
    assert ids(pacer.add([], 10.02)) == [(A, [6])]


def test_many_streams_wait_longer() -> None:
    """64 streams at 2 ms each: about 500 messages a second in all."""
    pacer = EventPacer(0.02)
    step = [Outbound(A, TokenEvents(tuple(TokenEvent(f"r{i}", 0, (i,)) for i in range(64))))]
    assert len(pacer.add(step, 10.0)) == 1
    assert pacer.add(step, 10.05) == []
    assert pacer.add(step, 10.1) == []
    assert pacer.due == pytest.approx(10.128)
    (sent,) = pacer.add([], 10.13)
    assert isinstance(sent.message, TokenEvents)
    assert len(sent.message.events) == 128
    pacer.add(tokens(A, 1), 20.0)  # one stream alone again
    pacer.add(tokens(A, 2), 20.001)
    assert pacer.due == pytest.approx(20.02)


def test_no_interval_holds_nothing_back() -> None:
    pacer = EventPacer(0.0)
    for number in range(5):
        assert ids(pacer.add(tokens(A, number), 10.0)) == [(A, [number])]
