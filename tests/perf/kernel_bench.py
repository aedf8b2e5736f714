"""Measures the CPU kernels on the embedded model: milliseconds per step by rows and weight format, and prefill.

`python -m tests.perf.kernel_bench [--threads 2] [--rounds 15]`. Formats are measured in turn within each round and
the least time of all rounds counts, so that other work on the machine disturbs neither much.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from gpu_worker.forward_batch import AttentionMetadata, ForwardBatch
from gpu_worker.kernels.linear import WeightFormat
from gpu_worker.kernels.native import Isa, ThreadTeam, load
from gpu_worker.models.native import NativeCausalLM, build_native
from gpu_worker.weights.gguf_checkpoint import GGUFCheckpoint
from gpu_worker.weights.resolve import resolve_model

PAGE_SIZE = 16


def make_batch(shapes: list[tuple[int, int]], vocab_size: int, seed: int = 0) -> ForwardBatch:
    """Requests of (prefix, rows) on pages in random order; the prefixes' KV is whatever the pool holds."""
    rng = np.random.default_rng(seed)
    lengths = np.array([prefix + rows for prefix, rows in shapes])
    pages = -(-lengths // PAGE_SIZE)
    page_indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    page_indices = rng.permutation(int(page_indptr[-1])).astype(np.int32)
    positions = np.concatenate([np.arange(prefix, prefix + rows) for prefix, rows in shapes])
    owner = np.repeat(np.arange(len(shapes)), [rows for _, rows in shapes])
    slots = (
        page_indices[page_indptr[owner] + positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE
        + positions % PAGE_SIZE
    )
    return ForwardBatch(
        input_ids=torch.from_numpy(rng.integers(0, vocab_size, len(positions))),
        positions=torch.from_numpy(positions),
        out_slots=torch.from_numpy(slots),
        attention=AttentionMetadata(
            PAGE_SIZE,
            np.concatenate([[0], np.cumsum([rows for _, rows in shapes])]).astype(np.int32),
            lengths.astype(np.int32),
            page_indptr,
            page_indices,
            (None,) * len(shapes),
        ),
    )


def least(rounds: int, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The least time of each call in milliseconds, calls taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - started) * 1e3)
    return {name: min(values) for name, values in times.items()}


def read_bandwidth(threads: int) -> float:
    """GB/s at which torch sums a tensor far larger than the caches."""
    torch.set_num_threads(threads)
    data = torch.ones(1 << 27, dtype=torch.float32)
    seconds = least(5, {"sum": lambda: data.sum()})["sum"] / 1e3
    return data.numel() * 4 / seconds / 1e9


def weight_bytes(model: NativeCausalLM) -> int:
    layers = [getattr(layer, name) for layer in model._layers for name in ("qkv", "o", "gate_up", "down")]
    return sum(linear.num_bytes for linear in (*layers, model.lm_head))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--isa", choices=[isa.name.lower() for isa in Isa])
    parser.add_argument("--formats", default="gguf,w8,q8_0,bf16")
    parser.add_argument("--rows", default="1,2,4,5,8,16,32,64")
    parser.add_argument("--prefill", default="512,1500")
    options = parser.parse_args()
    kernels = load(None if options.isa is None else Isa[options.isa.upper()])
    assert kernels is not None, "build the kernels first: python gpu_worker/kernels/build.py"
    team = ThreadTeam(kernels, options.threads)
    checkpoint = GGUFCheckpoint(resolve_model("").path)
    config = checkpoint.config
    models: dict[str, NativeCausalLM] = {}
    for name in options.formats.split(","):
        if name == "gguf":
            models[name] = build_native(config, checkpoint, "int8", kernels, team)
        elif name == "bf16":
            models[name] = build_native(config, checkpoint, "bfloat16", kernels, team)
        else:
            models[name] = build_native(
                config,
                checkpoint,
                "int8",
                kernels,
                team,
                float_format=WeightFormat[name.upper()],
                keep_blocks=False,
            )
    bandwidth = read_bandwidth(options.threads)
    print(f"{kernels.isa.name.lower()}, {options.threads} threads, reads {bandwidth:.1f} GB/s")
    print(" ".join(f"{name} {weight_bytes(model) / 1e6:.0f} MB" for name, model in models.items()))
    rows_list = [int(rows) for rows in options.rows.split(",") if rows]
    prefills = [int(n) for n in options.prefill.split(",") if n]
    most = max([*(rows * (options.context + 16) for rows in rows_list), *prefills]) + 64
    pool = next(iter(models.values())).new_pool(-(-most // PAGE_SIZE), PAGE_SIZE)
    slots = torch.arange(pool.num_pages * PAGE_SIZE)
    for layer in range(config.num_layers):  # untouched memory would be one page of zeros, always in the cache
        pool.write(layer, slots, *torch.randn(2, len(slots), config.num_kv_heads, config.head_dim))

    print(
        f"ms per step at context {options.context}: forward + argmax of all rows; (of it forward), GB/s of weights"
    )
    for rows in rows_list:
        for kind, shapes in (
            ("batch", [(options.context, 1)] * rows),
            ("verify", [(options.context, rows)] if 1 < rows <= 8 else []),
        ):
            if not shapes:
                continue
            batch = make_batch(shapes, config.vocab_size)

            def forward(model: NativeCausalLM, batch: ForwardBatch = batch) -> torch.Tensor:
                return model.forward(batch, pool)

            def step(model: NativeCausalLM, batch: ForwardBatch = batch) -> torch.Tensor:
                return model.compute_argmax(model.forward(batch, pool))

            calls: dict[str, Callable[[], object]] = {}
            for name, model in models.items():
                calls[name] = lambda model=model: step(model)
                calls[f"{name} forward"] = lambda model=model: forward(model)
            times = least(options.rounds, calls)
            cells = [
                f"{name} {times[name]:.2f} ({times[f'{name} forward']:.2f})"
                f" {weight_bytes(model) / times[name] / 1e6:.0f} GB/s"
                for name, model in models.items()
            ]
            print(f"{kind} {rows:3d} rows: " + " | ".join(cells), flush=True)
    for length in prefills:
        batch = make_batch([(0, length)], config.vocab_size)
        times = least(
            3,
            {
                name: lambda model=model, batch=batch: model.forward(batch, pool)
                for name, model in models.items()
            },
        )
        products = (
            2
            * length
            * sum(
                linear.in_features * linear.out_features
                for layer in next(iter(models.values()))._layers
                for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
            )
        )
        cells = [f"{name} {ms:.0f} ms ({products / ms / 1e6:.0f} GOP/s)" for name, ms in times.items()]
        print(f"prefill {length}: " + " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
