"""A row's bits depend on its tokens alone: not on the batch, its order, pages, page size, chunks, drafts or threads.

Everything is compared with the same tokens computed one by one in passes of one row, by torch.equal.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_worker.kernels.kv_pool import NativeKVPool
from tests.gpu_worker.kernels.conftest import BuildModel
from tests.gpu_worker.kernels.schedules import Rows, Sequence, num_pages, one_by_one, place, run, slots_of

_SETTINGS = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# One layout whose attention outputs are quantised head by head, and one where they are not (24 * 2 inputs).
_OPTIONS = (
    {"head_dim": 32, "num_heads": 4, "num_kv_heads": 2},
    {"head_dim": 24, "num_heads": 4, "num_kv_heads": 2},
)
_FORMATS = st.sampled_from([("q4_1", 0), ("q4_1", 1), ("w8", 0), ("bf16", 0)])
_LENGTHS = st.lists(st.one_of(st.integers(1, 40), st.integers(100, 300)), min_size=1, max_size=5)


def texts(lengths: list[int], rng: np.random.Generator) -> list[list[int]]:
    return [rng.integers(0, 300, n).tolist() for n in lengths]


def nan_filled(pool: NativeKVPool) -> NativeKVPool:
    """Every slot NaN: what a page of another request, long gone, may hold at its worst."""
    slots = torch.arange(pool.num_pages * pool.page_size)
    nan = torch.full((len(slots), pool.num_kv_heads, pool.head_dim), torch.nan)
    for layer in range(pool.num_layers):
        pool.write(layer, slots, nan, nan)
    return pool


@_SETTINGS
@given(
    format=_FORMATS,
    lengths=_LENGTHS,
    page_size=st.sampled_from([1, 4, 16, 32, 48]),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_schedule_gives_the_bits_of_one_by_one(
    build: BuildModel, format: tuple[str, int], lengths: list[int], page_size: int, threads: int, seed: int
) -> None:
    """Prefill in chunks, decode and windows of several rows of several requests at once, in any order."""
    rng = np.random.default_rng(seed)
    options = _OPTIONS[format[1]]
    sequences = place(rng, texts(lengths, rng), page_size)
    model = build(format[0], threads, **options)
    expected = [one_by_one(build(format[0], 1, **options), sequence.tokens) for sequence in sequences]
    pool = nan_filled(model.new_pool(num_pages(sequences), page_size))
    while waiting := [i for i, s in enumerate(sequences) if s.num_computed < len(s.tokens)]:
        chosen = rng.permutation(waiting)[: rng.integers(1, len(waiting) + 1)].tolist()
        starts = [sequences[i].num_computed for i in chosen]
        counts = [
            min(
                int(rng.choice([1, 1, 2, 5, 9, 40, 200])),
                len(sequences[i].tokens) - sequences[i].num_computed,
            )
            for i in chosen
        ]
        rows = [Rows(sequences[i], count) for i, count in zip(chosen, counts, strict=True)]
        for i, start, hidden in zip(chosen, starts, run(model, pool, rows), strict=True):
            assert torch.equal(hidden, expected[i][start : start + len(hidden)])


@_SETTINGS
@given(
    format=_FORMATS,
    prefix=st.one_of(st.integers(1, 20), st.integers(110, 150), st.integers(240, 262)),
    nodes=st.integers(2, 20),
    page_size=st.sampled_from([4, 16]),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_trees_give_the_bits_of_their_paths(
    build: BuildModel,
    format: tuple[str, int],
    prefix: int,
    nodes: int,
    page_size: int,
    threads: int,
    seed: int,
) -> None:
    """Each node equals the last token of its path; a path moved to contiguous slots decodes on with the same bits."""
    rng = np.random.default_rng(seed)
    options = _OPTIONS[format[1]]
    model, alone = build(format[0], threads, **options), build(format[0], 1, **options)
    tree_tokens = rng.integers(0, 300, nodes).tolist()
    parents = [0] + [int(rng.integers(max(0, i - 4), i)) for i in range(1, nodes)]
    other_text, text = texts([7, prefix], rng)
    sequence, other = place(rng, [text, other_text], page_size, spare=nodes + 1)
    pool = nan_filled(model.new_pool(num_pages([sequence, other]), page_size))
    run(model, pool, [Rows(sequence, prefix)])
    tree = Rows(sequence, nodes, tree_tokens, parents)
    hidden = run(model, pool, [Rows(other, 7), tree] if seed % 2 else [tree])[-1]

    def path_to(node: int) -> list[int]:
        path = [node]
        while path[0] != 0:
            path.insert(0, parents[path[0]])
        return path

    for node in {0, nodes - 1, *rng.integers(0, nodes, 3).tolist()}:
        expected = one_by_one(alone, text + [tree_tokens[i] for i in path_to(node)])
        assert torch.equal(hidden[node], expected[-1])

    path = path_to(nodes - 1)
    sources = slots_of(sequence, prefix + np.array(path), page_size)
    targets = slots_of(sequence, prefix + np.arange(len(path)), page_size)
    pool.move(torch.from_numpy(sources), torch.from_numpy(targets))
    sequence.tokens = text + [tree_tokens[i] for i in path] + [5]
    sequence.num_computed = prefix + len(path)
    (last,) = run(model, pool, [Rows(sequence, 1)])
    assert torch.equal(last[0], one_by_one(alone, sequence.tokens)[-1])


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 64])
def test_many_decode_rows(build: BuildModel, rows: int) -> None:
    """Decode batches of 1 to 64 rows, contexts of very different lengths."""
    rng = np.random.default_rng(rows)
    text = texts([170], rng)[0]
    expected = one_by_one(build("q4_1", 1), text)
    model = build("q4_1", 3)
    lengths = rng.integers(1, 170, rows)
    sequences = place(rng, [text[: n + 1] for n in lengths.tolist()], 16)
    pool = nan_filled(model.new_pool(num_pages(sequences), 16))
    run(model, pool, [Rows(sequence, len(sequence.tokens) - 1) for sequence in sequences])
    for i, hidden in enumerate(run(model, pool, [Rows(sequence, 1) for sequence in sequences])):
        assert torch.equal(hidden[0], expected[lengths[i]])


def test_a_chain_given_as_a_tree(build: BuildModel) -> None:
    """The same bits whether a chain of drafts comes with a mask or without."""
    model = build("q4_1", 2)
    text = texts([140], np.random.default_rng(0))[0]
    results = []
    for as_tree in (False, True):
        sequence = Sequence(text, list(range(9)))
        pool = model.new_pool(9, 16)
        run(model, pool, [Rows(sequence, 125)])
        chain = Rows(sequence, 15, text[125:], [0, *range(14)]) if as_tree else Rows(sequence, 15)
        results.append(run(model, pool, [chain])[0])
    assert torch.equal(*results)


def test_long_contexts_shared_out_among_threads(build: BuildModel) -> None:
    """One request whose blocks of keys are split over threads and merged again."""
    text = texts([500], np.random.default_rng(1))[0]
    expected = one_by_one(build("q4_1", 1), text)
    for threads in (2, 3, 4):
        model = build("q4_1", threads)
        sequence = Sequence(text, list(range(32)))
        pool = model.new_pool(32, 16)
        hidden = torch.cat([run(model, pool, [Rows(sequence, n)])[0] for n in (490, 1, 4, 1, 4)])
        assert torch.equal(hidden, expected)
