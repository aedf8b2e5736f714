"""The admin service: an address of its own, changes to the scheduler, its refusals as statuses."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from draftline.v1 import admin_pb2, admin_pb2_grpc, common_pb2, generation_pb2_grpc, info_pb2, info_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from scheduler_svc.config import ServerConfig
from scheduler_svc.errors import ErrorReason, StartupError
from scheduler_svc.frontend.server import FrontendServer
from scheduler_svc.messages import CallRefused, FlushCache, SetSpeculation
from shared_mem.enums import SpeculationMethod
from tests.frontend.calls import failure
from tests.frontend.conftest import request_of
from tests.frontend.fake_scheduler import FakeScheduler, make_model


@dataclass
class Service:
    frontend: FrontendServer
    scheduler: FakeScheduler
    channel: grpc.aio.Channel  # to the admin address
    admin: admin_pb2_grpc.AdminServiceStub
    socket: Path


@pytest_asyncio.fixture
async def service(tokenizer_dir: Path, runtime_dir: Path) -> AsyncIterator[Service]:
    scheduler = FakeScheduler(runtime_dir, make_model(tokenizer_dir))
    await scheduler.start()
    socket = runtime_dir / "admin.sock"
    frontend = FrontendServer(
        ServerConfig(listen="127.0.0.1:0", admin_listen=f"unix:{socket}", drain_grace_seconds=0.3),
        runtime_dir,
    )
    await frontend.start()
    await frontend.wait_serving()
    options = [("grpc.default_authority", "localhost")]
    async with grpc.aio.insecure_channel(frontend.admin_listen, options=options) as channel:
        yield Service(frontend, scheduler, channel, admin_pb2_grpc.AdminServiceStub(channel), socket)
    await frontend.stop()
    await scheduler.close()


async def test_only_what_is_set_is_changed(service: Service) -> None:
    mtp = common_pb2.SPECULATION_METHOD_MTP
    response = await service.admin.SetSpeculation(admin_pb2.SetSpeculationRequest(method=mtp))
    assert (response.method, response.max_draft_tokens, response.effective_step) == (mtp, 4, 17)
    await service.admin.SetSpeculation(
        admin_pb2.SetSpeculationRequest(max_draft_tokens=0, disable_at_batch_size=0)
    )
    first, second = await service.scheduler.wait_for(SetSpeculation, 2)
    assert first == SetSpeculation(first.call_id, SpeculationMethod.MTP, None, None)
    assert second == SetSpeculation(second.call_id, None, 0, 0)


async def test_flush(service: Service) -> None:
    response = await service.admin.FlushCache(admin_pb2.FlushCacheRequest())
    assert response.num_freed_pages == 5
    assert len(await service.scheduler.wait_for(FlushCache)) == 1


async def test_a_refusal_of_the_scheduler_is_a_status_with_details(service: Service) -> None:
    message = "method: medusa is not loaded; loaded: ngram"
    service.scheduler.change_answer = lambda change: CallRefused(
        change.call_id, ErrorReason.PRECONDITION, message, "method"
    )
    request = admin_pb2.SetSpeculationRequest(method=common_pb2.SPECULATION_METHOD_MEDUSA)
    error, status, details = await failure(service.admin.SetSpeculation(request))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert status.message == message
    assert details["ErrorInfo"].reason == "PRECONDITION"
    assert details["BadRequest"].field_violations[0].field == "method"


@pytest.mark.parametrize("method", [0, 99])
async def test_a_number_that_is_no_method(service: Service, method: int) -> None:
    error, _, details = await failure(
        service.admin.SetSpeculation(admin_pb2.SetSpeculationRequest(method=method))
    )
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details["BadRequest"].field_violations[0].field == "method"
    assert not [m for m in service.scheduler.received if isinstance(m, SetSpeculation)]


async def test_a_scheduler_that_does_not_serve_yet(service: Service) -> None:
    service.scheduler.change_answer = lambda change: CallRefused(
        change.call_id, ErrorReason.NOT_SERVING, "the model is still being loaded"
    )
    error, _, details = await failure(service.admin.SetSpeculation(admin_pb2.SetSpeculationRequest()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert details["RetryInfo"].retry_delay.seconds == 1


async def test_each_address_has_its_own_services(service: Service) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generation_pb2_grpc.GenerationServiceStub(service.channel).Generate(request_of()).read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    async with grpc.aio.insecure_channel(service.frontend.listen) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin_pb2_grpc.AdminServiceStub(channel).FlushCache(admin_pb2.FlushCacheRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        info = await info_pb2_grpc.InfoServiceStub(channel).GetServerInfo(info_pb2.GetServerInfoRequest())
    settings = info.speculation
    assert (settings.method, settings.max_draft_tokens, settings.disable_at_batch_size) == (3, 4, 16)


async def test_reflection_names_it(service: Service) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    response = await anext(aiter(call))
    names = {each.name for each in response.list_services_response.service}
    assert names == {"draftline.v1.AdminService", "grpc.reflection.v1alpha.ServerReflection"}


async def test_the_socket_is_its_owners_alone(service: Service) -> None:
    assert stat.S_IMODE(service.socket.stat().st_mode) == 0o600


async def test_an_address_in_use(service: Service, runtime_dir: Path) -> None:
    config = ServerConfig(listen="127.0.0.1:0", admin_listen=f"unix:{service.socket}")
    second = FrontendServer(config, runtime_dir)
    with pytest.raises(StartupError, match=r"admin_listen: unix:.*admin.sock: address already in use"):
        await second.start()
    await second.stop()
