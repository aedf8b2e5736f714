"""What InfoService tells, as dataclasses; durations are seconds, times are aware datetimes in UTC."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from google.protobuf import timestamp_pb2

from draftline.admin import SpeculationSettings, settings_from
from draftline.labels import METHODS, SERVING_STATES, label_of
from draftline.results import SpeculationStats, seconds, stats_from
from draftline.v1 import info_pb2


@dataclass(frozen=True, slots=True)
class Drafter:
    """One loaded drafter; model_path is "" for n-gram."""

    method: str
    model_path: str
    max_draft_tokens: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served and within which limits (tokens); default_sampling holds the fields the service sets."""

    model: str
    model_path: str
    revision: str
    architecture: str
    dtype: str
    kv_cache_dtype: str
    max_context_tokens: int
    max_prompt_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    default_sampling: dict[str, float | int]
    drafters: tuple[Drafter, ...]


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker process. heartbeat_age: seconds, None before its first heartbeat."""

    rank: int
    device: str
    pid: int
    heartbeat_age: float | None


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Build, topology and state of the service. state: "starting", "serving", "draining" or "failed".

    speculation: what the next step is planned with; None until the model is loaded.
    """

    version: str
    start_time: datetime
    state: str
    workers: tuple[Worker, ...]
    page_size: int
    num_pages: int
    max_running_requests: int
    max_batched_tokens: int
    speculation: SpeculationSettings | None


@dataclass(frozen=True, slots=True)
class Load:
    """A snapshot; the counters count since the service's start."""

    time: datetime
    num_running_requests: int
    num_waiting_requests: int
    num_waiting_tokens: int
    num_used_pages: int
    num_cached_pages: int
    num_generated_tokens: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    speculation: tuple[SpeculationStats, ...]


def model_info_from(response: info_pb2.GetModelInfoResponse) -> ModelInfo:
    """The typed form of GetModelInfo's answer."""
    defaults = response.default_sampling_params
    return ModelInfo(
        model=response.model,
        model_path=response.model_path,
        revision=response.revision,
        architecture=response.architecture,
        dtype=response.dtype,
        kv_cache_dtype=response.kv_cache_dtype,
        max_context_tokens=response.max_context_tokens,
        max_prompt_tokens=response.max_prompt_tokens,
        vocab_size=response.vocab_size,
        eos_token_ids=tuple(response.eos_token_ids),
        has_chat_template=response.has_chat_template,
        default_sampling={
            field.name: value for field, value in defaults.ListFields() if field.name != "logit_bias"
        },
        drafters=tuple(
            Drafter(label_of(METHODS, drafter.method), drafter.model_path, drafter.max_draft_tokens)
            for drafter in response.drafters
        ),
    )


def server_info_from(response: info_pb2.GetServerInfoResponse) -> ServerInfo:
    """The typed form of GetServerInfo's answer."""
    return ServerInfo(
        version=response.version,
        start_time=_datetime(response.start_time),
        state=label_of(SERVING_STATES, response.state),
        workers=tuple(
            Worker(
                worker.rank,
                worker.device,
                worker.pid,
                seconds(worker.heartbeat_age) if worker.HasField("heartbeat_age") else None,
            )
            for worker in response.workers
        ),
        page_size=response.page_size,
        num_pages=response.num_pages,
        max_running_requests=response.max_running_requests,
        max_batched_tokens=response.max_batched_tokens,
        speculation=settings_from(response.speculation) if response.HasField("speculation") else None,
    )


def load_from(response: info_pb2.GetLoadResponse) -> Load:
    """The typed form of GetLoad's answer."""
    return Load(
        time=_datetime(response.time),
        num_running_requests=response.num_running_requests,
        num_waiting_requests=response.num_waiting_requests,
        num_waiting_tokens=response.num_waiting_tokens,
        num_used_pages=response.num_used_pages,
        num_cached_pages=response.num_cached_pages,
        num_generated_tokens=response.num_generated_tokens,
        num_steps=response.num_steps,
        num_preemptions=response.num_preemptions,
        num_prompt_tokens=response.num_prompt_tokens,
        num_cached_tokens=response.num_cached_tokens,
        speculation=tuple(stats_from(stats) for stats in response.speculation),
    )


def _datetime(timestamp: timestamp_pb2.Timestamp) -> datetime:
    result: datetime = timestamp.ToDatetime(tzinfo=UTC)
    return result
