"""What each drafting method adds: resident memory, KV bytes a token, time to the first token, and parts of a step.

    python -m tests.perf.drafter_costs [--methods ngram,eagle3,...] [--shapes chain:4,tree:7] [--head METHOD=PATH]

Every method has a process of its own (memory that one left behind would count for the next) with the embedded model
alone, one request at a time; no service. A prompt of 512 tokens, then 64 greedy tokens; medians. `draft`, `verify` and
`catch up` are milliseconds of one step; `catch up` runs while the scheduler already plans.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_worker
from gpu_worker.config import WorkerConfig
from gpu_worker.engine import build_engine
from gpu_worker.training.batch_generator import BatchGenerator, GenerationRequest
from shared_mem.enums import SpeculationMethod
from shared_mem.records import SamplingRecord

assert gpu_worker.__doc__  # imported before torch, for the settings of its thread pools

CONTEXT_TOKENS, PAGE_SIZE, NUM_PAGES = 1024, 16, 512
PROMPT_TOKENS, NEW_TOKENS, REPEATS = 512, 64, 5
COLUMNS = ("method", "drafts", "MiB", "KV bytes/token", "TTFT ms", "draft", "verify", "catch up", "step ms")


def measure(method: SpeculationMethod, shape: str, budget: int, heads: list[str]) -> dict[str, Any]:
    """The figures of one method, in this process."""
    given = dict(pair.split("=", 1) for pair in heads)
    methods = () if method is SpeculationMethod.DISABLED else (method,)
    if method is SpeculationMethod.PORTFOLIO:
        methods = (method, SpeculationMethod.EAGLE3, SpeculationMethod.NGRAM)
    config = WorkerConfig(
        speculation=methods,
        num_draft_tokens=budget,
        draft_shape=shape,
        max_draft_depth=min(budget, 5),
        min_draft_probability=0.0,  # shapes cost what they cost when they are full
        draft_model=given.pop(SpeculationMethod.DRAFT_MODEL.label, ""),
        heads=tuple((SpeculationMethod.from_label(label), path) for label, path in given.items()),
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_running_requests=1,
        max_context_tokens=CONTEXT_TOKENS,
    )
    engine = build_engine(config)
    runner = engine.runner
    times: dict[str, list[float]] = {}

    def timed(name: str) -> None:
        inner: Callable[..., Any] = getattr(runner, name)

        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = inner(*arguments)
            times.setdefault(name, []).append(1000 * (time.perf_counter() - begin))
            return result

        setattr(runner, name, call)

    for name in ("_draft", "_verify", "_catch_up", "execute"):
        timed(name)
    generator = BatchGenerator(
        runner,
        num_slots=1,
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_context_tokens=CONTEXT_TOKENS,
        max_batched_tokens=512,
    )
    first, steps = [], []
    for repeat in range(REPEATS + 1):
        ids = tuple(1000 + (7919 * (i + 13 * repeat)) % 20000 for i in range(PROMPT_TOKENS))
        generator.submit(GenerationRequest(ids, NEW_TOKENS, SamplingRecord(), frozenset(), method, budget))
        begin = time.perf_counter()
        generator.step()
        first.append(1000 * (time.perf_counter() - begin))
        times.clear()
        generator.run()
        steps.append({name: statistics.median(values) for name, values in times.items()})
    drafters = runner._drafters.values()
    models = [getattr(d, "_head", None) or getattr(d, "_model", None) for d in drafters]
    return {
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "kv_bytes": [
            model.bytes_per_page(PAGE_SIZE) // PAGE_SIZE for model in (runner._target, *models) if model
        ],
        "ttft": statistics.median(first[1:]),
        **{name: statistics.median(of[name] for of in steps[1:]) for name in steps[0]},
    }


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="off,ngram,draft-model,eagle,eagle3,mtp,medusa,portfolio")
    parser.add_argument("--shapes", default="chain:4,tree:7")
    parser.add_argument("--head", action="append", default=[], metavar="METHOD=PATH")
    parser.add_argument("--one", nargs=3, metavar=("METHOD", "SHAPE", "BUDGET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        label, shape, budget = options.one
        heads = [pair for pair in options.head if pair.split("=", 1)[0] == label]
        print(json.dumps(measure(SpeculationMethod.from_label(label), shape, int(budget), heads)))
        return 0
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    plain: dict[str, Any] | None = None
    for label in options.methods.split(","):
        for text in options.shapes.split(",") if label not in ("off", "ngram") else ["chain:4"]:
            shape, budget = text.split(":")
            heads = [part for pair in options.head for part in ("--head", pair)]
            command = [
                *(sys.executable, "-m", "tests.perf.drafter_costs"),
                *("--one", label, shape, budget),
                *heads,
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"| {label} | {text} | {done.stderr.strip().splitlines()[-1]} |")
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            plain = plain or found
            print("| " + " | ".join(_row(label, text, found, plain)) + " |", flush=True)
    return 0


def _row(label: str, text: str, found: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """A line of the table; memory and KV as what they are more than without drafts."""
    extra = (found["resident"] - plain["resident"]) / 2**20
    return [
        label,
        "" if label == "off" else text,
        f"{found['resident'] / 2**20:.0f}" if found is plain else f"{extra:+.0f}",
        str(found["kv_bytes"][0]) if found is plain else f"+{sum(found['kv_bytes'][1:])}",
        f"{found['ttft']:.0f}",
        *(f"{found[name]:.2f}" for name in ("_draft", "_verify", "_catch_up", "execute")),
    ]


if __name__ == "__main__":
    sys.exit(main())
