"""The frontend's end of the scheduler connection: submits, cancels, asks, hands events to streams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from scheduler_svc.errors import DraftlineError, ErrorReason
from scheduler_svc.messages import (
    Abort,
    AbortReply,
    CacheFlushed,
    CallRefused,
    Cancel,
    FlushCache,
    FrontendHello,
    FrontendMessage,
    LoadQuery,
    LoadReply,
    Rejected,
    ServerQuery,
    ServerReply,
    ServiceStatus,
    SetSpeculation,
    SpeculationInForce,
    Submit,
    TokenEvent,
    TokenEvents,
    decode_scheduler_message,
    encode,
)
from shared_mem.enums import SpeculationMethod

_REPLY_TIMEOUT_SECONDS = 5.0
_MAX_RECENT_CANCELS = 4096
_LINGER_MS = 200  # for the last cancels to go out

log = structlog.get_logger()

_Reply = TypeVar("_Reply", AbortReply, SpeculationInForce, CacheFlushed, LoadReply, ServerReply)


class EventSink(Protocol):
    """Where one request's events go."""

    scheduler_is_done: bool

    def on_event(self, event: TokenEvent) -> None:
        """New tokens of a sample."""

    def on_rejected(self, error: DraftlineError) -> None:
        """The request ends with a status."""


class SchedulerClient:
    """A DEALER socket and who waits for what on it. All methods belong to the event loop's thread."""

    def __init__(self, address: str, on_status: Callable[[ServiceStatus], None]) -> None:
        self._address = address
        self._on_status = on_status
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None  # while a scheduler is there
        self._connecting: asyncio.Task[None] | None = None
        self._streams: dict[str, EventSink] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        # Ids whose late events may still be on their way; only if one is used again it must wait for them.
        self._recent_cancels: OrderedDict[str, None] = OrderedDict()

    def start(self) -> None:
        """Connects, now or as soon as the scheduler is there, and again whenever it comes back."""
        self._connecting = asyncio.create_task(self._stay_connected())

    async def close(self) -> None:
        """Ends the tasks and the socket; streams still open get nothing any more. May be called again."""
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
        self._context.term()

    async def submit(self, submit: Submit, stream: EventSink) -> None:
        """Sends a request whose events then go to `stream`, until `release`.

        Raises DraftlineError: DUPLICATE_REQUEST_ID, or NOT_SERVING when there is no scheduler.
        """
        request_id = submit.request_id
        if request_id in self._recent_cancels:
            # The scheduler answers in order: behind this answer no event of the id's earlier use can come.
            await self.query_load()
            self._recent_cancels.pop(request_id, None)
        if request_id in self._streams:
            raise DraftlineError(
                ErrorReason.DUPLICATE_REQUEST_ID, f"request_id: a live request has the id {request_id}"
            )
        self._send(submit)
        self._streams[request_id] = stream

    def release(self, request_id: str, stream: EventSink) -> None:
        """Ends a request from the frontend's side: cancels what the scheduler still does for it."""
        if self._streams.get(request_id) is not stream:
            return
        del self._streams[request_id]
        if not stream.scheduler_is_done:
            self._cancel(request_id, None, "client")

    def cancel_sample(self, request_id: str, index: int, reason: str) -> None:
        """Ends one sample of a live request."""
        self._cancel(request_id, index, reason)

    async def abort(self, request_ids: tuple[str, ...]) -> AbortReply:
        """Ends requests of any frontend. Raises DraftlineError NOT_SERVING when no scheduler answers."""
        return await self._ask(lambda call_id: Abort(call_id, request_ids), AbortReply)

    async def query_load(self) -> LoadReply:
        """Asks for the load. Raises DraftlineError NOT_SERVING when no scheduler answers."""
        return await self._ask(LoadQuery, LoadReply)

    async def query_server(self) -> ServerReply:
        """Asks for the state. Raises DraftlineError NOT_SERVING when no scheduler answers."""
        return await self._ask(ServerQuery, ServerReply)

    async def set_speculation(
        self,
        method: SpeculationMethod | None,
        max_draft_tokens: int | None,
        disable_at_batch_size: int | None,
    ) -> SpeculationInForce:
        """Changes what is not None. Raises DraftlineError when the scheduler refuses or does not answer."""
        return await self._ask(
            lambda call_id: SetSpeculation(call_id, method, max_draft_tokens, disable_at_batch_size),
            SpeculationInForce,
        )

    async def flush_cache(self) -> CacheFlushed:
        """Frees unreferenced cached pages. Raises DraftlineError NOT_SERVING when no scheduler answers."""
        return await self._ask(FlushCache, CacheFlushed)

    def reject_all(self, error: DraftlineError) -> None:
        """Ends every live stream, because no scheduler works on any of them."""
        for stream in self._streams.values():
            stream.on_rejected(error)

    def _cancel(self, request_id: str, index: int | None, reason: str) -> None:
        self._recent_cancels[request_id] = None
        self._recent_cancels.move_to_end(request_id)
        if len(self._recent_cancels) > _MAX_RECENT_CANCELS:
            self._recent_cancels.popitem(last=False)
        with contextlib.suppress(DraftlineError):  # no scheduler, nothing to cancel
            self._send(Cancel(request_id, index, reason))

    async def _ask(self, question: Callable[[int], FrontendMessage], kind: type[_Reply]) -> _Reply:
        call_id = next(self._call_ids)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[call_id] = reply
        try:
            self._send(question(call_id))
            answer = await asyncio.wait_for(reply, _REPLY_TIMEOUT_SECONDS)
        except TimeoutError as error:
            raise DraftlineError(ErrorReason.NOT_SERVING, "the scheduler does not answer") from error
        finally:
            del self._replies[call_id]
        if isinstance(answer, CallRefused):
            raise DraftlineError(answer.reason, answer.message, field=answer.field)
        if not isinstance(answer, kind):
            raise TypeError(f"call {call_id}: got {type(answer).__name__}, expected {kind.__name__}")
        return answer

    def _send(self, message: FrontendMessage) -> None:
        if self._socket is None:
            raise DraftlineError(ErrorReason.NOT_SERVING, "the scheduler is not there")
        # Without a limit nothing waits, so the outcome is known at once: it is queued.
        self._socket.send(encode(message), flags=zmq.NOBLOCK)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            data = await socket.recv()
            try:
                self._dispatch(data)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                log.error("bad_scheduler_message", error=str(error))
            except Exception:  # a bug in one message's handling must not deafen all streams
                log.exception("scheduler_message_failed")

    def _dispatch(self, data: bytes) -> None:
        message = decode_scheduler_message(data)
        if isinstance(message, TokenEvents):
            for event in message.events:
                stream = self._streams.get(event.request_id)
                if stream is not None:
                    stream.on_event(event)
        elif isinstance(message, Rejected):
            stream = self._streams.get(message.request_id)
            if stream is not None:
                stream.on_rejected(
                    DraftlineError(message.reason, message.message, retry_after=message.retry_after)
                )
        elif isinstance(message, ServiceStatus):
            self._on_status(message)
        else:
            reply = self._replies.get(message.call_id)
            if reply is not None and not reply.done():
                reply.set_result(message)

    async def _stay_connected(self) -> None:
        """Greets each scheduler that appears; tells when one is gone."""
        while True:
            await self._serve_one_scheduler()
            self._on_status(ServiceStatus("failed", detail="the scheduler is gone"))

    async def _serve_one_scheduler(self) -> None:
        """From the wait for a scheduler to its end.

        Each gets a socket of its own: what was meant for one that is gone must not reach the next.
        """
        socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        # Events wait in streams, which merge them; here a limit would lose them.
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        receiving = asyncio.create_task(self._receive(socket))
        try:
            socket.connect(self._address)
            await _event(monitor, zmq.EVENT_HANDSHAKE_SUCCEEDED)
            self._socket = socket
            self._send(FrontendHello())
            await _event(monitor, zmq.EVENT_DISCONNECTED)
            await _hear_last_words(socket)
        except asyncio.CancelledError:  # the frontend ends, not the scheduler: the last cancels are to go out
            socket.setsockopt(zmq.LINGER, _LINGER_MS if self._socket is not None else 0)
            raise
        finally:
            self._socket = None
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await receiving
            socket.disable_monitor()
            monitor.close()
            socket.close()


async def _event(monitor: zmq.asyncio.Socket, wanted: int) -> None:
    while (await recv_monitor_message(monitor))["event"] != wanted:
        pass


async def _hear_last_words(socket: zmq.asyncio.Socket) -> None:
    """Lets the reader take what has come: why requests end is better told by the scheduler than by its absence.

    ZeroMQ hands over all that it read before it reports the end of a connection.
    """
    while int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # the last one may have been taken, but not been handled yet
