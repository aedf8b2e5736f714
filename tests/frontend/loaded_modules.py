"""`python -m tests.frontend.loaded_modules TOKENIZER_DIR`: serves a request, prints what must not be loaded but is."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import grpc.aio
from draftline.v1 import generation_pb2, generation_pb2_grpc

from scheduler_svc.config import ServerConfig
from scheduler_svc.frontend import process  # what `python -m scheduler_svc.frontend.process` loads
from tests.frontend.fake_scheduler import FakeScheduler, make_model, says

_FORBIDDEN = ("torch", "gpu_worker", "scheduler_svc.scheduler")


async def serve_one(tokenizer_dir: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="dl-test-") as directory:
        scheduler = FakeScheduler(Path(directory), make_model(tokenizer_dir))
        scheduler.script = says([80, 81])
        await scheduler.start()
        frontend = process.FrontendServer(ServerConfig(listen="127.0.0.1:0"), Path(directory))
        await frontend.start()
        await frontend.wait_serving()
        message = generation_pb2.ChatMessage(role="user", content="hi")
        prompt = generation_pb2.Prompt(chat=generation_pb2.ChatPrompt(messages=[message]))
        async with grpc.aio.insecure_channel(frontend.listen) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(generation_pb2.GenerateRequest(prompt=prompt))
            text = "".join([response.delta.text async for response in call])
        await frontend.stop()
        await scheduler.close()
        return text


def is_forbidden(name: str) -> bool:
    if name.startswith("draftline."):
        return not name.startswith("draftline.v1")
    if name.startswith("shared_mem."):
        return name not in ("shared_mem.enums", "shared_mem.drafting_defaults")  # leaves
    return any(name == root or name.startswith(f"{root}.") for root in _FORBIDDEN)


if __name__ == "__main__":
    text = asyncio.run(serve_one(Path(sys.argv[1])))
    print(json.dumps({"text": text, "forbidden": sorted(filter(is_forbidden, sys.modules))}))
