"""One step on a rank: apply the plan's deltas, draft, verify, accept, publish, catch up; who runs is the plan's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.batching import SequenceRows, build_forward_batch
from gpu_worker.draft_tree import DraftTree, merge_trees, root_tree
from gpu_worker.drafting.base import Drafter, DraftRequest, TargetProgress
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
        verification, prompt_logprobs = self._verify(step)
        results, progress = self._commit(step, verification, prompt_logprobs)
        duration_us = int((time.perf_counter() - started) * 1e6)
        publish(StepResult(plan.step_id, tuple(results), duration_us))
        self._catch_up(progress)

    def _apply(self, plan: StepPlan) -> None:
        for release in plan.releases:
            self._table.release(release)
            self._sampler.release(release.slot)
            for drafter in self._drafters.values():
                drafter.release(release.slot)
        for admission in plan.admissions:
            self._table.admit(admission)
            self._sampler.admit(
                admission.slot, admission.sampling, admission.token_ids, admission.num_prompt_tokens
            )
            for drafter in self._drafters.values():
                drafter.admit(admission)
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

    def _verify(self, step: _Step) -> tuple[Verification | None, dict[int, Logprobs]]:
        """The target's pass over all rows; acceptance of the sampling rows; log-probabilities of prompt rows."""
        sequences = self._layout(step)
        batch = build_forward_batch(self._table, sequences)
        hidden = self._target.forward(batch, self._pool, self._attention)  # [T, h]
        ends = batch.attention.qo_indptr[1:]
        prompt_logprobs = {
            i: logprobs
            for i, row in enumerate(step.rows)
            if (row.num_query > 1 or not row.samples)  # a prompt's tokens follow
            and (logprobs := self._prompt_logprobs(row, step.starts[i], hidden, int(ends[i]) - row.num_query))
            is not None
        }
        if not step.sampling:
            return None, prompt_logprobs
        tree = step.tree
        if tree.num_nodes < batch.num_rows:
            nodes = np.diff(tree.indptr)
            shifts = ends[step.sampling] - tree.indptr[1:]  # a request's nodes are its last rows
            wanted = np.arange(tree.num_nodes) + np.repeat(shifts, nodes)
            hidden = hidden.index_select(0, torch.from_numpy(wanted).to(hidden.device))  # [N, h]
        if not self._sampler.needs_logits(step.slots):
            best = self._target.compute_argmax(hidden)
            return self._sampler.verify_greedy(tree, best), prompt_logprobs
        logits = self._target.compute_logits(hidden)  # [N, V]
        lengths = self._table.num_tokens[step.slots]
        return self._sampler.verify(tree, logits, step.slots, lengths), prompt_logprobs

    def _layout(self, step: _Step) -> list[SequenceRows]:
        tree, rows, starts = step.tree, step.rows, step.starts
        sequences = [
            SequenceRows(row.slot, start, row.num_query) for row, start in zip(rows, starts, strict=True)
        ]
        if not tree.has_drafts:
            return sequences
        ancestors = None if tree.is_chain() else tree.ancestors()
        tokens, depths, indptr = tree.tokens.tolist(), tree.depths.tolist(), tree.indptr.tolist()
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
        self, step: _Step, verification: Verification | None, prompt_logprobs: dict[int, Logprobs]
    ) -> tuple[list[RowResult], list[tuple[RowPlan, TargetProgress]]]:
        """Takes over what was accepted: KV to contiguous slots, tokens, penalties; one RowResult per row.

        Also what each row came to for the drafter that follows it.
        """
        emitted: list[list[int]] = []
        accepted: list[int] = []
        logprobs: list[Logprobs | None] = []
        if verification is not None:
            emitted, accepted = verification.token_ids, verification.num_accepted
            logprobs = verification.logprobs
            if step.tree.has_drafts:
                self._move_accepted(step, verification)
            self._table.append_each(step.slots, emitted)
            self._sampler.commit(step.slots, emitted)
        indptr = step.tree.indptr.tolist()
        depths = step.tree.depths.tolist() if step.tree.has_drafts else []
        request_of = {i: r for r, i in enumerate(step.sampling)}
        results: list[RowResult] = []
        progress: list[tuple[RowPlan, TargetProgress]] = []
        for i, (row, start) in enumerate(zip(step.rows, step.starts, strict=True)):
            r = request_of.get(i)
            token_ids = [] if r is None else emitted[r]
            num_accepted = 0 if r is None else accepted[r]
            num_drafts = 0 if r is None else indptr[r + 1] - indptr[r] - 1
            num_draft_computed = 0
            if (drafter := self._drafters.get(row.method)) is not None:
                done = TargetProgress(row.slot, start + row.num_query + len(token_ids), num_accepted)
                progress.append((row, done))
                num_draft_computed = drafter.num_computed_after(done)
            results.append(
                RowResult(
                    slot=row.slot,
                    epoch=row.epoch,
                    token_ids=np.array(token_ids, dtype=np.int32),
                    method=row.method if num_drafts else SpeculationMethod.DISABLED,
                    num_draft_tokens=num_drafts,
                    draft_depth=max(depths[indptr[r] : indptr[r + 1]]) if num_drafts else 0,
                    num_accepted_tokens=num_accepted,
                    num_draft_computed=num_draft_computed,
                    logprobs=None if r is None else logprobs[r],
                    prompt_logprobs=prompt_logprobs.get(i),
                )
            )
        return results, progress

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

    def _catch_up(self, progress: list[tuple[RowPlan, TargetProgress]]) -> None:
        for method, drafter in self._drafters.items():
            rows = [(row, done) for row, done in progress if row.method is method]
            prefilled = [done for row, done in rows if row.num_query > 1 or not row.samples]
            verified = [done for row, done in rows if row.num_query == 1 and row.samples]
            if prefilled:
                drafter.prefill(prefilled)
            if verified:
                drafter.catch_up(verified)
