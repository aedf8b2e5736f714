"""Small models and tokenizers that tests build on the spot: real files in the hub's layout, random weights.

The weights are random but not arbitrary: layer outputs outweigh the embedding in the residual stream, so
greedy text does not repeat one token, and logits have a standard deviation of about 3, so that the best two
rarely come close.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2

CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. The dog does not mind; the fox is quick.",
    "A language model predicts the next token of a text from all the tokens that came before it.",
    "for index in range(10):\n    print(index, 'is the value of the index')\n",
    "Speculative decoding drafts several tokens and verifies them together in one pass of the target.",
)

_LOGIT_STD = 3.0

EMBEDDING_STD = 0.05  # small beside the layers' outputs (about 1): a token must not predict itself


def make_tokenizer(directory: str | Path, vocab_size: int = 300, *, permuted: bool = False) -> Path:
    """Writes a byte-level BPE tokenizer (tokenizer.json, tokenizer_config.json with a ChatML template).

    Every byte is a token, so any text round-trips. Ids 0, 1, 2 are the SPECIAL_TOKENS. `permuted` exchanges
    the ids of two ordinary tokens: same size, same text, another token map. vocab_size is at least 259.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size {vocab_size}: the text gives {tokenizer.get_vocab_size()} tokens")
    content = json.loads(tokenizer.to_str())
    if permuted:
        vocab = content["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (directory / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2), encoding="utf-8")
    return directory


def make_tiny_llama(
    directory: str | Path,
    *,
    vocab_size: int = 320,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    seed: int = 0,
    max_position_embeddings: int = 512,
    architecture: str = "LlamaForCausalLM",
    rope: dict[str, Any] | None = None,
    rope_theta: float = 10000.0,
    rope_layout: str = "v4",
    tie: bool = True,
    ship_tied_head: bool = False,
    sharded: bool = False,
    write_index: bool = True,
    eos_token_id: int | list[int] | None = IM_END_ID,
    generation: dict[str, Any] | None = None,
    tokenizer_vocab_size: int | None = 300,
    permuted_tokenizer: bool = False,
    dtype: str = "float32",
) -> Path:
    """Writes a model directory: config.json, generation_config.json, safetensors, by default a tokenizer.

    architecture is LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM (with q/k/v biases) or
    Qwen3ForCausalLM (with q/k norms). `rope` is the scaling dict, written as `rope_scaling` ("v4") or into
    `rope_parameters` ("v5"). vocab_size counts the rows of embedding and head; rows past tokenizer_vocab_size
    are padding with weights as large as the others', so that code that may sample them does. Same arguments,
    same bytes.
    """
    import torch
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    head_dim = head_dim or hidden_size // num_heads
    intermediate_size = intermediate_size or 2 * hidden_size
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    def near_one(size: int) -> torch.Tensor:
        return 1.0 + normal(size, std=0.1)

    head_std = EMBEDDING_STD if tie else 0.2
    tensors: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": normal(vocab_size, hidden_size, std=EMBEDDING_STD),
        "model.norm.weight": near_one(hidden_size) * (_LOGIT_STD / (head_std * hidden_size**0.5)),
    }
    sizes = {
        "self_attn.q_proj": (num_heads * head_dim, hidden_size),
        "self_attn.k_proj": (num_kv_heads * head_dim, hidden_size),
        "self_attn.v_proj": (num_kv_heads * head_dim, hidden_size),
        "self_attn.o_proj": (hidden_size, num_heads * head_dim),
        "mlp.gate_proj": (intermediate_size, hidden_size),
        "mlp.up_proj": (intermediate_size, hidden_size),
        "mlp.down_proj": (hidden_size, intermediate_size),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in sizes.items():
            tensors[f"{prefix}{name}.weight"] = normal(rows, columns, std=1.5 / columns**0.5)
            if architecture == "Qwen2ForCausalLM" and name.endswith(("q_proj", "k_proj", "v_proj")):
                tensors[f"{prefix}{name}.bias"] = normal(rows, std=0.3)
        tensors[f"{prefix}input_layernorm.weight"] = near_one(hidden_size)
        tensors[f"{prefix}post_attention_layernorm.weight"] = near_one(hidden_size)
        if architecture == "Qwen3ForCausalLM":
            tensors[f"{prefix}self_attn.q_norm.weight"] = near_one(head_dim)
            tensors[f"{prefix}self_attn.k_norm.weight"] = near_one(head_dim)
    if not tie:
        tensors["lm_head.weight"] = normal(vocab_size, hidden_size, std=head_std)
    elif ship_tied_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}

    if not sharded:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        names = sorted(tensors)
        shards = [names[0::2], names[1::2]]
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            part = {name: tensors[name] for name in shard}
            save_file(part, directory / file_name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file_name))
        if write_index:
            index = {"metadata": {}, "weight_map": weight_map}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": IM_START_ID,
        "eos_token_id": eos_token_id,
        "pad_token_id": END_OF_TEXT_ID,
        "torch_dtype": dtype,
    }
    if architecture == "MistralForCausalLM":
        config["sliding_window"] = None
    if rope_layout == "v5":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": rope_theta, **(rope or {})}
    else:
        config["rope_theta"] = rope_theta
        config["rope_scaling"] = rope
    generation_config = {"bos_token_id": IM_START_ID, "eos_token_id": eos_token_id, **(generation or {})}
    for name, content in (("config.json", config), ("generation_config.json", generation_config)):
        (directory / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    if tokenizer_vocab_size is not None:
        make_tokenizer(directory, tokenizer_vocab_size, permuted=permuted_tokenizer)
    return directory
