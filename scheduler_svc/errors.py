"""The domain's errors, raised anywhere on the service side and mapped once, by frontend/status.py, to gRPC."""

from __future__ import annotations

import enum


class ErrorReason(enum.StrEnum):
    """Machine-readable reason; the values of google.rpc.ErrorInfo.reason (see ErrorReason in common.proto)."""

    INVALID_FIELD = "INVALID_FIELD"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    QUEUE_FULL = "QUEUE_FULL"
    NOT_SERVING = "NOT_SERVING"
    WORKER_LOST = "WORKER_LOST"
    EXPIRED_IN_QUEUE = "EXPIRED_IN_QUEUE"
    DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
    PRECONDITION = "PRECONDITION"
    INTERNAL = "INTERNAL"


class DraftlineError(Exception):
    """Base of every expected failure of a request; `reason` decides the status, the text is for the caller."""

    def __init__(
        self, reason: ErrorReason, message: str, *, field: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field  # path of the offending field, e.g. "sampling_params.top_p"
        self.retry_after = retry_after  # seconds


class InvalidFieldError(DraftlineError):
    """A request field is missing or out of range."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(ErrorReason.INVALID_FIELD, f"{field}: {message}", field=field)


class StartupError(Exception):
    """A part of the service cannot start: bad configuration, model, port or shared memory. Exit code 2."""
