"""What all engines are given, made once in our own environment: prompts as text and ids, and the weights.

Run as a process of its own (it needs torch and the worker's GGUF reader): a JSON request on stdin, a JSON
answer on stdout. For engines that read no GGUF it writes the dequantised weights, once, as a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from gpu_worker.errors import ModelError
from gpu_worker.models.config import ARCHITECTURES, ModelConfig
from gpu_worker.weights.gguf_checkpoint import GGUFCheckpoint
from gpu_worker.weights.resolve import ModelSource, resolve_model
from gpu_worker.weights.tokenizer_export import export_tokenizer

_FORMAT = 1  # part of the checkpoint's directory name: raise it when the same GGUF gives other files
_QUESTIONS = ("What is the text above about?", "Which part of it is the hardest?")  # cold and warm prefix
_BYTES_PER_VALUE = 2  # of the 16-bit keys and values that engines keep


def main() -> None:
    """Request: model, cache (directory), write_checkpoint, prompts [{id, text, chat}], num_long, long_tokens.

    Answer: gguf, checkpoint ("" unless asked for), eos_token_ids, kv_bytes_per_token, prompts [{id, text,
    token_ids}] and long prompts, each with `again`, the same text before another question.
    """
    request = json.load(sys.stdin)
    source = resolve_model(request["model"])
    if source.kind != "gguf":
        raise ModelError(
            f"{source.path}: engines are compared on one GGUF file, this is a checkpoint directory"
        )
    checkpoint = GGUFCheckpoint(source.path)
    config = checkpoint.config
    tokenizer = AutoTokenizer.from_pretrained(export_tokenizer(source))
    directory = ""
    if request["write_checkpoint"]:
        directory = str(_checkpoint_directory(source, checkpoint, Path(request["cache"]).expanduser()))
    rows = request["prompts"]
    long_texts = _long_texts(
        tokenizer, [row["text"] for row in rows], request["num_long"], request["long_tokens"]
    )
    answer = {
        "gguf": str(source.path),
        "checkpoint": directory,
        "eos_token_ids": list(config.eos_token_ids),
        "kv_bytes_per_token": 2
        * config.num_layers
        * config.num_kv_heads
        * config.head_dim
        * _BYTES_PER_VALUE,
        "prompts": [_rendered(tokenizer, row) for row in rows],
        "long": [_rendered_pair(tokenizer, f"long-{i}", text) for i, text in enumerate(long_texts)],
    }
    json.dump(answer, sys.stdout)


def _rendered(tokenizer: Any, row: dict[str, Any]) -> dict[str, Any]:
    text = row["text"]
    if row["chat"]:
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return {"id": row["id"], "text": text, "token_ids": tokenizer(text, add_special_tokens=False).input_ids}


def _rendered_pair(tokenizer: Any, name: str, text: str) -> dict[str, Any]:
    first, second = (
        _rendered(tokenizer, {"id": f"{name}{suffix}", "text": f"{text}\n\n{question}", "chat": True})
        for suffix, question in zip(("", "-again"), _QUESTIONS, strict=True)
    )
    return {**first, "again": second}


def _long_texts(tokenizer: Any, texts: list[str], count: int, num_tokens: int) -> list[str]:
    """`count` texts of about `num_tokens` tokens: the given ones in a row, read as a ring, from other places on."""
    longs = []
    for number in range(count):
        start = number * len(texts) // max(count, 1)
        ids: list[int] = []
        while len(ids) < num_tokens:
            for text in texts[start:] + texts[:start]:
                ids += tokenizer(text + "\n\n", add_special_tokens=False).input_ids
                if len(ids) >= num_tokens:
                    break
        longs.append(f"{number}. {tokenizer.decode(ids[:num_tokens])}")
    return longs


def _checkpoint_directory(source: ModelSource, checkpoint: GGUFCheckpoint, cache: Path) -> Path:
    """The directory with config, tokenizer and weights, written beside and renamed: one that exists is whole."""
    directory = cache / "checkpoints" / f"{source.path.stem}-{source.revision}-{_FORMAT}"
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        for file in export_tokenizer(source).iterdir():
            shutil.copy(file, unfinished)
        hub_config = _hub_config(checkpoint.config, source.path)
        (unfinished / "config.json").write_text(json.dumps(hub_config, indent=1) + "\n", encoding="utf-8")
        weights = {
            name: checkpoint.read(name, shape).to(torch.bfloat16).contiguous()
            for name, shape in _tensor_shapes(checkpoint.config)
        }
        save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
        os.rename(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def _hub_config(config: ModelConfig, path: Path) -> dict[str, Any]:
    if config.rope.kind != "default" or config.rope.frequency_divisors:
        raise ModelError(
            f"{path}: rotary scaling ({config.rope.kind}) cannot be written as a checkpoint here"
        )
    return {
        "architectures": [config.architecture],
        "model_type": ARCHITECTURES[config.architecture].model_type,
        "vocab_size": config.num_embeddings,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.qkv_bias,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": "bfloat16",
    }


def _tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the hub's checkpoint and its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.num_embeddings, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.num_embeddings, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q", query), ("k", key), ("v", key)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, hidden)
            if config.qkv_bias:
                yield f"{prefix}.self_attn.{name}_proj.bias", (rows,)
            if config.qk_norm and name != "v":
                yield f"{prefix}.self_attn.{name}_norm.weight", (config.head_dim,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, query)
        if config.output_bias:
            yield f"{prefix}.self_attn.o_proj.bias", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)


if __name__ == "__main__":
    try:
        main()
    except ModelError as error:
        sys.exit(f"error: {error}")
