"""The tensors of a draft head under one set of names, whatever checkpoint they come from.

fuse.weight [h, 3h]                 EAGLE-3
combine.weight [h, 2h], combine.bias [h]         EAGLE, MTP
embedding_norm.weight, feature_norm.weight [h]   EAGLE-3, MTP
layers.{i}.input_layernorm.weight [h]            not in layer 0 of EAGLE-3 and of EAGLE's original form
layers.{i}.self_attn.{q,k,v,o}_proj.weight       q, k, v of layer 0 of EAGLE-3 read 2h
layers.{i}.post_attention_layernorm.weight [h]
layers.{i}.mlp.{gate,up,down}_proj.weight
norm.weight [h]                     where norms_output
lm_head.weight [draft_vocab, h]     where own_lm_head
draft_ids [draft_vocab] int64       target id of each draft id, where the draft vocabulary is reduced
medusa.{k}.blocks.{i}.weight [h, h], medusa.{k}.blocks.{i}.bias [h]      Medusa, head k, residual block i
medusa.{k}.lm_head.weight [draft_vocab, h]       Medusa, where own_lm_head
"""

from __future__ import annotations

from gpu_worker.models.heads.config import HeadConfig, HeadKind

DRAFT_IDS = "draft_ids"


def tensor_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a head of this configuration has, with its shape."""
    h, shapes = config.hidden_size, dict[str, tuple[int, ...]]()
    if config.draft_vocab_size < config.vocab_size:
        shapes[DRAFT_IDS] = (config.draft_vocab_size,)
    if config.kind is HeadKind.MEDUSA:
        for k in range(config.num_medusa_heads):
            for i in range(config.num_medusa_layers):
                shapes[f"medusa.{k}.blocks.{i}.weight"] = (h, h)
                shapes[f"medusa.{k}.blocks.{i}.bias"] = (h,)
            if config.own_lm_head:
                shapes[f"medusa.{k}.lm_head.weight"] = (config.draft_vocab_size, h)
        return shapes
    if config.feature_layers:
        shapes["fuse.weight"] = (h, config.feature_size)
    if config.combines:
        shapes["combine.weight"] = (h, 2 * h)
        if config.combine_bias:
            shapes["combine.bias"] = (h,)
    if config.norms_inputs:
        shapes["embedding_norm.weight"] = shapes["feature_norm.weight"] = (h,)
    for layer in range(config.num_layers):
        shapes.update(_layer_shapes(config, layer))
    if config.norms_output:
        shapes["norm.weight"] = (h,)
    if config.own_lm_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, h)
    return shapes


def _layer_shapes(config: HeadConfig, layer: int) -> dict[str, tuple[int, ...]]:
    prefix, h = f"layers.{layer}.", config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    first = layer == 0
    width = 2 * h if first and config.side_input else h
    shapes = {
        f"{prefix}self_attn.q_proj.weight": (q, width),
        f"{prefix}self_attn.k_proj.weight": (kv, width),
        f"{prefix}self_attn.v_proj.weight": (kv, width),
        f"{prefix}self_attn.o_proj.weight": (h, q),
        f"{prefix}post_attention_layernorm.weight": (h,),
        f"{prefix}mlp.gate_proj.weight": (config.intermediate_size, h),
        f"{prefix}mlp.up_proj.weight": (config.intermediate_size, h),
        f"{prefix}mlp.down_proj.weight": (h, config.intermediate_size),
    }
    if config.qkv_bias:
        sizes = {"q": q, "k": kv, "v": kv}
        shapes |= {f"{prefix}self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if not first or (config.norms_attention_input and not config.side_input):
        shapes[f"{prefix}input_layernorm.weight"] = (h,)
    return shapes
