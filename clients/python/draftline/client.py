"""The synchronous client: one channel, every call of the service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftline.admin import SpeculationChange, change_from, set_speculation_request
from draftline.channel import channel_options
from draftline.errors import RequestCancelledError, from_rpc_error
from draftline.info import Load, ModelInfo, ServerInfo, load_from, model_info_from, server_info_from
from draftline.options import Chat, GenerateOptions, Prompt
from draftline.requests import abort_request, detokenize_request, generate_request, tokenize_request
from draftline.results import Completion, CompletionBuilder, Event, event_from
from draftline.retry import Attempts, RetryPolicy
from draftline.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2_grpc,
    info_pb2,
    info_pb2_grpc,
)

Result = TypeVar("Result")


class GenerationStream(Iterator[Event]):
    """Events of one generation as they come; leaving it as a context manager cancels what still runs.

    Iterating raises a DraftlineError when the call fails. Before the first event UNAVAILABLE is retried.
    """

    def __init__(self, start: Callable[[float | None], Any], attempts: Attempts) -> None:
        self._start = start
        self._attempts = attempts
        self._builder = CompletionBuilder()
        self._delivered = False
        self._cancelled = threading.Event()
        self._call = start(attempts.remaining())

    def __next__(self) -> Event:
        while True:
            try:
                event = event_from(next(self._call))
            except grpc.RpcError as error:
                delay = self._attempts.delay_or_raise(from_rpc_error(error), delivered=self._delivered)
                if self._cancelled.wait(delay):
                    raise RequestCancelledError("the call was cancelled") from None
                self._call = self._start(self._attempts.remaining())
                if self._cancelled.is_set():  # meanwhile, which ended the call before this one
                    self._call.cancel()
                continue
            self._delivered = True
            self._builder.add(event)
            return event

    def cancel(self) -> None:
        """Ends the request on the service too, from any thread; iterating raises RequestCancelledError."""
        self._cancelled.set()
        self._call.cancel()

    def completion(self) -> Completion:
        """Reads the rest of the stream and returns all of it, what was already iterated included."""
        for _ in self:
            pass
        return self._builder.completion()

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()


class Client:
    """A connection to a Draftline service; safe to share between threads, to be closed at the end.

    address: HOST:PORT or unix:PATH. Every method raises a DraftlineError when the call fails.
    """

    def __init__(self, address: str = "127.0.0.1:50051", *, retry: RetryPolicy | None = None) -> None:
        self.address = address
        self._retry = retry or RetryPolicy()
        self._channel = grpc.insecure_channel(address, options=channel_options(address))
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._info = info_pb2_grpc.InfoServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self, prompt: Prompt, options: GenerateOptions | None = None, **overrides: Any
    ) -> GenerationStream:
        """Starts a generation. prompt: text, token ids or a Chat; overrides are fields of GenerateOptions.

        `client.generate("Hello", max_tokens=16).completion()` collects it.
        """
        options = replace(options or GenerateOptions(), **overrides)
        request = generate_request(prompt, options)
        attempts = Attempts(self._retry, options.timeout)
        return GenerationStream(lambda timeout: self._generation.Generate(request, timeout=timeout), attempts)

    def chat(
        self, messages: Sequence[Any], options: GenerateOptions | None = None, **overrides: Any
    ) -> GenerationStream:
        """Starts the answer to a conversation of Message objects or {role, content} mappings."""
        return self.generate(Chat(messages), options, **overrides)

    def tokenize(self, prompt: Prompt, *, model: str = "", timeout: float | None = None) -> list[int]:
        """The ids that `generate` would run on for this prompt."""
        request = tokenize_request(prompt, model)
        return list(self._call(self._generation.Tokenize, request, timeout).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        special_tokens: bool = False,
        model: str = "",
        timeout: float | None = None,
    ) -> str:
        """The text of the ids, special tokens left out unless asked for."""
        request = detokenize_request(token_ids, special_tokens, model)
        response = self._call(self._generation.Detokenize, request, timeout)
        return str(response.text)

    def abort(self, *request_ids: str, timeout: float | None = None) -> list[str]:
        """Ends requests by id; returns those that were live. Their streams finish with reason "aborted"."""
        request = abort_request(request_ids)
        return list(self._call(self._generation.Abort, request, timeout).aborted_request_ids)

    def model_info(self, model: str = "", *, timeout: float | None = None) -> ModelInfo:
        """What is served and within which limits."""
        request = info_pb2.GetModelInfoRequest(model=model)
        return model_info_from(self._call(self._info.GetModelInfo, request, timeout))

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Build, topology and state of the service."""
        request = info_pb2.GetServerInfoRequest()
        return server_info_from(self._call(self._info.GetServerInfo, request, timeout))

    def load(self, *, timeout: float | None = None) -> Load:
        """A snapshot of queue, batch, pages and counters."""
        return load_from(self._call(self._info.GetLoad, info_pb2.GetLoadRequest(), timeout))

    def set_speculation(
        self,
        *,
        method: str | None = None,
        max_draft_tokens: int | None = None,
        disable_at_batch_size: int | None = None,
        timeout: float | None = None,
    ) -> SpeculationChange:
        """Changes what is given for steps planned from now on; the rest stays. method: a label, e.g. "ngram".

        The client must be connected to the service's admin address. Raises FailedPreconditionError for a method
        that is not loaded.
        """
        request = set_speculation_request(method, max_draft_tokens, disable_at_batch_size)
        return change_from(self._call(self._admin.SetSpeculation, request, timeout))

    def flush_cache(self, *, timeout: float | None = None) -> int:
        """Drops cached pages that no live request holds; returns how many. As set_speculation: admin address."""
        request = admin_pb2.FlushCacheRequest()
        response = self._call(self._admin.FlushCache, request, timeout)
        return int(response.num_freed_pages)

    def health(self, service: str = "", *, timeout: float | None = None) -> str:
        """State by the standard health protocol, e.g. "SERVING"; "" asks for the whole service."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = self._call(self._health.Check, request, timeout)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))

    def close(self) -> None:
        """Closes the connection; running calls are cancelled."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _call(self, method: Callable[..., Result], request: object, timeout: float | None) -> Result:
        attempts = Attempts(self._retry, timeout)
        while True:
            try:
                return method(request, timeout=attempts.remaining())
            except grpc.RpcError as error:
                delay = attempts.delay_or_raise(from_rpc_error(error))
            time.sleep(delay)
