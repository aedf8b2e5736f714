"""What tests do with calls: gather a stream, take a failure apart."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import grpc.aio
import pytest
from draftline.v1 import generation_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status


async def collect(call: Any) -> dict[int, list[generation_pb2.GenerateResponse]]:
    """Responses by sample; checks the order started, deltas, finished."""
    samples: dict[int, list[generation_pb2.GenerateResponse]] = defaultdict(list)
    async for response in call:
        samples[response.index].append(response)
    for responses in samples.values():
        kinds = [response.WhichOneof("event") for response in responses]
        assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"]
    return samples


def text_of(responses: list[generation_pb2.GenerateResponse]) -> str:
    return "".join(response.delta.text for response in responses)


async def failure(call: Any) -> tuple[grpc.aio.AioRpcError, status_pb2.Status, dict[str, Any]]:
    """The error a call ends with, its rich status, and the status' details by type."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (collect(call) if hasattr(call, "__aiter__") else call)
    status = rpc_status.from_call(caught.value)
    assert status is not None
    details = {}
    for packed in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                details[kind.__name__] = kind()
                packed.Unpack(details[kind.__name__])
    assert details["ErrorInfo"].domain == "draftline"
    return caught.value, status, details
