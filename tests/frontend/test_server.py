"""The server around the services: health, reflection, drain, pings, message sizes, addresses, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from draftline.v1 import generation_pb2, generation_pb2_grpc, info_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tokenizers import Tokenizer

from scheduler_svc.config import ServerConfig
from scheduler_svc.errors import StartupError
from scheduler_svc.frontend.server import OPTIONS, FrontendServer
from scheduler_svc.frontend.service_state import HEALTH_SERVICES
from scheduler_svc.messages import Cancel, FrontendHello, Submit, TokenEvents
from tests.frontend.conftest import Service, byte_ids, request_of
from tests.frontend.fake_scheduler import FakeScheduler, make_events, make_model, says

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(channel: grpc.aio.Channel) -> set[int]:
    stub = health_pb2_grpc.HealthStub(channel)
    return {
        (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status
        for service in HEALTH_SERVICES
    }


async def until_health(channel: grpc.aio.Channel, status: int) -> None:
    async with asyncio.timeout(5):
        while await health_of(channel) != {status}:
            await asyncio.sleep(0.01)


async def code_of(call: grpc.aio.UnaryStreamCall) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code(), caught.value.details() or ""


async def test_health_follows_the_scheduler(service: Service) -> None:
    assert await health_of(service.channel) == {SERVING}
    for state, detail in (("starting", ""), ("serving", ""), ("failed", "rank 0 died")):
        service.scheduler.set_state(state, detail)
        await until_health(service.channel, SERVING if state == "serving" else NOT_SERVING)
    code, text = await code_of(service.generation.Generate(request_of()))
    assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the service is failed: rank 0 died")


async def test_unknown_services_are_not_found(service: Service) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_pb2_grpc.HealthStub(service.channel).Check(health_pb2.HealthCheckRequest(service="x"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_fifty_watchers_and_quick_checks(service: Service) -> None:
    stub = health_pb2_grpc.HealthStub(service.channel)
    calls = [stub.Watch(health_pb2.HealthCheckRequest(service=HEALTH_SERVICES[i % 3])) for i in range(50)]
    assert {(await call.read()).status for call in calls} == {SERVING}
    service.scheduler.set_state("draining")
    assert {(await call.read()).status for call in calls} == {NOT_SERVING}
    began = time.perf_counter()
    assert await health_of(service.channel) == {NOT_SERVING}
    assert time.perf_counter() - began < 0.5
    for call in calls:
        call.cancel()


async def test_not_serving_until_the_model_is_loaded(tokenizer_dir: Path, runtime_dir: Path) -> None:
    """The frontend comes first, then a scheduler that is starting, then the model."""
    frontend = FrontendServer(ServerConfig(listen="127.0.0.1:0"), runtime_dir)
    await frontend.start()
    scheduler = FakeScheduler(runtime_dir, make_model(tokenizer_dir))
    scheduler.state = "starting"
    async with grpc.aio.insecure_channel(frontend.listen) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert await health_of(channel) == {NOT_SERVING}
        code, text = await code_of(stub.Generate(request_of()))
        assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the service is starting")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Abort(generation_pb2.AbortRequest(request_ids=["a"]))
        assert caught.value.details() == "the scheduler is not there"
        await scheduler.start()
        await scheduler.wait_for(FrontendHello)
        assert await health_of(channel) == {NOT_SERVING}
        scheduler.set_state("serving")
        assert await asyncio.wait_for(frontend.wait_serving(), 5) == "scripted"
        assert await health_of(channel) == {SERVING}
    await frontend.stop()
    await scheduler.close()


async def test_a_lost_scheduler_ends_streams_and_a_new_one_is_greeted(
    service: Service, tokenizer_dir: Path, runtime_dir: Path
) -> None:
    call = service.generation.Generate(request_of())
    await service.scheduler.wait_for(Submit)
    await service.scheduler.close()
    code, text = await code_of(call)
    assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the service failed: the scheduler is gone")
    await until_health(service.channel, NOT_SERVING)
    second = FakeScheduler(runtime_dir, make_model(tokenizer_dir))
    second.script = says([80])
    await second.start()
    await until_health(service.channel, SERVING)
    assert [response async for response in service.generation.Generate(request_of())]
    await second.close()


async def test_a_tokenizer_that_cannot_be_read_ends_the_frontend(tmp_path: Path, runtime_dir: Path) -> None:
    scheduler = FakeScheduler(runtime_dir, make_model(tmp_path / "none"))
    await scheduler.start()
    frontend = FrontendServer(ServerConfig(listen="127.0.0.1:0"), runtime_dir)
    await frontend.start()
    with pytest.raises(StartupError, match=r"none/tokenizer\.json: No such file"):
        await asyncio.wait_for(frontend.wait_serving(), 5)
    await frontend.stop()
    await scheduler.close()


async def test_reflection_lists_the_services(service: Service) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {each.name for each in (await call.read()).list_services_response.service}
    await call.done_writing()
    assert names == {
        "draftline.v1.GenerationService",
        "draftline.v1.InfoService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_info(service: Service) -> None:
    model = await service.info.GetModelInfo(info_pb2.GetModelInfoRequest(model="scripted"))
    assert (model.model, model.architecture, model.vocab_size) == ("scripted", "LlamaForCausalLM", 300)
    assert (model.max_context_tokens, model.max_prompt_tokens) == (256, 255)
    assert list(model.eos_token_ids) == [2]
    assert model.has_chat_template
    assert model.default_sampling_params.temperature == 1.0
    assert model.default_sampling_params.HasField("top_k")
    assert [(each.method, each.max_draft_tokens) for each in model.drafters] == [(3, 8)]
    server = await service.info.GetServerInfo(info_pb2.GetServerInfoRequest())
    assert server.version
    assert server.state == info_pb2.SERVING_STATE_SERVING
    assert server.start_time.ToSeconds() == 1_700_000_000
    (worker,) = server.workers
    assert (worker.device, worker.pid, worker.heartbeat_age.ToMilliseconds()) == ("cpu", 4242, 125)
    assert (server.page_size, server.num_pages) == (16, 100)
    load = await service.info.GetLoad(info_pb2.GetLoadRequest())
    assert load.time.ToMilliseconds() == 1_700_000_000_250
    assert (load.num_running_requests, load.num_waiting_requests, load.num_cached_tokens) == (1, 2, 10)
    (counters,) = load.speculation
    assert list(counters.num_accepted_tokens_per_pos) == [5, 4, 2, 1]
    service.scheduler.set_state("failed")
    server = await service.info.GetServerInfo(info_pb2.GetServerInfoRequest())
    assert server.state == info_pb2.SERVING_STATE_FAILED


async def test_a_worker_that_never_beat_has_no_age(service: Service) -> None:
    service.scheduler.heartbeat_age = float("inf")
    server = await service.info.GetServerInfo(info_pb2.GetServerInfoRequest())
    (worker,) = server.workers
    assert worker.pid == 4242
    assert not worker.HasField("heartbeat_age")


async def test_a_silent_scheduler_is_unavailable(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.frontend.scheduler_client._REPLY_TIMEOUT_SECONDS", 0.05)
    service.scheduler.answers_queries = False
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.info.GetLoad(info_pb2.GetLoadRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "the scheduler does not answer"


async def test_drain_lets_live_streams_finish(service: Service, tokenizer: Tokenizer) -> None:
    release = asyncio.Event()

    async def script(scheduler: FakeScheduler, submit: Submit) -> None:
        events = make_events(submit.request_id, 0, byte_ids(tokenizer, "all of it"))
        scheduler.send(TokenEvents(tuple(events[:2])))
        await release.wait()
        scheduler.send(TokenEvents(tuple(events[2:])))

    service.scheduler.script = script
    call = aiter(service.generation.Generate(request_of()))
    assert (await anext(call)).WhichOneof("event") == "started"
    drain = asyncio.create_task(service.frontend.drain_and_stop())
    await until_health(service.channel, NOT_SERVING)
    code, text = await code_of(service.generation.Generate(request_of()))
    assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the service is draining")
    release.set()
    responses = [response async for response in call]
    assert "".join(response.delta.text for response in responses) == "all of it"
    await asyncio.wait_for(drain, 5)


async def test_drain_ends_the_rest_with_a_status(service: Service) -> None:
    stub = health_pb2_grpc.HealthStub(service.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    call = service.generation.Generate(request_of())
    await service.scheduler.wait_for(Submit)
    began = time.perf_counter()
    drain = asyncio.create_task(service.frontend.drain_and_stop())
    code, text = await code_of(call)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "shut down" in text
    assert time.perf_counter() - began >= 0.3
    await service.scheduler.wait_for(Cancel)
    await asyncio.wait_for(drain, 5)  # a watcher, which never ends by itself, does not hold it up
    assert time.perf_counter() - began < 3
    with contextlib.suppress(grpc.aio.AioRpcError):
        await watch.read()


@pytest.mark.parametrize(
    ("mebibytes", "code"),
    [(31, grpc.StatusCode.INVALID_ARGUMENT), (33, grpc.StatusCode.RESOURCE_EXHAUSTED)],
)
async def test_messages_of_32_mebibytes_arrive(
    service: Service, mebibytes: int, code: grpc.StatusCode
) -> None:
    """One that arrives gets our answer, that there is no such model, one that does not gRPC's own."""
    prompt = generation_pb2.Prompt(text="x" * (mebibytes * 2**20))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.generation.Tokenize(generation_pb2.TokenizeRequest(model="other", prompt=prompt))
    assert caught.value.code() is code


async def pings_survived(listen: str, count: int) -> int:
    """How many of `count` HTTP/2 pings, 5 ms apart and without any call, are answered before a GOAWAY."""
    ping, goaway, settings = 6, 7, 4
    host, port = listen.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, settings, 0, 0, 0, 0, 0]))
    answered = 0

    async def read_frames() -> None:
        nonlocal answered
        while answered < count:
            header = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(header[:3]))
            if header[3] == goaway:
                return
            answered += header[3] == ping

    reading = asyncio.create_task(read_frames())
    with contextlib.suppress(ConnectionError):
        for number in range(count):
            writer.write((8).to_bytes(3) + bytes([ping, 0]) + bytes(4) + number.to_bytes(8))
            await writer.drain()
            await asyncio.sleep(0.005)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        await asyncio.wait_for(reading, 2)
    writer.close()
    return answered


async def test_pings_without_calls_are_tolerated(service: Service) -> None:
    assert await pings_survived(service.frontend.listen, 60) == 60
    plain = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), plain)
    port = plain.add_insecure_port("127.0.0.1:0")
    await plain.start()
    assert await pings_survived(f"127.0.0.1:{port}", 60) < 60  # what the settings are for
    await plain.stop(None)


def test_ping_settings_cover_ten_seconds() -> None:
    options = dict(OPTIONS)
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.http2.max_ping_strikes"] == 0
    assert options["grpc.http2.min_ping_interval_without_data_ms"] < 10_000


async def test_a_port_in_use_is_an_error(service: Service, runtime_dir: Path) -> None:
    other = FrontendServer(ServerConfig(listen=service.frontend.listen), runtime_dir)
    with pytest.raises(StartupError) as caught:
        await other.start()
    assert str(caught.value) == f"listen: {service.frontend.listen}: address already in use"
    await other.stop()


async def test_a_socket_path(tokenizer_dir: Path, runtime_dir: Path) -> None:
    scheduler = FakeScheduler(runtime_dir, make_model(tokenizer_dir))
    scheduler.script = says([80])
    await scheduler.start()
    listen = f"unix:{runtime_dir}/grpc.sock"
    frontend = FrontendServer(ServerConfig(listen=listen), runtime_dir)
    await frontend.start()
    assert frontend.listen == listen
    await frontend.wait_serving()
    async with grpc.aio.insecure_channel(listen) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert [response async for response in stub.Generate(request_of())]
        second = FrontendServer(ServerConfig(listen=listen), runtime_dir)
        with pytest.raises(StartupError, match="address already in use"):
            await second.start()
        await second.stop()
        assert await health_of(channel) == {SERVING}
    await frontend.stop()
    await scheduler.close()


async def test_metrics_are_scraped(tokenizer_dir: Path, tokenizer: Tokenizer, runtime_dir: Path) -> None:
    scheduler = FakeScheduler(runtime_dir, make_model(tokenizer_dir))
    scheduler.script = says(byte_ids(tokenizer, "the fox"), drafts=2)
    await scheduler.start()
    with contextlib.closing(await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)) as probe:
        port = probe.sockets[0].getsockname()[1]
    config = ServerConfig(listen="127.0.0.1:0", metrics_listen=f"127.0.0.1:{port}")
    frontend = FrontendServer(config, runtime_dir)
    await frontend.start()
    await frontend.wait_serving()
    async with grpc.aio.insecure_channel(frontend.listen) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        responses = [response async for response in stub.Generate(request_of())]
        await code_of(stub.Generate(generation_pb2.GenerateRequest()))
    page = await scrape(port)
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    delivered = responses[-1].finished.usage.completion_tokens
    assert float(values["draftline_generated_tokens_total"]) == delivered == 7
    assert float(values['draftline_calls_total{code="OK",method="Generate"}']) == 1
    assert float(values['draftline_calls_total{code="INVALID_ARGUMENT",method="Generate"}']) == 1
    assert float(values["draftline_time_to_first_token_seconds_count"]) == 1
    assert float(values["draftline_inter_token_seconds_count"]) == 4
    assert float(values['draftline_draft_tokens_total{method="ngram"}']) == 6
    assert float(values['draftline_accepted_tokens_total{method="ngram"}']) == 4
    assert float(values["draftline_waiting_requests"]) == 2
    await scheduler.close()
    assert "draftline_waiting_requests " not in await scrape(port)  # and yet a page
    await frontend.stop()


async def scrape(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    page = await reader.read()
    writer.close()
    return page.decode().partition("\r\n\r\n")[2]
