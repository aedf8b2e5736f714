"""The protocol between the model runner and every drafting method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpu_worker.draft_tree import DraftTree
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission


@dataclass(frozen=True)
class DraftRequest:
    """One decoding sequence that may be drafted for: its slot and the most draft tokens (tree nodes) it may get."""

    slot: int
    num_draft_tokens: int


@dataclass(frozen=True)
class TargetProgress:
    """What the target did for one sequence in this step, told to its drafter after the result went out.

    num_known: tokens of the sequence that the drafter may now consume (of a prefill chunk: up to its end, and the
    first sampled token if there is one). num_accepted: draft tokens kept (0 for a prefill row).
    """

    slot: int
    num_known: int
    num_accepted: int


class Drafter(Protocol):
    """One drafting method. Calls come in the order admit, prefill*, (propose, catch_up)*, release, per slot.

    A drafter never decides whether to draft: the plan says for which rows and how many tokens at most.
    """

    method: SpeculationMethod

    def admit(self, admission: Admission) -> None:
        """A sequence takes a slot; its first num_draft_cached_tokens already have valid draft KV."""
        ...

    def release(self, slot: int) -> None:
        """The slot's sequence is gone."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTree:
        """A tree per request, in order, each rooted at the sequence's last known token.

        A request may get fewer nodes than it allows, or only its root (nothing to propose).
        """
        ...

    def prefill(self, progress: Sequence[TargetProgress]) -> None:
        """Follows prefill rows of the target, after the result was published."""
        ...

    def catch_up(self, progress: Sequence[TargetProgress]) -> None:
        """Follows verified rows: replaces provisional state by what the target accepted, after the publish."""
        ...

    def num_computed_after(self, progress: TargetProgress) -> int:
        """Leading tokens with valid draft KV once prefill or catch_up of this progress has run."""
        ...
