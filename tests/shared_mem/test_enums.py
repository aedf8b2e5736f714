"""Names that every process agrees on."""

from __future__ import annotations

import pytest

from shared_mem.enums import AcceptanceRule, SpeculationMethod


def test_labels_and_back() -> None:
    assert [method.label for method in SpeculationMethod] == [
        "off",
        "draft-model",
        "ngram",
        "eagle",
        "mtp",
        "medusa",
        "eagle3",
        "portfolio",
    ]
    assert all(SpeculationMethod.from_label(method.label) is method for method in SpeculationMethod)
    assert [rule.label for rule in AcceptanceRule] == [
        "rejection",
        "typical",
        "coupled",
        "block",
        "threshold",
    ]


def test_unknown_label_names_the_choices() -> None:
    with pytest.raises(ValueError, match="'hydra'; one of: off, draft-model, ngram, eagle, mtp"):
        SpeculationMethod.from_label("hydra")
