"""draftline-train evaluate: what a head is worth with the serving implementation, offline and served side by side."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table

from gpu_worker.config import LayerIdsName
from gpu_worker.models.heads.base import DraftHead
from gpu_worker.models.heads.build import build_head
from gpu_worker.models.heads.config import SECTION, HeadKind
from gpu_worker.models.heads.medusa import MedusaHeads, build_medusa
from gpu_worker.models.native import NativeCausalLM
from gpu_worker.training.batch_generator import Generation
from gpu_worker.training.commands.options import (
    DATA,
    Conversations,
    LayerIds,
    Target,
    Threads,
    serving_target,
)
from gpu_worker.training.conversations import Conversation, read_shard, shard_paths
from gpu_worker.training.dataset import is_held_out
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.offline import OfflineAcceptance, OfflineEvaluator
from gpu_worker.training.offline_model import DraftModelAsHead
from gpu_worker.training.seen_text import SeenText
from gpu_worker.training.served import ServedAcceptance, ServedEvaluator, summarize
from gpu_worker.weights.draft_checkpoint import load_draft_model
from gpu_worker.weights.head_checkpoint import load_head
from gpu_worker.weights.resolve import resolve_model
from gpu_worker.weights.safetensors_checkpoint import read_json
from gpu_worker.weights.tokenizer_export import export_tokenizer
from shared_mem.enums import SpeculationMethod

_CONTEXT = 1024


def evaluate(
    head: Annotated[Path, typer.Argument(help="Directory of the head, or of a draft model.")],
    model: Target = "",
    conversations: Conversations = DATA / "conversations",
    dtype: Annotated[str, typer.Option(help="Precision to serve in.")] = "auto",
    count: Annotated[int, typer.Option(min=1, help="Held-out greedy conversations, at most.")] = 40,
    tokens: Annotated[int, typer.Option(min=1, help="Draft tokens of a chain.")] = 4,
    nodes: Annotated[int, typer.Option(min=0, help="Nodes of a tree, measured too; 0: chains only.")] = 15,
    depth: Annotated[int, typer.Option(min=1, help="Levels of the tree.")] = 5,
    answer_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Of a served answer, at most; long texts repeat themselves and flatter speculation.",
        ),
    ] = 448,
    temperature: Annotated[float, typer.Option(min=0, help="Of the served answers.")] = 0.0,
    served: Annotated[bool, typer.Option(help="Also generate the answers anew with drafting on.")] = True,
    eagle3_layer_ids: LayerIds = "inputs",
    threads: Threads = 0,
) -> None:
    """Acceptance on conversations that were held out of training; also written to evaluation.json beside the head.

    Greedy answers as served are measured offline too. Of that row and the served chain the lengths compare: both walk
    through the same texts. Acceptance by position does not: offline it counts from every token of an answer, served
    from every step. Prompts that leave no room for an answer are not served, so rows may differ in texts.
    """
    head = head.expanduser()
    load = partial(_load, head, model, dtype, tokens, eagle3_layer_ids, threads)
    loaded = load()
    chosen, num_repeating = held_out_greedy(conversations.expanduser(), count)
    if num_repeating:
        typer.echo(f"{num_repeating} held-out conversations say what training learns: not measured")
    offline, method, context = loaded.evaluator.measure(chosen), loaded.method, loaded.context
    del loaded
    results = {"offline chain": _Row(len(chosen), offline)}
    texts: list[Conversation] = []  # as served, greedily
    if served:
        prompts = [c.token_ids[: c.num_prompt_tokens] for c in chosen]
        for name, amount, levels in (("chain", tokens, None), ("tree", nodes, depth)):
            if not amount:
                continue
            evaluator = ServedEvaluator(
                model,
                dtype,
                method,
                str(head),
                num_draft_tokens=amount,
                tree_depth=levels,
                layer_ids_name=eagle3_layer_ids,
                max_context_tokens=context,
                num_threads=threads,
            )
            generations, seconds = evaluator.generate(
                prompts, temperature=temperature, max_tokens=answer_tokens
            )
            results[f"served {name} of {amount}"] = _Row(len(generations), summarize(generations, seconds))
            if not texts and not temperature:
                texts = [_as_conversation(generation) for generation in generations]
            del evaluator
    if texts:
        again = load().evaluator.measure(texts)
        results["offline chain, texts as served"] = _Row(len(texts), again)
    _print(results)
    facts = {
        "conversations": len(chosen),
        "repeating": num_repeating,
        "dtype": dtype,
        "temperature": temperature,
        **{name: {"texts": row.num_texts, **dataclasses.asdict(row.result)} for name, row in results.items()},
    }
    (head / "evaluation.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _as_conversation(generation: Generation) -> Conversation:
    prompt = generation.request.token_ids
    ids = prompt + generation.token_ids
    return Conversation(ids, ((len(prompt), len(ids)),), greedy=True)


def held_out_greedy(directory: Path, count: int) -> tuple[list[Conversation], int]:
    """The first `count` conversations with greedy answers of which training says nothing, and how many others it does.

    Reads all shards once, since any may repeat what is held out: seconds for 10,000 conversations, and 8 bytes of
    memory for each of their answer tokens. Raises TrainingError if there are none.
    """
    held_out: list[Conversation] = []

    def training() -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        for path in shard_paths(directory):
            for conversation in read_shard(path):
                if not conversation.answers:
                    continue
                if not is_held_out(conversation.token_array):
                    yield conversation.token_array, conversation.answer_mask
                elif conversation.greedy:
                    held_out.append(conversation)

    seen = SeenText(training())
    new = [one for one in held_out if not seen.repeats(one.token_array, one.answer_mask)]
    if not new:
        raise TrainingError(
            f"{directory}: no held-out greedy conversation in its shards"
            + (f" but {len(held_out)} that say what training learns" if held_out else "")
        )
    return new[:count], len(held_out) - len(new)


@dataclass(frozen=True)
class _Row:
    """What one way of measuring found."""

    num_texts: int
    result: OfflineAcceptance | ServedAcceptance


@dataclass(frozen=True)
class _Loaded:
    evaluator: OfflineEvaluator
    method: SpeculationMethod
    context: int  # tokens, to serve with


def _load(
    path: Path, model: str, dtype: str, depth: int, layer_ids_name: LayerIdsName, threads: int
) -> _Loaded:
    """The target with the head or draft model at `path` beside it."""
    source = resolve_model(model)
    target, attention = serving_target(source, dtype, threads)
    context = min(_CONTEXT, target.config.max_position_embeddings)
    head: DraftHead | MedusaHeads
    if _is_draft_model(path):
        team = target.team if isinstance(target, NativeCausalLM) else None
        draft = load_draft_model(str(path), target, export_tokenizer(source), dtype, target.device, team)
        head, method = DraftModelAsHead(draft, target.config.vocab_size), SpeculationMethod.DRAFT_MODEL
    else:
        checkpoint = load_head(str(path), target.config, layer_ids_name)
        config = checkpoint.config
        method = SpeculationMethod.from_label(config.kind.value)
        if config.kind is HeadKind.MEDUSA:
            depth = min(depth, config.num_medusa_heads)
            head = build_medusa(config, checkpoint.tensors, target)
        else:
            head = build_head(config, checkpoint.tensors, target)
    return _Loaded(OfflineEvaluator(target, head, attention, depth), method, context)


def _is_draft_model(path: Path) -> bool:
    """Whether the directory holds a whole causal LM, by its config.json."""
    config = path / "config.json"
    return config.is_file() and "architectures" in (fields := read_json(config)) and SECTION not in fields


def _print(results: dict[str, _Row]) -> None:
    positions = max(len(row.result.acceptance) for row in results.values())
    table = Table("", "texts", "length", *(f"{i + 1}" for i in range(positions)), "tokens/s")
    for name, row in results.items():
        result = row.result
        shares = [f"{value:.3f}" for value in result.acceptance] + [""] * positions
        speed = f"{result.tokens_per_second:.0f}" if isinstance(result, ServedAcceptance) else ""
        length = f"{result.acceptance_length:.2f}"
        table.add_row(name, str(row.num_texts), length, *shares[:positions], speed)
    Console().print(table)
