"""One step on a rank: apply the plan's deltas, draft, verify, accept, publish, catch up; who runs is the plan's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.batching import SequenceRows, build_forward_batch
from gpu_worker.draft_tree import DraftTree, chain_tree, merge_trees
from gpu_worker.drafting.base import Drafter, DraftRequest, TargetProgress
from gpu_worker.kv_pool import PagedPool
from gpu_worker.models.base import CausalLM
from gpu_worker.request_state import RequestTable
from gpu_worker.sampling.sampler import Sampler, Verification
from shared_mem.enums import SpeculationMethod
from shared_mem.records import FOLLOWS, Logprobs, RowPlan, RowResult, StepPlan, StepResult

Publish = Callable[[StepResult], None]


@dataclass(frozen=True)
class _Step:
    """The rows of one plan laid out for the target's forward pass."""

    rows: tuple[RowPlan, ...]
    sampling: list[int]  # indices of rows that draw a token; request r of `tree` is rows[sampling[r]]
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
        step = self._draft(self._located(plan))
        verification, prompt_logprobs = self._verify(step)
        results, progress = self._commit(step, verification, prompt_logprobs)
        duration_us = int((time.perf_counter() - started) * 1e6)
        publish(StepResult(plan.step_id, tuple(results), duration_us))
        self._catch_up(step, progress)

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

    def _located(self, plan: StepPlan) -> StepPlan:
        """The plan with the num_computed of rows that were planned before anybody could know it."""
        assert all(self._table.epochs[row.slot] == row.epoch for row in plan.rows), (
            "rows are of admitted sequences"
        )
        rows = tuple(
            replace(row, num_computed=int(self._table.num_tokens[row.slot]) - 1)
            if row.num_computed == FOLLOWS
            else row
            for row in plan.rows
        )
        return replace(plan, rows=rows)

    def _draft(self, plan: StepPlan) -> _Step:
        """Asks each row's drafter for a tree; rows that do not draft are trees of one node."""
        sampling = [i for i, row in enumerate(plan.rows) if row.samples]
        by_method: dict[SpeculationMethod, list[int]] = {}
        for r, i in enumerate(sampling):
            row = plan.rows[i]
            drafts = row.num_draft_tokens > 0 and row.method in self._drafters
            by_method.setdefault(row.method if drafts else SpeculationMethod.DISABLED, []).append(r)
        trees: list[DraftTree] = []
        order: list[tuple[int, int]] = [(0, 0)] * len(sampling)
        for method, members in by_method.items():
            rows = [plan.rows[sampling[r]] for r in members]
            if method is SpeculationMethod.DISABLED:
                roots = [int(self._table.known(row.slot)[-1]) for row in rows]
                tree = chain_tree(roots, [[] for _ in rows], self._table.device)
            else:
                tree = self._drafters[method].propose(
                    [DraftRequest(r.slot, r.num_draft_tokens) for r in rows]
                )
            for position, r in enumerate(members):
                order[r] = (len(trees), position)
            trees.append(tree)
        if not trees:
            tree = chain_tree([], [], self._table.device)
        else:
            tree = trees[0] if len(trees) == 1 else merge_trees(trees, order)
        return _Step(plan.rows, sampling, tree)

    def _verify(self, step: _Step) -> tuple[Verification | None, dict[int, Logprobs]]:
        """The target's pass over all rows; acceptance of the sampling rows; log-probabilities of prompt rows."""
        sequences = self._layout(step)
        batch = build_forward_batch(self._table, sequences)
        hidden = self._target.forward(batch, self._pool, self._attention)  # [T, h]
        ends = batch.attention.qo_indptr[1:]
        prompt_logprobs = {
            i: logprobs
            for i, row in enumerate(step.rows)
            if (logprobs := self._prompt_logprobs(row, hidden, int(ends[i]) - sequences[i].num_rows))
            is not None
        }
        if not step.sampling:
            return None, prompt_logprobs
        nodes = np.diff(step.tree.indptr)
        wanted = np.concatenate(
            [np.arange(ends[i] - n, ends[i]) for i, n in zip(step.sampling, nodes.tolist(), strict=True)]
        )
        hidden = hidden[torch.from_numpy(wanted).to(hidden.device)]  # [N, h]
        slots = [step.rows[i].slot for i in step.sampling]
        if not self._sampler.needs_logits(slots):
            best = self._target.compute_argmax(hidden)
            return self._sampler.verify_greedy(step.tree, best), prompt_logprobs
        logits = self._target.compute_logits(hidden)  # [N, V]
        lengths = [int(self._table.num_tokens[slot]) for slot in slots]
        return self._sampler.verify(step.tree, logits, slots, lengths), prompt_logprobs

    def _layout(self, step: _Step) -> list[SequenceRows]:
        tree = step.tree
        request_of = {i: r for r, i in enumerate(step.sampling)}
        branching = tree.num_nodes > tree.num_requests and not tree.is_chain()
        ancestors = tree.ancestors() if branching else None
        tokens, depths = tree.tokens.tolist(), tree.depths.tolist()
        sequences = []
        for i, row in enumerate(step.rows):
            r = request_of.get(i)
            start, stop = (int(tree.indptr[r]), int(tree.indptr[r + 1])) if r is not None else (0, 1)
            if stop - start == 1:
                sequences.append(SequenceRows(row.slot, row.num_computed, row.num_query))
                continue
            assert row.num_query == 1, "only decode rows draft"
            root = row.num_computed  # index and rotary position of the root token
            mask = None if ancestors is None else ancestors[start:stop, start:stop]
            sequences.append(
                SequenceRows(
                    row.slot,
                    row.num_computed,
                    1,
                    tuple(tokens[start + 1 : stop]),
                    tuple(root + depth for depth in depths[start + 1 : stop]),
                    mask,
                )
            )
        return sequences

    def _prompt_logprobs(self, row: RowPlan, hidden: torch.Tensor, first_row: int) -> Logprobs | None:
        """Log-probabilities of the prompt tokens that follow this row's tokens; None if not asked for."""
        count = self._table.sampling[row.slot].num_prompt_logprobs
        following = int(self._table.num_prompt_tokens[row.slot]) - 1 - row.num_computed
        m = min(row.num_query, following)
        if count < 0 or m <= 0:
            return None
        logits = self._target.compute_logits(hidden[first_row : first_row + m])
        token_ids = self._table.tokens[row.slot, row.num_computed + 1 : row.num_computed + 1 + m]
        return self._sampler.prompt_logprobs(logits, torch.from_numpy(token_ids).to(logits.device), count)

    def _commit(
        self, step: _Step, verification: Verification | None, prompt_logprobs: dict[int, Logprobs]
    ) -> tuple[list[RowResult], list[TargetProgress]]:
        """Takes over what was accepted: KV to contiguous slots, tokens, penalties; one RowResult per row."""
        request_of = {i: r for r, i in enumerate(step.sampling)}
        depths = step.tree.depths.tolist()
        if verification is not None:
            self._move_accepted(step, verification)
        results: list[RowResult] = []
        progress: list[TargetProgress] = []
        for i, row in enumerate(step.rows):
            r = request_of.get(i)
            emitted: list[int] = []
            num_nodes, depth, accepted = 1, 0, 0
            if r is not None and verification is not None:
                start, stop = int(step.tree.indptr[r]), int(step.tree.indptr[r + 1])
                num_nodes, depth = stop - start, max(depths[start:stop])
                emitted, accepted = verification.token_ids[r], verification.num_accepted[r]
                self._table.append(row.slot, emitted)
                self._sampler.commit(row.slot, emitted)
            known = row.num_computed + row.num_query + len(emitted)
            done = TargetProgress(row.slot, known, accepted)
            drafter = self._drafters.get(row.method)
            progress.append(done)
            results.append(
                RowResult(
                    slot=row.slot,
                    epoch=row.epoch,
                    token_ids=np.array(emitted, dtype=np.int32),
                    method=row.method if num_nodes > 1 else SpeculationMethod.DISABLED,
                    num_draft_tokens=num_nodes - 1,
                    draft_depth=depth,
                    num_accepted_tokens=accepted,
                    num_draft_computed=0 if drafter is None else drafter.num_computed_after(done),
                    logprobs=None if r is None or verification is None else verification.logprobs[r],
                    prompt_logprobs=prompt_logprobs.get(i),
                )
            )
        return results, progress

    def _move_accepted(self, step: _Step, verification: Verification) -> None:
        """Brings the accepted path of each tree to the slots right behind the root (a chain is there already)."""
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for r, i in enumerate(step.sampling):
            row = step.rows[i]
            start = int(step.tree.indptr[r])
            offsets = [node - start for node in verification.path_nodes[r][1:]]
            if offsets == list(range(1, len(offsets) + 1)):
                continue
            device = self._table.device
            root = row.num_computed + row.num_query - 1
            sources.append(self._table.kv_slots(row.slot, torch.tensor(offsets, device=device) + root))
            targets.append(
                self._table.kv_slots(row.slot, torch.arange(1, len(offsets) + 1, device=device) + root)
            )
        if sources:
            self._pool.move(torch.cat(sources), torch.cat(targets))

    def _catch_up(self, step: _Step, progress: list[TargetProgress]) -> None:
        for method, drafter in self._drafters.items():
            rows = [
                (row, done) for row, done in zip(step.rows, progress, strict=True) if row.method is method
            ]
            prefilled = [done for row, done in rows if row.num_query > 1 or not row.samples]
            verified = [done for row, done in rows if row.num_query == 1 and row.samples]
            if prefilled:
                drafter.prefill(prefilled)
            if verified:
                drafter.catch_up(verified)
