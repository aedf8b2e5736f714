"""Where a failed call becomes an exception: gRPC status and details in, one DraftlineError out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_REASON_PREFIX = "ERROR_REASON_"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of the request: its path, e.g. `sampling_params.top_p`, and what is wrong with it."""

    field: str
    description: str


class DraftlineError(Exception):
    """A call failed.

    code: name of the gRPC status, e.g. "INVALID_ARGUMENT". reason: ErrorReason of common.proto without its
    prefix, e.g. "QUEUE_FULL"; "" if the service named none. retry_after: seconds the service asks to wait,
    None if it does not say. may_retry: False if the service forbids a retry.
    """

    default_code = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        reason: str = "",
        field_violations: tuple[FieldViolation, ...] = (),
        retry_after: float | None = None,
        may_retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.reason = reason
        self.field_violations = field_violations
        self.retry_after = retry_after
        self.may_retry = may_retry

    @property
    def field(self) -> str | None:
        """Path of the first wrong field, None if the error is about none."""
        return self.field_violations[0].field if self.field_violations else None

    def __str__(self) -> str:
        """One line: code, reason, field, message, wait."""
        head = f"{self.code} ({self.reason})" if self.reason else self.code
        field = f"{self.field}: " if self.field and not self.message.startswith(self.field) else ""
        wait = "" if self.retry_after is None else f" (retry after {self.retry_after:g} s)"
        return " ".join(f"{head}: {field}{self.message}{wait}".split())


class InvalidArgumentError(DraftlineError):
    """A field is missing or out of range, or the prompt is too long."""

    default_code = "INVALID_ARGUMENT"


class NotFoundError(DraftlineError):
    """No model of that name is served."""

    default_code = "NOT_FOUND"


class AlreadyExistsError(DraftlineError):
    """A live request has this id."""

    default_code = "ALREADY_EXISTS"


class FailedPreconditionError(DraftlineError):
    """The service has not loaded what the request needs, e.g. the speculation method."""

    default_code = "FAILED_PRECONDITION"


class ResourceExhaustedError(DraftlineError):
    """The waiting queue is full."""

    default_code = "RESOURCE_EXHAUSTED"


class UnavailableError(DraftlineError):
    """The service is not reachable, starting, draining, or lost a worker."""

    default_code = "UNAVAILABLE"


class DeadlineExceededError(DraftlineError):
    """The timeout passed."""

    default_code = "DEADLINE_EXCEEDED"


class RequestCancelledError(DraftlineError):
    """The call was cancelled."""

    default_code = "CANCELLED"


class InternalError(DraftlineError):
    """A bug of the service; the message names the request."""

    default_code = "INTERNAL"


_CLASS_OF = {
    cls.default_code: cls
    for cls in (
        InvalidArgumentError,
        NotFoundError,
        AlreadyExistsError,
        FailedPreconditionError,
        ResourceExhaustedError,
        UnavailableError,
        DeadlineExceededError,
        RequestCancelledError,
        InternalError,
    )
}


def invalid_field(field: str, description: str) -> InvalidArgumentError:
    """The error of a value that no message of the protocol can carry: found before anything is sent."""
    return InvalidArgumentError(
        f"{field}: {description}",
        reason="INVALID_FIELD",
        field_violations=(FieldViolation(field, description),),
    )


def from_rpc_error(error: grpc.RpcError) -> DraftlineError:
    """The exception for a failed call of grpc or grpc.aio, with all its status details and trailers tell."""
    code = error.code().name
    reason, may_retry = "", True
    violations: tuple[FieldViolation, ...] = ()
    retry_after: float | None = None
    for any_message in _details(error):
        if any_message.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            any_message.Unpack(info)
            reason = info.reason.removeprefix(_REASON_PREFIX)
        elif any_message.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = error_details_pb2.BadRequest()
            any_message.Unpack(bad_request)
            violations = tuple(FieldViolation(v.field, v.description) for v in bad_request.field_violations)
        elif any_message.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry_info = error_details_pb2.RetryInfo()
            any_message.Unpack(retry_info)
            retry_after = retry_info.retry_delay.ToTimedelta().total_seconds()
    pushback = _pushback_ms(error)
    if pushback is not None:
        may_retry = pushback >= 0
        retry_after = pushback / 1000 if may_retry else retry_after
    cls = _CLASS_OF.get(code, DraftlineError)
    message = error.details() or code
    if code == "UNIMPLEMENTED":
        message += " (this address does not answer such a call; AdminService has an address of its own)"
    return cls(
        message,
        code=code,
        reason=reason,
        field_violations=violations,
        retry_after=retry_after,
        may_retry=may_retry,
    )


def _details(error: grpc.RpcError) -> list[Any]:
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # the details contradict the status: the status is what gRPC itself vouches for
        return []
    return [] if status is None else list(status.details)


def _pushback_ms(error: grpc.RpcError) -> int | None:
    """The trailer by which gRPC servers steer retries: wait so long, or never if negative or not a number."""
    for key, value in error.trailing_metadata() or ():
        if key == _PUSHBACK_KEY:
            try:
                return int(value)
            except ValueError:
                return -1
    return None
