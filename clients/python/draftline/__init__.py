"""Python client of a Draftline service; the first stop of a caller.

The names below load on first use: `import draftline.v1.generation_pb2` alone, as the service's frontend
does it, loads neither the client nor its dependencies.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftline.admin import SpeculationChange, SpeculationSettings
    from draftline.aio import AsyncClient, AsyncGenerationStream
    from draftline.client import Client, GenerationStream
    from draftline.errors import (
        AlreadyExistsError,
        DeadlineExceededError,
        DraftlineError,
        FailedPreconditionError,
        FieldViolation,
        InternalError,
        InvalidArgumentError,
        NotFoundError,
        RequestCancelledError,
        ResourceExhaustedError,
        UnavailableError,
    )
    from draftline.info import Drafter, Load, ModelInfo, ServerInfo, Worker
    from draftline.options import Chat, GenerateOptions, Message
    from draftline.results import (
        Completion,
        Delta,
        Event,
        Finished,
        Sample,
        SpeculationStats,
        SpeculationStep,
        Started,
        Timing,
        TokenLogprob,
        TopLogprob,
        Usage,
    )
    from draftline.retry import RetryPolicy

_HOME = {
    "draftline.admin": ("SpeculationChange", "SpeculationSettings"),
    "draftline.aio": ("AsyncClient", "AsyncGenerationStream"),
    "draftline.client": ("Client", "GenerationStream"),
    "draftline.errors": (
        "AlreadyExistsError",
        "DeadlineExceededError",
        "DraftlineError",
        "FailedPreconditionError",
        "FieldViolation",
        "InternalError",
        "InvalidArgumentError",
        "NotFoundError",
        "RequestCancelledError",
        "ResourceExhaustedError",
        "UnavailableError",
    ),
    "draftline.info": ("Drafter", "Load", "ModelInfo", "ServerInfo", "Worker"),
    "draftline.options": ("Chat", "GenerateOptions", "Message"),
    "draftline.results": (
        "Completion",
        "Delta",
        "Event",
        "Finished",
        "Sample",
        "SpeculationStats",
        "SpeculationStep",
        "Started",
        "Timing",
        "TokenLogprob",
        "TopLogprob",
        "Usage",
    ),
    "draftline.retry": ("RetryPolicy",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncGenerationStream",
    "Chat",
    "Client",
    "Completion",
    "DeadlineExceededError",
    "Delta",
    "Drafter",
    "DraftlineError",
    "Event",
    "FailedPreconditionError",
    "FieldViolation",
    "Finished",
    "GenerateOptions",
    "GenerationStream",
    "InternalError",
    "InvalidArgumentError",
    "Load",
    "Message",
    "ModelInfo",
    "NotFoundError",
    "RequestCancelledError",
    "ResourceExhaustedError",
    "RetryPolicy",
    "Sample",
    "ServerInfo",
    "SpeculationChange",
    "SpeculationSettings",
    "SpeculationStats",
    "SpeculationStep",
    "Started",
    "Timing",
    "TokenLogprob",
    "TopLogprob",
    "UnavailableError",
    "Usage",
    "Worker",
]


def __getattr__(name: str) -> Any:
    """Loads the module that holds `name`. Raises AttributeError for a name that is not public."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'draftline' has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
