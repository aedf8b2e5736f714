"""One step on a rank: apply the plan's deltas, draft, verify, accept, publish, catch up; who runs is the plan's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.draft_tree import DraftTree, merge_trees, root_tree
from gpu_worker.drafting.base import (
    Drafter,
    DraftRequest,
    FollowsWithoutLengths,
    TargetHidden,
    TargetProgress,
    UnreadRows,
)
from gpu_worker.kv_pool import PagedPool
from gpu_worker.models.base import CausalLM
from gpu_worker.request_state import Int64Array, RequestTable
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.sampling.verification import UnreadVerification, Verification
from gpu_worker.target_pass import Step, TargetForward, TargetPass
from gpu_worker.transfers import to_device
from shared_mem.enums import SpeculationMethod
from shared_mem.records import FOLLOWS, Logprobs, RowPlan, RowResult, StepPlan, StepResult

Publish = Callable[[StepResult], None]


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
        self._forward = TargetForward(target, pool, attention, table)
        self._sampler = sampler
        self._table = table
        self._drafters = drafters
        self._unread_followers = {
            method: drafter
            for method, drafter in drafters.items()
            if isinstance(drafter, FollowsWithoutLengths)
        }
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
        target = self._forward.run(step, self._hidden_layers(step.rows))
        verification = self._verify(step, target)
        results, progress = self._commit(step, target, verification)
        duration_us = int((time.perf_counter() - started) * 1e6)
        publish(StepResult(plan.step_id, tuple(results), duration_us))
        self._catch_up(step, progress, target.hidden)

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

    def _draft(self, rows: tuple[RowPlan, ...]) -> Step:
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
                roots = self._table.last_tokens([rows[sampling[r]].slot for r in members])
                tree = root_tree(roots, self._table.device)
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
            tree = root_tree([], self._table.device)  # nobody samples
        else:
            tree = trees[0] if len(trees) == 1 else merge_trees(trees, order)
        return Step(rows, self._starts(rows), sampling, slots, tree)

    def _verify(self, step: Step, target: TargetPass) -> Verification | None:
        """Acceptance of the sampling rows; None if no row draws a token.

        Drafters that need no lengths for it follow before anything is read back, and so beside what follows here.
        """
        if not step.sampling:
            return None
        tree, slots, sampler = step.tree, step.slots, self._sampler
        lengths = self._table.num_tokens[slots]
        unread_rows = self._unread_rows(step, target)
        if not sampler.needs_logits(slots):
            best = self._target.compute_argmax(target.nodes)
            if not unread_rows:
                return sampler.verify_greedy(tree, best)
            return self._follow(sampler.verify_unread_greedy(tree, best), unread_rows, target)
        logits = self._target.compute_logits(target.nodes)  # [N, V]
        if not unread_rows:
            return sampler.verify(tree, logits, slots, lengths)
        unread = sampler.verify_unread(tree, logits, slots, lengths)
        return sampler.with_logprobs(self._follow(unread, unread_rows, target), logits, slots)

    def _unread_rows(self, step: Step, target: TargetPass) -> dict[SpeculationMethod, list[UnreadRows]]:
        """The decode rows that drafters can follow without lengths, if acceptance in this step stays on the device."""
        rows: dict[SpeculationMethod, list[UnreadRows]] = {}
        if not self._unread_followers or not step.tree.drafts_one_at_most:
            return rows
        if not self._sampler.draws_first(step.slots):
            return rows
        indptr = step.tree.shape.indptr
        for r, i in enumerate(step.sampling):
            row, count = step.rows[i], indptr[r + 1] - indptr[r]
            if row.num_query == 1:
                unread = UnreadRows(row.slot, step.starts[i], count, target.first_rows[i], r, indptr[r])
                for method in self._followers[row.slot]:
                    if method in self._unread_followers:
                        rows.setdefault(method, []).append(unread)
        return rows

    def _follow(
        self,
        unread: UnreadVerification,
        rows: dict[SpeculationMethod, list[UnreadRows]],
        target: TargetPass,
    ) -> Verification:
        """Launches the catch-up of `rows`, then reads what was accepted."""
        for method, of_method in rows.items():
            self._unread_followers[method].follow(of_method, unread, target.hidden)
        return unread.read()

    def _hidden_layers(self, rows: tuple[RowPlan, ...]) -> tuple[int, ...]:
        """The target layers whose outputs the drafters that follow any of the rows will read."""
        methods = {method for row in rows for method in self._followers[row.slot]}
        layers = {layer for method in methods for layer in self._drafters[method].hidden_layers or ()}
        return tuple(sorted(layers))

    def _prompt_logprobs(self, step: Step, target: TargetPass) -> dict[int, Logprobs]:
        """By row, log-probabilities of the prompt tokens that follow a row's tokens, where they are asked for."""
        result: dict[int, Logprobs] = {}
        for i, row in enumerate(step.rows):
            if row.num_query == 1 and row.samples:
                continue  # no token of the prompt follows
            count, start = self._table.sampling[row.slot].num_prompt_logprobs, step.starts[i]
            m = min(row.num_query, int(self._table.num_prompt_tokens[row.slot]) - 1 - start)
            if count < 0 or m <= 0:
                continue
            first = target.first_rows[i]
            logits = self._target.compute_logits(target.hidden.normed[first : first + m])
            token_ids = self._table.tokens[row.slot, start + 1 : start + 1 + m]
            result[i] = self._sampler.prompt_logprobs(logits, to_device(token_ids, logits.device), count)
        return result

    def _commit(
        self, step: Step, target: TargetPass, verification: Verification | None
    ) -> tuple[list[RowResult], list[TargetProgress | None]]:
        """Takes over what was accepted: KV to contiguous slots, tokens, penalties; one RowResult per row.

        Also what each row came to for the drafters that follow its sequence; None where nobody does.
        """
        emitted: list[list[int]] = []
        accepted: list[int] = []
        logprobs: list[Logprobs | None] = []
        prompt_logprobs = self._prompt_logprobs(step, target)
        if verification is not None:
            emitted, accepted = verification.token_ids, verification.num_accepted
            logprobs = verification.logprobs
            if step.tree.has_drafts:
                self._move_accepted(step, verification)
            self._table.append_each(step.slots, emitted)
            self._sampler.commit(step.slots, emitted)
        indptr, depths = step.tree.shape.indptr, step.tree.shape.depths
        request_of = {i: r for r, i in enumerate(step.sampling)}
        results: list[RowResult] = []
        progress: list[TargetProgress | None] = []
        for i, row in enumerate(step.rows):
            r = request_of.get(i)
            token_ids = [] if r is None else emitted[r]
            num_accepted = 0 if r is None else accepted[r]
            num_drafts = 0 if r is None else indptr[r + 1] - indptr[r] - 1
            draft_depth = 0 if r is None or not num_drafts else max(depths[indptr[r] : indptr[r + 1]])
            done = self._progress(step, target, verification, i, r) if self._followers[row.slot] else None
            progress.append(done)
            results.append(
                RowResult(
                    slot=row.slot,
                    epoch=row.epoch,
                    token_ids=np.array(token_ids, dtype=np.int32),
                    method=row.method if num_drafts else SpeculationMethod.DISABLED,
                    num_draft_tokens=num_drafts,
                    draft_depth=draft_depth,
                    num_accepted_tokens=num_accepted,
                    num_draft_computed=self._num_draft_computed(row.slot, done),
                    logprobs=None if r is None else logprobs[r],
                    prompt_logprobs=prompt_logprobs.get(i),
                )
            )
        return results, progress

    def _progress(
        self, step: Step, target: TargetPass, verification: Verification | None, i: int, r: int | None
    ) -> TargetProgress:
        """Row i (request r of the tree, if it draws a token) for its drafters; the table has its new tokens already."""
        row, start, first = step.rows[i], step.starts[i], target.first_rows[i]
        rows = np.arange(first, first + row.num_query)
        if r is None or verification is None:
            return TargetProgress(row.slot, start + row.num_query, 0, start, rows)
        path = verification.path_nodes[r]
        if len(path) > 1:  # the accepted nodes' rows, root first
            rows = np.array(path) + (first - path[0])
        num_known = int(self._table.num_tokens[row.slot])
        return TargetProgress(row.slot, num_known, len(path) - 1, start, rows)

    def _num_draft_computed(self, slot: int, done: TargetProgress | None) -> int:
        """The draft model's mark once it has caught up: it alone can resume behind a mark of its own."""
        if done is None or SpeculationMethod.DRAFT_MODEL not in self._followers[slot]:
            return 0
        return self._drafters[SpeculationMethod.DRAFT_MODEL].num_computed_after(done)

    def _move_accepted(self, step: Step, verification: Verification) -> None:
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
            self._pool.move(to_device(source, device), to_device(target, device))

    def _catch_up(self, step: Step, progress: list[TargetProgress | None], hidden: TargetHidden) -> None:
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
