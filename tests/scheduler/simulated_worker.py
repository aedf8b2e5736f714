"""A worker without a model: checks that plans are legal, answers with tokens that only the prefix decides.

"KV" of a token is a hash of the prefix that ends with it, so a page that holds something else than it should
is found at the next step that reads it. The "model's" next token is a hash of prefix and seed: whatever is
batched, drafted, preempted or shared, a request's text must be `model_text`. Every drafter that reads hidden states
has such "KV" as well, written only where the target computes a token, and so has the draft model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import numpy as np

from scheduler_svc.scheduler.limits import Limits
from shared_mem.enums import SpeculationMethod
from shared_mem.records import FOLLOWS, Admission, Logprobs, RowPlan, RowResult, StepPlan, StepResult

VOCAB_SIZE = 40
_DRAFT_MODEL = SpeculationMethod.DRAFT_MODEL
_MASK = (1 << 61) - 1


def extend_hash(prefix_hash: int, token: int) -> int:
    """The hash of a prefix with one more token."""
    return (prefix_hash * 1_000_003 + token + 7) & _MASK


def next_token(prefix_hash: int, seed: int) -> int:
    """What the model draws behind a prefix."""
    mixed = ((prefix_hash ^ (seed * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    return (mixed >> 33) % VOCAB_SIZE


def model_text(prompt: tuple[int, ...], seed: int, num_tokens: int) -> list[int]:
    """The first num_tokens tokens that the model draws behind a prompt."""
    prefix_hash = 0
    for token in prompt:
        prefix_hash = extend_hash(prefix_hash, token)
    text = []
    for _ in range(num_tokens):
        text.append(next_token(prefix_hash, seed))
        prefix_hash = extend_hash(prefix_hash, text[-1])
    return text


@dataclass(eq=False)
class _Slot:
    admission: Admission
    hashes: list[int]  # hashes[i]: of tokens[: i + 1]
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    num_valid_pages: int = 0  # pages behind these may belong to somebody else by now
    num_computed: int = 0
    num_draft_computed: int = 0


class SimulatedWorker:
    """Executes plans in order. `acceptance` 0..1: how many drafts fit; tree_width 1: chains."""

    def __init__(
        self,
        limits: Limits,
        seed: int = 0,
        acceptance: float = 0.6,
        tree_width: int = 1,
        proposes_all: bool = False,
    ) -> None:
        self._limits = limits
        self._random = random.Random(seed)
        self._acceptance = acceptance
        self._tree_width = tree_width
        self._proposes_all = proposes_all  # else any number of drafts up to what the row allows
        self._kv = [[-1] * limits.page_size for _ in range(limits.num_pages)]
        self._draft_kv = [[-1] * limits.page_size for _ in range(limits.num_pages)]
        self._head_kv = {
            method: [[-1] * limits.page_size for _ in range(limits.num_pages)]
            for method, drafter in limits.drafters.items()
            if drafter.needs_hidden
        }
        self.slots: dict[int, _Slot] = {}
        self._last_step = 0
        self.num_computed_tokens = 0
        self.peak_rows = 0
        self.num_rows_ahead = 0  # whose place only the worker knew

    def execute(self, plan: StepPlan, cache_pages: frozenset[int] = frozenset()) -> StepResult:
        """One step. `cache_pages`: pages of the prefix cache when the plan was made; none may be written."""
        assert plan.step_id == self._last_step + 1
        self._last_step = plan.step_id
        for release in plan.releases:
            assert self.slots.pop(release.slot).admission.epoch == release.epoch
        for admission in plan.admissions:
            self._admit(admission)
        for update in plan.page_updates:
            slot = self.slots[update.slot]
            assert update.first_index <= len(slot.pages)
            slot.pages[update.first_index :] = update.page_ids.tolist()
        rows = tuple(self._located(row) for row in plan.rows)
        for row in rows:
            slot = self.slots[row.slot]
            covered = row.num_computed + row.num_query + row.num_draft_tokens + 1
            slot.num_valid_pages = self._pages_for(covered)
            assert len(slot.pages) >= slot.num_valid_pages, "pages do not cover the row"
        num_rows = sum(row.num_query + row.num_draft_tokens for row in plan.rows)
        self.peak_rows = max(self.peak_rows, num_rows)
        assert 0 < num_rows <= self._limits.max_batched_tokens
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        admitted = {admission.slot for admission in plan.admissions}
        assert admitted <= {row.slot for row in plan.rows}
        return StepResult(plan.step_id, tuple(self._execute_row(row, cache_pages) for row in rows))

    def _located(self, row: RowPlan) -> RowPlan:
        if row.num_computed != FOLLOWS:
            return row
        self.num_rows_ahead += 1
        assert (row.num_query, row.samples) == (1, True)
        return msgspec.structs.replace(row, num_computed=len(self.slots[row.slot].tokens) - 1)

    def _admit(self, admission: Admission) -> None:
        assert 0 <= admission.slot < self._limits.max_running_requests
        assert admission.slot not in self.slots, "the slot's tenant was not released"
        tokens = admission.token_ids.tolist()
        assert 1 <= admission.num_prompt_tokens <= len(tokens)
        assert admission.num_cached_tokens < len(tokens)
        assert admission.num_draft_cached_tokens <= admission.num_cached_tokens
        assert admission.methods & _DRAFT_MODEL.bit or not admission.num_draft_cached_tokens
        hashes = []
        prefix_hash = 0
        for token in tokens:
            prefix_hash = extend_hash(prefix_hash, token)
            hashes.append(prefix_hash)
        self.slots[admission.slot] = _Slot(
            admission,
            hashes,
            tokens,
            num_computed=admission.num_cached_tokens,
            num_draft_computed=admission.num_draft_cached_tokens,
        )

    def _execute_row(self, row: RowPlan, cache_pages: frozenset[int]) -> RowResult:
        slot = self.slots[row.slot]
        assert slot.admission.epoch == row.epoch
        assert row.num_computed == slot.num_computed
        end = row.num_computed + row.num_query
        assert row.num_query >= 1
        assert end <= len(slot.tokens)
        assert row.samples == (end == len(slot.tokens))
        assert row.method is SpeculationMethod.DISABLED or slot.admission.methods & row.method.bit
        if row.num_draft_tokens:
            assert row.num_query == 1
            assert row.samples
            assert row.method is not SpeculationMethod.DISABLED
            # neither model ever sees a position at its limit, even if this follows a row that accepted every draft
            limit = self._limits.drafters[row.method].max_context_tokens or self._limits.max_context_tokens
            assert end + row.num_draft_tokens <= min(limit, self._limits.max_context_tokens)
        for position in range(row.num_computed):
            assert self._read(self._kv, slot, position) == slot.hashes[position], "lost or foreign KV"
        for position in range(slot.num_draft_computed):
            assert self._read(self._draft_kv, slot, position) == slot.hashes[position], "lost draft KV"
        for method in self._hidden_followers(slot):
            for position in range(row.num_computed):
                assert self._read(self._head_kv[method], slot, position) == slot.hashes[position] ^ method, (
                    f"lost KV of {method.label}"
                )
        for position in range(row.num_computed, end):
            self._write(self._kv, slot, position, slot.hashes[position], cache_pages)
        self.num_computed_tokens += row.num_query
        prompt_logprobs = self._prompt_logprobs(slot, row)
        slot.num_computed = end
        if not row.samples:
            slot.num_valid_pages = self._pages_for(end + 1)
            self._catch_up(slot, row, cache_pages)
            return self._result(slot, row, [], 0, 0, 0, prompt_logprobs)
        num_nodes, depth, accepted = self._draft(slot, row, cache_pages)
        drawn = []
        for _ in range(accepted + 1):
            drawn.append(next_token(slot.hashes[-1], slot.admission.sampling.seed))
            slot.tokens.append(drawn[-1])
            slot.hashes.append(extend_hash(slot.hashes[-1], drawn[-1]))
        assert len(slot.tokens) <= self._limits.max_context_tokens + 1
        # the accepted path now lies behind the root; what the tree left behind it is junk
        for position in range(end, end + accepted):
            self._write(self._kv, slot, position, slot.hashes[position], cache_pages)
        slot.num_computed = end + accepted
        slot.num_valid_pages = self._pages_for(slot.num_computed + 1)
        self._catch_up(slot, row, cache_pages)
        return self._result(slot, row, drawn, num_nodes, depth, accepted, prompt_logprobs)

    def _draft(self, slot: _Slot, row: RowPlan, cache_pages: frozenset[int]) -> tuple[int, int, int]:
        """(nodes, depth, accepted) of a random proposal, whose KV is written behind the root."""
        fewest = row.num_draft_tokens if self._proposes_all else 0
        num_nodes = self._random.randint(fewest, row.num_draft_tokens)
        depth = min(num_nodes, -(-num_nodes // self._tree_width))
        accepted = 0
        while accepted < depth and self._random.random() < self._acceptance:
            accepted += 1
        first = row.num_computed + row.num_query
        for node in range(num_nodes):
            junk = -2 - self._random.randrange(1 << 30)
            self._write(self._kv, slot, first + node, junk, cache_pages)
            if row.method in self._head_kv:
                self._write(self._head_kv[row.method], slot, first + node, junk, cache_pages)
        return num_nodes, depth, accepted

    def _hidden_followers(self, slot: _Slot) -> list[SpeculationMethod]:
        return [method for method in self._head_kv if slot.admission.methods & method.bit]

    def _catch_up(self, slot: _Slot, row: RowPlan, cache_pages: frozenset[int]) -> None:
        """Followers that read hidden states take the tokens that the target has just computed.

        The draft model consumes all known tokens, also those on shared pages that lack its KV.
        """
        for method in self._hidden_followers(slot):
            for position in range(row.num_computed, slot.num_computed):
                self._write(
                    self._head_kv[method], slot, position, slot.hashes[position] ^ method, cache_pages
                )
        if not slot.admission.methods & _DRAFT_MODEL.bit:
            return
        end = min(
            slot.num_computed + row.samples,
            self._limits.drafters[_DRAFT_MODEL].max_context_tokens or 1 << 30,
            len(slot.pages) * self._limits.page_size,
        )
        assert self._pages_for(end) <= slot.num_valid_pages
        for position in range(slot.num_draft_computed, end):
            page = slot.pages[position // self._limits.page_size]
            for holder in self._holders(page):
                # sequences that share the page agree on what belongs there
                assert holder.hashes[position] == slot.hashes[position]
            self._draft_kv[page][position % self._limits.page_size] = slot.hashes[position]
        slot.num_draft_computed = max(slot.num_draft_computed, end)

    def _result(
        self,
        slot: _Slot,
        row: RowPlan,
        drawn: list[int],
        num_nodes: int,
        depth: int,
        accepted: int,
        prompt_logprobs: Logprobs | None,
    ) -> RowResult:
        count = slot.admission.sampling.num_logprobs
        return RowResult(
            slot=row.slot,
            epoch=row.epoch,
            token_ids=np.array(drawn, dtype=np.int32),
            method=row.method,
            num_draft_tokens=num_nodes,
            draft_depth=depth,
            num_accepted_tokens=accepted,
            num_draft_computed=slot.num_draft_computed,
            logprobs=_logprobs(drawn, count) if drawn and count >= 0 else None,
            prompt_logprobs=prompt_logprobs,
        )

    def _prompt_logprobs(self, slot: _Slot, row: RowPlan) -> Logprobs | None:
        count = slot.admission.sampling.num_prompt_logprobs
        first = row.num_computed + 1
        tokens = slot.tokens[first : min(first + row.num_query, slot.admission.num_prompt_tokens)]
        return _logprobs(tokens, count) if tokens and count >= 0 else None

    def _pages_for(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self._limits.max_context_tokens) // self._limits.page_size)

    def _holders(self, page: int) -> list[_Slot]:
        return [slot for slot in self.slots.values() if page in slot.pages[: slot.num_valid_pages]]

    def _read(self, kv: list[list[int]], slot: _Slot, position: int) -> int:
        page_size = self._limits.page_size
        return kv[slot.pages[position // page_size]][position % page_size]

    def _write(
        self, kv: list[list[int]], slot: _Slot, position: int, value: int, cache_pages: frozenset[int]
    ) -> None:
        page_size = self._limits.page_size
        assert position < self._limits.max_context_tokens
        assert position // page_size < slot.num_valid_pages, "write behind the pages of the row"
        page = slot.pages[position // page_size]
        assert page not in cache_pages, "write to a page of the prefix cache"
        assert self._holders(page) == [slot], "write to a page that another sequence holds"
        kv[page][position % page_size] = value


def _logprobs(tokens: list[int], num_alternatives: int) -> Logprobs:
    ids = np.array([[token, *range(num_alternatives)] for token in tokens], dtype=np.int32)
    values = -np.arange(1, 2 + num_alternatives, dtype=np.float32) / 4 - ids[:, :1]
    return Logprobs(ids, values.astype(np.float32))
