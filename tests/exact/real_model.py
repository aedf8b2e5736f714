"""Losslessness on the embedded model and real prompts: ids with speculation against ids without.

    python -m tests.exact.real_model --prompts FILE.jsonl --limit 40 --dtype float32 --dtype bfloat16 --dtype int8
    python -m tests.exact.real_model --prompts FILE.jsonl --seeded 200
    python -m tests.exact.real_model --prompts FILE.jsonl --dtype int8 --head eagle3=DIR --head mtp=DIR --tree 15

float32 greedy ids are compared with transformers' own greedy decoding; lower precisions with their own ids without
speculation, one request at a time. Rows of the file are {"turns": [...]} (the first turn is asked as a chat) or
{"prompt": ...}. A difference is excused only by a near tie of the best two (noised) logits where it begins; all are
listed. On the CPU kernels log-probabilities are compared too, and nothing is excused. Exit code 1 if any difference is
left.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from gpu_worker.drafting.tree_growth import CHAINS, TreeShape
from gpu_worker.kernels import native
from gpu_worker.kernels.native import ThreadTeam
from gpu_worker.models.base import CausalLM
from gpu_worker.models.heads.base import DraftHead
from gpu_worker.models.heads.build import build_head
from gpu_worker.models.heads.medusa import MedusaHeads, build_medusa
from gpu_worker.models.native import NativeCausalLM
from gpu_worker.sampling.random import gumbel_noise
from gpu_worker.weights.head_checkpoint import load_head
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from gpu_worker.weights.tokenizer_export import export_tokenizer
from scheduler_svc.messages import Sampling, Stopping
from shared_mem.enums import SpeculationMethod
from tests.exact.transformers_reference import greedy, load_reference, next_logits
from tests.harness.engine import GREEDY, InProcessEngine
from tests.harness.whole_sequence import forward_whole


@dataclass(frozen=True)
class Drafts:
    """What is loaded beside the target, besides n-gram lookup."""

    num_layers: int  # of the draft model, the target's first; 0: none
    heads: dict[SpeculationMethod, DraftHead]
    medusa: MedusaHeads | None
    tree_budget: int  # nodes of the heads' trees; 0: chains of four
    min_probability: float  # of a path that is drafted and verified; 0: all are

    @property
    def shape(self) -> TreeShape:
        """Of what models and heads draft."""
        shape = TreeShape(max_depth=5) if self.tree_budget else CHAINS
        least = math.log(self.min_probability) if self.min_probability > 0 else -math.inf
        return replace(shape, least_value=least)

    @property
    def methods(self) -> list[SpeculationMethod]:
        """Speculation off first, then everything loaded."""
        methods = [SpeculationMethod.DISABLED, SpeculationMethod.NGRAM]
        methods += [SpeculationMethod.DRAFT_MODEL] * (self.num_layers > 0)
        methods += self.heads
        methods += [SpeculationMethod.MEDUSA] * (self.medusa is not None)
        return [*methods, SpeculationMethod.PORTFOLIO] if self.heads or self.medusa else methods


@dataclass(frozen=True)
class Text:
    """What one prompt gave: ids and, on the CPU kernels, the log-probability of each."""

    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Difference:
    """Where a variant leaves its reference, and how close the two candidates were."""

    variant: str
    prompt: int
    position: int  # generated tokens before it
    gap: float

    def __str__(self) -> str:
        return f"  {self.variant}: prompt {self.prompt}, token {self.position}, gap {self.gap:.2e}"


def read_prompts(path: Path, limit: int) -> list[list[int]]:
    """Token ids of the first `limit` prompts that fit 1,500 tokens, spread over the file."""
    directory = export_tokenizer(resolve_model(""))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    template = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = rows[:: max(1, len(rows) // limit)]
    prompts = []
    for row in rows:
        text = (
            row.get("prompt")
            or render_jinja_template(
                conversations=[[{"role": "user", "content": row["turns"][0]}]],
                chat_template=template,
                add_generation_prompt=True,
            )[0][0]
        )
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) <= 1500:
            prompts.append(ids)
    return prompts[:limit]


def load_drafts(options: argparse.Namespace, target: CausalLM) -> Drafts:
    """The draft model and heads that the command line names."""
    heads: dict[SpeculationMethod, DraftHead] = {}
    medusa: MedusaHeads | None = None
    for text in options.head or ():
        label, _, path = text.partition("=")
        checkpoint = load_head(path, target.config)
        if label == SpeculationMethod.MEDUSA.label:
            medusa = build_medusa(checkpoint.config, checkpoint.tensors, target)
        else:
            method = SpeculationMethod.from_label(label)
            heads[method] = build_head(checkpoint.config, checkpoint.tensors, target)
    return Drafts(options.draft_layers, heads, medusa, options.tree, options.min_draft_probability)


def make_engine(target: CausalLM, drafts: Drafts, **settings: int) -> InProcessEngine:
    """Every drafter of `drafts` loaded beside the target."""
    defaults = {"page_size": 16, "num_pages": 2200, "max_batched_tokens": 512, "max_context_tokens": 2048}
    return InProcessEngine(
        target,
        ngram=True,
        draft=target.truncated(drafts.num_layers) if drafts.num_layers else None,
        heads=drafts.heads,
        medusa=drafts.medusa,
        portfolio=SpeculationMethod.PORTFOLIO in drafts.methods,
        tree=drafts.shape,
        num_draft_tokens=drafts.tree_budget or 4,
        eos_token_ids=target.config.eos_token_ids,
        **(defaults | settings),  # type: ignore[arg-type]
    )


def kernel_threads() -> ThreadTeam | None:
    """Two threads of the CPU kernels, if they are installed."""
    kernels = native.load()
    return None if kernels is None else ThreadTeam(kernels, 2)


def own_next_logits(target: CausalLM, tokens: list[int]) -> torch.Tensor:
    """[V] the served model's own logits behind `tokens`."""
    hidden, _ = forward_whole(target, tokens)
    return target.compute_logits(hidden[-1:])[0]


class Checker:
    """Runs variants against reference ids and collects the differences."""

    def __init__(
        self, target: CausalLM, prompts: list[list[int]], max_tokens: int, reference_model: object
    ) -> None:
        self.target = target
        self.prompts = prompts
        self.max_tokens = max_tokens
        self.reference_model = reference_model
        self.differences: list[Difference] = []
        self.num_compared = 0

    def run(
        self,
        engine: InProcessEngine,
        method: SpeculationMethod,
        together: int,
        samplings: Sequence[Sampling] | None = None,
    ) -> list[Text]:
        """What all prompts give, `together` at a time."""
        samplings = samplings or [GREEDY] * len(self.prompts)
        num_logprobs = 0 if isinstance(self.target, NativeCausalLM) else None
        texts: list[Text] = []
        for start in range(0, len(self.prompts), together):
            group = range(start, min(start + together, len(self.prompts)))
            requests = [
                engine.submit(
                    self.prompts[i],
                    stopping=Stopping(self.max_tokens),
                    method=method,
                    sampling=samplings[i],
                    num_logprobs=num_logprobs,
                )
                for i in group
            ]
            outputs = engine.run()
            for request in requests:
                output = outputs[request, 0]
                texts.append(Text(output.token_ids, [logprobs.logprob for logprobs in output.logprobs]))
        return texts

    def compare(
        self,
        variant: str,
        texts: list[Text],
        reference: list[Text],
        samplings: Sequence[Sampling] | None = None,
    ) -> None:
        """Notes every prompt whose ids (or log-probabilities) differ from the reference's."""
        for i, (text, expected) in enumerate(zip(texts, reference, strict=True)):
            self.num_compared += 1
            if text != expected:
                pairs = zip(_tokens(text), _tokens(expected), strict=False)
                shorter = min(len(text.ids), len(expected.ids))
                position = next((k for k, (a, b) in enumerate(pairs) if a != b), shorter)
                sampling = samplings[i] if samplings else GREEDY
                gap = self._gap(i, expected.ids[:position], sampling)
                self.differences.append(Difference(variant, i, position, gap))

    def _gap(self, prompt: int, generated: list[int], sampling: Sampling) -> float:
        tokens = [*self.prompts[prompt], *generated]
        if self.target.precision == "float32":
            logits = next_logits(self.reference_model, tokens)  # type: ignore[arg-type]
        else:  # the tie is in the numbers of the model that decoded
            logits = own_next_logits(self.target, tokens)
        if sampling.temperature > 0:
            noise = gumbel_noise(torch.tensor([sampling.seed]), torch.tensor([len(tokens)]), len(logits))[0]
            logits = torch.log_softmax(logits / sampling.temperature, 0) + noise
        best = torch.topk(logits, 2).values
        return float(best[0] - best[1])


def _tokens(text: Text) -> list[object]:
    return list(zip(text.ids, text.logprobs, strict=True)) if text.logprobs else list(text.ids)


def check_greedy(checker: Checker, dtype: str, drafts: Drafts) -> None:
    """Every method alone and 16 at a time, with preemption forced, and with a warm prefix cache."""
    started = time.perf_counter()
    if dtype == "float32":
        reference = [
            Text(greedy(checker.reference_model, prompt, checker.max_tokens), [])  # type: ignore[arg-type]
            for prompt in checker.prompts
        ]
        print(f"  transformers' greedy ids after {time.perf_counter() - started:.0f} s", flush=True)
    else:
        engine = make_engine(checker.target, drafts)
        reference = checker.run(engine, SpeculationMethod.DISABLED, 1)
    for method in drafts.methods:
        for together in (1, 16):
            engine = make_engine(checker.target, drafts)
            checker.compare(f"{method.label} x{together}", checker.run(engine, method, together), reference)
            print(f"  {method.label} x{together} after {time.perf_counter() - started:.0f} s", flush=True)
        checker.compare(f"{method.label} x16, warm prefix", checker.run(engine, method, 16), reference)
        longest = max(map(len, checker.prompts)) + checker.max_tokens
        small = make_engine(checker.target, drafts, num_pages=-(-longest // 16) + 30)
        checker.compare(f"{method.label} x16, small pool", checker.run(small, method, 16), reference)
        print(
            f"  {method.label}: warm and small pool ({small.scheduler.counters.num_preemptions} preemptions) "
            f"after {time.perf_counter() - started:.0f} s",
            flush=True,
        )


def check_seeded(checker: Checker, drafts: Drafts) -> None:
    """Seeded sampling at temperature 1: every method, alone and 16 at a time, against speculation off alone."""
    samplings = [Sampling(1.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 1000 + i) for i in range(len(checker.prompts))]
    started = time.perf_counter()
    reference = None
    for method in drafts.methods:
        for together in (1, 16):
            engine = make_engine(checker.target, drafts)
            texts = checker.run(engine, method, together, samplings)
            reference = reference or texts
            checker.compare(f"seeded {method.label} x{together}", texts, reference, samplings)
            print(
                f"  seeded {method.label} x{together} after {time.perf_counter() - started:.0f} s", flush=True
            )


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--seeded", type=int, default=0, help="this many requests at temperature 1 instead")
    parser.add_argument("--draft-layers", type=int, default=6, help="of the draft model; 0: none")
    parser.add_argument(
        "--head", action="append", metavar="METHOD=PATH", help="a head to draft with; repeatable"
    )
    parser.add_argument("--min-draft-probability", type=float, default=0.0, help="as served: 0.2")
    parser.add_argument("--tree", type=int, default=0, help="nodes of the heads' trees; 0: chains of four")
    parser.add_argument(
        "--torch", action="store_true", help="int8 and bfloat16 in torch, not on the CPU kernels"
    )
    options = parser.parse_args()
    dtypes = options.dtype or ["float32"]
    reference_model = load_reference() if "float32" in dtypes else None
    failed = False
    for dtype in dtypes:
        target = load_model(
            resolve_model(""), dtype, torch.device("cpu"), None if options.torch else kernel_threads()
        )
        prompts = read_prompts(options.prompts, options.limit)
        if options.seeded:
            prompts = [prompts[i % len(prompts)] for i in range(options.seeded)]
        checker = Checker(target, prompts, options.max_tokens, reference_model)
        print(f"{dtype}: {len(prompts)} prompts, up to {options.max_tokens} tokens", flush=True)
        if options.seeded:
            check_seeded(checker, load_drafts(options, target))
        else:
            check_greedy(checker, dtype, load_drafts(options, target))
        # on the kernels there is nothing to excuse: verify = decode, bit for bit
        allowed_gap = 1e-3 if dtype == "float32" else 0.0 if isinstance(target, NativeCausalLM) else 0.1
        unexcused = [d for d in checker.differences if d.gap > allowed_gap]
        print(
            f"{dtype}: {checker.num_compared} texts compared, {len(checker.differences)} differ, "
            f"{len(unexcused)} of them at a gap above {allowed_gap}"
        )
        for difference in checker.differences:
            print(difference)
        failed = failed or bool(unexcused)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
