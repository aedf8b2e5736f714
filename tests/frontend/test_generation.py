"""GenerationService over gRPC, against the scripted scheduler."""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio
import pytest
from draftline.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tokenizers import Tokenizer

from scheduler_svc import messages
from scheduler_svc.frontend.generation_stream import MAX_BUFFERED_ITEMS
from scheduler_svc.messages import Abort, Cancel, Finished, Started, Step, Submit, TokenEvent, TokenEvents
from shared_mem.enums import FinishReason, SpeculationMethod
from tests.frontend.calls import collect, failure, text_of
from tests.frontend.conftest import Service, byte_ids, request_of
from tests.frontend.fake_scheduler import FakeScheduler, make_events, says

FOX = "the fox 🎉 jumps 한국어"


async def test_a_whole_stream(service: Service, tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, FOX)
    prompt_logprobs = (messages.TokenLogprobs(11, -1.5, ((12, -0.25),)),)
    service.scheduler.script = says(ids, drafts=3, cached_tokens=1, prompt_logprobs=prompt_logprobs)
    output = generation_pb2.OutputOptions(
        token_ids=True, logprobs=2, prompt_logprobs=1, speculation_steps=True
    )
    before = time.time()
    call = service.generation.Generate(request_of(request_id="abc", output=output), timeout=20)
    (responses,) = (await collect(call)).values()
    assert dict(await call.initial_metadata())["x-request-id"] == "abc"
    assert {response.request_id for response in responses} == {"abc"}
    (submit,) = await service.scheduler.wait_for(Submit)
    assert submit.token_ids == tuple(tokenizer.encode("The fox").ids)
    # gRPC rounds timeouts up on the wire: those above 10 s to tenths of a second
    assert before + 19 < submit.deadline < time.time() + 20.2
    started, finished = responses[0].started, responses[-1].finished
    assert (started.model, started.prompt_tokens, started.cached_tokens) == (
        "scripted", len(submit.token_ids), 1,
    )  # fmt: skip
    first, second = started.prompt_logprobs
    assert first.token_id == submit.token_ids[0]
    assert not first.HasField("logprob")
    assert (second.token_id, second.logprob, second.top[0].token_id) == (11, -1.5, 12)
    deltas = [response.delta for response in responses[1:-1]]
    assert "".join(delta.text for delta in deltas) == FOX
    assert [token_id for delta in deltas for token_id in delta.token_ids] == ids
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
    assert [logprob.token_id for logprob in logprobs] == ids
    assert [(top.token_id, top.logprob) for top in logprobs[0].top] == [(0, 0), (1, -1)]
    steps = [step for delta in deltas for step in delta.speculation_steps]
    assert {step.method for step in steps} == {common_pb2.SPECULATION_METHOD_NGRAM}
    assert finished.finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert finished.WhichOneof("matched_stop") is None
    assert finished.usage.completion_tokens == len(ids)
    assert finished.speculation.num_drafts == len(steps) == finished.timing.num_steps
    assert finished.speculation.num_draft_tokens == 3 * len(steps)
    assert finished.speculation.num_accepted_tokens == sum(step.accepted_tokens for step in steps)
    assert list(finished.speculation.num_draft_tokens_per_pos) == [len(steps)] * 3
    assert 0 < finished.timing.time_to_first_token.ToMicroseconds() <= finished.timing.total.ToMicroseconds()
    assert not [message for message in service.scheduler.received if isinstance(message, Cancel)]


async def test_samples_share_a_stream(service: Service, tokenizer: Tokenizer) -> None:
    service.scheduler.script = says(byte_ids(tokenizer, FOX), drafts=1)
    call = service.generation.Generate(
        request_of(n=4, sampling_params=common_pb2.SamplingParams(seed=9, temperature=0))
    )
    samples = await collect(call)
    assert sorted(samples) == [0, 1, 2, 3]
    assert {text_of(responses) for responses in samples.values()} == {FOX}
    (submit,) = await service.scheduler.wait_for(Submit)
    assert submit.seeds[0] == 9
    assert len(set(submit.seeds)) == 4


async def test_a_stop_string_ends_one_sample_and_tells_the_scheduler(
    service: Service, tokenizer: Tokenizer
) -> None:
    async def script(scheduler: FakeScheduler, submit: Submit) -> None:
        """Sample 0 says the stop in mid-run and would go on; sample 1 goes on until it is done."""
        stopped = make_events(submit.request_id, 0, byte_ids(tokenizer, "one STOP two three"), drafts=6)
        whole = make_events(submit.request_id, 1, byte_ids(tokenizer, "no end here"), drafts=6)
        scheduler.send(TokenEvents((stopped[0], whole[0])))
        scheduler.send(TokenEvents((stopped[1],)))
        await scheduler.wait_for(Cancel)
        scheduler.send(TokenEvents((stopped[2], whole[1])))  # what was under way when the cancel came

    service.scheduler.script = script
    stopping = common_pb2.StoppingCriteria(stop=["STOP"])
    output = generation_pb2.OutputOptions(token_ids=True)
    samples = await collect(service.generation.Generate(request_of(n=2, stopping=stopping, output=output)))
    (cancel,) = await service.scheduler.wait_for(Cancel)
    assert (cancel.index, cancel.reason) == (0, "stop_string")
    assert text_of(samples[0]) == "one "
    finished = samples[0][-1].finished
    assert (finished.finish_reason, finished.stop) == (generation_pb2.FINISH_REASON_STOP, "STOP")
    assert finished.usage.completion_tokens == 8
    assert sum(len(response.delta.token_ids) for response in samples[0]) == 8
    assert finished.timing.num_steps == 2
    assert text_of(samples[1]) == "no end here"
    assert samples[1][-1].finished.finish_reason == generation_pb2.FINISH_REASON_LENGTH


async def test_a_stop_token_is_named(service: Service) -> None:
    service.scheduler.script = says([80, 81], finish=FinishReason.STOP, stop_token_id=81)
    (responses,) = (await collect(service.generation.Generate(request_of()))).values()
    assert responses[-1].finished.stop_token_id == 81
    assert responses[-1].finished.WhichOneof("matched_stop") == "stop_token_id"


async def test_cancelling_the_call_cancels_the_request(service: Service) -> None:
    call = service.generation.Generate(request_of(request_id="gone"))
    await service.scheduler.wait_for(Submit)
    call.cancel()
    (cancel,) = await service.scheduler.wait_for(Cancel)
    assert (cancel.request_id, cancel.index, cancel.reason) == ("gone", None, "client")


async def test_a_passed_deadline_cancels_the_request(service: Service) -> None:
    call = service.generation.Generate(request_of(), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await service.scheduler.wait_for(Cancel)
    (submit,) = await service.scheduler.wait_for(Submit)
    assert 0 < submit.deadline - submit.arrival_time < 0.31


async def test_no_deadline_is_none(service: Service) -> None:
    service.scheduler.script = says([80])
    await collect(service.generation.Generate(request_of()))
    assert (await service.scheduler.wait_for(Submit))[0].deadline is None


async def test_an_id_used_again_sees_no_event_of_its_first_use(
    service: Service, tokenizer: Tokenizer
) -> None:
    """The first run's late events, `started` included, are still under way when the id comes again."""
    ids = byte_ids(tokenizer, "late")
    late: list[TokenEvent] = []

    async def first(scheduler: FakeScheduler, submit: Submit) -> None:
        late.extend(make_events(submit.request_id, 0, ids))

    service.scheduler.script = first
    call = service.generation.Generate(request_of(request_id="twice"))
    await service.scheduler.wait_for(Submit)
    call.cancel()
    await service.scheduler.wait_for(Cancel)
    service.scheduler.script = says(byte_ids(tokenizer, "new"))
    second = asyncio.ensure_future(collect(service.generation.Generate(request_of(request_id="twice"))))
    # The scheduler answers in order: what it sent before the cancel is before the answer to the question.
    service.scheduler.send(TokenEvents(tuple(late)))
    assert text_of((await second)[0]) == "new"


async def test_abort(service: Service) -> None:
    service.scheduler.abort_answer = lambda ids: ids[:1]
    response = await service.generation.Abort(generation_pb2.AbortRequest(request_ids=["a", "b"]))
    assert list(response.aborted_request_ids) == ["a"]
    assert (await service.scheduler.wait_for(Abort))[0].request_ids == ("a", "b")


async def test_an_aborted_stream_ends_well(service: Service, tokenizer: Tokenizer) -> None:
    async def script(scheduler: FakeScheduler, submit: Submit) -> None:
        step = Step(SpeculationMethod.DISABLED, 0, 0, 0)
        ids = tuple(byte_ids(tokenizer, "한"))[:2]
        started = Started(0, time.time())
        scheduler.send(TokenEvents((TokenEvent(submit.request_id, 0, ids, step, started=started),)))
        aborted = TokenEvent(submit.request_id, 0, (), finished=Finished(FinishReason.ABORTED, None, 1, 0))
        scheduler.send(TokenEvents((aborted,)))

    service.scheduler.script = script
    (responses,) = (await collect(service.generation.Generate(request_of()))).values()
    assert responses[-1].finished.finish_reason == generation_pb2.FINISH_REASON_ABORTED
    assert text_of(responses) == "\ufffd"


async def test_a_slow_reader_gets_everything_and_holds_nobody_up(
    service: Service, tokenizer: Tokenizer
) -> None:
    """40,000 tokens to a caller that reads nothing at first, far more than any network buffer holds."""
    ids = byte_ids(tokenizer, "0123456789" * 4000)

    async def script(scheduler: FakeScheduler, submit: Submit) -> None:
        wanted = ids if submit.request_id == "slow" else byte_ids(tokenizer, FOX)
        events = make_events(submit.request_id, 0, wanted, drafts=7, num_logprobs=submit.num_logprobs)
        for start in range(0, len(events), 50):
            scheduler.send(TokenEvents(tuple(events[start : start + 50])))
            await asyncio.sleep(0)

    service.scheduler.script = script
    output = generation_pb2.OutputOptions(token_ids=True, logprobs=5)
    # A window that never grows: what the caller does not read stays on the server's side.
    options = (("grpc.http2.bdp_probe", 0),)
    async with grpc.aio.insecure_channel(service.frontend.listen, options=options) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        slow = aiter(stub.Generate(request_of(request_id="slow", output=output)))
        first = await anext(slow)
        assert first.WhichOneof("event") == "started"
        began = time.perf_counter()
        (other,) = (await collect(service.generation.Generate(request_of()))).values()
        assert text_of(other) == FOX
        assert time.perf_counter() - began < 5
        await asyncio.sleep(0.5)
        (stream,) = service.frontend._generation._live
        assert len(stream._buffer) <= MAX_BUFFERED_ITEMS + 2
        responses = [response async for response in slow]
    assert text_of(responses) == "0123456789" * 4000
    assert [token_id for response in responses for token_id in response.delta.token_ids] == ids
    assert responses[-1].finished.usage.completion_tokens == len(ids)
    assert len(responses) < 2500  # of 5,000 steps: merged


async def test_tokenize_and_detokenize(service: Service, tokenizer: Tokenizer) -> None:
    prompt = generation_pb2.Prompt(text=FOX)
    tokenized = await service.generation.Tokenize(generation_pb2.TokenizeRequest(prompt=prompt))
    assert list(tokenized.token_ids) == tokenizer.encode(FOX).ids
    for special_tokens in (False, True):
        request = generation_pb2.DetokenizeRequest(
            token_ids=[*tokenized.token_ids, 2], special_tokens=special_tokens
        )
        text = (await service.generation.Detokenize(request)).text
        assert text == FOX + ("<|im_end|>" if special_tokens else "")
    for call, field in (
        (service.generation.Tokenize(generation_pb2.TokenizeRequest(model="x", prompt=prompt)), "model"),
        (service.generation.Tokenize(generation_pb2.TokenizeRequest()), "prompt"),
        (service.generation.Detokenize(generation_pb2.DetokenizeRequest(token_ids=[300])), "token_ids[0]"),
        (service.generation.Detokenize(generation_pb2.DetokenizeRequest(model="x")), "model"),
    ):
        error, _, details = await failure(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details["BadRequest"].field_violations[0].field == field
        assert len(dict(error.initial_metadata())["x-request-id"]) == 32
