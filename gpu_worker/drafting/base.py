"""The protocol between the model runner and every drafting method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from gpu_worker.draft_tree import DraftTree
from gpu_worker.request_state import Int64Array
from gpu_worker.sampling.verification import UnreadVerification
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission


@dataclass(frozen=True)
class DraftRequest:
    """One decoding sequence that may be drafted for: its slot and the most draft tokens (tree nodes) it may get."""

    slot: int
    num_draft_tokens: int


@dataclass(frozen=True)
class TargetProgress:
    """What the target did for one sequence in this step, told to its drafters after the result went out.

    The step computed the sequence's tokens first .. first + len(rows) - 1 (accepted drafts included), whose hidden
    states are rows of the step's forward pass; num_accepted of them were draft tokens. num_known counts the tokens
    that a drafter may now consume: of a prefill chunk up to its end, else one more, the token that was drawn last.
    """

    slot: int
    num_known: int
    num_accepted: int
    first: int
    rows: Int64Array  # [computed tokens] indices into TargetHidden's rows

    @property
    def num_computed(self) -> int:
        """Leading tokens whose target KV is valid now."""
        return self.first + len(self.rows)


@dataclass(frozen=True)
class UnreadRows:
    """Rows of one decoding sequence in a step: its last known token, and at most one draft that nobody has judged yet.

    As far as the host knows them: how many of the rows count is in the UnreadVerification.
    """

    slot: int
    first: int  # position of the last known token
    num_rows: int  # 1 or 2
    first_row: int  # in TargetHidden
    request: int  # of the step's tree
    first_node: int  # in the step's tree


@dataclass(frozen=True)
class TargetHidden:
    """The target's hidden states of one step's T rows."""

    normed: torch.Tensor  # [T, h] behind the final norm
    captured: torch.Tensor | None  # [T, len(layers) * h] residual stream behind each of `layers`
    layers: tuple[int, ...]

    def features(self, layers: tuple[int, ...]) -> torch.Tensor:
        """[T, F]: the outputs of `layers` side by side, all of which were captured; of none: `normed`."""
        if not layers:
            return self.normed
        assert self.captured is not None, "the runner captures what its drafters name"
        if layers == self.layers:
            return self.captured
        h = self.normed.shape[1]
        parts = [self.captured[:, i * h : (i + 1) * h] for i in map(self.layers.index, layers)]
        return torch.cat(parts, dim=1)


class Drafter(Protocol):
    """One drafting method. Calls come in the order admit, prefill*, (propose, catch_up)*, release, per slot.

    A drafter never decides whether to draft: the plan says for which rows and how many tokens at most. It follows a
    sequence if the sequence's admission names it: then prefill or catch_up is called for every step of it, whatever
    method drafted.
    """

    @property
    def method(self) -> SpeculationMethod: ...

    @property
    def keeps_state(self) -> bool:
        """Of sequences, that is: has to follow them; False for what reads the tokens alone."""
        ...

    @property
    def hidden_layers(self) -> tuple[int, ...] | None:
        """Target layers that it reads; (): the last hidden state; None: nothing."""
        ...

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

    def prefill(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """Follows prefill rows of the target, after the result was published."""
        ...

    def catch_up(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """Follows decode rows: replaces provisional state by what the target accepted, after the publish."""
        ...

    def num_computed_after(self, progress: TargetProgress) -> int:
        """Leading tokens with valid draft KV once prefill or catch_up of this progress has run."""
        ...


@runtime_checkable
class FollowsWithoutLengths(Drafter, Protocol):
    """A drafter that follows a verification on the device, before the host knows how many drafts were accepted."""

    def follow(
        self, rows: Sequence[UnreadRows], verification: UnreadVerification, hidden: TargetHidden
    ) -> None:
        """Launches what the catch-up of these rows takes, and waits for nothing.

        Called before the lengths are read, in steps whose requests have one draft at most. catch_up of the same step
        comes all the same, once the result was published: for the sequences that it left out, and for what only the
        host keeps.
        """
        ...
