"""Between the scheduler's events and its frontends: token events of a few milliseconds travel together.

Each message wakes a frontend and, in the end, a caller. Where steps are short, or streams many, that work competes with
the worker for the cores and slows the very steps that it reports. What somebody waits for, a first or a last token or
an answer, is never held back.
"""

from __future__ import annotations

from scheduler_svc.messages import TokenEvent, TokenEvents
from scheduler_svc.scheduler.events import Outbound

# Streams that get tokens in the same step share this much time each: together about 500 messages a second.
_SECONDS_PER_STREAM = 0.002


class EventPacer:
    """Holds token events until `interval` seconds have passed since the last ones went out; longer for many streams.

    The events of one request keep their order.
    """

    def __init__(self, interval: float) -> None:
        """interval 0 holds nothing back, however many streams there are."""
        self._interval = interval
        self._held: dict[bytes, list[TokenEvent]] = {}  # by frontend
        self._most_streams = 0  # of one step since events last went out
        self._next = 0.0  # when what is held may go

    def add(self, outbound: list[Outbound], now: float) -> list[Outbound]:
        """Takes what the scheduler gives at time `now` (seconds of any clock); returns what is to be sent now."""
        sent: list[Outbound] = []
        urgent: set[str] = set()  # requests of which somebody waits for what has come
        for item in outbound:
            if isinstance(item.message, TokenEvents):
                events = item.message.events
                self._held.setdefault(item.frontend, []).extend(events)
                self._most_streams = max(self._most_streams, len(events))
                urgent.update(event.request_id for event in events if _is_awaited(event))
            else:  # it may end a request whose tokens are held
                sent += [*self._release_all(), item]
        if self._held and now >= self._next:
            sent += self._release_all()
            if self._interval:
                self._next = now + max(self._interval, _SECONDS_PER_STREAM * self._most_streams)
            self._most_streams = 0
        elif urgent:
            sent += self._release(urgent)
        return sent

    @property
    def due(self) -> float | None:
        """When `add` has something to send even if nothing comes; None: nothing is held."""
        return self._next if self._held else None

    def _release_all(self) -> list[Outbound]:
        held, self._held = self._held, {}
        return [Outbound(frontend, TokenEvents(tuple(events))) for frontend, events in held.items()]

    def _release(self, request_ids: set[str]) -> list[Outbound]:
        """The held events of these requests alone."""
        held, self._held = self._held, {}
        sent = []
        for frontend, events in held.items():
            wanted = tuple(event for event in events if event.request_id in request_ids)
            rest = [event for event in events if event.request_id not in request_ids]
            if wanted:
                sent.append(Outbound(frontend, TokenEvents(wanted)))
            if rest:
                self._held[frontend] = rest
        return sent


def _is_awaited(event: TokenEvent) -> bool:
    return event.started is not None or event.finished is not None
