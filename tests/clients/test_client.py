"""Sync and async client against the scripted service: results, errors with details, retries, cancellation."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc
import pytest
from draftline import (
    AlreadyExistsError,
    AsyncClient,
    Client,
    DeadlineExceededError,
    Delta,
    DraftlineError,
    FailedPreconditionError,
    Finished,
    InternalError,
    InvalidArgumentError,
    Message,
    RequestCancelledError,
    ResourceExhaustedError,
    RetryPolicy,
    SpeculationSettings,
    Started,
    UnavailableError,
)
from draftline.retry import NO_RETRY, Attempts

from tests.clients.fake_service import STORY, Failure, FakeService

FAST = RetryPolicy(initial_backoff=0.01)


class Sync:
    """The sync client in the async one's clothes, so that each behaviour is tested once for both."""

    def __init__(self, address: str, retry: RetryPolicy) -> None:
        self._client = Client(address, retry=retry)

    async def complete(self, *args, **options):
        return await asyncio.to_thread(lambda: self._client.generate(*args, **options).completion())

    async def events(self, *args, **options):
        return await asyncio.to_thread(lambda: list(self._client.generate(*args, **options)))

    async def call(self, name, *args, **options):
        return await asyncio.to_thread(getattr(self._client, name), *args, **options)

    async def close(self):
        self._client.close()


class Async:
    def __init__(self, address: str, retry: RetryPolicy) -> None:
        self._client = AsyncClient(address, retry=retry)

    async def complete(self, *args, **options):
        return await self._client.generate(*args, **options).completion()

    async def events(self, *args, **options):
        return [event async for event in self._client.generate(*args, **options)]

    async def call(self, name, *args, **options):
        return await getattr(self._client, name)(*args, **options)

    async def close(self):
        await self._client.close()


@pytest.fixture(params=[Sync, Async])
async def client(request, service):
    made = request.param(service.address, FAST)
    yield made
    await made.close()


async def test_events_and_completion(client, service: FakeService):
    events = await client.events("hello", token_ids=True, speculation_steps=True, max_tokens=9)
    assert isinstance(events[0], Started)
    assert (events[0].prompt_tokens, events[0].cached_tokens, events[0].model) == (5, 1, "fake")
    deltas = [event for event in events if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas).encode() == STORY[:9]
    assert deltas[1].token_ids == tuple(STORY[1:5])
    step = deltas[1].speculation_steps[0]
    assert (step.method, step.draft_tokens, step.accepted_tokens) == ("ngram", 4, 3)
    assert isinstance(events[-1], Finished)

    completion = await client.complete("hello", token_ids=True, max_tokens=9)
    assert completion.text.encode() == STORY[:9]
    assert completion.token_ids == tuple(STORY[:9])
    assert completion.finish_reason == "length"
    assert completion.usage.completion_tokens == 9
    assert completion.speculation.acceptance_rate == 0.75
    assert completion.speculation.acceptance_length == 4.0
    assert completion.timing.total == 2.5
    assert completion.timing.time_to_first_token == 0.5
    assert completion.timing.num_preemptions == 1


async def test_n_samples_and_logprobs(client):
    completion = await client.complete([1, 2], n=3, logprobs=1, prompt_logprobs=0, max_tokens=2)
    assert [sample.index for sample in completion.samples] == [0, 1, 2]
    assert [len(sample.logprobs) for sample in completion.samples] == [2, 2, 2]
    assert completion.samples[0].logprobs[0].top[0].logprob == -0.25
    assert [entry.logprob for entry in completion.prompt_logprobs] == [None, -0.5]


async def test_matched_stop(client):
    completion = await client.complete("x", stop=["dog"])
    assert (completion.finish_reason, completion.samples[0].matched_stop) == ("stop", "dog")


async def test_unary_calls(client):
    assert await client.call("tokenize", "ab") == [97, 98]
    assert await client.call("detokenize", [104, 105]) == "hi"
    assert await client.call("abort", "nobody") == []
    assert await client.call("health") == "SERVING"
    model = await client.call("model_info")
    assert model.max_context_tokens == 100
    assert model.default_sampling == {"temperature": 0.0, "top_k": 0}
    assert [(d.method, d.model_path) for d in model.drafters] == [("ngram", ""), ("draft-model", "layers:2")]
    info = await client.call("server_info")
    assert info.state == "serving"
    assert [worker.heartbeat_age for worker in info.workers] == [0.3, None]
    assert info.speculation == SpeculationSettings("ngram", 4, 16)
    load = await client.call("load")
    assert load.speculation[0].acceptance_length == 4.0


async def test_admin_calls(client, service: FakeService):
    change = await client.call("set_speculation", method="off", disable_at_batch_size=0)
    assert (change.settings, change.effective_step) == (SpeculationSettings("off", 4, 0), 17)
    (sent,) = service.changes
    assert sent.HasField("disable_at_batch_size")
    assert not sent.HasField("max_draft_tokens")
    change = await client.call("set_speculation", max_draft_tokens=2)
    assert change.settings == SpeculationSettings("ngram", 2, 0)
    assert not service.changes[1].HasField("method")
    assert await client.call("flush_cache") == 5
    for wrong in ({"method": "magic"}, {"max_draft_tokens": -1}, {"disable_at_batch_size": 2**32}):
        with pytest.raises(InvalidArgumentError) as caught:
            await client.call("set_speculation", **wrong)
        assert caught.value.field == next(iter(wrong))
    service.script.failures.append(
        Failure(
            grpc.StatusCode.FAILED_PRECONDITION, "mtp is not loaded", reason="PRECONDITION", field="method"
        )
    )
    with pytest.raises(FailedPreconditionError) as caught:
        await client.call("set_speculation", method="mtp")
    assert (caught.value.reason, caught.value.field) == ("PRECONDITION", "method")
    assert len(service.changes) == 2


async def test_chat_sends_turns(service: FakeService):
    async with AsyncClient(service.address) as client:
        await client.chat([Message("user", "a"), {"role": "assistant", "content": "b"}]).completion()
    assert [turn.content for turn in service.requests[0].prompt.chat.messages] == ["a", "b"]


async def test_a_bad_field_is_told_by_its_path(client, service: FakeService):
    service.script.failures.append(
        Failure(
            grpc.StatusCode.INVALID_ARGUMENT,
            "2.0 is above 1",
            reason="INVALID_FIELD",
            field="sampling_params.top_p",
        )
    )
    with pytest.raises(InvalidArgumentError) as caught:
        await client.complete("x", top_p=2.0)
    error = caught.value
    assert (error.code, error.reason, error.field) == (
        "INVALID_ARGUMENT",
        "INVALID_FIELD",
        "sampling_params.top_p",
    )
    assert str(error) == "INVALID_ARGUMENT (INVALID_FIELD): sampling_params.top_p: 2.0 is above 1"
    assert len(service.requests) == 1


async def test_queue_full_carries_its_wait_and_is_not_retried(client, service: FakeService):
    service.script.failures.append(
        Failure(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            reason="ERROR_REASON_QUEUE_FULL",
            retry_after=1.5,
            message="full",
        )
    )
    with pytest.raises(ResourceExhaustedError) as caught:
        await client.complete("x")
    assert (caught.value.reason, caught.value.retry_after) == ("QUEUE_FULL", 1.5)
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.ALREADY_EXISTS, AlreadyExistsError),
        (grpc.StatusCode.INTERNAL, InternalError),
        (grpc.StatusCode.DATA_LOSS, DraftlineError),
        (grpc.StatusCode.CANCELLED, RequestCancelledError),
    ],
)
async def test_each_code_has_its_class(client, service: FakeService, code, cls):
    service.script.failures.append(Failure(code, after_events=2))
    with pytest.raises(DraftlineError) as caught:
        await client.events("x")
    assert type(caught.value) is cls
    assert caught.value.code == code.name


async def test_a_call_at_the_wrong_address_says_so(client, service: FakeService):
    service.script.failures.append(Failure(grpc.StatusCode.UNIMPLEMENTED))
    with pytest.raises(DraftlineError, match="AdminService has an address of its own") as caught:
        await client.events("x")
    assert caught.value.code == "UNIMPLEMENTED"


async def test_unavailable_is_tried_again_before_the_first_token(client, service: FakeService):
    service.script.failures.extend([Failure(grpc.StatusCode.UNAVAILABLE)] * 2)
    completion = await client.complete("x", max_tokens=3)
    assert completion.text.encode() == STORY[:3]
    assert len(service.requests) == 3


async def test_unavailable_after_the_first_token_is_not(client, service: FakeService):
    service.script.failures.append(Failure(grpc.StatusCode.UNAVAILABLE, reason="WORKER_LOST", after_events=2))
    with pytest.raises(UnavailableError) as caught:
        await client.complete("x")
    assert caught.value.reason == "WORKER_LOST"
    assert len(service.requests) == 1


async def test_attempts_are_bounded(client, service: FakeService):
    service.script.failures.extend([Failure(grpc.StatusCode.UNAVAILABLE)] * 9)
    with pytest.raises(UnavailableError):
        await client.complete("x")
    assert len(service.requests) == FAST.max_attempts


async def test_unary_calls_are_retried_too(client, service: FakeService):
    service.script.failures.append(Failure(grpc.StatusCode.UNAVAILABLE))
    assert await client.call("tokenize", "a") == [97]


async def test_the_wait_the_service_asks_for_is_kept(client, service: FakeService):
    service.script.failures.append(Failure(grpc.StatusCode.UNAVAILABLE, retry_after=0.3))
    before = time.monotonic()
    await client.complete("x")
    assert 0.3 <= time.monotonic() - before < 3


async def test_negative_pushback_forbids_the_retry(client, service: FakeService):
    service.script.failures.append(
        Failure(grpc.StatusCode.UNAVAILABLE, trailers=(("grpc-retry-pushback-ms", "-1"),))
    )
    with pytest.raises(UnavailableError):
        await client.complete("x")
    assert len(service.requests) == 1


def test_pushback_trailer_sets_the_wait_and_the_deadline_bounds_it():
    error = UnavailableError("later", retry_after=0.25)
    assert Attempts(FAST, None).delay_or_raise(error) == 0.25
    with pytest.raises(UnavailableError):
        Attempts(FAST, 0.2).delay_or_raise(error)
    assert [round(RetryPolicy().backoff(n) / 0.2 / 2 ** (n - 1), 1) for n in (1, 2, 3)] == pytest.approx(
        [1, 1, 1], abs=0.25
    )
    with pytest.raises(UnavailableError):
        Attempts(NO_RETRY, None).delay_or_raise(error)


async def test_timeout(client, service: FakeService):
    service.script.hang_after = 2
    with pytest.raises(DeadlineExceededError):
        await client.complete("x", timeout=0.3)
    assert await asyncio.to_thread(service.cancelled.wait, 5)


async def test_abort_ends_the_stream_well(service: FakeService):
    service.script.hang_after = 2
    async with AsyncClient(service.address) as client, client.generate("x", request_id="mine") as stream:
        await anext(stream)
        assert await client.abort("mine", "other") == ["mine"]
        completion = await stream.completion()
    assert completion.finish_reason == "aborted"


def test_cancel_from_another_thread_ends_the_request_on_the_service(service: FakeService):
    service.script.hang_after = 2
    with Client(service.address) as client:
        stream = client.generate("x")
        next(stream)
        threading.Timer(0.05, stream.cancel).start()
        with pytest.raises(RequestCancelledError):
            stream.completion()
    assert service.cancelled.wait(5)


def test_a_cancel_while_a_retry_starts_ends_the_new_call(service: FakeService):
    service.script.failures.append(Failure(grpc.StatusCode.UNAVAILABLE))
    with Client(service.address, retry=FAST) as client:
        stream = client.generate("x", timeout=10)
        start = stream._start

        def start_and_be_cancelled(timeout: float | None):
            call = start(timeout)
            canceller = threading.Thread(target=stream.cancel)  # it sees the call that failed
            canceller.start()
            canceller.join()
            return call

        stream._start = start_and_be_cancelled
        with pytest.raises(RequestCancelledError):
            next(stream)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_cancel_ends_the_wait_for_a_retry(service: FakeService, asynchronous: bool):
    service.script.failures.append(Failure(grpc.StatusCode.UNAVAILABLE, retry_after=30))
    before = time.monotonic()
    if asynchronous:
        async with AsyncClient(service.address) as client:
            waiting = client.generate("x")
            asyncio.get_running_loop().call_later(0.2, waiting.cancel)
            with pytest.raises(RequestCancelledError):
                await anext(waiting)
    else:
        with Client(service.address) as client:
            stream = client.generate("x")
            threading.Timer(0.2, stream.cancel).start()
            with pytest.raises(RequestCancelledError):
                await asyncio.to_thread(stream.completion)
    assert time.monotonic() - before < 10
    assert len(service.requests) == 1


async def test_leaving_the_stream_cancels_the_request(service: FakeService):
    service.script.hang_after = 2
    async with AsyncClient(service.address) as client, client.generate("x") as stream:
        await anext(stream)
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            await stream.completion()
    assert await asyncio.to_thread(service.cancelled.wait, 5)


async def test_a_cancelled_task_still_unwinds_as_cancelled(service: FakeService):
    service.script.hang_after = 2
    async with AsyncClient(service.address) as client:
        task = asyncio.create_task(client.generate("x").completion())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_a_stream_without_its_end_is_an_error(service: FakeService):
    from draftline.results import CompletionBuilder

    builder = CompletionBuilder()
    builder.add(Started("r", 0, "fake", 1, 0, ()))
    with pytest.raises(InternalError, match="end of sample 0"):
        builder.completion()


def test_unix_socket(tmp_path):
    with FakeService(f"unix:{tmp_path}/s") as service, Client(service.address) as client:
        assert client.tokenize("a") == [97]


def test_nobody_listens():
    retry = RetryPolicy(max_attempts=2, initial_backoff=0.01)
    with Client("127.0.0.1:1", retry=retry) as client, pytest.raises(UnavailableError):
        client.model_info()


def test_messages_over_grpc_s_own_4_mib_pass_both_ways(service: FakeService):
    size = 5 << 20
    with Client(service.address) as client:
        assert len(client.tokenize("a" * size)) == size


def test_a_timeout_that_is_no_number_is_refused():
    with pytest.raises(InvalidArgumentError, match="timeout: nan is no number of seconds"):
        Attempts(NO_RETRY, float("nan"))
    remaining = Attempts(NO_RETRY, 0).remaining()
    assert remaining is not None
    assert remaining <= 0  # a deadline that has passed is one, and ends the call at once
