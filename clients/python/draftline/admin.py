"""AdminService for both clients: requests out, settings in force back. It answers on the admin address only."""

from __future__ import annotations

from dataclasses import dataclass

from draftline.labels import METHODS, label_of, number_of
from draftline.requests import set_field
from draftline.v1 import admin_pb2, info_pb2


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Speculation as an operator set it. disable_at_batch_size: sequences from which on nobody drafts; 0 is never."""

    method: str
    max_draft_tokens: int
    disable_at_batch_size: int


@dataclass(frozen=True, slots=True)
class SpeculationChange:
    """What is in force after a change, and the first step planned with it."""

    settings: SpeculationSettings
    effective_step: int


def set_speculation_request(
    method: str | None, max_draft_tokens: int | None, disable_at_batch_size: int | None
) -> admin_pb2.SetSpeculationRequest:
    """The message that changes what is not None. Raises InvalidArgumentError for what it cannot carry."""
    request = admin_pb2.SetSpeculationRequest()
    if method is not None:
        request.method = number_of(METHODS, method, "method")
    for name, value in (
        ("max_draft_tokens", max_draft_tokens),
        ("disable_at_batch_size", disable_at_batch_size),
    ):
        set_field(request, name, value, "")
    return request


def settings_from(
    settings: info_pb2.SpeculationSettings | admin_pb2.SetSpeculationResponse,
) -> SpeculationSettings:
    """The typed form of the settings in an answer."""
    return SpeculationSettings(
        label_of(METHODS, settings.method), settings.max_draft_tokens, settings.disable_at_batch_size
    )


def change_from(response: admin_pb2.SetSpeculationResponse) -> SpeculationChange:
    """The typed form of SetSpeculation's answer."""
    return SpeculationChange(settings_from(response), response.effective_step)
