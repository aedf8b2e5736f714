"""What a precision costs: perplexity of float32's own greedy answers under every way the model is served.

    python -m tests.exact.fidelity --prompts FILE.jsonl --limit 100

The answers are written by float32 (the embedded model, greedy); each row of the table scores the same tokens. A ratio
of 1.005 means half a percent more perplexity than float32 itself.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from gpu_worker.models.base import CausalLM
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from shared_mem.enums import SpeculationMethod
from tests.exact.real_model import Checker, Drafts, kernel_threads, make_engine, read_prompts
from tests.harness.whole_sequence import forward_whole


@torch.inference_mode()
def answer_nll(model: CausalLM, prompt: list[int], answer: list[int]) -> float:
    """Sum of -log p over the answer's tokens, the prompt given; one forward pass."""
    hidden, _ = forward_whole(model, [*prompt, *answer])
    logits = model.compute_logits(hidden[len(prompt) - 1 : -1])  # [len(answer), V]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"))


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    device, team = torch.device("cpu"), kernel_threads()
    prompts = read_prompts(options.prompts, options.limit)
    target = load_model(resolve_model(""), "float32", device)
    writer = Checker(target, prompts, options.max_tokens, None)
    engine = make_engine(target, Drafts(0, {}, None, 0))
    answers = [text.ids for text in writer.run(engine, SpeculationMethod.NGRAM, 16)]
    num_tokens = sum(map(len, answers))
    print(f"{len(prompts)} answers, {num_tokens} tokens\n")
    print("| served as | perplexity | against float32 |\n|---|---|---|")
    rows = [
        ("float32 (torch)", "float32", None),
        ("bfloat16 (torch)", "bfloat16", None),
        ("int8 (torch)", "int8", None),
    ]
    if team is not None:
        rows += [("bfloat16 (CPU kernels)", "bfloat16", team), ("int8 (CPU kernels)", "int8", team)]
    base = 0.0
    for name, dtype, threads in rows:
        model = load_model(resolve_model(""), dtype, device, threads)
        nll = sum(answer_nll(model, p, a) for p, a in zip(prompts, answers, strict=True))
        perplexity = math.exp(nll / num_tokens)
        base = base or perplexity
        print(f"| {name} | {perplexity:.4f} | {perplexity / base:.4f} |", flush=True)


if __name__ == "__main__":
    main()
