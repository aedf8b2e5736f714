"""What each kind is trained towards, and what of it may be chosen."""

from __future__ import annotations

import pytest

from gpu_worker.training.errors import TrainingError
from gpu_worker.training.new_head import default_objective


def test_weights_are_the_kinds_own_unless_they_are_given() -> None:
    own = default_objective("mtp")
    assert own.law_weight > 0
    assert own.regression_weight > 0
    assert default_objective("mtp", law_weight=None, regression_weight=None) == own
    given = default_objective("mtp", law_weight=0.25, regression_weight=0.0)
    assert (given.law_weight, given.regression_weight) == (0.25, 0.0)
    assert (given.unroll, given.decay) == (own.unroll, own.decay)


def test_zero_keeps_the_kinds_unrolling_and_decay() -> None:
    own = default_objective("eagle3")
    assert default_objective("eagle3", unroll=0, decay=0.0) == own
    given = default_objective("eagle3", unroll=2, decay=0.5)
    assert (given.unroll, given.decay) == (2, 0.5)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "draft-model"])
def test_a_kind_without_hidden_states_to_match_refuses_their_weight(kind: str) -> None:
    with pytest.raises(TrainingError, match=r"regression_weight: 0\.5, .* has none; .*: mtp, eagle"):
        default_objective(kind, regression_weight=0.5)
    assert default_objective(kind, regression_weight=0.0) == default_objective(kind)


def test_something_must_be_left_to_learn() -> None:
    with pytest.raises(TrainingError, match="nothing is left to learn"):
        default_objective("eagle3", law_weight=0.0)
    with pytest.raises(TrainingError, match="nothing is left to learn"):
        default_objective("mtp", law_weight=0.0, regression_weight=0.0)
    assert default_objective("mtp", law_weight=0.0).regression_weight > 0
