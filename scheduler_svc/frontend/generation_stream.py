"""One live request in the frontend: its samples, and the bounded buffer between events and the caller."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from scheduler_svc.errors import DraftlineError
from scheduler_svc.frontend.sample_output import SampleDelta, SampleItem, SampleOutput
from scheduler_svc.messages import TokenEvent

MAX_BUFFERED_ITEMS = 64
MERGED_SIZE = 1024  # waiting deltas are joined up to about so many bytes: one message costs less than two


class OutputBuffer:
    """What waits to be written, at most `limit` items and one more of each kind per sample.

    A delta joins the last one of its sample that still waits, as long as that is short, so that what arrives together
    leaves together. Past the limit it does so whatever the length: a caller that reads slowly neither blocks anyone
    nor loses anything.
    """

    def __init__(self, limit: int = MAX_BUFFERED_ITEMS) -> None:
        self._limit = limit
        self._items: deque[tuple[int, SampleItem]] = deque()
        self._last_delta: dict[
            int, SampleDelta
        ] = {}  # by sample: its newest item, if that is a waiting delta
        self._changed = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, index: int, item: SampleItem) -> None:
        """Appends an item of sample `index`; never waits."""
        if isinstance(item, SampleDelta):
            last = self._last_delta.get(index)
            if last is not None and (last.size < MERGED_SIZE or len(self._items) >= self._limit):
                last.extend(item)
                return
            self._last_delta[index] = item
        else:
            self._last_delta.pop(index, None)
        self._items.append((index, item))
        self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        """Nothing follows: after what waits now `get` gives None or raises `error`. The first end counts."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._changed.set()

    async def get(self) -> tuple[int, SampleItem] | None:
        """The next (sample, item), None at the end. Raises the error that `end` was given."""
        while not self._items:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()
        index, item = self._items.popleft()
        if self._last_delta.get(index) is item:
            del self._last_delta[index]
        return index, item


class GenerationStream:
    """Takes a request's events from the scheduler client and gives items to its handler."""

    def __init__(
        self, request_id: str, samples: list[SampleOutput], cancel_sample: Callable[[str, int, str], None]
    ) -> None:
        self.request_id = request_id
        self.scheduler_is_done = False  # every sample ended, or the request was rejected: nothing to cancel
        self._samples = samples
        self._cancel_sample = cancel_sample
        self._buffer = OutputBuffer()

    def on_event(self, event: TokenEvent) -> None:
        """Turns one event into items at once, so that a stop string ends the work even if nobody reads."""
        try:
            sample = self._samples[event.index]
            items = sample.accept(event, time.time())
        except Exception as error:  # a bug: it must end this stream alone
            self.fail(error)
            return
        for item in items:
            self._buffer.put(event.index, item)
        if items and sample.finished:
            if sample.ended_by_stop_string:
                self._cancel_sample(self.request_id, event.index, "stop_string")
            if all(other.finished for other in self._samples):
                self.scheduler_is_done = True
                self._buffer.end()

    def on_rejected(self, error: DraftlineError) -> None:
        """The scheduler ended the request with a status."""
        self.scheduler_is_done = True
        self._buffer.end(error)

    def fail(self, error: Exception) -> None:
        """Ends the stream, after what waits, with `error`."""
        self._buffer.end(error)

    async def get(self) -> tuple[int, SampleItem] | None:
        """See OutputBuffer.get."""
        return await self._buffer.get()
