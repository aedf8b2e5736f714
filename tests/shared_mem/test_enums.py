"""Names that every process agrees on."""

from __future__ import annotations

import pytest

from shared_mem.enums import AcceptanceRule, SpeculationMethod


def test_labels_and_back() -> None:
    assert [method.label for method in SpeculationMethod] == ["off", "draft-model", "ngram"]
    assert all(SpeculationMethod.from_label(method.label) is method for method in SpeculationMethod)
    assert [rule.label for rule in AcceptanceRule] == ["rejection", "typical", "coupled", "threshold"]


def test_unknown_label_names_the_choices() -> None:
    with pytest.raises(ValueError, match="'medusa'; one of: off, draft-model, ngram"):
        SpeculationMethod.from_label("medusa")
