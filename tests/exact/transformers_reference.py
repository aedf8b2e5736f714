"""transformers as the oracle of greedy decoding: its own Llama on the weights that our loader reads."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_worker.weights.gguf_checkpoint import GGUFCheckpoint
from gpu_worker.weights.resolve import resolve_model


def load_reference(spec: str = "") -> LlamaForCausalLM:
    """A GGUF Llama (the embedded model by default) in float32."""
    checkpoint = GGUFCheckpoint(resolve_model(spec).path)
    config = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.num_embeddings,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope.theta,
            tie_word_embeddings=config.tie_word_embeddings,
            bos_token_id=None,
            eos_token_id=list(config.eos_token_ids),
            pad_token_id=config.eos_token_ids[0],
        )
    )
    weights = {
        name: checkpoint.read(name, tuple(tensor.shape)).float()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" or not config.tie_word_embeddings
    }
    model.load_state_dict(weights, strict=False)
    return model.eval()


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers' generate gives, up to and including the end of text."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
    )
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def next_logits(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """[V] logits of the token behind `tokens`."""
    return model(torch.tensor([tokens])).logits[0, -1]
