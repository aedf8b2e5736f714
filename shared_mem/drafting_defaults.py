"""What is drafted with where the settings do not say: service and workers read the same file, and have to agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The embedded model has a trained head of its own. With n-gram lookup beside it, it is as fast as lookup alone where
# texts repeat themselves, and faster where they do not. Four sequences fill a step: drafts then cost what they bring.
_EMBEDDED_MODEL = {
    "speculation": ["portfolio", "eagle3", "ngram"],
    "draft_shape": "tree",
    "num_draft_tokens": 6,
    "max_draft_depth": 6,
    "disable_at_batch_size": 4,
}
_ANY_MODEL = {"speculation": ["ngram"]}


def with_drafting_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` (fields of ServerConfig that were given) with what they leave open about drafting.

    Where they name methods, all else has the defaults of ServerConfig.
    """
    if "speculation" in settings:
        return dict(settings)
    return {**(_ANY_MODEL if settings.get("model") else _EMBEDDED_MODEL), **settings}
