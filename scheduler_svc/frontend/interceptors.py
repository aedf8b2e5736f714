"""Around every call of our services: request id, error to status, one log line, one count."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from scheduler_svc.errors import DraftlineError, InvalidFieldError
from scheduler_svc.frontend import status
from scheduler_svc.metrics import FrontendMetrics

REQUEST_ID_KEY = "x-request-id"
_OUR_SERVICES = "/draftline."
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

log = structlog.get_logger()

_Handler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The outermost frame of a handler. Health and reflection pass untouched."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wraps the handler of a method of ours; all of them take one request message."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_OUR_SERVICES):
            return handler
        method = handler_call_details.method.rpartition("/")[2]
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        inner: _Handler = getattr(handler, kind)
        if not inspect.iscoroutinefunction(inner):
            raise TypeError(f"{method}: the handler must be a coroutine function that writes to its context")

        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            return await self._call(method, inner, request, context)

        make_handler = getattr(grpc, f"{kind}_rpc_method_handler")
        return make_handler(
            call,
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    async def _call(
        self, method: str, inner: _Handler, request: Any, context: grpc.aio.ServicerContext
    ) -> Any:
        started = time.perf_counter()
        code = "OK"
        request_id, problem = _request_id(request, context)
        failure: DraftlineError | None = problem
        # Echoed before anything can fail, so that every outcome carries it.
        await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
        try:
            if failure is None:
                with structlog.contextvars.bound_contextvars(request_id=request_id):
                    return await inner(request, context)
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except DraftlineError as error:
            failure = error
        except Exception:
            if context.cancelled():  # a write found the caller gone
                code = "CANCELLED"
                raise
            log.exception("call_failed", method=method, request_id=request_id)
            failure = status.internal_error(request_id)
        finally:
            if failure is not None:
                code = status.code_of(failure).name
            self._metrics.call_ended(method, code)
            milliseconds = round((time.perf_counter() - started) * 1000, 1)
            detail = (
                {} if failure is None else {"reason": failure.reason.value, "error": failure.message[:200]}
            )
            log.info("call", method=method, code=code, ms=milliseconds, request_id=request_id, **detail)
        await context.abort_with_status(status.grpc_status(failure, request_id))


@dataclass(frozen=True)
class _Undecodable:
    """Bytes of a request that are no message of its type (or nest too deeply to be read)."""

    why: str


def _tolerant(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """gRPC answers UNKNOWN to an exception in here; like this our own error table answers."""

    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            return _Undecodable(str(error))

    return deserialize


def _request_id(request: Any, context: grpc.aio.ServicerContext) -> tuple[str, DraftlineError | None]:
    """The call's id: the request's own, else the x-request-id header's, else a new one.

    A GenerateRequest without an id gets it written in, so that everything behind sees one id. With an id that
    is not allowed comes the error, and a new id to report it under.
    """
    name, wished = "request_id", getattr(request, "request_id", "")
    if not wished:
        name = REQUEST_ID_KEY
        metadata = context.invocation_metadata() or ()
        wished = next((value for key, value in metadata if key == REQUEST_ID_KEY), "")
    problem = None
    if wished and not _REQUEST_ID.fullmatch(wished):
        problem = InvalidFieldError(name, f"{wished[:80]!r} is not 1 to 64 of A-Z, a-z, 0-9, _ and -")
        wished = ""
    request_id = wished or uuid.uuid4().hex
    if isinstance(request, _Undecodable):
        problem = InvalidFieldError("request", f"cannot be decoded: {request.why}")
    elif "request_id" in request.DESCRIPTOR.fields_by_name:
        request.request_id = request_id
    return request_id, problem
