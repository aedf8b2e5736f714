"""Between target logits and the step's result: which drafts are accepted, which token follows, and logprobs.

The model runner calls `verify` after the target's forward pass and `commit` with what it emitted; drafters
that sample call `propose` on their own logits, so that drafts are drawn under the very rule that judges them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.draft_tree import DraftTree
from gpu_worker.kernels.native import ThreadTeam
from gpu_worker.sampling.acceptance import (
    Decision,
    accept_by_block,
    accept_by_bound,
    accept_by_rejection,
    follow_drawn,
    typical_bound,
)
from gpu_worker.sampling.law import Law
from gpu_worker.sampling.logits import LogitsProcessor, Rows
from gpu_worker.sampling.logprobs import raw_logprobs, rows_of
from gpu_worker.sampling.random import Purpose, coupled_keys, round_keys
from gpu_worker.sampling.slot_states import Int64Array, SlotStates, to_tensor
from gpu_worker.sampling.target_draws import GREEDY, Kind, TargetDraws
from gpu_worker.sampling.tree_walk import HostTree
from gpu_worker.sampling.verification import (
    UnreadVerification,
    Verification,
    accept_single_drafts,
    verification_of_drawn,
    verification_of_paths,
)
from shared_mem.enums import AcceptanceRule
from shared_mem.records import Logprobs, SamplingRecord

Integers = Sequence[int] | Int64Array


@dataclass(frozen=True)
class PlainDraws:
    """Drafts ranked by log q alone, or, where the temperature is above 0, by log q + coupled noise."""

    temperatures: npt.NDArray[np.float32] | None  # [R]; None: all 0
    seeds: Int64Array | None  # [R]


class Sampler:
    """Sampling state of `num_slots` slots over a vocabulary of `vocab_size` ids; slots of any rules in one
    batch.

    Logits may be wider than vocab_size (padded embeddings); ids beyond it are never drawn.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device | str,
        team: ThreadTeam | None = None,
    ) -> None:
        """team: threads of the CPU kernels, which draw the same tokens as torch in a fraction of the time."""
        self._vocab_size = vocab_size
        self._states = SlotStates(num_slots, vocab_size, torch.device(device))
        self._processor = LogitsProcessor(self._states, team)
        self._draws = TargetDraws(self._states, self._processor)

    def admit(
        self,
        slot: int,
        record: SamplingRecord,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        num_prompt_tokens: int,
    ) -> None:
        """A sequence takes `slot`: token_ids [n] are its prompt and what was generated so far."""
        self._states.admit(slot, record, token_ids, num_prompt_tokens)

    def release(self, slot: int) -> None:
        """Forgets the slot's sequence; releasing a free slot does nothing."""
        self._states.release(slot)

    def commit(self, slots: Integers, token_ids: Sequence[Sequence[int]]) -> None:
        """The step emitted token_ids[r] (accepted drafts, the target's own token) in slots[r]: each counts once."""
        if self._states.penalties:
            for slot, tokens in zip(slots, token_ids, strict=True):
                self._states.commit(int(slot), tokens)

    def needs_logits(self, slots: Integers) -> bool:
        """Whether verifying these slots takes more than the best id of every node.

        Greedy sequences without penalties, bias, bans or log-probabilities need only that: `verify_greedy`.
        """
        return not self._states.needs_logits.isdisjoint(np.asarray(slots).tolist())

    def verify_greedy(self, tree: DraftTree, best: torch.Tensor) -> Verification:
        """`verify` for slots that do not need logits: best [N] int64 is the target's best id at every node."""
        return verification_of_drawn(tree, best.tolist())

    def draws_first(self, slots: Integers) -> bool:
        """Whether acceptance in these slots only compares drafts with the target's own tokens: `verify_unread`."""
        kinds = self._draws.by_kind(np.array(slots, dtype=np.int64))
        return all(kind.draws_first for kind, _ in kinds)

    def verify_unread_greedy(self, tree: DraftTree, best: torch.Tensor) -> UnreadVerification:
        """`verify_greedy` of at most one draft per request without waiting for the device."""
        return accept_single_drafts(tree, best)

    def verify_unread(
        self, tree: DraftTree, logits: torch.Tensor, slots: Integers, num_tokens: Integers
    ) -> UnreadVerification:
        """`verify` of at most one draft per request, in slots that draw first, without waiting for the device.

        Only what truncated and penalised slots look at is still read. `with_logprobs` adds the log-probabilities.
        """
        request_slots, first = np.array(slots, dtype=np.int64), np.array(num_tokens, dtype=np.int64)
        drawn = self._draws.of_nodes(tree, self._in_vocabulary(logits), request_slots, first)
        return accept_single_drafts(tree, drawn)

    def with_logprobs(
        self, verification: Verification, logits: torch.Tensor, slots: Integers
    ) -> Verification:
        """Adds the log-probabilities that the slots ask for, of logits [N, V] as in `verify`."""
        paths, emitted = verification.path_nodes, verification.token_ids
        request_slots = np.array(slots, dtype=np.int64)
        logprobs = self._logprobs(self._in_vocabulary(logits), request_slots, paths, emitted)
        return replace(verification, logprobs=logprobs)

    def verify(
        self, tree: DraftTree, logits: torch.Tensor, slots: Integers, num_tokens: Integers
    ) -> Verification:
        """Judges the drafts of every request and draws the token behind the accepted ones.

        logits [N, V] float32: the target's, one row per node. Request r is in slots[r] and has num_tokens[r]
        known tokens, the last of which is its root: a node at depth d draws the token at position
        num_tokens[r] + d. Changes no state: the caller commits what it emits.
        """
        logits = self._in_vocabulary(logits)
        host = HostTree.of(tree)
        request_slots = np.array(slots, dtype=np.int64)
        first = np.array(num_tokens, dtype=np.int64)
        last_nodes = np.zeros(len(slots), dtype=np.int64)
        own_tokens = np.zeros(len(slots), dtype=np.int64)
        for kind, requests in self._draws.by_kind(request_slots):
            nodes = np.flatnonzero(np.isin(host.owner, requests))
            rows = Rows(
                index=nodes,
                slots=request_slots[host.owner[nodes]],
                positions=first[host.owner[nodes]] + host.depths[nodes],
                path=host.drafts_on_path,
            )
            decision = self._decide(kind, host, requests, rows, logits, first, request_slots, tree.q)
            last_nodes[requests] = decision.last_nodes
            own_tokens[requests] = decision.tokens
        return self.with_logprobs(verification_of_paths(host, last_nodes, own_tokens), logits, slots)

    def proposes_best(self, slots: list[int]) -> bool:
        """Whether `propose` would only take the best id of each of these slots' draft logits."""
        return self._states.draws_drafts.isdisjoint(slots)

    def draws_plainly(self, slot: int) -> bool:
        """Whether drafts of this slot are ranked by log q alone, or by log q + coupled noise: `propose_unread`."""
        return slot not in self._states.draws_otherwise

    def plain_draws(self, slots: list[int]) -> PlainDraws | None:
        """How drafts of these slots are ranked where that is all there is to it; None where any needs more."""
        states = self._states
        if not states.draws_otherwise.isdisjoint(slots):
            return None
        if states.draws_drafts.isdisjoint(slots):
            return PlainDraws(None, None)
        parameters = states.parameters[slots]
        drawn = [slot in states.draws_drafts for slot in slots]
        temperatures = np.where(drawn, parameters["temperature"], np.float32(0))
        return PlainDraws(temperatures.astype(np.float32), parameters["seed"].copy())

    def propose(
        self, logits: torch.Tensor, slots: list[int], positions: list[int], drafted: list[list[int]]
    ) -> tuple[list[int], torch.Tensor | None]:
        """The next draft token of M sequences, from the DRAFT model's logits [M, V] float32.

        positions[i]: absolute position of the token to propose; drafted[i]: what this round drafted before it
        (penalties see it, and positions[i] - len(drafted[i]) is the round's first position). Coupled slots
        use the target's own noise at that position; rejection and block slots sample, and their rows of q [M, V] say
        from what (zero rows elsewhere; None if nobody sampled); greedy, typical and threshold slots take the
        best token.
        """
        logits = self._in_vocabulary(logits)
        row_slots = np.array(slots, dtype=np.int64)
        at = np.array(positions, dtype=np.int64)
        depths = np.array([len(path) for path in drafted], dtype=np.int64)
        tokens = np.zeros(len(slots), dtype=np.int64)
        q: torch.Tensor | None = None
        for kind, members in self._draws.by_kind(row_slots):
            rows = Rows(members, row_slots[members], at[members], drafted.__getitem__)
            if kind.rule in (AcceptanceRule.COUPLED, AcceptanceRule.REJECTION, AcceptanceRule.BLOCK):
                law = self._processor.law(self._processor.adjusted(logits, rows), rows.slots)
                seeds = self._seeds(rows.slots, logits.device)
                if kind.rule == AcceptanceRule.COUPLED:
                    keys = coupled_keys(seeds, to_tensor(rows.positions, logits.device))
                else:
                    first = to_tensor(rows.positions - depths[members], logits.device)
                    depth = to_tensor(depths[members], logits.device)
                    keys = round_keys(seeds, first, depth, Purpose.DRAFT)
                    q = logits.new_zeros(logits.shape) if q is None else q
                    q[to_tensor(members, logits.device)] = law.scatter(law.probabilities(), logits.shape[1])
                tokens[members] = law.draw(keys).cpu().numpy()
            else:
                best = Kind(GREEDY, kind.adjusts)
                tokens[members] = self._draws.draw(best, logits, rows).cpu().numpy()
        return tokens.tolist(), q

    def propose_unread(self, logits: torch.Tensor, slots: list[int], positions: torch.Tensor) -> torch.Tensor:
        """`propose` for slots that draw plainly, whose positions [M] int64 the host does not know yet: [M] int64."""
        return self._draws.of_drafts(self._in_vocabulary(logits), slots, positions)

    def propose_children(
        self,
        logits: torch.Tensor,
        slots: list[int],
        positions: list[int],
        drafted: list[list[int]],
        count: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` next tokens of M tree nodes that their rule is most likely to accept; arguments as in `propose`.

        (ids [M, count] int64, log-probabilities [M, count]), best first; what cannot be drawn is -inf. Coupled slots
        rank by log q + the target's own noise, so that the first child is what `propose` would give. Under all other
        rules a tree's children are deterministic: the most probable ones.
        """
        logits = self._in_vocabulary(logits)
        row_slots = np.array(slots, dtype=np.int64)
        at = np.array(positions, dtype=np.int64)
        ids = torch.zeros(len(slots), count, dtype=torch.int64, device=logits.device)
        values = torch.full((len(slots), count), -torch.inf, device=logits.device)
        for kind, members in self._draws.by_kind(row_slots):
            rows = Rows(members, row_slots[members], at[members], drafted.__getitem__)
            adjusted = self._processor.adjusted(logits, rows)
            keys = None
            if kind.rule == GREEDY:
                law = Law(adjusted, None)
            else:
                law = self._processor.law(adjusted, rows.slots)
                if kind.rule == AcceptanceRule.COUPLED:
                    seeds = self._seeds(rows.slots, logits.device)
                    keys = coupled_keys(seeds, to_tensor(rows.positions, logits.device))
            best, log_probs = law.best(count, keys)
            index = to_tensor(members, logits.device)
            ids[index, : best.shape[1]] = best
            values[index, : best.shape[1]] = log_probs
        return ids, values

    def prompt_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_alternatives: int
    ) -> Logprobs:
        """Log-probabilities of the prompt tokens token_ids [m] under the rows before them, logits [m, V]."""
        return raw_logprobs(self._in_vocabulary(logits), token_ids, num_alternatives)

    def _decide(
        self,
        kind: Kind,
        host: HostTree,
        requests: Int64Array,
        rows: Rows,
        logits: torch.Tensor,
        first: Int64Array,
        request_slots: Int64Array,
        q: torch.Tensor | None,
    ) -> Decision:
        """The decision for `requests` [r], all of one kind; `rows` are all their nodes."""
        device = logits.device
        if kind.draws_first:
            drawn = np.zeros(len(host.tokens), dtype=np.int64)
            drawn[rows.index] = self._draws.draw(kind, logits, rows).cpu().numpy()
            return follow_drawn(host, requests, drawn)
        law = self._processor.law(self._processor.adjusted(logits, rows), rows.slots)
        law_rows = np.zeros(len(host.tokens), dtype=np.int64)
        law_rows[rows.index] = np.arange(len(rows))
        if kind.rule in (AcceptanceRule.REJECTION, AcceptanceRule.BLOCK):
            q = None if q is None else self._in_vocabulary(q)
            return self._accept_exactly(kind.rule, host, requests, law, law_rows, request_slots, first, q)

        def draw(last: Law, owners: Int64Array, nodes: Int64Array) -> torch.Tensor:
            # These rules look at no random number, so the coupled noise of the position is still unused.
            positions = to_tensor(first[owners] + host.depths[nodes], device)
            return last.draw(coupled_keys(self._seeds(request_slots[owners], device), positions))

        accepts = self._bound(AcceptanceRule(kind.rule), request_slots)
        return accept_by_bound(host, requests, law, law_rows, accepts, draw)

    def _accept_exactly(
        self,
        rule: int,
        host: HostTree,
        requests: Int64Array,
        law: Law,
        law_rows: Int64Array,
        request_slots: Int64Array,
        first: Int64Array,
        q: torch.Tensor | None,
    ) -> Decision:
        """The rejection rule; where `rule` is BLOCK, chains with sampled drafts are judged as blocks.

        For chains without sampled drafts both are the same: either keeps the first i drafts with the probability that
        the target writes them, which no lossless rule exceeds.
        """
        device = law.log_weights.device
        as_block = np.zeros(len(requests), dtype=np.bool_)
        if rule == AcceptanceRule.BLOCK and q is not None:
            sampled = np.unique(host.owner[q.any(dim=1).cpu().numpy()])
            as_block = host.are_chains(requests) & np.isin(requests, sampled)
        nodes, tokens = host.roots[requests].copy(), np.zeros(len(requests), dtype=np.int64)
        for block in (False, True):
            some = np.flatnonzero(as_block == block)
            if not len(some):
                continue
            seeds = self._seeds(request_slots[requests[some]], device)
            first_positions = to_tensor(first[requests[some]], device)
            if block and q is not None:
                decision = accept_by_block(host, requests[some], law, law_rows, seeds, first_positions, q)
            else:
                decision = accept_by_rejection(host, requests[some], law, law_rows, seeds, first_positions, q)
            nodes[some], tokens[some] = decision.last_nodes, decision.tokens
        return Decision(nodes, tokens)

    def _bound(
        self, rule: AcceptanceRule, request_slots: Int64Array
    ) -> Callable[[torch.Tensor, torch.Tensor, Int64Array], torch.Tensor]:
        """The test of `accept_by_bound` for the typical and threshold rules."""

        def accepts(mass: torch.Tensor, entropy: torch.Tensor, owners: Int64Array) -> torch.Tensor:
            parameters = self._states.parameters[request_slots[owners]]
            if rule == AcceptanceRule.THRESHOLD:
                return mass >= to_tensor(parameters["threshold"], mass.device)
            epsilon = to_tensor(parameters["typical_epsilon"], mass.device)
            delta = to_tensor(parameters["typical_delta"], mass.device)
            return mass > typical_bound(entropy, epsilon, delta)

        return accepts

    def _logprobs(
        self, logits: torch.Tensor, slots: Int64Array, paths: list[list[int]], emitted: list[list[int]]
    ) -> list[Logprobs | None]:
        wanted = self._states.parameters["num_logprobs"][slots]
        result: list[Logprobs | None] = [None] * len(slots)
        requests = np.flatnonzero(wanted >= 0).tolist()
        if not requests:
            return result
        nodes = torch.tensor([node for r in requests for node in paths[r]], device=logits.device)
        tokens = torch.tensor([token for r in requests for token in emitted[r]], device=logits.device)
        together = raw_logprobs(logits.index_select(0, nodes), tokens, int(wanted.max()))
        start = 0
        for r in requests:
            end = start + len(emitted[r])
            result[r] = rows_of(together, start, end, int(wanted[r]))
            start = end
        return result

    def _seeds(self, slots: Int64Array, device: torch.device) -> torch.Tensor:
        return to_tensor(self._states.parameters["seed"][slots], device)

    def _in_vocabulary(self, values: torch.Tensor) -> torch.Tensor:
        assert values.shape[1] >= self._vocab_size, "logits are at least as wide as the vocabulary"
        return values[:, : self._vocab_size]
