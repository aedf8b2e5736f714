"""One step on a rank: apply the plan's deltas, draft, verify, accept, publish, catch up; who runs is the plan's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.batching import SequenceRows, build_forward_batch
from gpu_worker.draft_tree import DraftTree, merge_trees, root_tree
from gpu_worker.drafting.base import Drafter, DraftRequest, TargetHidden, TargetProgress
from gpu_worker.kv_pool import PagedPool
from gpu_worker.models.base import CausalLM
from gpu_worker.request_state import Int64Array, RequestTable
from gpu_worker.sampling.sampler import Sampler, Verification
from shared_mem.enums import SpeculationMethod
from shared_mem.records import FOLLOWS, Logprobs, RowPlan, RowResult, StepPlan, StepResult

Publish = Callable[[StepResult], None]


@dataclass(frozen=True)
class _Step:
    """The rows of one plan laid out for the target's forward pass."""

    rows: tuple[RowPlan, ...]
    starts: list[int]  # num_computed of each row, counted here where the plan says FOLLOWS
    sampling: list[int]  # indices of rows that draw a token; request r of `tree` is rows[sampling[r]]
    slots: Int64Array  # [R] slots of the sampling rows
    tree: DraftTree  # one request per sampling row


class _Verified(NamedTuple):
    """What the target's forward pass came to."""

    verification: Verification | None  # None: no row drew a token
    prompt_logprobs: dict[int, Logprobs]  # by row
    hidden: TargetHidden
    first_rows: list[int]  # of each plan row, in `hidden`


class ModelRunner:
    """Executes step plans on one device; the state it keeps is the table's, the sampler's, the pools' and drafters'."""

    def __init__(
        self,
        target: CausalLM,
        pool: PagedPool,
        attention: AttentionBackend,
        sampler: Sampler,
        table: RequestTable,
        drafters: Mapping[SpeculationMethod, Drafter],
    ) -> None:
        self._target = target
        self._pool = pool
        self._attention = attention
        self._sampler = sampler
        self._table = table
        self._drafters = drafters
        # Which drafters keep state of their own for the sequence in each slot, as its admission said.
        self._followers: list[tuple[SpeculationMethod, ...]] = [()] * table.num_slots

    @torch.inference_mode()
    def execute(self, plan: StepPlan, publish: Publish) -> None:
        """Runs one step and publishes its result before the drafters catch up.

        The drafters' catch-up overlaps with the scheduler's planning of the next step.
        """
        started = time.perf_counter()
        self._apply(plan)
        if not plan.rows:
            publish(StepResult(plan.step_id, ()))
            return
        step = self._draft(plan.rows)
        verified = self._verify(step)
        results, progress = self._commit(step, verified)
        duration_us = int((time.perf_counter() - started) * 1e6)
        publish(StepResult(plan.step_id, tuple(results), duration_us))
        self._catch_up(step, progress, verified.hidden)

    def _apply(self, plan: StepPlan) -> None:
        for release in plan.releases:
            self._table.release(release)
            self._sampler.release(release.slot)
            for method in self._followers[release.slot]:
                self._drafters[method].release(release.slot)
            self._followers[release.slot] = ()
        for admission in plan.admissions:
            self._table.admit(admission)
            self._sampler.admit(
                admission.slot, admission.sampling, admission.token_ids, admission.num_prompt_tokens
            )
            self._followers[admission.slot] = tuple(
                method
                for method, drafter in self._drafters.items()
                if drafter.keeps_state and admission.methods >> method & 1
            )
            for method in self._followers[admission.slot]:
                self._drafters[method].admit(admission)
        for update in plan.page_updates:
            self._table.set_pages(update)

    def _starts(self, rows: tuple[RowPlan, ...]) -> list[int]:
        """num_computed of each row, also of those that were planned before anybody could know it."""
        slots = [row.slot for row in rows]
        assert self._table.epochs[slots].tolist() == [row.epoch for row in rows], (
            "rows are of admitted sequences"
        )
        num_known = self._table.num_tokens[slots].tolist()
        return [
            known - 1 if row.num_computed == FOLLOWS else row.num_computed
            for row, known in zip(rows, num_known, strict=True)
        ]

    def _draft(self, rows: tuple[RowPlan, ...]) -> _Step:
        """Asks each row's drafter for a tree; rows that do not draft are trees of one node."""
        sampling = [i for i, row in enumerate(rows) if row.samples]
        slots = np.array([rows[i].slot for i in sampling], dtype=np.int64)
        by_method: dict[SpeculationMethod, list[int]] = {}
        for r, i in enumerate(sampling):
            drafts = rows[i].num_draft_tokens > 0 and rows[i].method in self._drafters
            by_method.setdefault(rows[i].method if drafts else SpeculationMethod.DISABLED, []).append(r)
        trees: list[DraftTree] = []
        order: list[tuple[int, int]] = [(0, 0)] * len(sampling)
        for method, members in by_method.items():
            if method is SpeculationMethod.DISABLED:
                tree = root_tree(self._table.last_tokens(slots[members]), self._table.device)
            else:
                requests = [
                    DraftRequest(row.slot, row.num_draft_tokens)
                    for row in (rows[sampling[r]] for r in members)
                ]
                tree = self._drafters[method].propose(requests)
            for position, r in enumerate(members):
                order[r] = (len(trees), position)
            trees.append(tree)
        if not trees:
            tree = root_tree(slots, self._table.device)  # nobody samples
        else:
            tree = trees[0] if len(trees) == 1 else merge_trees(trees, order)
        return _Step(rows, self._starts(rows), sampling, slots, tree)

    def _verify(self, step: _Step) -> _Verified:
        """The target's pass over all rows; acceptance of the sampling rows; log-probabilities of prompt rows."""
        sequences = self._layout(step)
        batch = build_forward_batch(self._table, sequences)
        layers = self._hidden_layers(step)
        hidden, captured = self._target.forward_capturing(
            batch, self._pool, self._attention, layers
        )  # [T, h]
        states = TargetHidden(hidden, captured, layers)
        ends = batch.attention.qo_indptr[1:]
        first_rows = batch.attention.qo_indptr[:-1].tolist()
        prompt_logprobs = {
            i: logprobs
            for i, row in enumerate(step.rows)
            if (row.num_query > 1 or not row.samples)  # a prompt's tokens follow
            and (logprobs := self._prompt_logprobs(row, step.starts[i], hidden, int(ends[i]) - row.num_query))
            is not None
        }
        if not step.sampling:
            return _Verified(None, prompt_logprobs, states, first_rows)
        tree = step.tree
        if tree.num_nodes < batch.num_rows:
            nodes = np.diff(tree.indptr)
            shifts = ends[step.sampling] - tree.indptr[1:]  # a request's nodes are its last rows
            wanted = np.arange(tree.num_nodes) + np.repeat(shifts, nodes)
            hidden = hidden.index_select(0, torch.from_numpy(wanted).to(hidden.device))  # [N, h]
        if not self._sampler.needs_logits(step.slots):
            verification = self._sampler.verify_greedy(tree, self._target.compute_argmax(hidden))
        else:
            logits = self._target.compute_logits(hidden)  # [N, V]
            lengths = self._table.num_tokens[step.slots]
            verification = self._sampler.verify(tree, logits, step.slots, lengths)
        return _Verified(verification, prompt_logprobs, states, first_rows)

    def _hidden_layers(self, step: _Step) -> tuple[int, ...]:
        """The target layers whose outputs the drafters that follow any of the rows will read."""
        methods = {method for row in step.rows for method in self._followers[row.slot]}
        layers = {layer for method in methods for layer in self._drafters[method].hidden_layers or ()}
        return tuple(sorted(layers))

    def _layout(self, step: _Step) -> list[SequenceRows]:
        tree, rows, starts = step.tree, step.rows, step.starts
        sequences = [
            SequenceRows(row.slot, start, row.num_query) for row, start in zip(rows, starts, strict=True)
        ]
        if not tree.has_drafts:
            return sequences
        ancestors = None if tree.is_chain() else tree.ancestors()
        tokens, depths, indptr = tree.host.tokens, tree.host.depths, tree.host.indptr
        for r, i in enumerate(step.sampling):
            begin, end = indptr[r], indptr[r + 1]
            if end - begin == 1:
                continue
            assert rows[i].num_query == 1, "only decode rows draft"
            sequences[i] = SequenceRows(
                rows[i].slot,
                starts[i],
                1,
                tuple(tokens[begin + 1 : end]),
                tuple(starts[i] + depth for depth in depths[begin + 1 : end]),
                None if ancestors is None else ancestors[begin:end, begin:end],
            )
        return sequences

    def _prompt_logprobs(
        self, row: RowPlan, start: int, hidden: torch.Tensor, first_row: int
    ) -> Logprobs | None:
        """Log-probabilities of the prompt tokens that follow this row's tokens; None if not asked for."""
        count = self._table.sampling[row.slot].num_prompt_logprobs
        following = int(self._table.num_prompt_tokens[row.slot]) - 1 - start
        m = min(row.num_query, following)
        if count < 0 or m <= 0:
            return None
        logits = self._target.compute_logits(hidden[first_row : first_row + m])
        token_ids = self._table.tokens[row.slot, start + 1 : start + 1 + m]
        return self._sampler.prompt_logprobs(logits, torch.from_numpy(token_ids).to(logits.device), count)

    def _commit(
        self, step: _Step, verified: _Verified
    ) -> tuple[list[RowResult], list[TargetProgress | None]]:
        """Takes over what was accepted: KV to contiguous slots, tokens, penalties; one RowResult per row.

        Also what each row came to for the drafters that follow its sequence; None where nobody does.
        """
        emitted: list[list[int]] = []
        accepted: list[int] = []
        logprobs: list[Logprobs | None] = []
        verification = verified.verification
        if verification is not None:
            emitted, accepted = verification.token_ids, verification.num_accepted
            logprobs = verification.logprobs
            if step.tree.has_drafts:
                self._move_accepted(step, verification)
            self._table.append_each(step.slots, emitted)
            self._sampler.commit(step.slots, emitted)
        indptr, depths = step.tree.host.indptr, step.tree.host.depths
        request_of = {i: r for r, i in enumerate(step.sampling)}
        results: list[RowResult] = []
        progress: list[TargetProgress | None] = []
        for i, row in enumerate(step.rows):
            r = request_of.get(i)
            token_ids = [] if r is None else emitted[r]
            num_accepted = 0 if r is None else accepted[r]
            num_drafts = 0 if r is None else indptr[r + 1] - indptr[r] - 1
            done = self._progress(step, verified, i, r) if self._followers[row.slot] else None
            progress.append(done)
            results.append(
                RowResult(
                    slot=row.slot,
                    epoch=row.epoch,
                    token_ids=np.array(token_ids, dtype=np.int32),
                    method=row.method if num_drafts else SpeculationMethod.DISABLED,
                    num_draft_tokens=num_drafts,
                    draft_depth=max(depths[indptr[r] : indptr[r + 1]]) if num_drafts else 0,
                    num_accepted_tokens=num_accepted,
                    num_draft_computed=self._num_draft_computed(row.slot, done),
                    logprobs=None if r is None else logprobs[r],
                    prompt_logprobs=verified.prompt_logprobs.get(i),
                )
            )
        return results, progress

    def _progress(self, step: _Step, verified: _Verified, i: int, r: int | None) -> TargetProgress:
        """Row i (request r of the tree, if it draws a token) for its drafters; the table has its new tokens already."""
        row, start, first = step.rows[i], step.starts[i], verified.first_rows[i]
        rows = np.arange(first, first + row.num_query)
        if r is None or verified.verification is None:
            return TargetProgress(row.slot, start + row.num_query, 0, start, rows)
        path = verified.verification.path_nodes[r]
        if len(path) > 1:  # the accepted nodes' rows, root first
            rows = np.array(path) + (first - path[0])
        num_known = int(self._table.num_tokens[row.slot])
        return TargetProgress(row.slot, num_known, len(path) - 1, start, rows)

    def _num_draft_computed(self, slot: int, done: TargetProgress | None) -> int:
        """The draft model's mark once it has caught up: it alone can resume behind a mark of its own."""
        if done is None or SpeculationMethod.DRAFT_MODEL not in self._followers[slot]:
            return 0
        return self._drafters[SpeculationMethod.DRAFT_MODEL].num_computed_after(done)

    def _move_accepted(self, step: _Step, verification: Verification) -> None:
        """Brings the accepted path of each tree to the slots right behind the root (a chain is there already)."""
        sources: list[Int64Array] = []
        targets: list[Int64Array] = []
        for r, i in enumerate(step.sampling):
            row, first = step.rows[i], int(step.tree.indptr[r])
            offsets = [node - first for node in verification.path_nodes[r][1:]]
            if offsets == list(range(1, len(offsets) + 1)):
                continue
            root = step.starts[i] + row.num_query - 1
            sources.append(self._table.kv_slots(row.slot, np.array(offsets) + root))
            targets.append(self._table.kv_slots(row.slot, np.arange(1, len(offsets) + 1) + root))
        if sources:
            device = self._table.device
            source, target = np.concatenate(sources), np.concatenate(targets)
            self._pool.move(torch.from_numpy(source).to(device), torch.from_numpy(target).to(device))

    def _catch_up(self, step: _Step, progress: list[TargetProgress | None], hidden: TargetHidden) -> None:
        """Lets every drafter follow the sequences that it keeps state for, whatever method drafted."""
        prefilled: dict[SpeculationMethod, list[TargetProgress]] = {}
        decoded: dict[SpeculationMethod, list[TargetProgress]] = {}
        for row, done in zip(step.rows, progress, strict=True):
            if done is not None:
                kind = prefilled if row.num_query > 1 or not row.samples else decoded
                for method in self._followers[row.slot]:
                    kind.setdefault(method, []).append(done)
        for method, rows in prefilled.items():
            self._drafters[method].prefill(rows, hidden)
        for method, rows in decoded.items():
            self._drafters[method].catch_up(rows, hidden)
