"""The few messages between scheduler and workers that are not steps: handshake, readiness, failure, shutdown.

They travel as msgpack over a ZeroMQ DEALER (worker) / ROUTER (scheduler) pair; never on the hot path.
"""

from __future__ import annotations

import msgspec


class DrafterFacts(msgspec.Struct, frozen=True):
    """One drafter that the worker has loaded."""

    method: int  # shared_mem.enums.SpeculationMethod
    model_path: str  # "" for n-gram
    max_draft_tokens: int
    max_context_tokens: int  # of the draft model; past it the drafter stays silent. 0: no limit of its own
    # It reads the target's hidden states, so its draft KV can only be made while the target computes a token. False
    # for drafters that work from tokens alone and for those without KV.
    needs_hidden: bool = False


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What an unset sampling field means for this model (its generation_config, or neutral values)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class ModelFacts(msgspec.Struct, frozen=True):
    """What scheduler and frontend must know of the target; stable until the worker restarts."""

    name: str  # served model name
    model_path: str  # as given: directory, GGUF file or hub id
    revision: str  # hub commit or a short hash of the weight files' names, sizes and times
    architecture: str
    dtype: str
    kv_cache_dtype: str
    vocab_size: int  # ids that may be used: rows of the output head that the tokenizer knows
    max_context_tokens: int  # prompt plus completion
    eos_token_ids: tuple[int, ...]
    tokenizer_path: str  # directory with tokenizer.json, tokenizer_config.json and the chat template
    sampling_defaults: SamplingDefaults
    drafters: tuple[DrafterFacts, ...]


class WorkerHello(msgspec.Struct, frozen=True, tag=True):
    """Worker -> scheduler, once its weights are loaded and its pool is allocated."""

    rank: int
    world_size: int
    pid: int
    device: str
    layout_version: int
    page_size: int
    num_pages: int
    num_slots: int
    model: ModelFacts


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """Worker -> scheduler: it cannot go on; `message` says what and where in one line."""

    rank: int
    message: str


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> worker: attach to these and start to listen."""

    plan_ring: str  # segment name; one writer, one reader per rank
    result_ring: str  # segment name; written by the leader only
    heartbeat: str  # segment name; one record per rank
    plan_doorbell: str  # ZeroMQ address
    result_doorbell: str  # ZeroMQ address


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> worker: the handshake does not fit (layout version, rank, world size, page size)."""

    message: str


class WorkerAttached(msgspec.Struct, frozen=True, tag=True):
    """Worker -> scheduler: rings are attached, plans may come."""

    rank: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> worker: finish the step at hand and exit 0."""


WorkerMessage = WorkerHello | WorkerFailed | WorkerAttached
SchedulerMessage = Welcome | Refused | Shutdown

_worker_decoder = msgspec.msgpack.Decoder(WorkerMessage)
_scheduler_decoder = msgspec.msgpack.Decoder(SchedulerMessage)


def encode(message: WorkerMessage | SchedulerMessage) -> bytes:
    """The message as tagged msgpack."""
    return msgspec.msgpack.encode(message)


def decode_worker_message(data: bytes) -> WorkerMessage:
    """What a worker sent. Raises msgspec.DecodeError or ValidationError for anything else."""
    return _worker_decoder.decode(data)


def decode_scheduler_message(data: bytes) -> SchedulerMessage:
    """What the scheduler sent. Raises msgspec.DecodeError or ValidationError for anything else."""
    return _scheduler_decoder.decode(data)
