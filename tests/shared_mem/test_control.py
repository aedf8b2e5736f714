"""Handshake messages: every kind comes back as itself, and only from the side that may send it."""

from __future__ import annotations

import msgspec
import pytest

from shared_mem.control import (
    DrafterFacts,
    ModelFacts,
    Refused,
    SamplingDefaults,
    SchedulerMessage,
    Shutdown,
    Welcome,
    WorkerAttached,
    WorkerFailed,
    WorkerHello,
    WorkerMessage,
    decode_scheduler_message,
    decode_worker_message,
    encode,
)
from shared_mem.enums import SpeculationMethod

HELLO = WorkerHello(
    rank=1,
    world_size=2,
    pid=4242,
    device="cpu",
    layout_version=1,
    page_size=16,
    num_pages=1000,
    num_slots=64,
    model=ModelFacts(
        name="smol",
        model_path="/models/smol.gguf",
        revision="ab12",
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        vocab_size=49152,
        max_context_tokens=8192,
        eos_token_ids=(2, 0),
        tokenizer_path="/models/tokenizer",
        sampling_defaults=SamplingDefaults(temperature=0.6),
        drafters=(
            DrafterFacts(SpeculationMethod.NGRAM, "", 8, 0),
            DrafterFacts(SpeculationMethod.EAGLE3, "/models/head", 8, 0, needs_hidden=True),
        ),
    ),
)
FROM_WORKERS: list[WorkerMessage] = [
    HELLO,
    WorkerFailed(rank=0, message="out of memory"),
    WorkerAttached(rank=3),
]
FROM_SCHEDULER: list[SchedulerMessage] = [
    Welcome("draftline-a-plan", "draftline-a-result", "draftline-a-heartbeat", "ipc:///a", "ipc:///b"),
    Refused(message="page size 16, not 32"),
    Shutdown(),
]


@pytest.mark.parametrize("message", FROM_WORKERS, ids=lambda m: type(m).__name__)
def test_worker_messages_come_back(message: WorkerMessage) -> None:
    assert decode_worker_message(encode(message)) == message
    with pytest.raises(msgspec.ValidationError):
        decode_scheduler_message(encode(message))


@pytest.mark.parametrize("message", FROM_SCHEDULER, ids=lambda m: type(m).__name__)
def test_scheduler_messages_come_back(message: SchedulerMessage) -> None:
    assert decode_scheduler_message(encode(message)) == message
    with pytest.raises(msgspec.ValidationError):
        decode_worker_message(encode(message))


def test_truncated_and_ill_typed_messages_are_refused() -> None:
    data = encode(HELLO)
    for length in range(len(data)):
        with pytest.raises(msgspec.DecodeError):
            decode_worker_message(data[:length])
    wrong = msgspec.msgpack.encode({"type": "WorkerAttached", "rank": "three"})
    with pytest.raises(msgspec.ValidationError, match="rank"):
        decode_worker_message(wrong)
