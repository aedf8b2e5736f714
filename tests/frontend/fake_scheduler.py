"""A scheduler for tests: speaks scheduler_svc.messages over a ROUTER and generates what the test scripted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from scheduler_svc import messages
from scheduler_svc.messages import Finished, Started, Step, Submit, TokenEvent, TokenEvents, TokenLogprobs
from shared_mem.enums import FinishReason, SpeculationMethod

Script = Callable[["FakeScheduler", Submit], Awaitable[None]]

VOCAB_SIZE = 300
MAX_CONTEXT = 256
EOS_ID = 2  # <|im_end|> of tests.models.make_tokenizer


def make_model(tokenizer_dir: Path, **changes: Any) -> messages.Model:
    """Facts of a model that has the n-gram drafter."""
    values: dict[str, Any] = {
        "name": "scripted",
        "model_path": "/models/scripted",
        "revision": "r1",
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "max_context_tokens": MAX_CONTEXT,
        "max_prompt_tokens": MAX_CONTEXT - 1,
        "eos_token_ids": (EOS_ID,),
        "tokenizer_path": str(tokenizer_dir),
        "default_temperature": 1.0,
        "default_top_k": 0,
        "default_top_p": 1.0,
        "default_min_p": 0.0,
        "default_repetition_penalty": 1.0,
        "drafters": (messages.Drafter(SpeculationMethod.NGRAM, "", 8),),
        "default_method": SpeculationMethod.NGRAM,
        "default_num_draft_tokens": 4,
    }
    return messages.Model(**{**values, **changes})


def make_events(
    request_id: str,
    index: int,
    token_ids: Sequence[int],
    *,
    drafts: int = 0,
    finish: FinishReason = FinishReason.LENGTH,
    stop_token_id: int | None = None,
    num_logprobs: int | None = None,
    cached_tokens: int = 0,
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
) -> list[TokenEvent]:
    """The events of one sample whose steps each propose `drafts` tokens and have all of them accepted."""
    events = []
    size = drafts + 1
    chunks = [tuple(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]
    now = time.time()
    for number, chunk in enumerate(chunks, start=1):
        logprobs = None
        if num_logprobs is not None:
            top = tuple((rank, -float(rank)) for rank in range(num_logprobs))
            logprobs = tuple(TokenLogprobs(token_id, -0.5, top) for token_id in chunk)
        last = number == len(chunks)
        events.append(
            TokenEvent(
                request_id=request_id,
                index=index,
                token_ids=chunk,
                step=Step(SpeculationMethod.NGRAM, drafts, drafts, min(drafts, len(chunk) - 1)),
                logprobs=logprobs,
                started=Started(cached_tokens, now, prompt_logprobs) if number == 1 else None,
                finished=Finished(finish, stop_token_id, number, 0) if last else None,
                num_steps=number,
            )
        )
    return events


def says(token_ids: Sequence[int], **options: Any) -> Script:
    """A script that gives every sample these tokens, one message a step; see make_events."""

    async def script(scheduler: FakeScheduler, submit: Submit) -> None:
        samples = [
            make_events(submit.request_id, index, token_ids, num_logprobs=submit.num_logprobs, **options)
            for index in range(len(submit.seeds))
        ]
        for step in range(max(map(len, samples))):
            scheduler.send(TokenEvents(tuple(events[step] for events in samples if step < len(events))))
            await asyncio.sleep(0)

    return script


async def silent(scheduler: FakeScheduler, submit: Submit) -> None:
    """A script that never answers."""


def rejects(reason: messages.ErrorReason, message: str, retry_after: float | None = None) -> Script:
    """A script that refuses every request."""

    async def script(scheduler: FakeScheduler, submit: Submit) -> None:
        scheduler.send(messages.Rejected(submit.request_id, reason, message, retry_after))

    return script


def _obey(change: messages.SetSpeculation) -> messages.SchedulerMessage:
    """What was not set is n-gram with 4 draft tokens, never disabled."""
    return messages.SpeculationInForce(
        change.call_id,
        change.method or SpeculationMethod.NGRAM,
        change.max_draft_tokens or 4,
        change.disable_at_batch_size or 0,
        effective_step=17,
    )


class FakeScheduler:
    """Runs `script` for every Submit; everything received is kept in `received`."""

    def __init__(self, runtime_dir: Path, model: messages.Model) -> None:
        self.model = model
        self.script: Script = silent
        self.received: list[messages.FrontendMessage] = []
        self.state = "serving"
        self.abort_answer: Callable[[tuple[str, ...]], tuple[str, ...]] = lambda ids: ids
        self.change_answer: Callable[[messages.SetSpeculation], messages.SchedulerMessage] = _obey
        self.answers_queries = True
        self.heartbeat_age = 0.125
        self._path = runtime_dir / "scheduler.sock"
        self._context = zmq.asyncio.Context()
        self._peer = b""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(f"ipc://{self._path}")
        self._add(self._run())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._socket.close(linger=0)
        self._context.term()

    def send(self, message: messages.SchedulerMessage) -> None:
        """To the frontend that spoke last."""
        self._socket.send_multipart([self._peer, messages.encode(message)])

    def set_state(self, state: str, detail: str = "") -> None:
        """Changes the service's state and tells the frontend."""
        self.state = state
        if self._peer:
            self.send(self._status(detail))

    async def wait_for(self, kind: type[Any], count: int = 1, timeout: float = 5.0) -> list[Any]:
        """The received messages of a kind, once there are `count`."""
        async with asyncio.timeout(timeout):
            while len(found := [message for message in self.received if isinstance(message, kind)]) < count:
                self._changed.clear()
                await self._changed.wait()
        return found

    def _status(self, detail: str = "") -> messages.ServiceStatus:
        return messages.ServiceStatus(self.state, self.model if self.state != "starting" else None, detail)

    def _add(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        while True:
            self._peer, data = await self._socket.recv_multipart()
            message = messages.decode_frontend_message(data)
            self.received.append(message)
            self._changed.set()
            self._answer(message)

    def _answer(self, message: messages.FrontendMessage) -> None:
        if isinstance(message, messages.FrontendHello):
            self.send(self._status())
        elif isinstance(message, Submit):
            self._add(self.script(self, message))
        elif not self.answers_queries:
            return
        elif isinstance(message, messages.Abort):
            self.send(messages.AbortReply(message.call_id, self.abort_answer(message.request_ids)))
        elif isinstance(message, messages.LoadQuery):
            counters = messages.MethodCounters(SpeculationMethod.NGRAM, 5, 20, 12, (5, 5, 5, 5), (5, 4, 2, 1))
            self.send(
                messages.LoadReply(
                    call_id=message.call_id,
                    time=1_700_000_000.25,
                    num_running_requests=1,
                    num_waiting_requests=2,
                    num_waiting_tokens=3,
                    num_used_pages=4,
                    num_cached_pages=5,
                    num_generated_tokens=6,
                    num_steps=7,
                    num_preemptions=8,
                    num_prompt_tokens=9,
                    num_cached_tokens=10,
                    speculation=(counters,),
                )
            )
        elif isinstance(message, messages.ServerQuery):
            self.send(
                messages.ServerReply(
                    call_id=message.call_id,
                    start_time=1_700_000_000.0,
                    state=self.state,
                    workers=(messages.Worker(0, "cpu", 4242, self.heartbeat_age),),
                    page_size=16,
                    num_pages=100,
                    max_running_requests=8,
                    max_batched_tokens=512,
                    speculation=messages.SpeculationInForce(
                        message.call_id, SpeculationMethod.NGRAM, 4, 16, effective_step=8
                    ),
                )
            )
        elif isinstance(message, messages.SetSpeculation):
            self.send(self.change_answer(message))
        elif isinstance(message, messages.FlushCache):
            self.send(messages.CacheFlushed(message.call_id, 5))
