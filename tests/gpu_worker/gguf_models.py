"""Writes GGUF files from model directories, in the row order and keys of llama.cpp's converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

_ARCHS = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}


def permute(weight: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """The converter's reordering of llama's q and k rows: halves of a head become neighbouring pairs."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def write_gguf(
    model_dir: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    pre: str = "gpt-2",
    tokenizer_model: str = "gpt2",
    num_padding_tokens: int = 0,
    rope_divisors: list[float] | None = None,
    extra: dict[str, Any] | None = None,
    omit: str = "",
    reshape: dict[str, tuple[int, ...]] | None = None,
) -> Path:
    """The model of `model_dir` (written by make_tiny_llama) as a GGUF file.

    Matrices are quantised to `kind`, vectors stay F32. num_padding_tokens unused entries lengthen the token
    list. extra metadata overrides what is written by default; `omit` names a tensor to leave out; `reshape`
    gives wrong shapes to tensors, by their name in the file.
    """
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    arch = _ARCHS[config["architectures"][0]]
    arch_name = gguf.MODEL_ARCH_NAMES[arch]
    writer = gguf.GGUFWriter(path, arch_name)
    rope = config.get("rope_scaling") or {}
    values: dict[str, Any] = {
        f"{arch_name}.block_count": config["num_hidden_layers"],
        f"{arch_name}.context_length": config["max_position_embeddings"],
        f"{arch_name}.embedding_length": config["hidden_size"],
        f"{arch_name}.feed_forward_length": config["intermediate_size"],
        f"{arch_name}.attention.head_count": config["num_attention_heads"],
        f"{arch_name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch_name}.attention.key_length": config["head_dim"],
        f"{arch_name}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch_name}.rope.freq_base": config["rope_theta"],
        f"{arch_name}.rope.dimension_count": config["head_dim"],
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        values[f"{arch_name}.rope.scaling.type"] = rope["rope_type"]
        values[f"{arch_name}.rope.scaling.factor"] = float(rope["factor"])
        if "original_max_position_embeddings" in rope:
            key = f"{arch_name}.rope.scaling.original_context_length"
            values[key] = rope["original_max_position_embeddings"]
    values.update(extra or {})
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    if (model_dir / "tokenizer.json").exists():
        _add_tokenizer(writer, model_dir, tokenizer_model, pre, num_padding_tokens)

    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors: dict[str, npt.NDArray[Any]] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        tensors.update(load_file(file))
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        gguf_name = f"{names.get_name(stem)}.{suffix}"
        if gguf_name == omit:
            continue
        if arch == gguf.MODEL_ARCH.LLAMA and ".q_proj." in name:
            tensor = permute(tensor, config["num_attention_heads"])
        if arch == gguf.MODEL_ARCH.LLAMA and ".k_proj." in name:
            tensor = permute(tensor, config["num_key_value_heads"])
        tensor = np.ascontiguousarray(tensor.reshape((reshape or {}).get(gguf_name, tensor.shape)))
        if tensor.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name, tensor)
        else:
            writer.add_tensor(gguf_name, gguf.quantize(tensor, kind), raw_dtype=kind)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(
    writer: gguf.GGUFWriter, model_dir: Path, model: str, pre: str, num_padding_tokens: int
) -> None:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer_config = json.loads((model_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    tokens += [f"[PAD{len(tokens) + number}]" for number in range(num_padding_tokens)]
    kinds += [gguf.TokenType.UNUSED] * num_padding_tokens
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(vocab[tokenizer_config["bos_token"]])
    writer.add_eos_token_id(vocab[tokenizer_config["eos_token"]])
    writer.add_pad_token_id(vocab[tokenizer_config["pad_token"]])
    writer.add_chat_template(tokenizer_config["chat_template"])
