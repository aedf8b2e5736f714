"""Between the scheduler's events and its frontends: token events of a few milliseconds travel together.

Each message wakes a frontend and, in the end, a caller. Where steps are short, that work competes with the worker for
the cores and slows the very steps that it reports. What somebody waits for, a first or a last token or an answer, is
never held back.
"""

from __future__ import annotations

from scheduler_svc.messages import TokenEvent, TokenEvents
from scheduler_svc.scheduler.events import Outbound


class EventPacer:
    """Holds token events until `interval` seconds have passed since the last ones went out. Keeps the order."""

    def __init__(self, interval: float) -> None:
        """interval 0 holds nothing back."""
        self._interval = interval
        self._held: list[Outbound] = []
        self._next = 0.0  # when what is held may go

    def add(self, outbound: list[Outbound], now: float) -> list[Outbound]:
        """Takes what the scheduler gives at time `now` (seconds of any clock); returns what is to be sent now."""
        self._held += outbound
        if not self._held or (now < self._next and not any(map(_is_urgent, outbound))):
            return []
        held, self._held = self._held, []
        self._next = now + self._interval
        return _merged(held)

    @property
    def due(self) -> float | None:
        """When `add` has something to send even if nothing comes; None: nothing is held."""
        return self._next if self._held else None


def _is_urgent(outbound: Outbound) -> bool:
    message = outbound.message
    return not isinstance(message, TokenEvents) or any(
        event.started is not None or event.finished is not None for event in message.events
    )


def _merged(outbound: list[Outbound]) -> list[Outbound]:
    """Runs of token events for one frontend as one message each."""
    result: list[Outbound] = []
    events: dict[bytes, list[TokenEvent]] = {}

    def close() -> None:
        result.extend(Outbound(frontend, TokenEvents(tuple(group))) for frontend, group in events.items())
        events.clear()

    for item in outbound:
        if isinstance(item.message, TokenEvents):
            events.setdefault(item.frontend, []).extend(item.message.events)
        else:
            close()
            result.append(item)
    close()
    return result
