"""draftline-train evaluate: what a head is worth with the serving implementation, offline and served side by side."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gpu_worker.models.heads.build import build_head
from gpu_worker.models.heads.config import HeadKind
from gpu_worker.models.heads.medusa import build_medusa
from gpu_worker.training.commands.options import (
    DATA,
    Conversations,
    Target,
    Threads,
    serving_target,
)
from gpu_worker.training.conversations import Conversation, read_shard, shard_paths
from gpu_worker.training.dataset import is_held_out
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.offline import OfflineAcceptance, OfflineEvaluator
from gpu_worker.training.served import ServedAcceptance, ServedEvaluator
from gpu_worker.weights.head_checkpoint import load_head
from gpu_worker.weights.resolve import resolve_model
from shared_mem.enums import SpeculationMethod

_CONTEXT = 1024


def evaluate(
    head: Annotated[Path, typer.Argument(help="Directory of the head.")],
    model: Target = "",
    conversations: Conversations = DATA / "conversations",
    dtype: Annotated[str, typer.Option(help="Precision to serve in.")] = "auto",
    count: Annotated[int, typer.Option(min=1, help="Held-out greedy conversations, at most.")] = 40,
    tokens: Annotated[int, typer.Option(min=1, help="Draft tokens of a chain.")] = 4,
    nodes: Annotated[int, typer.Option(min=0, help="Nodes of a tree, measured too; 0: chains only.")] = 15,
    depth: Annotated[int, typer.Option(min=1, help="Levels of the tree.")] = 5,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Of a served answer, at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="Of the served answers.")] = 0.0,
    served: Annotated[bool, typer.Option(help="Also generate the answers anew with drafting on.")] = True,
    threads: Threads = 0,
) -> None:
    """Acceptance on conversations that were held out of training; also written to evaluation.json beside the head."""
    head = head.expanduser()
    chosen = held_out_greedy(conversations.expanduser(), count)
    offline, kind, context = _offline(head, model, dtype, chosen, tokens, threads)
    method = SpeculationMethod.from_label(kind.value)
    results: dict[str, OfflineAcceptance | ServedAcceptance] = {"offline chain": offline}
    if served:
        prompts = [c.token_ids[: c.answers[0][0]] for c in chosen]
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
                max_context_tokens=context,
                num_threads=threads,
            )
            results[f"served {name} of {amount}"] = evaluator.measure(
                prompts, temperature=temperature, max_tokens=answer_tokens
            )
    _print(results)
    facts = {
        "conversations": len(chosen),
        "dtype": dtype,
        "temperature": temperature,
        **{name: dataclasses.asdict(result) for name, result in results.items()},
    }
    (head / "evaluation.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def held_out_greedy(directory: Path, count: int) -> list[Conversation]:
    """The first `count` conversations with greedy answers that training never sees. Raises TrainingError for none."""
    chosen: list[Conversation] = []
    for path in shard_paths(directory):
        for conversation in read_shard(path):
            if len(chosen) == count:
                return chosen
            held = is_held_out(conversation.token_array)
            if conversation.greedy and conversation.answers and held:
                chosen.append(conversation)
    if not chosen:
        raise TrainingError(f"{directory}: no held-out greedy conversation in its shards")
    return chosen


def _offline(
    path: Path, model: str, dtype: str, chosen: list[Conversation], depth: int, threads: int
) -> tuple[OfflineAcceptance, HeadKind, int]:
    """The measurement, the head's kind, and tokens of a context to serve with."""
    target, attention = serving_target(resolve_model(model), dtype, threads)
    checkpoint = load_head(str(path), target.config)
    kind = checkpoint.config.kind
    build = build_medusa if kind is HeadKind.MEDUSA else build_head
    if kind is HeadKind.MEDUSA:
        depth = min(depth, checkpoint.config.num_medusa_heads)
    head = build(checkpoint.config, checkpoint.tensors, target)
    context = min(_CONTEXT, target.config.max_position_embeddings)
    return OfflineEvaluator(target, head, attention, depth).measure(chosen), kind, context


def _print(results: dict[str, OfflineAcceptance | ServedAcceptance]) -> None:
    positions = max(len(result.acceptance) for result in results.values())
    table = Table("", "length", *(f"{i + 1}" for i in range(positions)), "tokens/s")
    for name, result in results.items():
        shares = [f"{value:.3f}" for value in result.acceptance]
        speed = f"{result.tokens_per_second:.0f}" if isinstance(result, ServedAcceptance) else ""
        table.add_row(
            name, f"{result.acceptance_length:.2f}", *shares, *[""] * (positions - len(shares)), speed
        )
    Console().print(table)
