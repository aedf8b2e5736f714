"""Names that every process agrees on; the values are the ones of protos/draftline/v1/common.proto."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class SpeculationMethod(enum.IntEnum):
    """Where draft tokens come from."""

    DISABLED = 1
    DRAFT_MODEL = 2
    NGRAM = 3
    EAGLE = 4
    MTP = 5
    MEDUSA = 6
    EAGLE3 = 7
    PORTFOLIO = 8

    @property
    def label(self) -> str:
        """The name used in flags, logs and metrics, e.g. `draft-model`; `off` for DISABLED."""
        return "off" if self is SpeculationMethod.DISABLED else self.name.lower().replace("_", "-")

    @property
    def bit(self) -> int:
        """The method's bit in a mask of methods (Admission.methods)."""
        return 1 << self.value

    def followers(self, loaded: Iterable[SpeculationMethod]) -> frozenset[SpeculationMethod]:
        """Whose drafters follow a sequence admitted with this method: a portfolio may choose any in any step."""
        return frozenset(loaded if self is SpeculationMethod.PORTFOLIO else {self})

    @classmethod
    def from_label(cls, label: str) -> SpeculationMethod:
        """The inverse of `label`. Raises ValueError, naming the choices, for an unknown one."""
        for method in cls:
            if method.label == label:
                return method
        choices = ", ".join(method.label for method in cls)
        raise ValueError(f"unknown speculation method {label!r}; one of: {choices}")


class AcceptanceRule(enum.IntEnum):
    """How the target decides which draft tokens to keep (gpu_worker/sampling/acceptance.py)."""

    REJECTION = 1
    TYPICAL = 2
    COUPLED = 3
    BLOCK = 4
    THRESHOLD = 5

    @property
    def label(self) -> str:
        """The name used in flags, e.g. `coupled`."""
        return self.name.lower()


class FinishReason(enum.IntEnum):
    """Why a sequence ended; failures are statuses, not finish reasons."""

    EOS = 1
    STOP = 2
    LENGTH = 3
    ABORTED = 4
