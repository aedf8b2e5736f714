"""A frontend in the test's own event loop, its scripted scheduler, and a channel to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from draftline.v1 import generation_pb2, generation_pb2_grpc, info_pb2_grpc
from tokenizers import Tokenizer

from scheduler_svc.config import ServerConfig
from scheduler_svc.frontend.server import FrontendServer
from scheduler_svc.frontend.tokenizer import ServedTokenizer
from tests.frontend.fake_scheduler import FakeScheduler, make_model
from tests.models import make_tokenizer


@dataclass
class Service:
    """What a test of the whole frontend needs."""

    frontend: FrontendServer
    scheduler: FakeScheduler
    channel: grpc.aio.Channel
    generation: generation_pb2_grpc.GenerationServiceStub
    info: info_pb2_grpc.InfoServiceStub


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 300 tokens with a ChatML template; ids 0..2 are special, 2 is EOS. Read only."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    """The library's own view of it: the oracle."""
    return Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def served_tokenizer(tokenizer_dir: Path) -> ServedTokenizer:
    """Ours."""
    return ServedTokenizer.load(tokenizer_dir)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """Short enough for socket paths, which tmp_path may not be."""
    path = Path(tempfile.mkdtemp(prefix="dl-test-"))
    yield path
    shutil.rmtree(path)


@pytest_asyncio.fixture
async def service(tokenizer_dir: Path, runtime_dir: Path) -> AsyncIterator[Service]:
    """Serving, at a free port, with a drain grace of 0.3 s."""
    scheduler = FakeScheduler(runtime_dir, make_model(tokenizer_dir))
    await scheduler.start()
    config = ServerConfig(listen="127.0.0.1:0", drain_grace_seconds=0.3)
    frontend = FrontendServer(config, runtime_dir)
    await frontend.start()
    assert await frontend.wait_serving() == "scripted"
    async with grpc.aio.insecure_channel(frontend.listen) as channel:
        yield Service(
            frontend,
            scheduler,
            channel,
            generation_pb2_grpc.GenerationServiceStub(channel),
            info_pb2_grpc.InfoServiceStub(channel),
        )
    await frontend.stop()
    await scheduler.close()


def request_of(**fields: Any) -> generation_pb2.GenerateRequest:
    """A GenerateRequest with the prompt `The fox` unless another is given."""
    fields.setdefault("prompt", generation_pb2.Prompt(text="The fox"))
    return generation_pb2.GenerateRequest(**fields)


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per UTF-8 byte of `text`, so that characters can be cut anywhere."""
    from scheduler_svc.frontend.detokenizer import _byte_of_character

    character_of = {byte: character for character, byte in _byte_of_character().items()}
    return [tokenizer.token_to_id(character_of[byte]) for byte in text.encode()]
