"""Failures as callers see them: codes, details, request ids, and neighbours that notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from draftline.v1 import common_pb2, generation_pb2
from tokenizers import Tokenizer

from scheduler_svc.errors import ErrorReason
from scheduler_svc.messages import Cancel, Started, Submit, TokenEvent, TokenEvents
from tests.frontend.calls import collect, failure, text_of
from tests.frontend.conftest import Service, byte_ids, request_of
from tests.frontend.fake_scheduler import FakeScheduler, make_events, rejects, says

FOX = "the fox 🎉 jumps 한국어"


async def test_a_live_id_is_refused(service: Service) -> None:
    call = service.generation.Generate(request_of(request_id="one"))
    await service.scheduler.wait_for(Submit)
    error, _, details = await failure(service.generation.Generate(request_of(request_id="one")))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert details["ErrorInfo"].reason == "DUPLICATE_REQUEST_ID"
    assert len(await service.scheduler.wait_for(Submit)) == 1
    assert not [message for message in service.scheduler.received if isinstance(message, Cancel)]
    call.cancel()
    await service.scheduler.wait_for(Cancel)


async def test_a_bad_field_says_which(service: Service) -> None:
    stopping = common_pb2.StoppingCriteria(stop=["a", "b", ""])
    call = service.generation.Generate(request_of(request_id="bad", stopping=stopping))
    error, status, details = await failure(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == status.message == "stopping.stop[2]: must not be empty"
    assert details["ErrorInfo"].reason == "INVALID_FIELD"
    assert details["ErrorInfo"].metadata["request_id"] == "bad"
    (violation,) = details["BadRequest"].field_violations
    assert violation.field == "stopping.stop[2]"
    assert "RetryInfo" not in details
    assert dict(error.initial_metadata())["x-request-id"] == "bad"


@contextlib.asynccontextmanager
async def neighbour_of(service: Service, tokenizer: Tokenizer) -> AsyncIterator[None]:
    """A stream that is half way meanwhile, and has to end well."""
    release = asyncio.Event()

    async def script(scheduler: FakeScheduler, submit: Submit) -> None:
        events = make_events(submit.request_id, 0, byte_ids(tokenizer, FOX))
        scheduler.send(TokenEvents(tuple(events[:5])))
        await release.wait()
        scheduler.send(TokenEvents(tuple(events[5:])))

    service.scheduler.script = script
    neighbour = asyncio.ensure_future(collect(service.generation.Generate(request_of())))
    await service.scheduler.wait_for(Submit)
    yield
    release.set()
    assert text_of((await neighbour)[0]) == FOX
    assert len(await service.scheduler.wait_for(Submit)) == 1, "what was refused got no further"


async def test_bad_requests_leave_their_neighbours_alone(service: Service, tokenizer: Tokenizer) -> None:
    async with neighbour_of(service, tokenizer):
        for prompt in (
            generation_pb2.Prompt(text=""),
            generation_pb2.Prompt(tokens=generation_pb2.TokenIds()),
        ):
            error, _, _ = await failure(service.generation.Generate(request_of(prompt=prompt)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("broken", [b"\xed\xa0\x80", b"\xff\xfe\xff", "한".encode()[:2] + b"x"])
async def test_text_that_is_no_utf8_is_refused_and_harms_no_neighbour(
    service: Service, tokenizer: Tokenizer, broken: bytes
) -> None:
    """Half of a surrogate pair and broken bytes, which stubs of some languages send as they are."""
    message = generation_pb2.ChatMessage(role="user", content="BAD")
    requests = [
        request_of(prompt=generation_pb2.Prompt(text="BAD")),
        request_of(stopping=common_pb2.StoppingCriteria(stop=["BAD"])),
        request_of(prompt=generation_pb2.Prompt(chat=generation_pb2.ChatPrompt(messages=[message]))),
    ]
    generate = service.channel.unary_stream("/draftline.v1.GenerationService/Generate")
    tokenize = service.channel.unary_unary("/draftline.v1.GenerationService/Tokenize")
    async with neighbour_of(service, tokenizer):
        for request in requests:
            tokens_of = generation_pb2.TokenizeRequest(prompt=request.prompt)
            for call, data in ((generate, request), (tokenize, tokens_of)):
                sent = data.SerializeToString().replace(b"BAD", broken)
                if broken not in sent:  # Tokenize has no stop strings
                    continue
                error, _, details = await failure(call(sent))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert details["ErrorInfo"].reason == "INVALID_FIELD"
                assert "cannot be decoded" in error.details()


@pytest.mark.parametrize("wished", ["bad id", "ä", "x" * 65, "new\nline"])
async def test_bad_request_ids(service: Service, wished: str) -> None:
    error, _, details = await failure(service.generation.Generate(request_of(request_id=wished)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details["BadRequest"].field_violations[0].field == "request_id"
    assert dict(error.initial_metadata())["x-request-id"] == details["ErrorInfo"].metadata["request_id"]


async def test_the_header_names_a_request_without_an_id(service: Service) -> None:
    service.scheduler.script = says([80])
    for request_id, header, expected in (("", "from-header", "from-header"), ("own", "from-header", "own")):
        call = service.generation.Generate(
            request_of(request_id=request_id), metadata=(("x-request-id", header),)
        )
        (responses,) = (await collect(call)).values()
        assert responses[0].request_id == expected
        assert dict(await call.initial_metadata())["x-request-id"] == expected
    call = service.generation.Generate(request_of())
    (responses,) = (await collect(call)).values()
    assert len(responses[0].request_id) == 32
    _, _, details = await failure(
        service.generation.Generate(request_of(), metadata=(("x-request-id", "not allowed"),))
    )
    assert details["BadRequest"].field_violations[0].field == "x-request-id"


@pytest.mark.parametrize(
    ("reason", "code", "retry_after", "pushback"),
    [
        (ErrorReason.QUEUE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED, 2.5, "2500"),
        (ErrorReason.QUEUE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED, None, "1000"),
        (ErrorReason.NOT_SERVING, grpc.StatusCode.UNAVAILABLE, None, "1000"),
        (ErrorReason.WORKER_LOST, grpc.StatusCode.UNAVAILABLE, None, None),
        (ErrorReason.EXPIRED_IN_QUEUE, grpc.StatusCode.DEADLINE_EXCEEDED, None, None),
        (ErrorReason.DUPLICATE_REQUEST_ID, grpc.StatusCode.ALREADY_EXISTS, None, None),
        (ErrorReason.PRECONDITION, grpc.StatusCode.FAILED_PRECONDITION, None, None),
        (ErrorReason.INTERNAL, grpc.StatusCode.INTERNAL, None, None),
    ],
)
async def test_rejections(
    service: Service,
    reason: ErrorReason,
    code: grpc.StatusCode,
    retry_after: float | None,
    pushback: str | None,
) -> None:
    service.scheduler.script = rejects(reason, "because 한국어", retry_after)
    error, _, details = await failure(service.generation.Generate(request_of()))
    assert (error.code(), error.details()) == (code, "because 한국어")
    assert details["ErrorInfo"].reason == reason.value
    assert dict(error.trailing_metadata()).get("grpc-retry-pushback-ms") == pushback
    assert ("RetryInfo" in details) == (pushback is not None)
    if pushback is not None:
        assert details["RetryInfo"].retry_delay.ToMilliseconds() == int(pushback)
    assert not [message for message in service.scheduler.received if isinstance(message, Cancel)]


async def test_a_rejection_after_text_comes_after_it(service: Service, tokenizer: Tokenizer) -> None:
    async def script(scheduler: FakeScheduler, submit: Submit) -> None:
        events = make_events(submit.request_id, 0, byte_ids(tokenizer, "some text"))
        scheduler.send(TokenEvents(tuple(events[:4])))
        await rejects(ErrorReason.WORKER_LOST, "rank 0 died")(scheduler, submit)

    service.scheduler.script = script
    text: list[str] = []

    async def read() -> None:
        async for response in service.generation.Generate(request_of()):
            text.append(response.delta.text)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read()
    assert "".join(text) == "some"
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_bug_is_internal_without_its_traceback(
    service: Service, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def broken(*_: Any) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr("scheduler_svc.frontend.generation_servicer.read_generate", broken)
    error, status, details = await failure(service.generation.Generate(request_of(request_id="oops")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "oops" in error.details()
    assert "secret" not in str(status)
    assert "Traceback" not in str(status)
    assert details["ErrorInfo"].reason == "INTERNAL"
    assert "secret detail" in "".join(capfd.readouterr())


async def test_a_bug_in_one_stream_stays_there(service: Service, tokenizer: Tokenizer) -> None:
    async def script(scheduler: FakeScheduler, submit: Submit) -> None:
        if submit.request_id == "bug":  # an index that the request does not have
            bad = TokenEvent(submit.request_id, 5, (80,), None, started=Started(0, 0.0))
            good = make_events("good", 0, byte_ids(tokenizer, FOX))
            scheduler.send(TokenEvents((bad, *good)))

    service.scheduler.script = script
    good = asyncio.ensure_future(collect(service.generation.Generate(request_of(request_id="good"))))
    await service.scheduler.wait_for(Submit)
    error, _, _ = await failure(service.generation.Generate(request_of(request_id="bug")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert text_of((await good)[0]) == FOX
