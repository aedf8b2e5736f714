"""What an operator can change of speculation while the service runs, and who is allowed what by it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_svc.errors import DraftlineError, ErrorReason, InvalidFieldError
from scheduler_svc.messages import SetSpeculation, Speculation
from scheduler_svc.scheduler.limits import Limits
from shared_mem.enums import SpeculationMethod


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """In force for every step that is planned from now on."""

    method: SpeculationMethod  # of requests that ask for none
    max_draft_tokens: int  # per step and sequence, whatever a request asks for
    disable_at_batch_size: int = 0  # running sequences from which on nobody drafts; 0: never

    def method_of(self, wish: Speculation) -> SpeculationMethod:
        """The method of a request that is admitted now."""
        return self.method if wish.method is None else wish.method

    def draft_tokens_of(self, wish: Speculation) -> int:
        """The most draft tokens of one step of the request."""
        return (
            self.max_draft_tokens
            if wish.max_draft_tokens is None
            else min(wish.max_draft_tokens, self.max_draft_tokens)
        )


def initial_settings(limits: Limits) -> SpeculationSettings:
    """What the command line says."""
    return SpeculationSettings(
        limits.default_method, limits.default_num_draft_tokens, limits.disable_at_batch_size
    )


def check_loaded(method: SpeculationMethod, limits: Limits, field: str) -> None:
    """Raises DraftlineError PRECONDITION, naming `field`, for a method that is not loaded; DISABLED always is."""
    if method is not SpeculationMethod.DISABLED and method not in limits.drafters:
        loaded = ", ".join(each.label for each in limits.drafters) or "none"
        message = f"{field}: {method.label} is not loaded; loaded: {loaded}"
        raise DraftlineError(ErrorReason.PRECONDITION, message, field=field)


def changed(settings: SpeculationSettings, wish: SetSpeculation, limits: Limits) -> SpeculationSettings:
    """The settings with what `wish` sets. Raises DraftlineError for a method that is not loaded or a bad count."""
    if wish.method is not None:
        check_loaded(wish.method, limits, "method")
        settings = replace(settings, method=wish.method)
    if wish.max_draft_tokens is not None:
        most = max((drafter.max_draft_tokens for drafter in limits.drafters.values()), default=0)
        if not 1 <= wish.max_draft_tokens <= most:
            raise InvalidFieldError(
                "max_draft_tokens",
                f"{wish.max_draft_tokens} is not in 1..{most}, what loaded drafters can serve",
            )
        settings = replace(settings, max_draft_tokens=wish.max_draft_tokens)
    if wish.disable_at_batch_size is not None:
        settings = replace(settings, disable_at_batch_size=wish.disable_at_batch_size)
    return settings
