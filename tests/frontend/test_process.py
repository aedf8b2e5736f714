"""The frontend as a process of its own: what it loads, its report, its end, its logs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import grpc.aio
import msgspec
import pytest
from draftline.v1 import generation_pb2_grpc
from tokenizers import Tokenizer

from scheduler_svc.config import ServerConfig
from scheduler_svc.messages import Submit
from tests.frontend.calls import collect, text_of
from tests.frontend.conftest import request_of
from tests.frontend.fake_scheduler import FakeScheduler, make_model, says

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "clients/python")])}


async def start(
    runtime_dir: Path, config: ServerConfig, *arguments: str, fd: int | None = None
) -> asyncio.subprocess.Process:
    path = runtime_dir / "config.json"
    path.write_bytes(msgspec.json.encode(config))
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scheduler_svc.frontend.process", "--config-json", str(path),
        "--runtime-dir", str(runtime_dir), *arguments,
        cwd=ROOT, env=ENVIRONMENT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        pass_fds=() if fd is None else (fd,),
    )  # fmt: skip


async def test_torch_stays_out(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.frontend.loaded_modules", str(tokenizer_dir),
        cwd=ROOT, env=ENVIRONMENT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    result = json.loads(output.splitlines()[-1])
    assert result == {"text": tokenizer.decode([80, 81]), "forbidden": []}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_life_of_a_frontend(
    tokenizer_dir: Path, tokenizer: Tokenizer, runtime_dir: Path, number: signal.Signals
) -> None:
    scheduler = FakeScheduler(runtime_dir, make_model(tokenizer_dir))
    await scheduler.start()
    config = ServerConfig(listen="127.0.0.1:0", drain_grace_seconds=0.2)
    read_end, write_end = os.pipe()
    process = await start(runtime_dir, config, "--ready-fd", str(write_end), fd=write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        report = json.loads(await asyncio.to_thread(pipe.read))
    assert report["model"] == "scripted"
    async with grpc.aio.insecure_channel(report["listen"]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        scheduler.script = says([80, 81])
        samples = await collect(stub.Generate(request_of(request_id="one")))
        assert text_of(samples[0]) == tokenizer.decode([80, 81])
        scheduler.script = silent_script
        hanging = stub.Generate(request_of(request_id="two"))
        await scheduler.wait_for(Submit, 2)
        process.send_signal(number)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(hanging))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    output, errors = await asyncio.wait_for(process.communicate(), 10)
    await scheduler.close()
    assert (process.returncode, output) == (0, b"")
    events = [json.loads(line) for line in errors.splitlines()]
    assert {event["process"] for event in events} == {"frontend"}
    calls = [event for event in events if event["event"] == "call"]
    assert [(call["request_id"], call["code"]) for call in calls] == [("one", "OK"), ("two", "UNAVAILABLE")]


async def silent_script(scheduler: FakeScheduler, submit: Submit) -> None:
    """Never answers."""


async def test_a_port_in_use_is_one_line_and_exit_code_2(runtime_dir: Path) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    process = await start(runtime_dir, ServerConfig(listen=address))
    output, errors = await asyncio.wait_for(process.communicate(), 20)
    server.close()
    assert (process.returncode, output) == (2, b"")
    assert errors.decode() == f"error: listen: {address}: address already in use\n"


async def test_a_missing_tokenizer_is_one_line_and_exit_code_2(runtime_dir: Path) -> None:
    scheduler = FakeScheduler(runtime_dir, make_model(runtime_dir / "none"))
    await scheduler.start()
    config = ServerConfig(listen="127.0.0.1:0", log_level="error")
    process = await start(runtime_dir, config)
    _, errors = await asyncio.wait_for(process.communicate(), 20)
    await scheduler.close()
    assert process.returncode == 2
    text = errors.decode()
    assert text.startswith(f"error: tokenizer {runtime_dir}/none/tokenizer.json: No such file")
    assert text.count("\n") == 1
