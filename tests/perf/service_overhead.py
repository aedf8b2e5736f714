"""What the service costs beside its worker: tokens/s through gRPC against the same ModelRunner driven in one process.

    python -m tests.perf.service_overhead --prompts FILE.jsonl [--batches 1,16] [--rounds 5] [--max-tokens 128]

In one process, plans come from a BatchGenerator: no scheduler, no shared memory, no sockets, no text. Through gRPC, as
many callers as the batch has rows keep one request each in flight. Both run the same token ids to the same length,
greedy and without drafts, on the same settings; rounds alternate between the two, so that a ratio compares the same
minutes. Prefill is part of both. Exit code 1 if a ratio of medians is below its bar.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftline import AsyncClient, Delta, GenerateOptions
from draftline.bench.workload import read_prompts

from gpu_worker.config import WorkerConfig
from gpu_worker.engine import build_engine
from gpu_worker.training.batch_generator import BatchGenerator, GenerationRequest
from shared_mem.records import SamplingRecord
from tests.harness.service import Service

BARS = {1: 0.95, 16: 0.90}  # least ratio of medians by batch
REQUESTS_PER_ROW = 2  # of a batch, in each run; batch 1 has four: a run of one would be short
CONTEXT_TOKENS = 1024
PAGE_SIZE = 16

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Settings:
    """What both sides share."""

    prompts: Prompts
    max_tokens: int
    max_batch: int

    def of_run(self, number: int, batch: int) -> Prompts:
        """The prompts of one run, other ones in every run; both sides of a round get the same."""
        count = max(4, REQUESTS_PER_ROW * batch)
        return [self.prompts[(number * count + i) % len(self.prompts)] for i in range(count)]


class InProcess:
    """The model runner, by plans that need no service."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pages = settings.max_batch * -(-(CONTEXT_TOKENS + 1) // PAGE_SIZE)
        self._config = WorkerConfig(
            dtype="int8",
            speculation=(),
            page_size=PAGE_SIZE,
            num_pages=self._pages,
            max_running_requests=settings.max_batch,
            max_context_tokens=CONTEXT_TOKENS,
        )
        self._runner = build_engine(self._config).runner

    def run(self, prompts: Prompts, batch: int) -> float:
        """Tokens per second over all prompts, `batch` at a time."""
        generator = BatchGenerator(
            self._runner,
            num_slots=batch,
            page_size=PAGE_SIZE,
            num_pages=self._pages,
            max_context_tokens=CONTEXT_TOKENS,
            max_batched_tokens=self._config.max_batched_tokens,
        )
        for prompt in prompts:
            generator.submit(
                GenerationRequest(prompt, self._settings.max_tokens, SamplingRecord(), frozenset())
            )
        begin = time.perf_counter()
        texts = generator.run()
        generator.step()  # gives the last slots back
        return sum(len(text.token_ids) for text in texts) / (time.perf_counter() - begin)


class ThroughService:
    """Callers of a service with the same settings."""

    def __init__(self, settings: Settings, address: str) -> None:
        self._settings = settings
        self._client = AsyncClient(address)

    async def run(self, prompts: Prompts, batch: int) -> float:
        """Tokens per second over all prompts, `batch` callers with one request each."""
        options = GenerateOptions(
            temperature=0.0,
            max_tokens=self._settings.max_tokens,
            ignore_eos=True,
            speculation="off",
            token_ids=True,
        )
        queue = iter(prompts)

        async def caller() -> int:
            count = 0
            for prompt in queue:  # shared: each goes to whoever is free
                async with self._client.generate(list(prompt), options) as stream:
                    async for event in stream:
                        if isinstance(event, Delta):
                            count += len(event.token_ids)
            return count

        begin = time.perf_counter()
        counts = await asyncio.gather(*(caller() for _ in range(batch)))
        return sum(counts) / (time.perf_counter() - begin)

    async def close(self) -> None:
        """Closes the connection."""
        await self._client.close()


async def prompt_ids(address: str, path: Path, max_tokens: int) -> Prompts:
    """The file's prompts as the service tokenises them, those that leave room for the answer."""
    async with AsyncClient(address) as client:
        ids = [tuple(await client.tokenize(row.text)) for row in read_prompts(path)]
    return [each for each in ids if len(each) + max_tokens < CONTEXT_TOKENS]


async def measure(options: argparse.Namespace) -> bool:
    """Prints one line per batch; True if every ratio reaches its bar."""
    batches = [int(batch) for batch in options.batches.split(",")]
    flags = ["--speculation", "off", "--dtype", "int8", "--no-prefix-cache", "--log-level", "warning"]
    flags += ["--page-size", str(PAGE_SIZE), "--max-context-tokens", str(CONTEXT_TOKENS)]
    flags += ["--max-running-requests", str(max(batches))]
    with Service(*flags) as service:
        prompts = await prompt_ids(service.address, options.prompts, options.max_tokens)
        settings = Settings(prompts, options.max_tokens, max(batches))
        alone, served = InProcess(settings), ThroughService(settings, service.address)
        speeds: dict[int, list[tuple[float, float]]] = {batch: [] for batch in batches}
        for number in range(-1, options.rounds):
            for batch in batches:
                run = settings.of_run(number + 1, batch)
                if number % 2:
                    pair = (alone.run(run, batch), await served.run(run, batch))
                else:
                    through = await served.run(run, batch)
                    pair = (alone.run(run, batch), through)
                if number >= 0:  # the first round warms up
                    speeds[batch].append(pair)
        await served.close()
    passed = True
    for batch, pairs in speeds.items():
        in_process, through = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio, bar = through / in_process, BARS.get(batch, 0.0)
        passed = passed and ratio >= bar
        print(
            f"batch {batch}: {in_process:.0f} tokens/s in one process, {through:.0f} through gRPC, ratio {ratio:.3f}"
            + (f" (bar {bar})" if bar else "")
        )
    return passed


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True, help="rows {id, category, turns} or {prompt}")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    return 0 if asyncio.run(measure(parser.parse_args())) else 1


if __name__ == "__main__":
    sys.exit(main())
