"""The services of the protocol, scripted: a byte is a token, steps and failures are given."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from draftline.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    info_pb2,
    info_pb2_grpc,
)
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

NGRAM, DRAFT_MODEL, OFF = (
    common_pb2.SPECULATION_METHOD_NGRAM,
    common_pb2.SPECULATION_METHOD_DRAFT_MODEL,
    common_pb2.SPECULATION_METHOD_DISABLED,
)
STORY = b"The quick brown fox jumps over the lazy dog. "


@dataclass
class Failure:
    """How one call fails: before anything is sent, or after some events of Generate."""

    code: grpc.StatusCode
    message: str = "no"
    reason: str = ""
    field: str = ""
    retry_after: float | None = None
    after_events: int = 0
    trailers: tuple[tuple[str, str], ...] = ()

    def status(self) -> status_pb2.Status:
        """The google.rpc.Status with the details that the fields name."""
        details = []
        if self.reason:
            details.append(error_details_pb2.ErrorInfo(reason=self.reason, domain="draftline"))
        if self.field:
            bad_request = error_details_pb2.BadRequest()
            bad_request.field_violations.add(field=self.field, description=self.message)
            details.append(bad_request)
        if self.retry_after is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(self.retry_after * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        packed = []
        for detail in details:
            wrapped = any_pb2.Any()
            wrapped.Pack(detail)
            packed.append(wrapped)
        code = getattr(code_pb2, self.code.name)
        return status_pb2.Status(code=code, message=self.message, details=packed)


@dataclass
class Step:
    """Tokens (bytes) that one step adds; the first `accepted` of them were drafted by `method`."""

    tokens: bytes
    drafted: int = 0
    accepted: int = 0
    method: int = OFF


@dataclass
class Script:
    """What every following call meets."""

    failures: deque[Failure] = field(default_factory=deque)
    deltas: Sequence[tuple[str, Sequence[Step]]] | None = None  # (text, steps) instead of the usual story
    hang_after: int | None = None  # events after which Generate waits for the end of the call
    step_seconds: float = 0.0
    drafters: tuple[int, ...] = (NGRAM, DRAFT_MODEL)


class FakeService(
    generation_pb2_grpc.GenerationServiceServicer,
    info_pb2_grpc.InfoServiceServicer,
    admin_pb2_grpc.AdminServiceServicer,
):
    """Runs in a thread of its own; `address` is where it listens, `requests` what Generate was asked."""

    def __init__(self, listen: str = "127.0.0.1:0") -> None:
        self._listen = listen
        self.script = Script()
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.changes: list[admin_pb2.SetSpeculationRequest] = []
        self.live: dict[str, asyncio.Event] = {}
        self.cancelled = threading.Event()
        self.num_running = self.most_running = 0
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> FakeService:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._run())
        self._loop.close()

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        options = [("grpc.max_receive_message_length", 32 << 20), ("grpc.max_send_message_length", 32 << 20)]
        server = grpc.aio.server(options=options)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)
        info_pb2_grpc.add_InfoServiceServicer_to_server(self, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, server)
        self._health = health.aio.HealthServicer()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        port = server.add_insecure_port(self._listen)
        self.address = self._listen if self._listen.startswith("unix:") else f"127.0.0.1:{port}"
        await server.start()
        self._started.set()
        await self._stop.wait()
        await server.stop(0)

    def set_health(self, status: int) -> None:
        """Changes what the health protocol says; from any thread."""
        asyncio.run_coroutine_threadsafe(self._health.set("", status), self._loop).result(10)

    async def Generate(self, request, context):
        self.requests.append(request)
        failure = self.script.failures.popleft() if self.script.failures else None
        if failure and not failure.after_events:
            await self._fail(context, failure)
        request_id = request.request_id or f"r{len(self.requests)}"
        self.live[request_id] = asyncio.Event()
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        completed = False
        try:
            for number, response in enumerate(self._responses(request, request_id)):
                if failure and number == failure.after_events:
                    await self._fail(context, failure)
                if number == self.script.hang_after:
                    await self.live[request_id].wait()
                    yield _aborted(request_id)
                    break
                if self.script.step_seconds:
                    await asyncio.sleep(self.script.step_seconds)
                yield response
            completed = True
        finally:
            # Not `except CancelledError`: a call cancelled while a message is written closes this generator.
            if not completed:
                self.cancelled.set()
            self.num_running -= 1
            del self.live[request_id]

    def _responses(self, request, request_id):
        num_prompt = len(prompt_ids(request.prompt))
        for index in range(max(1, request.n)):
            started = generation_pb2.GenerationStarted(
                model="fake", prompt_tokens=num_prompt, cached_tokens=1
            )
            if request.output.HasField("prompt_logprobs"):
                started.prompt_logprobs.add(token_id=7)
                started.prompt_logprobs.add(token_id=8, logprob=-0.5)
            yield generation_pb2.GenerateResponse(request_id=request_id, index=index, started=started)
            deltas = self.script.deltas if self.script.deltas is not None else story(request)
            stats, tokens, steps = common_pb2.SpeculationStats(), 0, 0
            for text, delta_steps in deltas:
                delta = _delta(request, text, delta_steps)
                yield generation_pb2.GenerateResponse(request_id=request_id, index=index, delta=delta)
                for step in delta_steps:
                    tokens += len(step.tokens)
                    steps += 1
                    if step.drafted:
                        stats.method = step.method
                        stats.num_drafts += 1
                        stats.num_draft_tokens += step.drafted
                        stats.num_accepted_tokens += step.accepted
            finished = generation_pb2.GenerationFinished(
                finish_reason=generation_pb2.FINISH_REASON_LENGTH,
                usage=generation_pb2.Usage(
                    prompt_tokens=num_prompt, cached_tokens=1, completion_tokens=tokens
                ),
                timing=generation_pb2.RequestTiming(
                    queue=duration_pb2.Duration(nanos=1_000_000),
                    time_to_first_token=duration_pb2.Duration(nanos=500_000_000),
                    total=duration_pb2.Duration(seconds=2, nanos=500_000_000),
                    num_steps=steps,
                    num_preemptions=1,
                ),
            )
            if stats.num_drafts:
                finished.speculation.CopyFrom(stats)
            if request.stopping.stop:
                finished.finish_reason = generation_pb2.FINISH_REASON_STOP
                finished.stop = request.stopping.stop[0]
            yield generation_pb2.GenerateResponse(request_id=request_id, index=index, finished=finished)

    async def Abort(self, request, context):
        found = [request_id for request_id in request.request_ids if request_id in self.live]
        for request_id in found:
            self.live[request_id].set()
        return generation_pb2.AbortResponse(aborted_request_ids=found)

    async def Tokenize(self, request, context):
        await self._maybe_fail(context)
        return generation_pb2.TokenizeResponse(token_ids=prompt_ids(request.prompt))

    async def Detokenize(self, request, context):
        text = bytes(request.token_ids).decode("utf-8", "replace")
        return generation_pb2.DetokenizeResponse(text=text)

    async def GetModelInfo(self, request, context):
        await self._maybe_fail(context)
        return info_pb2.GetModelInfoResponse(
            model="fake",
            model_path="/models/fake",
            architecture="LlamaForCausalLM",
            dtype="float32",
            kv_cache_dtype="float32",
            max_context_tokens=100,
            max_prompt_tokens=80,
            vocab_size=256,
            eos_token_ids=[0],
            has_chat_template=True,
            default_sampling_params=common_pb2.SamplingParams(temperature=0.0, top_k=0),
            drafters=[
                info_pb2.DrafterInfo(
                    method=method, model_path="layers:2" if method == DRAFT_MODEL else "", max_draft_tokens=4
                )
                for method in self.script.drafters
            ],
        )

    async def GetServerInfo(self, request, context):
        response = info_pb2.GetServerInfoResponse(
            version="0.1.0", state=info_pb2.SERVING_STATE_SERVING, page_size=16, num_pages=100
        )
        response.start_time.FromSeconds(1_700_000_000)
        response.speculation.method = NGRAM
        response.speculation.max_draft_tokens = 4
        response.speculation.disable_at_batch_size = 16
        response.workers.add(rank=0, device="cpu", pid=42).heartbeat_age.FromMilliseconds(300)
        response.workers.add(rank=1, device="cpu", pid=43)  # its first heartbeat is still to come
        return response

    async def SetSpeculation(self, request, context):
        await self._maybe_fail(context)
        self.changes.append(request)
        return admin_pb2.SetSpeculationResponse(
            method=request.method or NGRAM,
            max_draft_tokens=request.max_draft_tokens if request.HasField("max_draft_tokens") else 4,
            disable_at_batch_size=request.disable_at_batch_size,
            effective_step=17,
        )

    async def FlushCache(self, request, context):
        return admin_pb2.FlushCacheResponse(num_freed_pages=5)

    async def GetLoad(self, request, context):
        response = info_pb2.GetLoadResponse(num_used_pages=3, num_generated_tokens=10, num_steps=4)
        response.time.FromSeconds(1_700_000_100)
        response.speculation.add(method=NGRAM, num_drafts=2, num_draft_tokens=8, num_accepted_tokens=6)
        return response

    async def _maybe_fail(self, context) -> None:
        if self.script.failures:
            await self._fail(context, self.script.failures.popleft())

    async def _fail(self, context, failure: Failure) -> None:
        status = rpc_status.to_status(failure.status())
        await context.abort(status.code, status.details, (*status.trailing_metadata, *failure.trailers))


def story(request: generation_pb2.GenerateRequest) -> list[tuple[str, list[Step]]]:
    """The usual text in max_tokens (default 12) tokens: with speculation 3 of 4 drafts per step are kept."""
    count = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else 12
    method = request.speculation.method or NGRAM
    tokens = (STORY * (count // len(STORY) + 1))[:count]
    deltas = [(tokens[:1].decode(), [Step(tokens[:1])])]
    at = 1
    while at < count:
        chunk = tokens[at : at + (1 if method == OFF else 4)]
        step = Step(chunk) if method == OFF else Step(chunk, 4, 3, method)
        deltas.append((chunk.decode(), [step]))
        at += len(chunk)
    return deltas


def prompt_ids(prompt: generation_pb2.Prompt) -> list[int]:
    """The prompt's bytes, or its ids; turns of a chat are joined."""
    if prompt.WhichOneof("content") == "tokens":
        return list(prompt.tokens.ids)
    if prompt.WhichOneof("content") == "chat":
        return list("".join(turn.content for turn in prompt.chat.messages).encode())
    return list(prompt.text.encode())


def _delta(request, text: str, steps: Sequence[Step]) -> generation_pb2.TokenDelta:
    delta = generation_pb2.TokenDelta(text=text)
    tokens = b"".join(step.tokens for step in steps)
    if request.output.token_ids:
        delta.token_ids.extend(tokens)
    if request.output.HasField("logprobs"):
        for token in tokens:
            delta.logprobs.add(token_id=token, logprob=-0.25).top.add(token_id=token, logprob=-0.25)
    if request.output.speculation_steps:
        for step in steps:
            delta.speculation_steps.add(
                draft_tokens=step.drafted, accepted_tokens=step.accepted, method=step.method
            )
    return delta


def _aborted(request_id: str) -> generation_pb2.GenerateResponse:
    finished = generation_pb2.GenerationFinished(finish_reason=generation_pb2.FINISH_REASON_ABORTED)
    return generation_pb2.GenerateResponse(request_id=request_id, finished=finished)
