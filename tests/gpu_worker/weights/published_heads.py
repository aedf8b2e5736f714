"""Small draft heads in the layouts of their publishers: real tensor names, random weights, written on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpu_worker.layers.rotary import RopeConfig
from gpu_worker.models.config import ModelConfig
from shared_mem.control import SamplingDefaults

H, VOCAB, PADDED, DRAFT_VOCAB, INNER = 32, 90, 96, 40, 48
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 8, 6

TARGET = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    num_embeddings=PADDED,
    hidden_size=H,
    intermediate_size=INNER,
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
    rope=RopeConfig(),
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(2,),
    sampling_defaults=SamplingDefaults(),
)

Tensors = dict[str, torch.Tensor]
Json = dict[str, Any]

DECODER: Json = {
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "max_position_embeddings": 128,
    "vocab_size": PADDED,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


def random(seed: int, **shapes: tuple[int, ...]) -> Tensors:
    """Names are written with __ for a dot."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name.replace("__", "."): torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }


def layer(prefix: str, *, width: int = H, input_norm: bool = True, bias: bool = False) -> Tensors:
    """A decoder layer whose attention reads `width`."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn__q_proj__weight": (q, width),
        "self_attn__k_proj__weight": (kv, width),
        "self_attn__v_proj__weight": (kv, width),
        "self_attn__o_proj__weight": (H, q),
        "mlp__gate_proj__weight": (INNER, H),
        "mlp__up_proj__weight": (INNER, H),
        "mlp__down_proj__weight": (H, INNER),
        "post_attention_layernorm__weight": (H,),
    }
    if input_norm:
        shapes["input_layernorm__weight"] = (H,)
    if bias:
        shapes |= {f"self_attn__{name}_proj__bias": (q if name == "q" else kv,) for name in "qkv"}
    return {f"{prefix}{name}": tensor for name, tensor in random(len(prefix), **shapes).items()}


def eagle(**changes: Any) -> tuple[Json, Tensors]:
    """SafeAILab/EAGLE, versions 1 and 2."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **DECODER, **changes}
    tensors = random(1, fc__weight=(H, 2 * H), fc__bias=(H,), embed_tokens__weight=(PADDED, H))
    return config, tensors | layer("layers.0.", input_norm=False)


def eagle3(first: str = "midlayer.", **changes: Any) -> tuple[Json, Tensors]:
    """LlamaForCausalLMEagle3; every second id up to 2 * DRAFT_VOCAB is in the draft vocabulary."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **DECODER,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5], "use_aux_hidden_state": True},
        **changes,
    }
    tensors = random(
        2, fc__weight=(H, 3 * H), norm__weight=(H,), lm_head__weight=(DRAFT_VOCAB, H), hidden_norm=(H,)
    )
    tensors[f"{first}hidden_norm.weight"] = tensors.pop("hidden_norm")
    tensors["d2t"] = torch.arange(DRAFT_VOCAB)  # id + offset = 2 * id
    tensors["t2d"] = torch.zeros(PADDED, dtype=torch.bool)
    tensors["t2d"][: 2 * DRAFT_VOCAB : 2] = True
    return config, tensors | layer(first, width=2 * H)


def speculators_eagle3(**changes: Any) -> tuple[Json, Tensors]:
    """vllm-project/speculators."""
    _, tensors = eagle3("layers.0.")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 6],
        "norm_before_residual": True,
        "transformer_layer_config": {"model_type": "llama", **DECODER},
        **changes,
    }
    return config, tensors | random(3, embed_tokens__weight=(PADDED, H))


def speculators_eagle(**changes: Any) -> tuple[Json, Tensors]:
    """Its EAGLE-1."""
    config = {
        "speculators_model_type": "eagle",
        "fusion_bias": False,
        "layernorms": False,
        "transformer_layer_config": {"model_type": "llama", **DECODER},
        **changes,
    }
    return config, random(4, fusion_fc__weight=(H, 2 * H)) | layer("transformer.", input_norm=False)


def medusa(num_heads: int = 3, num_blocks: int = 1) -> Tensors:
    """FasterDecoding's medusa_lm_head.pt."""
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(num_heads):
        for j in range(num_blocks):
            shapes |= {f"{k}.{j}.linear.weight": (H, H), f"{k}.{j}.linear.bias": (H,)}
        shapes[f"{k}.{num_blocks}.weight"] = (PADDED, H)
    return random(5, **shapes)


def medusa_vllm(num_heads: int = 2, num_blocks: int = 2, rows: int = PADDED) -> Tensors:
    """vLLM's form, without biases."""
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(num_heads):
        shapes |= {f"blocks.{k}.layers.{j}.weight": (H, H) for j in range(num_blocks)}
        shapes[f"lm_heads.{k}.weight"] = (rows, H)
    return random(6, **shapes)


def deepseek_mtp(**changes: Any) -> tuple[Json, Tensors]:
    """DeepSeek-V3's and GLM-4.5's names behind LAYERS layers, beside some of the target's own tensors."""
    config = {
        "architectures": ["Glm4MoeForCausalLM"],
        **DECODER,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        **changes,
    }
    prefix = f"model.layers.{LAYERS}."
    shapes = {"enorm.weight": (H,), "hnorm.weight": (H,), "eh_proj.weight": (H, 2 * H)}
    tensors = {
        f"{prefix}{name}": t for name, t in random(7, **shapes, **{"shared_head.norm.weight": (H,)}).items()
    }
    own = random(8, **{"model.embed_tokens.weight": (PADDED, H), "lm_head.weight": (PADDED, H)})
    tensors[f"{prefix}shared_head.head.weight"] = own["lm_head.weight"].clone()
    tensors[f"{prefix}embed_tokens.weight"] = own["model.embed_tokens.weight"].clone()
    return config, tensors | own | layer(prefix) | layer("model.layers.0.")


def qwen_mtp(**changes: Any) -> tuple[Json, Tensors]:
    """Qwen3-Next's names, with a layer of the plain kind."""
    names = {"fc.weight": (H, 2 * H), "pre_fc_norm_embedding.weight": (H,), "pre_fc_norm_hidden.weight": (H,)}
    tensors = random(
        9, **{f"mtp.{name}": shape for name, shape in names.items()}, **{"mtp.norm.weight": (H,)}
    )
    return {**DECODER, **changes}, tensors | layer("mtp.layers.0.") | random(10, model__norm__weight=(H,))


def mimo_mtp(**changes: Any) -> tuple[Json, Tensors]:
    """MiMo's names; its attention has biases."""
    prefix = "model.mtp_layers.0."
    names = {"input_proj.weight": (H, 2 * H), "token_layernorm.weight": (H,)}
    names |= {"hidden_layernorm.weight": (H,), "final_layernorm.weight": (H,)}
    tensors = random(11, **{f"{prefix}{name}": shape for name, shape in names.items()})
    return {"model_type": "mimo", **DECODER, **changes}, tensors | layer(prefix, bias=True)


def write(directory: Path, config: Json | None, tensors: Tensors, file: str = "model.safetensors") -> Path:
    """A checkpoint's directory; a file that is not named .safetensors is written by torch.save."""
    directory.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if file.endswith(".safetensors"):
        save_file(tensors, directory / file)
    else:
        torch.save(tensors, directory / file)
    return directory
