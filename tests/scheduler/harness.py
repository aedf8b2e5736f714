"""Scheduler and simulated worker in one loop; every event is collected and checked."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

from scheduler_svc.messages import (
    Abort,
    AbortReply,
    Cancel,
    Finished,
    Rejected,
    Sampling,
    Speculation,
    Started,
    Step,
    Stopping,
    Submit,
    TokenEvents,
    TokenLogprobs,
)
from scheduler_svc.scheduler.events import Outbound
from scheduler_svc.scheduler.limits import Limits
from scheduler_svc.scheduler.scheduler import Scheduler
from scheduler_svc.scheduler.speculation_policy import (
    FixedSpeculation,
    SpeculationDecision,
    SpeculationFacts,
    SpeculationPolicy,
)
from shared_mem.control import DrafterFacts
from shared_mem.enums import SpeculationMethod
from shared_mem.records import StepPlan
from tests.scheduler.simulated_worker import VOCAB_SIZE, SimulatedWorker

EOS = 0
FRONTEND = b"frontend"

DRAFTERS = {
    method: DrafterFacts(int(method), method.label, 16, 0, needs_hidden=needs_hidden)
    for method, needs_hidden in (
        (SpeculationMethod.NGRAM, False),
        (SpeculationMethod.DRAFT_MODEL, False),
        (SpeculationMethod.EAGLE3, True),
        (SpeculationMethod.MTP, True),
        (SpeculationMethod.PORTFOLIO, False),
    )
}


def make_limits(**changes: object) -> Limits:
    """Small limits: pages of 4 tokens, a context of 64, drafters of every kind, EOS 0."""
    limits = Limits(
        page_size=4,
        num_pages=64,
        max_context_tokens=64,
        max_running_requests=8,
        max_queued_requests=100,
        max_batched_tokens=32,
        eos_token_ids=frozenset({EOS}),
        drafters=DRAFTERS,
        default_method=SpeculationMethod.NGRAM,
        default_num_draft_tokens=16,
    )
    return replace(limits, **changes)


def make_submit(
    request_id: str,
    prompt: tuple[int, ...] | list[int],
    *,
    max_tokens: int = 8,
    n: int = 1,
    seed: int = 1,
    method: SpeculationMethod | None = None,
    max_draft_tokens: int | None = 4,
    ignore_eos: bool = True,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    arrival_time: float = 0.0,
    deadline: float | None = None,
    priority: int = 0,
    cache_salt: str = "",
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
) -> Submit:
    """A Submit with neutral sampling."""
    return Submit(
        request_id=request_id,
        token_ids=tuple(prompt),
        sampling=Sampling(1.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, seed),
        stopping=Stopping(max_tokens, min_tokens, stop_token_ids, ignore_eos),
        speculation=Speculation(method, max_draft_tokens),
        arrival_time=arrival_time,
        seeds=tuple(seed + i for i in range(n)),
        deadline=deadline,
        priority=priority,
        cache_salt=cache_salt,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def prompt_of(length: int, first: int = 1) -> tuple[int, ...]:
    """A prompt whose tokens tell prompts with another `first` apart."""
    return tuple((first * 7 + i * 3) % VOCAB_SIZE for i in range(length))


class SwitchingSpeculation:
    """Any drafters may follow a sequence, and any of those may draft in any step."""

    def __init__(self, limits: Limits, seed: int) -> None:
        self._fixed = FixedSpeculation(limits.drafters)
        self._loaded = list(limits.drafters)
        self._random = random.Random(seed)

    def followers(self, method: SpeculationMethod) -> frozenset[SpeculationMethod]:
        """A random set that holds the method itself; nobody for one that asked for none."""
        if method is SpeculationMethod.DISABLED:
            return frozenset()
        return frozenset({method, *self._random.sample(self._loaded, self._random.choice((0, 0, 1, 2)))})

    def decide(self, facts: SpeculationFacts) -> SpeculationDecision:
        """As FixedSpeculation does for a random follower, or nothing at all."""
        choices = [method for method in self._loaded if facts.methods & method.bit]
        method = self._random.choice((SpeculationMethod.DISABLED, *choices, *choices))
        return self._fixed.decide(replace(facts, method=method))


@dataclass
class Output:
    """What one sample's frontend saw."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None


@dataclass
class _StepInFlight:
    plan: StepPlan
    cache_pages: frozenset[int]  # when the plan was made
    writable: dict[tuple[int, int], list[int]]  # (slot, epoch) of a row -> private pages that it may write


class Harness:
    """Runs steps; results may be held back, so that things happen between dispatch and result."""

    def __init__(
        self,
        limits: Limits | None = None,
        max_steps_in_flight: int = 1,
        policy: SpeculationPolicy | None = None,
        **worker_options: object,
    ) -> None:
        self.limits = limits or make_limits()
        self.scheduler = Scheduler(self.limits, policy, max_steps_in_flight)
        self.worker = SimulatedWorker(self.limits, **worker_options)  # type: ignore[arg-type]
        self.now = 0.0
        self.outputs: dict[tuple[str, int], Output] = {}
        self.rejected: dict[str, Rejected] = {}
        self.aborted: list[str] = []
        self.plans: list[StepPlan] = []
        self._in_flight: deque[_StepInFlight] = deque()

    def submit(self, submit: Submit) -> None:
        self.take(self.scheduler.submit(FRONTEND, submit))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self.scheduler.cancel(FRONTEND, Cancel(request_id, index))
        self.scheduler.check_integrity()

    def abort(self, *request_ids: str) -> None:
        self.take(self.scheduler.abort(b"operator", Abort(1, request_ids)))
        self.scheduler.check_integrity()

    def dispatch(self) -> StepPlan | None:
        """expire + schedule; checks that no page changes hands while a step in flight may write it."""
        self.take(self.scheduler.expire(self.now))
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        self._check_counts_of_cached_tokens()
        if plan is None:
            return None
        self.plans.append(plan)
        for update in plan.page_updates:
            owner = next((row.slot, row.epoch) for row in plan.rows if row.slot == update.slot)
            for step in self._in_flight:
                for other, pages in step.writable.items():
                    assert other == owner or not set(pages) & set(update.page_ids.tolist()), (
                        "page is still written"
                    )
        cache_pages = frozenset(self.scheduler._allocator.cache.pages())
        writable = {
            (sequence.slot, sequence.epoch): sequence.pages[len(sequence.cache_nodes) :]
            for sequence in self.scheduler._slots.running
            if sequence.in_flight.last_step == plan.step_id
        }
        self._in_flight.append(_StepInFlight(plan, cache_pages, writable))
        return plan

    def _check_counts_of_cached_tokens(self) -> None:
        """What a load counts by numbers is what an admission would find, whoever follows."""
        allocator = self.scheduler._allocator
        hidden = [m.bit for m, drafter in self.limits.drafters.items() if drafter.needs_hidden]
        for sequence in self.scheduler._queue:
            for methods in (0, *hidden, sum(hidden)):
                num_cached = len(allocator.find_prefix(sequence, methods)) * self.limits.page_size
                assert allocator.num_cached_tokens(sequence, methods) == num_cached

    def deliver(self) -> None:
        """Executes and applies the oldest step in flight."""
        step = self._in_flight.popleft()
        result = self.worker.execute(step.plan, step.cache_pages)
        running = {(s.slot, s.epoch): s for s in self.scheduler._slots.running}
        before = {key: list(sequence.pages) for key, sequence in running.items()}
        self.take(self.scheduler.apply(result))
        self.scheduler.check_integrity()
        # What is known now bounds what steps in flight write (the worker checks it): no page that turned out to be
        # complete or surplus.
        complete = set(self.scheduler._allocator.cache.pages())
        for key, sequence in running.items():
            surplus = set(before[key][len(sequence.pages) :]) if sequence.pages else set()
            for later in self._in_flight:
                if key in later.writable:
                    later.writable[key] = [p for p in later.writable[key] if p not in surplus | complete]

    def step(self) -> StepPlan | None:
        """One whole step."""
        plan = self.dispatch()
        if plan is not None:
            self.deliver()
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(max_steps):
            while self.dispatch() is not None:
                pass
            if not self._in_flight:
                assert self.scheduler.num_live_requests == 0, "somebody waits forever"
                return
            self.deliver()
        raise AssertionError(f"not done after {max_steps} steps")

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def output(self, request_id: str, index: int = 0) -> Output:
        return self.outputs[request_id, index]

    def assert_idle_and_clean(self) -> None:
        """Nothing lives; without the cache every page is free."""
        assert self.scheduler.num_live_requests == 0
        ledger = self.scheduler._allocator.ledger
        assert ledger.num_owned == 0
        assert ledger.num_quarantined == 0
        self.scheduler.flush_prefix_cache()
        assert ledger.num_free == self.limits.num_pages
        self.scheduler.check_integrity()

    def take(self, outbound: list[Outbound]) -> None:
        """Collects messages as a frontend would, and checks their order."""
        for item in outbound:
            match item.message:
                case TokenEvents(events):
                    assert item.frontend == FRONTEND
                    for event in events:
                        self._take_event(event)
                case Rejected() as rejected:
                    assert rejected.request_id not in self.rejected
                    self.rejected[rejected.request_id] = rejected
                case AbortReply(_, request_ids):
                    assert item.frontend == b"operator"
                    self.aborted.extend(request_ids)
                case other:
                    raise AssertionError(f"unexpected {other}")

    def _take_event(self, event) -> None:  # type: ignore[no-untyped-def]
        output = self.outputs.setdefault((event.request_id, event.index), Output())
        assert output.finished is None, "an event after the last one"
        if event.token_ids:
            assert (event.started is not None) == (not output.tokens)
            assert event.step is not None
            assert event.step.num_accepted_tokens <= len(event.token_ids)
            output.steps.append(event.step)
        if event.started is not None:
            output.started = event.started
        output.tokens += event.token_ids
        if event.logprobs is not None:
            assert [logprob.token_id for logprob in event.logprobs] == list(event.token_ids)
            output.logprobs += event.logprobs
        output.finished = event.finished
