"""Names of the protocol's enums as flags and reports spell them, e.g. `off`, `draft-model`, `coupled`."""

from __future__ import annotations

from typing import Any

from draftline.errors import invalid_field
from draftline.v1 import common_pb2, generation_pb2, info_pb2


def _labels(enum: Any, prefix: str, renamed: dict[str, str]) -> dict[str, int]:
    """label -> number of every value but UNSPECIFIED, read from the stubs: a new value needs no edit here.

    enum: protobuf's wrapper of an enum.
    """
    labels = {}
    for name, number in enum.items():
        if number:
            bare = name.removeprefix(prefix).lower().replace("_", "-")
            labels[renamed.get(bare, bare)] = number
    return labels


METHODS = _labels(common_pb2.SpeculationMethod, "SPECULATION_METHOD_", {"disabled": "off"})
ACCEPTANCE_RULES = _labels(common_pb2.AcceptanceRule, "ACCEPTANCE_RULE_", {"rejection-sampling": "rejection"})
FINISH_REASONS = _labels(generation_pb2.FinishReason, "FINISH_REASON_", {})
SERVING_STATES = _labels(info_pb2.ServingState, "SERVING_STATE_", {})


def number_of(labels: dict[str, int], label: str, field: str) -> Any:
    """The enum number of a label, an int that fits whichever enum the labels are of.

    Raises InvalidArgumentError naming `field` and the choices.
    """
    if label not in labels:
        raise invalid_field(field, f"{label!r} is not one of {', '.join(labels)}")
    return labels[label]


def label_of(labels: dict[str, int], number: int) -> str:
    """The label of an enum number: "" for 0 (unspecified), the digits for a number newer than these stubs."""
    if number == 0:
        return ""
    return next((label for label, value in labels.items() if value == number), str(number))
