"""Which sequence runs in which slot of the worker; epochs tell a slot's tenants apart."""

from __future__ import annotations

from scheduler_svc.scheduler.request import Sequence, SequenceState
from shared_mem.records import SlotRelease


class SlotTable:
    """`num_slots` slots. A slot is free as soon as its sequence leaves: plans release before they admit."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._epochs = [0] * num_slots
        self._tenants: dict[int, Sequence] = {}
        self._releases: list[SlotRelease] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a slot, in no order."""
        return list(self._tenants.values())

    def __len__(self) -> int:
        return len(self._tenants)

    def assign(self, sequence: Sequence) -> None:
        """Gives a waiting sequence a free slot under a new epoch."""
        slot = self._free.pop()
        self._epochs[slot] += 1
        sequence.slot, sequence.epoch = slot, self._epochs[slot]
        sequence.state = SequenceState.RUNNING
        self._tenants[slot] = sequence

    def vacate(self, sequence: Sequence) -> None:
        """Takes the slot back; the worker learns of it with the next plan."""
        assert self._tenants.pop(sequence.slot) is sequence, "a slot has one tenant"
        self._releases.append(SlotRelease(sequence.slot, sequence.epoch))
        self._free.append(sequence.slot)
        sequence.slot = -1

    def tenant(self, slot: int, epoch: int) -> Sequence | None:
        """The sequence that (slot, epoch) names, unless it has left."""
        sequence = self._tenants.get(slot)
        return sequence if sequence is not None and sequence.epoch == epoch else None

    def take_releases(self) -> tuple[SlotRelease, ...]:
        """What the next plan tells the worker to forget."""
        releases, self._releases = tuple(self._releases), []
        return releases
