"""What is drafted with where the settings do not say: service and workers read the same file, and have to agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FIELDS = (
    "speculation",
    "num_draft_tokens",
    "draft_shape",
    "max_draft_depth",
    "draft_model",
    "heads",
    "disable_at_batch_size",
)

_EMBEDDED = {"speculation": ["ngram"]}
_OTHERS = {"speculation": ["ngram"]}


def with_drafting_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` (fields of ServerConfig that were given) with the drafting fields that apply if none of them was."""
    embedded = not settings.get("model") and not any(field in settings for field in _FIELDS)
    return {**(_EMBEDDED if embedded else _OTHERS), **settings}
