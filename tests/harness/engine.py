"""Scheduler and model runner in one process, joined by the same encoded records: the service without its sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.attention.cpu import CPUAttention
from gpu_worker.drafting.base import Drafter
from gpu_worker.drafting.draft_model import DraftModelDrafter
from gpu_worker.drafting.hidden_state import HiddenStateDrafter
from gpu_worker.drafting.medusa import MedusaDrafter
from gpu_worker.drafting.ngram import NgramDrafter
from gpu_worker.drafting.portfolio import PortfolioDrafter
from gpu_worker.drafting.tree_growth import CHAINS, TreeShape
from gpu_worker.kv_pool import KVPool, PagedPool
from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.base import CausalLM
from gpu_worker.models.heads.base import DraftHead, new_head_pool
from gpu_worker.models.heads.medusa import MedusaHeads
from gpu_worker.models.native import NativeCausalLM
from gpu_worker.request_state import RequestTable
from gpu_worker.sampling.sampler import Sampler
from scheduler_svc.messages import (
    Finished,
    Rejected,
    Sampling,
    Speculation,
    Stopping,
    Submit,
    TokenEvents,
    TokenLogprobs,
)
from scheduler_svc.scheduler.events import Outbound
from scheduler_svc.scheduler.limits import Limits
from scheduler_svc.scheduler.scheduler import Scheduler
from scheduler_svc.scheduler.speculation_policy import SpeculationPolicy
from shared_mem.control import DrafterFacts
from shared_mem.enums import AcceptanceRule, SpeculationMethod
from shared_mem.records import StepResult, decode_plan, decode_result, encode_plan, encode_result

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0)
FRONTEND = b"test"

DrafterFactory = Callable[[RequestTable], Drafter]


@dataclass
class Output:
    """Everything that came back for one sample."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)  # (drafts, accepted) of each step
    finished: Finished | None = None
    rejected: Rejected | None = None


class InProcessEngine:
    """One rank and its scheduler; `run` takes requests to their ends, checking the page ledger at every step."""

    def __init__(
        self,
        target: CausalLM,
        *,
        draft: CausalLM | None = None,
        draft_ids: torch.Tensor | None = None,
        ngram: bool = False,
        heads: Mapping[SpeculationMethod, DraftHead] | None = None,
        medusa: MedusaHeads | None = None,
        tree: TreeShape = CHAINS,
        scripted: Mapping[SpeculationMethod, DrafterFactory] | None = None,
        portfolio: bool = False,
        portfolio_options: Mapping[str, Any] | None = None,
        page_size: int = 4,
        num_pages: int = 256,
        max_running_requests: int = 16,
        max_batched_tokens: int = 64,
        max_context_tokens: int = 0,
        num_draft_tokens: int = 4,
        eos_token_ids: Sequence[int] = (),
        attention: Callable[[], AttentionBackend] = CPUAttention,
        prefix_cache: bool = True,
        drafts_beside_prefill: bool = True,
        steps_in_flight: int = 1,
        policy: SpeculationPolicy | None = None,
        head_drafter: type[HiddenStateDrafter] = HiddenStateDrafter,
    ) -> None:
        device = torch.device("cpu")
        max_context = max_context_tokens or target.config.max_position_embeddings
        self.table = RequestTable(max_running_requests, max_context, page_size, device)
        team = target.team if isinstance(target, NativeCausalLM) else None
        self.sampler = Sampler(max_running_requests, target.config.vocab_size, device, team)
        self.pool = target.new_pool(num_pages, page_size)
        self.drafters: dict[SpeculationMethod, Drafter] = {}
        if ngram:
            self.drafters[SpeculationMethod.NGRAM] = NgramDrafter(self.table)
        self.draft_pool: KVPool | None = None
        draft_limit = 0
        if draft is not None:
            self.draft_pool = draft.new_pool(num_pages, page_size)
            draft_limit = draft.config.max_position_embeddings
            self.drafters[SpeculationMethod.DRAFT_MODEL] = DraftModelDrafter(
                draft,
                self.draft_pool,
                attention(),
                self.sampler,
                self.table,
                max_batched_tokens,
                draft_ids=draft_ids,
                shape=tree,
            )
        self.head_pools: dict[SpeculationMethod, PagedPool] = {}
        for method, head in (heads or {}).items():
            pool = self.head_pools[method] = new_head_pool(head, num_pages, page_size)
            self.drafters[method] = head_drafter(
                method,
                head,
                pool,
                attention(),
                self.sampler,
                self.table,
                num_pages,
                target.num_layers,
                tree,
            )
        if medusa is not None:
            depth = medusa.config.num_medusa_heads
            self.drafters[SpeculationMethod.MEDUSA] = MedusaDrafter(
                medusa, self.sampler, self.table, depth, tree=not tree.is_chain
            )
        for method, factory in (scripted or {}).items():
            self.drafters[method] = factory(self.table)
        if (
            portfolio
        ):  # of all others, and the default; all are asked in each step unless the options say otherwise
            parts = dict(self.drafters)
            options = {"least_probability": 0.0, "probe_interval": 1, **(portfolio_options or {})}
            merged = PortfolioDrafter(parts, self.table, **options)
            self.drafters = {SpeculationMethod.PORTFOLIO: merged, **parts}
        self.runner = ModelRunner(target, self.pool, attention(), self.sampler, self.table, self.drafters)
        self.limits = Limits(
            page_size=page_size,
            num_pages=num_pages,
            max_context_tokens=min(max_context, num_pages * page_size),
            max_running_requests=max_running_requests,
            max_queued_requests=10_000,
            max_batched_tokens=max_batched_tokens,
            eos_token_ids=frozenset(eos_token_ids),
            drafters={
                method: DrafterFacts(
                    int(method),
                    "",
                    num_draft_tokens,
                    draft_limit if method is SpeculationMethod.DRAFT_MODEL else 0,
                    drafter.hidden_layers is not None and method is not SpeculationMethod.MEDUSA,
                )
                for method, drafter in self.drafters.items()
            },
            default_method=next(iter(self.drafters), SpeculationMethod.DISABLED),
            default_num_draft_tokens=num_draft_tokens,
            drafts_beside_prefill=drafts_beside_prefill,
            prefix_cache=prefix_cache,
        )
        self.scheduler = Scheduler(self.limits, policy, max_steps_in_flight=steps_in_flight)
        self._plans: deque[bytes] = deque()  # in the worker's ring, oldest first
        self.num_steps = 0
        self.outputs: dict[tuple[str, int], Output] = {}
        self._num_requests = 0

    def submit(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int = 16,
        method: SpeculationMethod | None = None,
        max_draft_tokens: int | None = None,
        rule: AcceptanceRule = AcceptanceRule.COUPLED,
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] | None = None,
        stopping: Stopping | None = None,
        **fields: object,
    ) -> str:
        """Queues one request; returns its id."""
        self._num_requests += 1
        request_id = f"r{self._num_requests}"
        submit = Submit(
            request_id=request_id,
            token_ids=tuple(token_ids),
            sampling=sampling,
            stopping=stopping or Stopping(max_tokens, ignore_eos=True),
            speculation=Speculation(method, max_draft_tokens, rule),
            arrival_time=float(self._num_requests),
            seeds=tuple(seeds if seeds is not None else (sampling.seed,)),
            **fields,  # type: ignore[arg-type]
        )
        self._take(self.scheduler.submit(FRONTEND, submit))
        return request_id

    def run(self, *, on_step: Callable[[int], None] | None = None) -> dict[tuple[str, int], Output]:
        """Steps until nothing is live; returns the outputs by (request id, sample index) since the last run."""
        while self.step():
            if on_step is not None:
                on_step(self.num_steps)
        outputs, self.outputs = self.outputs, {}
        return outputs

    def step(self) -> bool:
        """The oldest planned step, once all that may be planned ahead is; False if there was nothing to do."""
        while (plan := self.scheduler.schedule(0.0)) is not None:
            self.scheduler.check_integrity()
            self._plans.append(encode_plan(plan))
        if not self._plans:
            return False
        self.num_steps += 1
        published: list[StepResult] = []
        self.runner.execute(decode_plan(self._plans.popleft()), published.append)
        (result,) = published
        self._take(self.scheduler.apply(decode_result(encode_result(result))))
        self.scheduler.check_integrity()
        return True

    def generate(self, prompts: Sequence[Sequence[int]], **fields: object) -> list[list[int]]:
        """Token ids of all prompts, run together."""
        ids = [self.submit(prompt, **fields) for prompt in prompts]  # type: ignore[arg-type]
        outputs = self.run()
        return [outputs[request_id, 0].token_ids for request_id in ids]

    def _take(self, outbound: list[Outbound]) -> None:
        outputs = self.outputs
        for item in outbound:
            message = item.message
            if isinstance(message, Rejected):
                outputs.setdefault((message.request_id, 0), Output()).rejected = message
            if not isinstance(message, TokenEvents):
                continue
            for event in message.events:
                output = outputs.setdefault((event.request_id, event.index), Output())
                assert output.finished is None, "nothing follows the end"
                output.token_ids += event.token_ids
                output.logprobs += event.logprobs or ()
                if event.step is not None:
                    output.num_draft_tokens += event.step.num_draft_tokens
                    output.num_accepted_tokens += event.step.num_accepted_tokens
                    output.steps.append((event.step.num_draft_tokens, event.step.num_accepted_tokens))
                if event.started is not None:
                    output.num_cached_tokens = event.started.num_cached_tokens
                    output.prompt_logprobs = event.started.prompt_logprobs
                if event.finished is not None:
                    output.finished = event.finished
