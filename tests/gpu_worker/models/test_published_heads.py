"""A published head computes what its authors' code computes: checkpoint, loader and head against their formulas.

The formulas are written out here over the checkpoint's own tensor names, one whole sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.models.base import CausalLM
from gpu_worker.models.heads.build import build_head
from gpu_worker.models.heads.medusa import build_medusa
from gpu_worker.weights.head_checkpoint import load_head
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from tests.gpu_worker.weights import published_heads as heads
from tests.gpu_worker.weights.published_heads import HEAD_DIM, HEADS, KV_HEADS, LAYERS, H, Json, Tensors
from tests.harness.whole_sequence import forward_whole, whole_batch
from tests.models import make_tiny_llama

IDS = [5, 80, 3, 3, 41, 77, 20, 9, 60]
EPS, THETA = heads.DECODER["rms_norm_eps"], heads.DECODER["rope_theta"]

# (tensors, embedded tokens [n, h], hidden states before them [n, F]) -> recycled [n, h], logits [n, ids]
Formula = Callable[[Tensors, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    directory = make_tiny_llama(
        tmp_path_factory.mktemp("target"),
        vocab_size=heads.PADDED,
        hidden_size=H,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        tokenizer_vocab_size=None,
        tie=False,
    )
    return load_model(resolve_model(str(directory)), "float32", "cpu")


def norm(t: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * t[f"{name}.weight"]


def project(t: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [n, heads, D] at positions 0..n-1."""
    frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(len(x))[:, None] * frequencies
    cos, sin = torch.cat([angles.cos()] * 2, 1)[:, None], torch.cat([angles.sin()] * 2, 1)[:, None]
    half = HEAD_DIM // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def attention(t: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
    q = rotated(project(t, f"{prefix}self_attn.q_proj", x).view(len(x), HEADS, HEAD_DIM))
    k = rotated(project(t, f"{prefix}self_attn.k_proj", x).view(len(x), KV_HEADS, HEAD_DIM))
    v = project(t, f"{prefix}self_attn.v_proj", x).view(len(x), KV_HEADS, HEAD_DIM)
    k, v = (one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (k, v))
    out = scaled_dot_product_attention(*(one.transpose(0, 1)[None] for one in (q, k, v)), is_causal=True)
    return project(t, f"{prefix}self_attn.o_proj", out[0].transpose(0, 1).reshape(len(x), -1))


def mlp(t: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate = silu(project(t, f"{prefix}mlp.gate_proj", x)) * project(t, f"{prefix}mlp.up_proj", x)
    return project(t, f"{prefix}mlp.down_proj", gate)


def layer(t: Tensors, prefix: str, x: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
    x = x + attention(t, prefix, side)
    return x + mlp(t, prefix, norm(t, f"{prefix}post_attention_layernorm", x))


def eagle(t: Tensors, emb: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = project(t, "fc", torch.cat([emb, hidden], -1))
    x = layer(t, "layers.0.", x, x)
    return x, linear(x, t["target.lm_head"])


def eagle3(t: Tensors, emb: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    g = project(t, "fc", hidden)
    side = [norm(t, "midlayer.input_layernorm", emb), norm(t, "midlayer.hidden_norm", g)]
    x = layer(t, "midlayer.", g, torch.cat(side, -1))
    return x, project(t, "lm_head", norm(t, "norm", x))


def speculators_eagle3(
    t: Tensors, emb: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    g = norm(t, "layers.0.hidden_norm", project(t, "fc", hidden))
    x = layer(t, "layers.0.", g, torch.cat([norm(t, "layers.0.input_layernorm", emb), g], -1))
    normed = norm(t, "norm", x)
    return normed, project(t, "lm_head", normed)


def deepseek_mtp(t: Tensors, emb: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = f"model.layers.{LAYERS}."
    x = project(t, f"{p}eh_proj", torch.cat([norm(t, f"{p}enorm", emb), norm(t, f"{p}hnorm", hidden)], -1))
    x = layer(t, p, x, norm(t, f"{p}input_layernorm", x))
    return x, linear(norm(t, f"{p}shared_head.norm", x), t["target.lm_head"])


def mimo_mtp(t: Tensors, emb: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = "model.mtp_layers.0."
    pair = [norm(t, f"{p}hidden_layernorm", hidden), norm(t, f"{p}token_layernorm", emb)]
    x = project(t, f"{p}input_proj", torch.cat(pair, -1))
    x = norm(t, f"{p}final_layernorm", layer(t, p, x, norm(t, f"{p}input_layernorm", x)))
    return x, linear(x, t["target.lm_head"])


def qwen_mtp(t: Tensors, emb: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    t = {name: tensor + 1 if "norm" in name else tensor for name, tensor in t.items()}
    pair = [norm(t, "mtp.pre_fc_norm_embedding", emb), norm(t, "mtp.pre_fc_norm_hidden", hidden)]
    x = project(t, "mtp.fc", torch.cat(pair, -1))
    p = "mtp.layers.0."
    x = norm(t, "mtp.norm", layer(t, p, x, norm(t, f"{p}input_layernorm", x)))
    return x, linear(x, t["target.lm_head"])


CASES: dict[str, tuple[tuple[Json, Tensors], Formula, tuple[int, ...]]] = {
    # the checkpoint, its authors' formula, and the target's layers whose INPUTS are fused
    "eagle": (heads.eagle(), eagle, ()),
    "eagle3": (heads.eagle3(), eagle3, (2, 3, 5)),
    "speculators": (heads.speculators_eagle3(norm_output=True), speculators_eagle3, (1, 2, 6)),
    "deepseek": (heads.deepseek_mtp(), deepseek_mtp, ()),
    "mimo": (heads.mimo_mtp(), mimo_mtp, ()),
    "qwen": (heads.qwen_mtp(model_type="qwen3_next"), qwen_mtp, ()),
}


def target_states(target: CausalLM, inputs_of: tuple[int, ...]) -> torch.Tensor:
    """[n, F] the states that the head pairs with the NEXT token: the inputs of the layers named, or the last one."""
    if not inputs_of:
        return forward_whole(target, IDS)[0]
    outputs = tuple(
        layer - 1 for layer in inputs_of
    )  # the input of layer i is the output of the one before it
    pool = target.new_pool(1, 16)
    _, captured = target.forward_capturing(whole_batch(IDS, 16), pool, ReferenceAttention(), outputs)
    assert captured is not None
    return captured


@pytest.mark.parametrize("case", CASES)
def test_head_computes_its_authors_formula(case: str, target: CausalLM, tmp_path: Path) -> None:
    (config, tensors), formula, inputs_of = CASES[case]
    # in the range of trained weights: attention neither flat nor one-hot
    tensors = {name: tensor * 0.25 if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    checkpoint = load_head(str(heads.write(tmp_path, config, tensors)), target.config)
    head = build_head(checkpoint.config, checkpoint.tensors, target)
    states = target_states(target, inputs_of)
    before = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
    emb = target.embedding(torch.tensor(IDS))  # type: ignore[attr-defined]
    known = tensors | {"target.lm_head": target.lm_head.weight}  # type: ignore[attr-defined]
    recycled, logits = formula(known, emb, before)
    pool = head.new_pool(1, 16)
    rows = head.forward(whole_batch(IDS, 16), before, pool, ReferenceAttention(), recycled=False)
    torch.testing.assert_close(rows.recycled, recycled, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.output.logits(rows.normed), logits, rtol=1e-4, atol=1e-4)
    assert recycled.std() > 0.05


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_medusa_computes_its_authors_formula(num_blocks: int, target: CausalLM, tmp_path: Path) -> None:
    tensors = {name: tensor * 0.25 for name, tensor in heads.medusa(3, num_blocks).items()}
    heads.write(tmp_path, None, tensors, "medusa_lm_head.pt")
    checkpoint = load_head(str(tmp_path), target.config)
    medusa = build_medusa(checkpoint.config, checkpoint.tensors, target)
    hidden, _ = forward_whole(target, IDS)
    states = medusa.forward(hidden, len(medusa.outputs))
    for k in range(3):
        x = hidden
        for i in range(num_blocks):
            x = x + silu(project(tensors, f"{k}.{i}.linear", x))
        logits = project(tensors, f"{k}.{num_blocks}", x)
        torch.testing.assert_close(medusa.outputs[k].logits(states[:, k]), logits, rtol=1e-4, atol=1e-4)
