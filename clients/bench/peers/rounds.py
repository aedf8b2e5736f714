"""Runs the rounds: every engine once per round, alone on the machine, each round beginning with the next one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from peers.catalogue import Peer
from peers.child import Child, PeerFailedError
from peers.machine import OtherLoad, tree_memory
from peers.workload import Load, Rendered, Workload

_WARM_UP_TOKENS = 8
_KV_ROOM = 1.25  # pages are filled in part

Start = Callable[[Peer], AbstractContextManager[Child]]


@dataclass(frozen=True)
class Setup:
    """What every engine is given."""

    workload: Workload
    gguf: str
    checkpoint: str
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    threads: int
    dtype: str
    server_flags: tuple[str, ...] = ()
    timeout: float = 1800.0  # seconds for one job

    def settings(self, peer: Peer) -> dict[str, Any]:
        """The first line that a runner reads."""
        kv_bytes = self.workload.num_kv_tokens * self.kv_bytes_per_token * _KV_ROOM
        return {
            "gguf": self.gguf,
            "checkpoint": self.checkpoint,
            "eos_token_ids": list(self.eos_token_ids),
            "threads": self.threads,
            "dtype": self.dtype,
            "lookup_tokens": peer.lookup_tokens,
            "max_context": self.workload.max_context,
            "max_batch": max(load.batch for load in self.workload.loads),
            "kv_gib": max(1, math.ceil(kv_bytes / 2**30)),
            "server_flags": list(self.server_flags),
        }


@dataclass
class LoadResult:
    """One load of one round; answers: runner.Answer as dictionaries, in the order of the load's prompts."""

    seconds: float
    answers: list[dict[str, Any]]


@dataclass
class Measurement:
    """One engine in one round; times are seconds, memory bytes by phase."""

    peer: str
    round: int
    version: str
    load_seconds: float
    loads: dict[int, LoadResult] = field(default_factory=dict)  # by batch
    unsupported: dict[int, str] = field(default_factory=dict)  # batch -> why there is no result
    long_cold: list[float] = field(default_factory=list)
    long_warm: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    memory_kind: str = "pss"
    num_tokenized_otherwise: int = 0  # prompts whose ids by the engine's own tokenizer are others
    other_load: float = 0.0  # cores that other processes kept busy meanwhile, on average


def run_order(peers: Sequence[Peer], rounds: int) -> Iterator[tuple[int, Peer]]:
    """(round, engine): each round has every engine once and begins with the next."""
    for number in range(rounds):
        first = number % len(peers)
        for peer in [*peers[first:], *peers[:first]]:
            yield number, peer


def run_rounds(
    peers: Sequence[Peer], rounds: int, setup: Setup, start: Start, tell: Callable[[str], None]
) -> tuple[list[Measurement], dict[str, str]]:
    """All measurements, and engine -> why it failed; one that failed sits out the rest of the rounds."""
    measurements: list[Measurement] = []
    failures: dict[str, str] = {}
    for number, peer in run_order(peers, rounds):
        if peer.name in failures:
            continue
        tell(f"round {number + 1}/{rounds}: {peer.name}")
        try:
            with start(peer) as child:
                measurements.append(_measure(child, peer, number, setup))
        except PeerFailedError as error:
            failures[peer.name] = str(error)
            tell(f"{peer.name} failed: {error}")
    return measurements, failures


def _measure(child: Child, peer: Peer, number: int, setup: Setup) -> Measurement:
    ready = child.ask(setup.settings(peer), setup.timeout)
    result = Measurement(peer.name, number, ready["version"], ready["load_seconds"])

    def note_memory(phase: str) -> None:
        result.memory[phase], result.memory_kind = tree_memory(ready["memory_pid"])

    other_load = OtherLoad(child.pid)
    if number == 0:
        result.num_tokenized_otherwise = _count_tokenized_otherwise(child, setup)
    for load in setup.workload.loads:
        warm_up = Load(load.batch, _WARM_UP_TOKENS, True, _unmeasured(load.prompts[: load.batch]))
        if "unsupported" in (reply := _generate(child, warm_up, setup)):
            result.unsupported[load.batch] = reply["unsupported"]
            continue
        reply = _generate(child, load, setup)
        result.loads[load.batch] = LoadResult(reply["seconds"], reply["answers"])
        note_memory(f"batch {load.batch}")
    _measure_long(child, setup, result)
    note_memory("long prompt")
    result.other_load = other_load.cores()
    return result


def _measure_long(child: Child, setup: Setup, result: Measurement) -> None:
    """Time to the first token of each long prompt, then of another that differs from it at the end alone."""
    for row in _unmeasured(setup.workload.long[:1]):
        _first_token(child, row, setup)
    for row in setup.workload.long:
        result.long_cold.append(_first_token(child, row, setup))
        result.long_warm.append(_first_token(child, row["again"], setup))


def _first_token(child: Child, row: Rendered, setup: Setup) -> float:
    answer = _generate(child, Load(1, 1, True, (row,)), setup)["answers"][0]
    return float(answer["time_to_first_token"] or answer["seconds"])


def _generate(child: Child, load: Load, setup: Setup) -> dict[str, Any]:
    job = {
        "do": "generate",
        "prompts": [row["token_ids"] for row in load.prompts],
        "batch": load.batch,
        "max_tokens": load.max_tokens,
        "ignore_eos": load.ignore_eos,
    }
    return child.ask(job, setup.timeout)


def _unmeasured(rows: Sequence[Rendered]) -> tuple[Rendered, ...]:
    """Prompts to warm up with: as long as the measured ones, since engines compile for the lengths they meet.

    Read backwards, so that a prefix cache holds nothing of the measured ones afterwards.
    """
    return tuple({**row, "token_ids": row["token_ids"][::-1]} for row in rows)


def _count_tokenized_otherwise(child: Child, setup: Setup) -> int:
    rows = {row["text"]: row["token_ids"] for load in setup.workload.loads for row in load.prompts}
    rows |= {row["text"]: row["token_ids"] for row in setup.workload.long}
    reply = child.ask({"do": "tokenize", "texts": list(rows)}, setup.timeout)
    return sum(theirs != ours for theirs, ours in zip(reply["token_ids"], rows.values(), strict=True))
