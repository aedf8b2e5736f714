"""The only error table: what a caller is told of each failure, as a gRPC status with google.rpc details."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from scheduler_svc.errors import DraftlineError, ErrorReason

DOMAIN = "draftline"
PUSHBACK_KEY = "grpc-retry-pushback-ms"  # read by gRPC's own retry policy

_CODES = {
    ErrorReason.INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorReason.PROMPT_TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorReason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.NOT_SERVING: grpc.StatusCode.UNAVAILABLE,
    ErrorReason.WORKER_LOST: grpc.StatusCode.UNAVAILABLE,
    ErrorReason.EXPIRED_IN_QUEUE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorReason.DUPLICATE_REQUEST_ID: grpc.StatusCode.ALREADY_EXISTS,
    ErrorReason.PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.INTERNAL: grpc.StatusCode.INTERNAL,
}
_DEFAULT_RETRY_SECONDS = {ErrorReason.QUEUE_FULL: 1.0, ErrorReason.NOT_SERVING: 1.0}
_MAX_MESSAGE_BYTES = 600  # it travels three times, in headers that clients limit to 8 KiB


def code_of(error: DraftlineError) -> grpc.StatusCode:
    """The status code of an error."""
    return _CODES[error.reason]


def internal_error(request_id: str) -> DraftlineError:
    """What a caller learns of a bug: which request to ask about, never how the server looks inside."""
    return DraftlineError(
        ErrorReason.INTERNAL, f"internal error in request {request_id}; the server's log has it"
    )


def grpc_status(error: DraftlineError, request_id: str) -> grpc.Status:
    """The status to abort a call with: code, message, details in trailing metadata, pushback for retries."""
    message = _shorten(error.message)
    info = error_details_pb2.ErrorInfo(
        reason=error.reason.value, domain=DOMAIN, metadata={"request_id": request_id}
    )
    if error.field is not None:
        info.metadata["field"] = error.field
    details: list[any_pb2.Any] = [_pack(info)]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    retry_after = error.retry_after
    if retry_after is None:
        retry_after = _DEFAULT_RETRY_SECONDS.get(error.reason)
    if retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(retry_after * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    rich = status_pb2.Status(code=code_of(error).value[0], message=message, details=details)
    status: grpc.Status = rpc_status.to_status(rich)
    if retry_after is None:
        return status
    pushback = (PUSHBACK_KEY, str(round(retry_after * 1000)))
    return status._replace(trailing_metadata=(*status.trailing_metadata, pushback))


def _pack(detail: object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _shorten(message: str) -> str:
    data = message.encode("utf-8", errors="replace")
    if len(data) <= _MAX_MESSAGE_BYTES:
        return data.decode()
    return data[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."
