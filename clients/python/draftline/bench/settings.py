"""Everything that decides a benchmark; stored in its report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """One benchmark. speculation: labels; "default" is the service's choice, "off" the base of speedups.

    Exactly one way to load: closed loop (concurrency), open loop (rate, requests/s) or a trace (trace, whose
    arrival times are divided by trace_speed).
    """

    server: str
    prompts: Path
    speculation: tuple[str, ...] = ("default",)
    concurrency: tuple[int, ...] = ()
    rate: float | None = None
    trace: Path | None = None
    trace_speed: float = 1.0
    max_tokens: int = 128
    limit: int | None = None  # most prompts, or rows of the trace
    temperature: float | None = None
    seed: int = 0  # of the requests, of the arrivals and of the trace's prompts
    ignore_eos: bool = False
    warmup: int = 1  # unmeasured requests per speculation setting
    rounds: int = 1
    num_draft_tokens: int | None = None
    acceptance_rule: str | None = None
    timeout: float | None = None  # seconds per request
    share_prefix_cache: bool = False  # True lets a run hit the prefixes that earlier runs left

    def loads(self) -> tuple[Load, ...]:
        """The loads to put on the service, one after the other."""
        if self.trace is not None:
            return (Load("trace", self.trace_speed),)
        if self.rate is not None:
            return (Load("open", self.rate),)
        return tuple(Load("closed", level) for level in self.concurrency)


@dataclass(frozen=True)
class Load:
    """kind: "closed" (value: requests in flight), "open" (requests/s), "trace" (speed-up of its arrivals)."""

    kind: str
    value: float

    def __str__(self) -> str:
        return {
            "closed": f"{self.value:g} at a time",
            "open": f"{self.value:g} requests/s",
            "trace": f"trace at {self.value:g}x",
        }[self.kind]
