"""Everything that frontend and scheduler say to each other: tagged msgpack over a ZeroMQ DEALER / ROUTER pair.

Values are resolved and checked by the frontend (scheduler_svc/frontend/convert.py): a message that reaches the
scheduler is valid. Times are seconds of the wall clock (time.time()), comparable between processes of one host.
"""

from __future__ import annotations

import msgspec

from scheduler_svc.errors import ErrorReason
from shared_mem.enums import AcceptanceRule, FinishReason, SpeculationMethod


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Resolved sampling parameters; the meaning of each is shared_mem.records.SamplingRecord's."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int  # a random one was drawn when the caller gave none
    logit_bias: tuple[tuple[int, float], ...] = ()


class Stopping(msgspec.Struct, frozen=True, array_like=True):
    """Token-level ends; stop strings stay in the frontend, which cancels with `stop_string`."""

    max_tokens: int  # at least 1; already capped by the context limit
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Speculation(msgspec.Struct, frozen=True, array_like=True):
    """A caller's wish; the scheduler's policy may always draft less."""

    method: SpeculationMethod | None = None  # None: the server's default
    max_draft_tokens: int | None = None
    acceptance_rule: AcceptanceRule = AcceptanceRule.COUPLED
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    threshold: float = 0.5


# --- frontend -> scheduler ---------------------------------------------------------------------------------


class FrontendHello(msgspec.Struct, frozen=True, tag=True):
    """First message of a frontend; answered with ServiceStatus now and at every change."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Runs `n` samples of one prompt. Sample i draws with `seeds[i]`."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    speculation: Speculation
    arrival_time: float
    seeds: tuple[int, ...]  # one per sample; len(seeds) == n
    deadline: float | None = (
        None  # the scheduler keeps what is left of it at arrival, whatever the clock does then
    )
    priority: int = 0  # higher runs first
    cache_salt: str = ""
    num_logprobs: int | None = None  # alternatives per token; None: no logprobs
    num_prompt_logprobs: int | None = (
        None  # the same for the prompt, of sample 0, which reuses no cached prefix
    )


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Ends one sample (or all: index None) silently: the frontend wants no further events of it.

    reason: `client` (call cancelled or deadline passed), `stop_string` (text ended; the sample finished well).
    """

    request_id: str
    index: int | None = None
    reason: str = "client"


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Ends requests of any frontend; each of their samples gets a Finished with ABORTED. Answered by AbortReply."""

    call_id: int
    request_ids: tuple[str, ...]


class SetSpeculation(msgspec.Struct, frozen=True, tag=True):
    """Changes what is not None, for steps planned from now on. Answered by SpeculationInForce or CallRefused."""

    call_id: int
    method: SpeculationMethod | None = None
    max_draft_tokens: int | None = None
    disable_at_batch_size: int | None = None


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Frees every cached page that no running sequence holds. Answered by CacheFlushed or CallRefused."""

    call_id: int


class LoadQuery(msgspec.Struct, frozen=True, tag=True):
    """Answered by LoadReply."""

    call_id: int


class ServerQuery(msgspec.Struct, frozen=True, tag=True):
    """Answered by ServerReply."""

    call_id: int


# --- scheduler -> frontend ---------------------------------------------------------------------------------


class Drafter(msgspec.Struct, frozen=True, array_like=True):
    """One loaded drafter."""

    method: SpeculationMethod
    model_path: str
    max_draft_tokens: int


class Model(msgspec.Struct, frozen=True):
    """What the frontend must know of the served model (shared_mem.control.ModelFacts, as the scheduler limits it)."""

    name: str
    model_path: str
    revision: str
    architecture: str
    dtype: str
    kv_cache_dtype: str
    vocab_size: int
    max_context_tokens: int
    max_prompt_tokens: int
    eos_token_ids: tuple[int, ...]
    tokenizer_path: str
    default_temperature: float
    default_top_k: int
    default_top_p: float
    default_min_p: float
    default_repetition_penalty: float
    drafters: tuple[Drafter, ...]
    default_method: SpeculationMethod
    default_num_draft_tokens: int


class ServiceStatus(msgspec.Struct, frozen=True, tag=True):
    """The service's state: `starting`, `serving`, `draining` or `failed`; `model` is set from `serving` on."""

    state: str
    model: Model | None = None
    detail: str = ""  # for `failed`: why


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """A request ends with a status instead of a result; the last message about it (all samples).

    It may have run: EXPIRED_IN_QUEUE stands for every deadline that the scheduler notices before its call ends.
    """

    request_id: str
    reason: ErrorReason
    message: str
    retry_after: float | None = None  # seconds; for reasons that pass


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One token's log-probability and its alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One verification step of one sample: what was proposed and kept."""

    method: SpeculationMethod
    num_draft_tokens: int
    draft_depth: int  # deepest proposed position; equals num_draft_tokens for a chain
    num_accepted_tokens: int


class Started(msgspec.Struct, frozen=True, array_like=True):
    """Sent with the first event of a sample."""

    num_cached_tokens: int
    first_scheduled_time: float
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of prompt tokens 2..n, in sample 0


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """Sent with the last event of a sample."""

    reason: FinishReason
    stop_token_id: int | None  # for STOP
    num_steps: int
    num_preemptions: int


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sample from one step. After a stop or EOS id nothing follows; the id itself is included."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    step: Step | None = None  # None only for an event without tokens (e.g. an abort)
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token
    started: Started | None = None
    finished: Finished | None = None
    num_steps: int = 0  # forward passes of the sample so far; a stop string may end it here, in the frontend
    num_preemptions: int = 0  # so far, for the same reason


class TokenEvents(msgspec.Struct, frozen=True, tag=True):
    """All events of one step for one frontend."""

    events: tuple[TokenEvent, ...]


class AbortReply(msgspec.Struct, frozen=True, tag=True):
    """See Abort."""

    call_id: int
    aborted_request_ids: tuple[str, ...]


class CallRefused(msgspec.Struct, frozen=True, tag=True):
    """A call that changes the service cannot be done; nothing has changed."""

    call_id: int
    reason: ErrorReason
    message: str
    field: str | None = None


class SpeculationInForce(msgspec.Struct, frozen=True, tag=True):
    """See SetSpeculation; `effective_step` is the first step planned with these settings."""

    call_id: int
    method: SpeculationMethod
    max_draft_tokens: int
    disable_at_batch_size: int
    effective_step: int


class CacheFlushed(msgspec.Struct, frozen=True, tag=True):
    """See FlushCache."""

    call_id: int
    num_freed_pages: int


class MethodCounters(msgspec.Struct, frozen=True, array_like=True):
    """Speculation counters of one method since start."""

    method: SpeculationMethod
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_draft_tokens_per_pos: tuple[int, ...]
    num_accepted_tokens_per_pos: tuple[int, ...]


class LoadReply(msgspec.Struct, frozen=True, tag=True):
    """See LoadQuery; the counters count since the scheduler's start."""

    call_id: int
    time: float
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
    speculation: tuple[MethodCounters, ...]


class Worker(msgspec.Struct, frozen=True, array_like=True):
    """One worker process."""

    rank: int
    device: str
    pid: int
    heartbeat_age: float  # seconds; infinite before the first


class ServerReply(msgspec.Struct, frozen=True, tag=True):
    """See ServerQuery."""

    call_id: int
    start_time: float
    state: str
    workers: tuple[Worker, ...]
    page_size: int
    num_pages: int
    max_running_requests: int
    max_batched_tokens: int
    speculation: SpeculationInForce | None = None  # None until the model is loaded


FrontendMessage = (
    FrontendHello | Submit | Cancel | Abort | SetSpeculation | FlushCache | LoadQuery | ServerQuery
)
SchedulerMessage = (
    ServiceStatus
    | Rejected
    | TokenEvents
    | AbortReply
    | CallRefused
    | SpeculationInForce
    | CacheFlushed
    | LoadReply
    | ServerReply
)

_encoder = msgspec.msgpack.Encoder()
_frontend_decoder = msgspec.msgpack.Decoder(FrontendMessage)
_scheduler_decoder = msgspec.msgpack.Decoder(SchedulerMessage)


def encode(message: FrontendMessage | SchedulerMessage) -> bytes:
    """The message as tagged msgpack."""
    return _encoder.encode(message)


def decode_frontend_message(data: bytes) -> FrontendMessage:
    """What a frontend sent. Raises msgspec.ValidationError or DecodeError for anything else."""
    return _frontend_decoder.decode(data)


def decode_scheduler_message(data: bytes) -> SchedulerMessage:
    """What the scheduler sent. Raises msgspec.ValidationError or DecodeError for anything else."""
    return _scheduler_decoder.decode(data)
