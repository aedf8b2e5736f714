"""The unrolled training forward against a draft that runs one row after the other, as a served head does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpu_worker.layers.rotary import RotaryEmbedding, rotate
from gpu_worker.models.heads.config import HeadConfig, HeadKind
from gpu_worker.training.batches import TrainingBatch, collate
from gpu_worker.training.features import ConversationFeatures
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.objective import ACCEPTED, LAW_LOSS, REACHED, ROWS, unrolled_logits
from tests.gpu_worker.training.samples import draft_objective

_LENGTH, _STEPS = 9, 4


class _OneByOne:
    """A head as the served one works: a growing cache of keys, one pair at a time. Written from the formulas alone."""

    def __init__(self, config: HeadConfig, weights: dict[str, torch.Tensor]) -> None:
        self.config, self.w = config, weights
        self.cache: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(config.num_layers)]
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, 64, torch.float32, torch.device("cpu"))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.w.get(f"{name}.weight")
        if weight is None:
            return x
        return x / (x.square().mean() + self.config.rms_norm_eps).sqrt() * weight

    def pair(
        self, embedded: torch.Tensor, g: torch.Tensor, position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the output head reads, what is recycled); both [h]."""
        c = self.config
        e_n, g_n = self.norm("embedding_norm", embedded), self.norm("feature_norm", g)
        if c.kind is HeadKind.EAGLE3:
            x, side = (g_n if c.residual_is_normed else g), torch.cat((e_n, g_n))
        else:
            x = self.w["combine.weight"] @ torch.cat((e_n, g_n) if c.embedding_first else (g_n, e_n))
            side = None
        for i in range(c.num_layers):
            p = f"layers.{i}"
            a = side if side is not None and i == 0 else self.norm(f"{p}.input_layernorm", x)
            x = x + self.attend(i, a, position)
            y = self.norm(f"{p}.post_attention_layernorm", x)
            gate, up = self.w[f"{p}.mlp.gate_proj.weight"] @ y, self.w[f"{p}.mlp.up_proj.weight"] @ y
            x = x + self.w[f"{p}.mlp.down_proj.weight"] @ (F.silu(gate) * up)
        normed = self.norm("norm", x)
        return normed, normed if c.recycles_normed else x

    def attend(self, layer: int, a: torch.Tensor, position: int) -> torch.Tensor:
        c, p = self.config, f"layers.{layer}.self_attn"
        at = self.rotary.at(torch.tensor([position]))
        q, k, v = (self.w[f"{p}.{n}_proj.weight"] @ a for n in "qkv")
        q = rotate(q.view(1, c.num_heads, c.head_dim), *at)[0]
        k = rotate(k.view(1, c.num_kv_heads, c.head_dim), *at)[0]
        self.cache[layer].append((k, v.view(c.num_kv_heads, c.head_dim)))
        heads = []
        for head in range(c.num_heads):
            kv = head * c.num_kv_heads // c.num_heads
            keys = torch.stack([key[kv] for key, _ in self.cache[layer]])
            values = torch.stack([value[kv] for _, value in self.cache[layer]])
            heads.append((keys @ q[head] * c.head_dim**-0.5).softmax(0) @ values)
        return self.w[f"{p}.o_proj.weight"] @ torch.cat(heads)

    def forget(self, count: int) -> None:
        for keys in self.cache:
            del keys[count:]


@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        (HeadKind.EAGLE3, {}),
        (HeadKind.EAGLE3, {"num_layers": 2}),
        (HeadKind.MTP, {}),
        (HeadKind.MTP, {"num_layers": 2}),
        (HeadKind.EAGLE, {"full_norms": False}),
        (HeadKind.EAGLE, {"full_norms": True, "recycles_normed": True}),
    ],
)
def test_every_step_is_what_a_served_head_computes(
    kind: HeadKind, choices: dict[str, Any], frozen: FrozenTarget
) -> None:
    objective, _ = draft_objective(kind, frozen, **choices)
    head, config = objective.head, objective.head.config
    head.set_feature_sizes(0.5 + torch.rand(config.feature_size))
    weights = {name: value.detach() for name, value in head.tensors().items()}
    torch.manual_seed(3)
    ids = torch.randint(3, 100, (_LENGTH,))
    features = torch.randn(_LENGTH, config.feature_size)
    with torch.no_grad():
        logits = unrolled_logits(objective, ids, features, _STEPS)
        served = _OneByOne(config, weights)
        for i in range(_LENGTH - _STEPS + 1):
            feature = torch.zeros(config.feature_size) if i == 0 else features[i - 1]
            g = weights["fuse.weight"] @ feature if config.feature_layers else feature
            for k in range(_STEPS):
                normed, g = served.pair(frozen.embedding[ids[i + k]], g, i + k)
                expected = objective.output_rows @ normed
                torch.testing.assert_close(logits[k, i], expected, rtol=1e-4, atol=1e-4)
            served.forget(i + 1)


def _features(count: int, answers: list[tuple[int, int]], layers: int, seed: int) -> ConversationFeatures:
    generator = torch.Generator().manual_seed(seed)
    answer = torch.zeros(count, dtype=torch.bool)
    for start, stop in answers:
        answer[start:stop] = True
    rows = answer[1:].nonzero().squeeze(1)
    probs = torch.rand(len(rows), 4, generator=generator).sort(-1, descending=True).values / 4
    return ConversationFeatures(
        torch.randint(3, 100, (count,), generator=generator),
        rows,
        torch.randn(count, 64, generator=generator),
        torch.randn(count, 64 * layers, generator=generator),
        torch.randint(0, 100, (len(rows), 4), generator=generator),
        probs,
    )


def _batch(items: list[ConversationFeatures], vocab: Any, kind: HeadKind) -> TrainingBatch:
    return collate(items, vocab, torch.float32, from_captured=kind is HeadKind.EAGLE3)


@pytest.mark.parametrize("kind", [HeadKind.EAGLE3, HeadKind.MTP, HeadKind.EAGLE])
def test_a_batch_is_its_conversations_alone(kind: HeadKind, frozen: FrozenTarget) -> None:
    objective, vocab = draft_objective(kind, frozen)
    objective.eval()
    items = [_features(9, [(5, 9)], 2, 1), _features(14, [(3, 6), (8, 14)], 2, 2)]
    together = objective(_batch(items, vocab, kind), 3)
    apart = [objective(_batch([item], vocab, kind), 3) for item in items]
    columns = [ROWS, LAW_LOSS, ACCEPTED, REACHED]  # the regression is in units of the batch's own scale
    torch.testing.assert_close(
        together.sums[:, columns], (apart[0].sums + apart[1].sums)[:, columns], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("step", [0, 1, 2])
def test_gradients_come_from_answer_rows_alone(step: int, frozen: FrozenTarget) -> None:
    """Prompt of five, answer of four: rows 4 .. 7 have a next token in the answer, the last for step 0 alone."""
    objective, vocab = draft_objective(HeadKind.MTP, frozen)
    batch = _batch([_features(9, [(5, 9)], 2, 1), _features(6, [(4, 6)], 2, 4)], vocab, HeadKind.MTP)
    outputs = list(objective.head.unroll(batch, objective.embedding, 3))
    for output in outputs:
        output.normed.retain_grad()

    class _Replay(torch.nn.Module):
        lookahead = 0

        def output_rows(self, k: int) -> None:
            return None

        def unroll(self, *_: object) -> Any:
            return iter(outputs)

    objective.head = _Replay()  # type: ignore[assignment]
    objective(batch, 3).loss.backward()
    gradient = outputs[step].normed.grad
    assert batch.rows.tolist() == [4, 5, 6, 7, 9 + 3, 9 + 4]
    reached = [i for i in range(batch.num_rows) if gradient[i].abs().sum() > 0]
    # A later step still sends gradients through what it recycled, so only the last step shows its own rows alone.
    own = [i for i, room in enumerate(batch.room.tolist()) if room >= step]
    assert set(own) <= set(reached)
    assert own == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 4], [0, 1]][step]
    if step == 2:
        assert reached == own


def test_what_lies_behind_a_row_changes_nothing(frozen: FrozenTarget) -> None:
    objective, _ = draft_objective(HeadKind.EAGLE3, frozen)
    torch.manual_seed(0)
    ids, features = torch.randint(3, 100, (8,)), torch.randn(8, 128)
    with torch.no_grad():
        before = unrolled_logits(objective, ids, features, 2)
        features[5:] += 1.0
        ids[7] = 100
        after = unrolled_logits(objective, ids, features, 2)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=0, atol=0)
    assert not torch.equal(before[1, 6], after[1, 6])
