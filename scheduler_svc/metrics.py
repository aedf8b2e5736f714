"""Prometheus metrics of a frontend: what clients got and how fast; queue gauges are asked for at a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from scheduler_svc.errors import StartupError
from scheduler_svc.listen import ListenAddress
from scheduler_svc.messages import LoadReply

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class FrontendMetrics:
    """Counters and histograms of one frontend, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "draftline_calls",
            "Calls ended, by method and status code",
            ["method", "code"],
            registry=self.registry,
        )
        self._prompt_tokens = self._counter("draftline_prompt_tokens", "Prompt tokens of started samples")
        self._cached_tokens = self._counter(
            "draftline_cached_tokens", "Prompt tokens found in the prefix cache"
        )
        self._tokens = self._counter(
            "draftline_generated_tokens", "Tokens generated for callers; adds up to usage"
        )
        self._first_token = self._histogram("draftline_time_to_first_token_seconds", "Arrival to first token")
        self._inter_token = self._histogram(
            "draftline_inter_token_seconds", "Time from a token to the next one"
        )
        self._drafts = Counter(
            "draftline_drafts", "Verification steps with drafts", ["method"], registry=self.registry
        )
        self._draft_tokens = Counter(
            "draftline_draft_tokens", "Draft tokens verified", ["method"], registry=self.registry
        )
        self._accepted_tokens = Counter(
            "draftline_accepted_tokens", "Draft tokens kept", ["method"], registry=self.registry
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self.registry)

    def call_ended(self, method: str, code: str) -> None:
        """One call of `method` (its short name) ended with the status `code`, e.g. OK."""
        self._calls.labels(method, code).inc()

    def sample_started(self, prompt_tokens: int, cached_tokens: int, seconds: float) -> None:
        """A sample's first token came `seconds` after its request."""
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)
        self._first_token.observe(seconds)

    def tokens_generated(self, count: int, seconds: float | None) -> None:
        """`count` tokens of one sample, `seconds` after the tokens before them (None: they are its first)."""
        self._tokens.inc(count)
        if seconds is not None:
            for _ in range(count):
                self._inter_token.observe(seconds / count)

    def step_verified(self, method: str, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """One verification step with at least one draft token of `method` (its label)."""
        self._drafts.labels(method).inc()
        self._draft_tokens.labels(method).inc(num_draft_tokens)
        self._accepted_tokens.labels(method).inc(num_accepted_tokens)

    def serve(self, address: ListenAddress, load: Callable[[], LoadReply | None]) -> Callable[[], None]:
        """Serves the registry over HTTP from a thread of its own; returns what stops it.

        `load` runs in that thread at each scrape; None leaves the queue gauges out. Raises StartupError when
        the address cannot be bound.
        """
        self.registry.register(_QueueGauges(load))
        try:
            server, thread = start_http_server(address.port, address.host, registry=self.registry)
        except OSError as error:
            raise StartupError(
                f"{address.field}: {address.text}: {(error.strerror or str(error)).lower()}"
            ) from error

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop


class _QueueGauges:
    """The scheduler's queue and pages at the moment of a scrape."""

    _GAUGES = (
        ("draftline_running_requests", "Sequences in the running batch", "num_running_requests"),
        ("draftline_waiting_requests", "Requests in the queue", "num_waiting_requests"),
        (
            "draftline_waiting_tokens",
            "Prompt tokens in the queue that no cached prefix covers",
            "num_waiting_tokens",
        ),
        ("draftline_used_pages", "KV pages held by running sequences", "num_used_pages"),
        ("draftline_cached_pages", "KV pages held by the prefix cache alone", "num_cached_pages"),
    )

    def __init__(self, load: Callable[[], LoadReply | None]) -> None:
        self._load = load

    def describe(self) -> Iterable[Metric]:
        """Names without values: registering must not ask the scheduler."""
        return [GaugeMetricFamily(name, text) for name, text, _ in self._GAUGES]

    def collect(self) -> Iterator[Metric]:
        """One gauge per number of the scheduler's answer, if it gave one."""
        load = self._load()
        if load is not None:
            for name, text, field in self._GAUGES:
                yield GaugeMetricFamily(name, text, value=getattr(load, field))
