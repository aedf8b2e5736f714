"""The embedded SmolLM2 gives transformers' logits on its dequantised weights; lower precisions come close."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_worker.attention.cpu import CPUAttention
from gpu_worker.weights.gguf_file import GGUFFile
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from gpu_worker.weights.tokenizer_export import export_tokenizer
from tests.gpu_worker.forwarding import prompt_logits

pytestmark = pytest.mark.real_model

# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


TEXT = (
    "The Nile is the longest river in Africa. It flows north through eleven countries before it reaches "
    "the Mediterranean Sea. For thousands of years, farmers along its banks have depended on the yearly "
    "flood, which left rich black soil on their fields. The ancient Egyptians built their cities and "
    "temples near the river, and they used boats to carry stone, grain and people. Today, large dams "
    "control the flow of the water."
)


@pytest.fixture(scope="module")
def text_ids(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    directory = export_tokenizer(resolve_model(""), tmp_path_factory.mktemp("cache"))
    ids: list[int] = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT).ids
    return ids


@pytest.fixture(scope="module")
def expected(embedded_model: Path) -> torch.Tensor:
    """float32 logits [len(PROMPT), 49152] of transformers; weights are mapped here, not by the loader."""
    file = GGUFFile(embedded_model)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    weights = {}
    for name, tensor in file.tensors.items():
        raw = np.fromfile(embedded_model, np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        row_bytes = tensor.num_bytes // tensor.shape[0] if len(tensor.shape) > 1 else tensor.num_bytes
        value = torch.from_numpy(
            gguf.dequantize(raw.reshape(-1, row_bytes), tensor.kind).reshape(tensor.shape)
        )
        if name == "token_embd.weight":
            weights["model.embed_tokens.weight"] = value
        elif name == "output_norm.weight":
            weights["model.norm.weight"] = value
        else:
            _, layer, kind, _ = name.split(".")
            heads = {"attn_q": 9, "attn_k": 3}.get(kind)
            if heads is not None:  # row 2j + half of a head belongs at half * 32 + j
                order = torch.arange(64).view(32, 2).T.reshape(-1)
                value = value.view(heads, 64, 576)[:, order].reshape(value.shape)
            weights[f"model.layers.{layer}.{names[kind]}.weight"] = value
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffer is not among the weights
    with torch.inference_mode():
        return model.eval()(torch.tensor([PROMPT])).logits[0]


def logits_of(dtype: str, ids: list[int]) -> torch.Tensor:
    return prompt_logits(load_model(resolve_model(""), dtype, "cpu"), ids, attention=CPUAttention())


def test_float32_logits_equal_transformers(expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits_of("float32", PROMPT), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("dtype", "least_cosine"), [("bfloat16", 0.999), ("int8", 0.99)])
def test_lower_precision_agrees(expected: torch.Tensor, dtype: str, least_cosine: float) -> None:
    logits = logits_of(dtype, PROMPT)
    assert torch.cosine_similarity(logits, expected, dim=-1).mean() > least_cosine
    assert logits[-1].argmax() == expected[-1].argmax()


def test_lower_precision_predicts_text_as_well(text_ids: list[int]) -> None:
    """Mean surprise per token, in nats; e to the difference is the ratio of perplexities."""
    surprise = {
        dtype: cross_entropy(logits_of(dtype, text_ids)[:-1], torch.tensor(text_ids[1:])).item()
        for dtype in ("float32", "bfloat16", "int8")
    }
    assert 2.0 < surprise["float32"] < 3.2, "plain English to a model of this size"
    assert abs(surprise["bfloat16"] - surprise["float32"]) < 0.02
    assert abs(surprise["int8"] - surprise["float32"]) < 0.15


def test_facts_of_the_file() -> None:
    config = load_model(resolve_model(""), "int8", "cpu").config
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.num_embeddings, config.max_position_embeddings) == (49152, 49152, 8192)
    assert config.eos_token_ids == (2,)
    assert config.tie_word_embeddings
