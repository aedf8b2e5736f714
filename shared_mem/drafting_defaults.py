"""What is drafted with where the settings do not say: service and workers read the same file, and have to agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_drafting_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` (fields of ServerConfig that were given) with the methods that are loaded if they name none."""
    return {"speculation": ["ngram"], **settings}
