"""The scheduler's memory of one call: a Request and its sequences, one per sample, built at its arrival."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler_svc.messages import Submit, TokenLogprobs
from scheduler_svc.scheduler.limits import Limits
from scheduler_svc.scheduler.page_keys import PageKeys
from scheduler_svc.scheduler.rows_in_flight import RowsInFlight
from scheduler_svc.scheduler.stopping import EndRules
from shared_mem.enums import SpeculationMethod
from shared_mem.records import SamplingRecord

if TYPE_CHECKING:
    from scheduler_svc.scheduler.prefix_cache import CacheNode

RankKey = tuple[int, float, int, int]


class SequenceState(enum.Enum):
    """WAITING (in the queue) -> RUNNING (has a slot) -> ENDED; a preemption goes back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Request:
    """One Submit with everything that was resolved once, at its arrival."""

    submit: Submit
    frontend: bytes  # whom the events go to
    serial: int  # order of arrival in this process; settles equal arrival times
    salt_id: int  # number of its cache salt
    end_rules: EndRules
    prompt: list[int]  # this and its keys are shared by the samples until each is admitted
    prompt_keys: PageKeys
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def live_sequences(self) -> list[Sequence]:
        """Samples that have not ended."""
        return [sequence for sequence in self.sequences if sequence.state is not SequenceState.ENDED]

    @property
    def is_live(self) -> bool:
        """Whether any sample goes on."""
        return any(sequence.state is not SequenceState.ENDED for sequence in self.sequences)

    @property
    def was_scheduled(self) -> bool:
        """Whether any sample ever had a slot: from then on the caller may have seen output."""
        return any(sequence.first_scheduled_time is not None for sequence in self.sequences)


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample: its tokens, how far they are computed, and what it holds while it runs."""

    request: Request
    index: int
    tokens: list[int]  # prompt, then generated
    sampling: SamplingRecord
    page_keys: PageKeys
    state: SequenceState = SequenceState.WAITING

    # while RUNNING
    slot: int = -1
    epoch: int = 0
    pages: list[int] = field(default_factory=list)
    cache_nodes: list[CacheNode] = field(default_factory=list)  # of the leading pages
    leaves_cache_alone: bool = False  # its next full page exists in the cache, in a form it cannot share
    method: SpeculationMethod = SpeculationMethod.DISABLED  # as of its admission
    methods: int = 0  # bit mask of the drafters that follow it
    num_pages_marked: int = 0  # leading cache_nodes whose KV of the draft model is known to be valid
    num_pages_sent: int = 0  # leading pages that the worker knows
    num_computed: int = 0  # by steps whose results are here
    num_draft_computed: int = 0  # by the draft model, if it follows
    decoding: bool = False  # has drawn a token since it got its slot, as far as results tell
    in_flight: RowsInFlight = field(default_factory=RowsInFlight)

    # over its whole life
    num_cached_tokens: int = 0  # of the first admission
    first_scheduled_time: float | None = None
    started_sent: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_steps: int = 0
    num_preemptions: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.submit.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.submit.token_ids)

    @property
    def num_tokens_at_least(self) -> int:
        """Known tokens once the rows in flight are through, if no draft is accepted."""
        return len(self.tokens) + self.in_flight.num_sampling

    @property
    def num_tokens_at_most(self) -> int:
        """The same if every draft is accepted."""
        return self.num_tokens_at_least + self.in_flight.num_draft_tokens

    @property
    def num_computed_at_least(self) -> int:
        """Tokens with KV once the rows in flight are through, if no draft is accepted."""
        return self.num_computed + self.in_flight.num_query

    @property
    def num_computed_at_most(self) -> int:
        """The same if every draft is accepted."""
        return self.num_computed_at_least + self.in_flight.num_draft_tokens

    @property
    def decodes_next(self) -> bool:
        """Whether the row behind those in flight is a decode row."""
        return self.decoding or self.in_flight.num_sampling > 0

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that the rows in flight leave to generate at most; none: they surely end the sequence."""
        num_generated = self.num_generated + self.in_flight.num_sampling
        return self.request.end_rules.max_generated_tokens - num_generated

    @property
    def rank(self) -> RankKey:
        """Smaller is served first: priority, then arrival. Preemption takes the largest."""
        submit = self.request.submit
        return (-submit.priority, submit.arrival_time, self.request.serial, self.index)

    @property
    def reuses_prefix(self) -> bool:
        """Whether cached pages may stand in for this sequence's own prefill.

        Prompt log-probabilities need every prompt row computed, until they were delivered.
        """
        return not self.gives_prompt_logprobs or self.started_sent

    @property
    def gives_prompt_logprobs(self) -> bool:
        """Whether the prompt's log-probabilities are asked of this sequence: they are the same in all samples."""
        return self.index == 0 and self.request.submit.num_prompt_logprobs is not None

    def take_own_tokens(self) -> None:
        """From now on the sequence may generate: it no longer shares the prompt with its siblings. Once is enough."""
        if self.tokens is self.request.prompt:
            self.tokens = list(self.tokens)
            self.page_keys = self.page_keys.copy()

    def page_key(self, index: int) -> bytes:
        """The token ids of full page `index`, as bytes."""
        return self.keys_of(index + 1).keys[index]

    def keys_of(self, num_pages: int) -> PageKeys:
        """The keys of at least so many pages."""
        if len(self.page_keys.keys) < num_pages:
            self.page_keys.extend(self.tokens)
            assert len(self.page_keys.keys) >= num_pages, "only full pages have a key"
        return self.page_keys


def new_request(submit: Submit, frontend: bytes, serial: int, limits: Limits, salt_id: int = 0) -> Request:
    """The request of a Submit that was accepted, with one waiting sequence per sample."""
    stopping = submit.stopping
    prompt_keys = PageKeys(submit.cache_salt, limits.page_size)
    if limits.prefix_cache:
        prompt_keys.extend(submit.token_ids)  # now, so that no look at a long queue has to
    request = Request(
        submit=submit,
        frontend=frontend,
        serial=serial,
        salt_id=salt_id,
        prompt=list(submit.token_ids),
        prompt_keys=prompt_keys,
        end_rules=EndRules(
            eos_token_ids=frozenset() if stopping.ignore_eos else limits.eos_token_ids,
            stop_token_ids=frozenset(stopping.stop_token_ids),
            min_tokens=stopping.min_tokens,
            max_tokens=stopping.max_tokens,
            max_context_tokens=limits.max_context_tokens,
            num_prompt_tokens=len(submit.token_ids),
        ),
    )
    request.sequences = [
        Sequence(request, index, request.prompt, _sampling_record(request, index, seed), prompt_keys)
        for index, seed in enumerate(submit.seeds)
    ]
    return request


def _sampling_record(request: Request, index: int, seed: int) -> SamplingRecord:
    submit, rules = request.submit, request.end_rules
    num_prompt_logprobs = submit.num_prompt_logprobs if index == 0 else None
    sampling, wish = submit.sampling, submit.speculation
    ends = sorted(rules.eos_token_ids | rules.stop_token_ids) if rules.min_tokens > 0 else []
    return SamplingRecord(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=seed,
        min_tokens=rules.min_tokens,
        logit_bias=sampling.logit_bias,
        end_ids=tuple(ends),
        num_logprobs=-1 if submit.num_logprobs is None else submit.num_logprobs,
        num_prompt_logprobs=-1 if num_prompt_logprobs is None else num_prompt_logprobs,
        acceptance_rule=wish.acceptance_rule,
        typical_epsilon=wish.typical_epsilon,
        typical_delta=wish.typical_delta,
        threshold=wish.threshold,
    )
