"""Responses: what is large is built beside the event loop, the rest on it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from draftline.v1 import generation_pb2
from tokenizers import Tokenizer

from scheduler_svc import messages
from scheduler_svc.frontend.responses import ResponseWriter
from tests.frontend.calls import collect
from tests.frontend.conftest import Service, byte_ids, request_of
from tests.frontend.fake_scheduler import says


async def test_thousands_of_logprobs_are_built_in_a_thread(
    service: Service, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {"started": set(), "delta": set(), "finished": set()}
    build = ResponseWriter.build

    def watched_build(writer: ResponseWriter, index: int, item: Any) -> generation_pb2.GenerateResponse:
        response = build(writer, index, item)
        threads[response.WhichOneof("event")].add(threading.get_ident())
        return response

    monkeypatch.setattr(ResponseWriter, "build", watched_build)
    top = tuple((rank, -float(rank)) for rank in range(20))
    logged = tuple(messages.TokenLogprobs(number % 300, -0.5, top) for number in range(200))
    service.scheduler.script = says(byte_ids(tokenizer, "the fox"), prompt_logprobs=logged)
    call = service.generation.Generate(request_of(output=generation_pb2.OutputOptions(prompt_logprobs=20)))
    (responses,) = (await collect(call)).values()
    here = threading.get_ident()
    assert here not in threads["started"]
    assert threads["delta"] == threads["finished"] == {here}
    received = responses[0].started.prompt_logprobs
    assert [entry.token_id for entry in received[1:]] == [entry.token_id for entry in logged]
    assert [entry.token_id for entry in received[-1].top] == list(range(20))
