"""What the settings and the workers' pool come to together: the limits that every plan keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_svc.config import ServerConfig
from scheduler_svc.errors import StartupError
from scheduler_svc.messages import Drafter, Model
from shared_mem.control import DrafterFacts, ModelFacts, WorkerHello
from shared_mem.enums import SpeculationMethod


@dataclass(frozen=True)
class Limits:
    """Counts are tokens, pages, sequences or requests."""

    page_size: int
    num_pages: int
    max_context_tokens: int  # prompt + generated; at most what the pool holds: one sequence alone always fits
    max_running_requests: int  # slots; at most max_batched_tokens: every running sequence can get a row
    max_queued_requests: int  # counts samples; while fewer wait for a slot, one more request is taken whole
    max_batched_tokens: int
    eos_token_ids: frozenset[int]
    drafters: Mapping[SpeculationMethod, DrafterFacts] = field(default_factory=dict)
    default_method: SpeculationMethod = SpeculationMethod.DISABLED
    default_num_draft_tokens: int = 0
    disable_at_batch_size: int = 0  # at first; 0: never
    drafts_beside_prefill: bool = True
    prefix_cache: bool = True


def resolve_limits(config: ServerConfig, hellos: Sequence[WorkerHello]) -> Limits:
    """The limits of a group of ranks: the smallest pool and slot count decide, the leader's model facts hold.

    Raises StartupError when nothing could be served within them.
    """
    facts = hellos[0].model
    num_pages = min(hello.num_pages for hello in hellos)
    max_context = min(facts.max_context_tokens, num_pages * config.page_size)
    if config.max_context_tokens:
        max_context = min(max_context, config.max_context_tokens)
    if max_context < 2:
        raise StartupError(f"num_pages: {num_pages} pages of {config.page_size} tokens hold no request")
    drafters = {SpeculationMethod(drafter.method): drafter for drafter in facts.drafters}
    loaded = [method for method in config.speculation if method in drafters]
    return Limits(
        page_size=config.page_size,
        num_pages=num_pages,
        max_context_tokens=max_context,
        max_running_requests=min(
            config.max_running_requests, config.max_batched_tokens, *(hello.num_slots for hello in hellos)
        ),
        max_queued_requests=config.max_queued_requests,
        max_batched_tokens=config.max_batched_tokens,
        eos_token_ids=frozenset(facts.eos_token_ids),
        drafters=drafters,
        default_method=loaded[0] if loaded else SpeculationMethod.DISABLED,
        default_num_draft_tokens=config.num_draft_tokens,
        disable_at_batch_size=config.disable_at_batch_size,
        drafts_beside_prefill=config.draft_in == "mixed",
        prefix_cache=config.prefix_cache,
    )


def served_model(config: ServerConfig, limits: Limits, facts: ModelFacts) -> Model:
    """What frontends are told of the model."""
    defaults = facts.sampling_defaults
    return Model(
        name=config.model_name or facts.name,
        model_path=facts.model_path,
        revision=facts.revision,
        architecture=facts.architecture,
        dtype=facts.dtype,
        kv_cache_dtype=facts.kv_cache_dtype,
        vocab_size=facts.vocab_size,
        max_context_tokens=limits.max_context_tokens,
        max_prompt_tokens=limits.max_context_tokens - 1,
        eos_token_ids=facts.eos_token_ids,
        tokenizer_path=facts.tokenizer_path,
        default_temperature=defaults.temperature,
        default_top_k=defaults.top_k,
        default_top_p=defaults.top_p,
        default_min_p=defaults.min_p,
        default_repetition_penalty=defaults.repetition_penalty,
        drafters=tuple(
            Drafter(method, drafter.model_path, drafter.max_draft_tokens)
            for method, drafter in limits.drafters.items()
        ),
        default_method=limits.default_method,
        default_num_draft_tokens=limits.default_num_draft_tokens,
    )
