"""Draft heads against a reference of each form, row independence, and chains against their steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker.kernels.kv_pool import NativeKVPool
from gpu_worker.kernels.linear import PackedLinear, WeightFormat
from gpu_worker.kernels.native import Isa, NativeKernels, ThreadTeam
from tests.gpu_worker.kernels import reference
from tests.gpu_worker.kernels.conftest import BuildHead, Teams
from tests.gpu_worker.kernels.heads import FORMS, SHAPE, VOCAB, Head, random_text, tree_start
from tests.gpu_worker.kernels.schedules import Rows, Sequence, make_batch, num_pages, place

H = SHAPE.hidden_size


def run(
    head: Head,
    pool: NativeKVPool,
    team: ThreadTeam,
    rows: list[Rows],
    features: torch.Tensor,
    recycled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass; causal rows count as computed afterwards."""
    out = head.native.forward(make_batch(rows, pool.page_size), pool, team, features, recycled)
    for row in rows:
        if not row.tree_tokens:
            row.sequence.num_computed += row.count
    return out


def drafted(head: Head, team: ThreadTeam, n: int, steps: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """n rows of the target, then `steps` recycled ones: (ids, features as hidden_states takes them, both outputs)."""
    ids, features = random_text(n + steps, head.native.feature_size, seed=3)
    sequence = Sequence(ids, list(range(-(-len(ids) // 16))))
    pool = head.native.new_pool(len(sequence.pages), 16)
    recycled, normed = run(head, pool, team, [Rows(sequence, n)], features[:n])
    outputs = [torch.stack([recycled, normed])]
    for step in range(steps):
        features[n + step, :H] = outputs[-1][0, -1]
        outputs.append(
            torch.stack(
                run(head, pool, team, [Rows(sequence, 1)], outputs[-1][0, -1:].clone(), recycled=True)
            )
        )
    return ids, features, torch.cat(outputs, dim=1)


def row_errors(actual: torch.Tensor, expected: tuple[np.ndarray, np.ndarray]) -> torch.Tensor:
    wanted = torch.from_numpy(np.stack(expected)).float()
    return (actual - wanted).norm(dim=-1) / wanted.norm(dim=-1)


@pytest.mark.parametrize("format", [WeightFormat.Q8_0, WeightFormat.BF16], ids=lambda f: f.name)
@pytest.mark.parametrize("name", FORMS)
def test_equals_the_reference_with_the_same_quantisation(
    heads: BuildHead, teams: Teams, name: str, format: WeightFormat
) -> None:
    """Prefill of more rows than are prepared by each thread alone, then steps on the head's own outputs."""
    head = heads(name, format)
    ids, features, actual = drafted(head, teams(2), 40, 4)
    errors = row_errors(actual, head.hidden_states(ids, features.double().numpy(), 40))
    layers = head.form.num_layers
    assert errors.median() < (2e-4 if layers == 1 else 0.01)
    assert errors.max() < (0.03 if layers == 1 else 0.06)


@pytest.mark.parametrize("format", [WeightFormat.Q8_0, WeightFormat.BF16], ids=lambda f: f.name)
@pytest.mark.parametrize("name", FORMS)
def test_close_to_the_float_head(heads: BuildHead, teams: Teams, name: str, format: WeightFormat) -> None:
    head = heads(name, format)
    ids, features, actual = drafted(head, teams(2), 40, 4)
    expected = head.hidden_states(ids, features.double().numpy(), 40, exact=True)
    assert row_errors(actual, expected).max() < 0.1


@pytest.mark.parametrize("k", [2 * 576, 3 * 576])
@pytest.mark.parametrize("format", [WeightFormat.Q8_0, WeightFormat.BF16], ids=lambda f: f.name)
def test_wide_inputs(kernels: NativeKernels, teams: Teams, format: WeightFormat, k: int) -> None:
    """The widths of pairs and of three hidden states of a small model."""
    generator = torch.Generator().manual_seed(k)
    linear = PackedLinear(kernels, format, 96, k)
    linear.pack_floats(torch.randn(96, k, generator=generator))
    x = torch.randn(5, k, generator=generator)
    round_pairs = kernels.isa is Isa.AVX512_BF16
    expected = reference.product(linear, x.double().numpy(), 32, round_pairs=round_pairs)
    torch.testing.assert_close(
        linear.run(teams(2), x, 32), torch.from_numpy(expected).float(), rtol=1e-4, atol=1e-3
    )


def one_by_one(
    head: Head, team: ThreadTeam, ids: list[int], features: torch.Tensor, recycled: bool
) -> torch.Tensor:
    """[2, n, h]: each row in a pass of its own."""
    sequence = Sequence(ids, list(range(-(-len(ids) // 16))))
    pool = head.native.new_pool(len(sequence.pages), 16)
    outputs = [
        torch.stack(run(head, pool, team, [Rows(sequence, 1)], features[i : i + 1].clone(), recycled))
        for i in range(len(ids))
    ]
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", FORMS)
def test_any_schedule_gives_the_bits_of_one_by_one(
    heads: BuildHead, teams: Teams, name: str, threads: int
) -> None:
    head, rng = heads(name), np.random.default_rng(threads)
    texts = [random_text(n, head.native.feature_size, seed=n) for n in (5, 61, 23)]
    expected = [one_by_one(head, teams(1), ids, features, recycled=False) for ids, features in texts]
    sequences = place(rng, [ids for ids, _ in texts], 16)
    pool = head.native.new_pool(num_pages(sequences), 16)
    while waiting := [i for i, s in enumerate(sequences) if s.num_computed < len(s.tokens)]:
        chosen = rng.permutation(waiting)[: rng.integers(1, len(waiting) + 1)].tolist()
        starts = [sequences[i].num_computed for i in chosen]
        counts = [
            min(int(rng.choice([1, 2, 5, 30])), len(sequences[i].tokens) - start)
            for i, start in zip(chosen, starts, strict=True)
        ]
        spans = [(i, start, start + count) for i, start, count in zip(chosen, starts, counts, strict=True)]
        out = run(
            head,
            pool,
            teams(threads),
            [Rows(sequences[i], count) for i, count in zip(chosen, counts, strict=True)],
            torch.cat([texts[i][1][begin:end] for i, begin, end in spans]),
        )
        wanted = torch.cat([expected[i][:, begin:end] for i, begin, end in spans], dim=1)
        assert torch.equal(torch.stack(out), wanted)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["eagle original", "eagle 3", "mtp"])
def test_trees_give_the_bits_of_their_paths(heads: BuildHead, teams: Teams, name: str, threads: int) -> None:
    """A tree of recycled rows, beside another request's row, equals each of its paths."""
    head, rng = heads(name), np.random.default_rng(threads)
    prefix, nodes = 131, 12
    ids, features = random_text(prefix, head.native.feature_size, seed=9)
    tree_ids, recycled = random_text(nodes + 1, H, seed=10)
    parents = [0] + [int(rng.integers(max(0, i - 4), i)) for i in range(1, nodes)]
    sequence, other = place(rng, [ids, tree_ids[-1:]], 16, spare=nodes)
    pool = head.native.new_pool(num_pages([sequence, other]), 16)
    run(head, pool, teams(threads), [Rows(sequence, prefix)], features)
    tree = Rows(sequence, nodes, tree_ids[:nodes], parents)
    out = torch.stack(run(head, pool, teams(threads), [tree, Rows(other, 1)], recycled, recycled=True))
    for node in (0, 4, nodes - 1):
        path = [node]
        while path[0] != 0:
            path.insert(0, parents[path[0]])
        alone = Sequence(ids + [tree_ids[i] for i in path], list(range(9)))
        own_pool = head.native.new_pool(9, 16)
        run(head, own_pool, teams(1), [Rows(alone, prefix)], features)
        for i in path:
            row = recycled[i : i + 1].clone()
            expected = torch.stack(run(head, own_pool, teams(1), [Rows(alone, 1)], row, recycled=True))
        assert torch.equal(out[:, node], expected[:, 0])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_chain_equals_its_steps(
    heads: BuildHead, teams: Teams, name: str, mapped: bool, threads: int
) -> None:
    """Sequences of different lengths and budgets; the KV they leave behind is the same too."""
    head, rng, counts = heads(name), np.random.default_rng(5), [4, 0, 6, 1, 6]
    native, team, group = head.native, teams(threads), SHAPE.activation_group
    target_ids = head.target_ids if mapped else None
    texts = [random_text(n, native.feature_size, seed=n) for n in (14, 3, 130, 16, 40)]
    sequences = place(rng, [ids for ids, _ in texts], 16, spare=6)
    pools = [native.new_pool(num_pages(sequences), 16) for _ in range(2)]
    prompts = [Rows(s, len(s.tokens)) for s in sequences]
    features = torch.cat([f for _, f in texts])
    ends = np.cumsum([len(ids) for ids, _ in texts]) - 1
    for pool in pools:
        for s in sequences:
            s.num_computed = 0
        recycled, normed = (out[ends].contiguous() for out in run(head, pool, team, prompts, features))
    start = tree_start(sequences, recycled, normed, counts, max_depth=6, max_children=1)
    grown = native.tree(start, pools[0], team, head.lm_head, target_ids)
    assert grown.parents == [list(range(-1, count - 1)) for count in counts]

    for d, sequence in enumerate(sequences):
        row, seen = recycled[d : d + 1].clone(), normed[d : d + 1].clone()
        expected, value = [], 0.0
        for step in range(counts[d]):
            column, logit, lse = head.lm_head.topk(teams(1), seen, 1, group)
            token = int(column) if target_ids is None else int(target_ids[column])
            expected.append(token)
            value += float(logit - lse)
            assert grown.values[d][step] == value
            if step < counts[d] - 1:  # the last token is not run
                sequence.tokens = [*sequence.tokens[: sequence.num_computed], token]
                row, seen = run(head, pools[1], teams(1), [Rows(sequence, 1)], row, recycled=True)
        assert grown.tokens[d] == expected
    slots = torch.arange(num_pages(sequences) * 16)
    for layer in range(native.num_layers):
        for a, b in zip(pools[0].read(layer, slots), pools[1].read(layer, slots), strict=True):
            assert torch.equal(a, b)


def test_nothing_to_draft(heads: BuildHead, teams: Teams) -> None:
    head = heads("mtp")
    start = tree_start([Sequence([1], [0], 1)], torch.zeros(1, H), torch.zeros(1, H), [0], 3, 4)
    assert head.native.tree(start, head.native.new_pool(1, 16), teams(1), head.lm_head).tokens == [[]]


def test_a_packed_embedding_gives_the_bits_of_its_floats(
    heads: BuildHead, teams: Teams, kernels: NativeKernels
) -> None:
    head = heads("eagle 3")
    packed = PackedLinear(kernels, WeightFormat.BF16, VOCAB, H)
    packed.pack_floats(head.embedding)
    table = head.embedding.to(torch.bfloat16)
    ids, features = random_text(12, 3 * H, seed=1)
    batch = make_batch([Rows(Sequence(ids, [0]), 12)], 16)
    results = []
    for embedding in (packed, table):
        native = type(head.native)(kernels, SHAPE, embedding, head.cos, head.sin, head.native.weights)
        results.append(native.forward(batch, native.new_pool(1, 16), teams(2), features, False)[1])
    assert torch.equal(*results)
