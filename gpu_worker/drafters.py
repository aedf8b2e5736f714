"""Loads what the drafting methods need and builds their drafters: a draft model, heads, or nothing at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from gpu_worker.attention.cpu import CPUAttention
from gpu_worker.config import WorkerConfig
from gpu_worker.draft_tree import MAX_NODES
from gpu_worker.drafting.base import Drafter
from gpu_worker.drafting.draft_model import DraftModelDrafter
from gpu_worker.drafting.hidden_state import HiddenStateDrafter
from gpu_worker.drafting.medusa import MedusaDrafter
from gpu_worker.drafting.mtp_one import OneTokenDrafter
from gpu_worker.drafting.ngram import NgramDrafter
from gpu_worker.drafting.portfolio import PortfolioDrafter
from gpu_worker.drafting.suffix_store import SuffixStore
from gpu_worker.drafting.tree_growth import CHAINS, TreeShape
from gpu_worker.drafting.tree_shape import assumed_hit_rates, build_product_tree
from gpu_worker.errors import ModelError
from gpu_worker.kernels.native import ThreadTeam
from gpu_worker.models.base import CausalLM
from gpu_worker.models.heads.base import DraftHead, new_head_pool
from gpu_worker.models.heads.build import build_head
from gpu_worker.models.heads.medusa import MedusaHeads, build_medusa
from gpu_worker.request_state import RequestTable
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.weights.draft_checkpoint import DraftModel, load_draft_model
from gpu_worker.weights.head_checkpoint import load_head
from shared_mem.control import DrafterFacts
from shared_mem.enums import SpeculationMethod

HEAD_METHODS = (
    SpeculationMethod.EAGLE,
    SpeculationMethod.EAGLE3,
    SpeculationMethod.MTP,
    SpeculationMethod.MEDUSA,
)

_SHIPPED = Path(__file__).parent / "shipped_heads"  # by method label, for the embedded model


@dataclass(frozen=True)
class DraftWeights:
    """The models behind the drafting methods that have any."""

    draft_model: DraftModel | None = None
    heads: dict[SpeculationMethod, DraftHead] = field(default_factory=dict)
    medusa: MedusaHeads | None = None
    paths: dict[SpeculationMethod, str] = field(default_factory=dict)  # where each came from

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes that a KV page takes in all of their pools together."""
        pools: list[CausalLM | DraftHead] = [*self.heads.values()]
        if self.draft_model is not None:
            pools.append(self.draft_model.model)
        return sum(pool.bytes_per_page(page_size) for pool in pools)


def load_draft_weights(
    config: WorkerConfig,
    target: CausalLM,
    tokenizer_path: Path,
    dtype: str,
    device: torch.device,
    team: ThreadTeam | None,
) -> DraftWeights:
    """Everything that the methods of `config.speculation` draft with. Raises ModelError naming what does not fit."""
    heads: dict[SpeculationMethod, DraftHead] = {}
    paths: dict[SpeculationMethod, str] = {}
    medusa: MedusaHeads | None = None
    model: DraftModel | None = None
    given = dict(config.heads)
    for method in config.speculation:
        if method is SpeculationMethod.DRAFT_MODEL:
            path = paths[method] = config.draft_model or _shipped(method, config)
            model = load_draft_model(path, target, tokenizer_path, dtype, device, team)
        elif method in HEAD_METHODS:
            path = paths[method] = given.get(method) or _shipped(method, config)
            checkpoint = load_head(path, target.config, config.eagle3_layer_ids)
            if checkpoint.config.kind.value != method.label:
                raise ModelError(f"{path}: holds a head of kind {checkpoint.config.kind}, not {method.label}")
            if method is SpeculationMethod.MEDUSA:
                medusa = build_medusa(checkpoint.config, checkpoint.tensors, target)
            else:
                heads[method] = build_head(checkpoint.config, checkpoint.tensors, target)
    return DraftWeights(model, heads, medusa, paths)


def build_drafters(
    config: WorkerConfig,
    weights: DraftWeights,
    target: CausalLM,
    sampler: Sampler,
    table: RequestTable,
    num_pages: int,
) -> tuple[dict[SpeculationMethod, Drafter], tuple[DrafterFacts, ...]]:
    """One drafter per loaded method, and what the scheduler has to know of each."""
    drafters: dict[SpeculationMethod, Drafter] = {}
    facts: list[DrafterFacts] = []
    for method in config.speculation:
        limit = 0
        if method is SpeculationMethod.PORTFOLIO:
            continue  # made of the others
        if method is SpeculationMethod.NGRAM:
            drafters[method] = _ngram_drafter(config, table)
        elif method is SpeculationMethod.DRAFT_MODEL:
            assert weights.draft_model is not None, "loaded with the others"
            limit = weights.draft_model.model.config.max_position_embeddings
            vocab_size = target.config.vocab_size
            drafters[method] = _draft_model_drafter(
                config, weights.draft_model, vocab_size, sampler, table, num_pages
            )
        elif method is SpeculationMethod.MEDUSA:
            assert weights.medusa is not None, "loaded with the others"
            tree = config.draft_shape != "chain"  # one kind of tree, whichever is asked for
            drafters[method] = MedusaDrafter(
                weights.medusa,
                sampler,
                table,
                config.max_draft_depth,
                _least_value(config),
                tree=tree,
            )
        else:
            limit = weights.heads[method].config.max_position_embeddings
            drafters[method] = _head_drafter(
                method, config, weights.heads[method], target.num_layers, sampler, table, num_pages
            )
        # Medusa reads hidden states too, but has no KV that a cached page could lack.
        needs_hidden = drafters[method].hidden_layers is not None and method is not SpeculationMethod.MEDUSA
        path = weights.paths.get(method, "")
        facts.append(DrafterFacts(int(method), path, config.num_draft_tokens, limit, needs_hidden))
    if SpeculationMethod.PORTFOLIO in config.speculation:
        drafters[SpeculationMethod.PORTFOLIO] = PortfolioDrafter(
            dict(drafters), table, config.min_draft_probability
        )
        facts.append(DrafterFacts(int(SpeculationMethod.PORTFOLIO), "", config.num_draft_tokens, 0))
    return drafters, tuple(facts)


def _ngram_drafter(config: WorkerConfig, table: RequestTable) -> NgramDrafter:
    if not config.suffix_store:
        return NgramDrafter(table)
    return NgramDrafter(table, store=SuffixStore(), salt_of=lambda admission: admission.salt_id)


def _draft_model_drafter(
    config: WorkerConfig,
    draft: DraftModel,
    vocab_size: int,
    sampler: Sampler,
    table: RequestTable,
    num_pages: int,
) -> DraftModelDrafter:
    return DraftModelDrafter(
        draft.model,
        draft.model.new_pool(num_pages, config.page_size),
        CPUAttention(table.device),
        sampler,
        table,
        config.max_batched_tokens,
        draft_ids=draft.draft_ids,
        vocab_size=vocab_size,
        shape=_tree_shape(config),
    )


def _tree_shape(config: WorkerConfig, hit_rates: tuple[tuple[float, ...], ...] = ()) -> TreeShape:
    """hit_rates: as measured for the head, if they were (HeadConfig.hit_rates)."""
    depth, shape = config.max_draft_depth, CHAINS
    if config.draft_shape == "fixed-tree":
        rates = hit_rates or assumed_hit_rates(depth)
        shape = TreeShape(depth, fixed=build_product_tree(rates[:depth], MAX_NODES))
    elif config.draft_shape == "tree":
        shape = TreeShape(depth)
    return replace(shape, least_value=_least_value(config))


def _least_value(config: WorkerConfig) -> float:
    """Log-probability of a path below which a draft is not worth a row."""
    least = config.min_draft_probability
    return math.log(least) if least > 0 else -math.inf


def head_drafter_class(
    method: SpeculationMethod, num_draft_tokens: int, device: torch.device
) -> type[HiddenStateDrafter]:
    """The drafter of a decoder head. On the CPU nothing runs beside the host: one call of the kernels drafts faster."""
    if method is SpeculationMethod.MTP and num_draft_tokens == 1 and device.type != "cpu":
        return OneTokenDrafter
    return HiddenStateDrafter


def _head_drafter(
    method: SpeculationMethod,
    config: WorkerConfig,
    head: DraftHead,
    num_target_layers: int,
    sampler: Sampler,
    table: RequestTable,
    num_pages: int,
) -> HiddenStateDrafter:
    pool = new_head_pool(head, num_pages, config.page_size)
    attention = CPUAttention(table.device)
    drafter = head_drafter_class(method, config.num_draft_tokens, table.device)
    return drafter(
        method,
        head,
        pool,
        attention,
        sampler,
        table,
        num_pages,
        num_target_layers,
        _tree_shape(config, head.config.hit_rates),
    )


def _shipped(method: SpeculationMethod, config: WorkerConfig) -> str:
    path = _SHIPPED / method.label
    if config.model == "" and path.is_dir():
        return str(path)
    what = "the embedded model" if config.model == "" else config.model
    field, kind = (
        ("draft_model", "") if method is SpeculationMethod.DRAFT_MODEL else ("heads", f"{method.label} ")
    )
    raise ModelError(f"{field}: no {kind}one is given, and none ships for {what}")
