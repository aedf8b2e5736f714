"""The frontend's end of the connection: what a scheduler said before it went is heard before its going is told."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import zmq

from scheduler_svc.errors import DraftlineError, ErrorReason
from scheduler_svc.frontend.scheduler_client import SchedulerClient
from scheduler_svc.messages import (
    FrontendHello,
    Rejected,
    ServiceStatus,
    TokenEvent,
    TokenEvents,
    decode_frontend_message,
    encode,
)
from tests.scheduler.harness import make_submit


class _Heard:
    """One stream's events and the scheduler's states, in the order in which they were told."""

    def __init__(self) -> None:
        self.scheduler_is_done = False
        self.order: list[str] = []
        self.gone = asyncio.Event()

    def on_event(self, event: TokenEvent) -> None:
        self.order.append(f"token {event.token_ids[0]}")

    def on_rejected(self, error: DraftlineError) -> None:
        self.order.append(error.message)

    def on_status(self, status: ServiceStatus) -> None:
        self.order.append(status.state)
        self.gone.set()


@pytest.mark.parametrize("num_tokens", [0, 1, 500])
async def test_last_words_come_before_the_end(tmp_path: Path, num_tokens: int) -> None:
    """Both are there when the event loop wakes up, in whatever order it looks at its sockets."""
    address = f"ipc://{tmp_path}/scheduler.sock"
    for _ in range(10):
        heard = _Heard()
        with zmq.Context() as context, context.socket(zmq.ROUTER) as scheduler:
            scheduler.bind(address)
            client = SchedulerClient(address, heard.on_status)
            client.start()
            while not scheduler.poll(0):
                await asyncio.sleep(0.001)
            frontend, data = scheduler.recv_multipart()
            assert isinstance(decode_frontend_message(data), FrontendHello)
            await client.submit(make_submit("one", [1]), heard)
            for number in range(num_tokens):
                events = TokenEvents((TokenEvent("one", 0, (number,), None),))
                scheduler.send_multipart([frontend, encode(events)])
            last = Rejected("one", ErrorReason.WORKER_LOST, "the worker is lost", None)
            scheduler.send_multipart([frontend, encode(last)])
            scheduler.close(linger=1000)
        time.sleep(0.02)  # the loop is busy meanwhile
        async with asyncio.timeout(5):
            await heard.gone.wait()
        await client.close()
        assert heard.order == [
            *(f"token {number}" for number in range(num_tokens)),
            "the worker is lost",
            "failed",
        ]
