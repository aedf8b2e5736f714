"""What a caller can ask for: the prompt's three shapes and every option of one generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. role: "system", "user", "assistant" or "tool"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, oldest turn first, rendered by the model's chat template with `template_variables`."""

    messages: Sequence[Message | Mapping[str, str]]
    template_variables: Mapping[str, Any] = field(default_factory=dict)


Prompt = str | Sequence[int] | Chat


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Options of one generation; None leaves the choice to the service. Ranges: protos/draftline/v1.

    speculation and acceptance_rule are labels (draftline.labels), e.g. "off", "ngram", "coupled".
    timeout: seconds for the whole call, retries included.
    """

    model: str = ""
    request_id: str = ""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False

    speculation: str | None = None
    num_draft_tokens: int | None = None
    acceptance_rule: str | None = None
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    threshold: float | None = None

    skip_text: bool = False
    token_ids: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens_per_message: int = 0
    speculation_steps: bool = False
    special_tokens: bool = False

    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
