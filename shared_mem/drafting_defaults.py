"""What the settings say of drafting, in one form, and what holds where they do not say.

Service and workers read the same file, and have to agree.
"""

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

    Where they name methods, all else has the defaults of ServerConfig. Texts that list something, as flags have them
    ("draft-model, ngram", ["eagle3=PATH"]), become the lists and tables that they mean; what is none of these stays,
    for the reader to refuse.
    """
    given = dict(settings)
    if "speculation" in given:
        given["speculation"] = _labels(given["speculation"])
    else:
        given = {**(_ANY_MODEL if given.get("model") else _EMBEDDED_MODEL), **given}
    if "heads" in given:
        given["heads"] = _table(given["heads"])
    return given


def _labels(speculation: Any) -> Any:
    labels = speculation.split(",") if isinstance(speculation, str) else speculation
    if isinstance(labels, list):
        return [label.strip() if isinstance(label, str) else label for label in labels]
    return labels


def _table(heads: Any) -> Any:
    if not isinstance(heads, list) or not all(isinstance(entry, str) and "=" in entry for entry in heads):
        return heads
    pairs = [tuple(entry.split("=", 1)) for entry in heads]
    table = dict(pairs)
    return table if len(table) == len(pairs) else heads  # a method that is named twice
