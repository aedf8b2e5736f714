"""Ends inside the tokens of one step."""

from __future__ import annotations

import pytest

from scheduler_svc.scheduler.stopping import End, EndRules, find_end
from shared_mem.enums import FinishReason

EOS, STOP = 2, 7
RUN = [10, 11, STOP, 12, 13]  # five tokens of one step, a stop id in the middle


def rules(
    *,
    eos: tuple[int, ...] = (EOS,),
    stops: tuple[int, ...] = (STOP,),
    min_tokens: int = 0,
    max_tokens: int = 100,
    context: int = 1000,
    prompt: int = 5,
) -> EndRules:
    return EndRules(frozenset(eos), frozenset(stops), min_tokens, max_tokens, context, prompt)


def test_a_stop_id_in_an_accepted_run_cuts_what_follows() -> None:
    assert find_end(rules(), 3, RUN) == (3, End(FinishReason.STOP, STOP))


def test_a_stop_id_before_max_tokens_in_one_run() -> None:
    assert find_end(rules(max_tokens=5), 0, RUN) == (3, End(FinishReason.STOP, STOP))


def test_max_tokens_before_a_stop_id_in_one_run() -> None:
    assert find_end(rules(max_tokens=5), 3, RUN) == (2, End(FinishReason.LENGTH))


def test_a_stop_id_that_reaches_max_tokens_is_a_stop() -> None:
    assert find_end(rules(max_tokens=3), 0, RUN) == (3, End(FinishReason.STOP, STOP))


def test_eos_that_reaches_max_tokens_is_eos() -> None:
    assert find_end(rules(max_tokens=2), 0, [10, EOS, 11]) == (2, End(FinishReason.EOS))


def test_an_id_that_is_eos_and_stop_id_is_eos() -> None:
    assert find_end(rules(stops=(EOS,)), 0, [EOS]) == (1, End(FinishReason.EOS))


def test_ignored_eos_still_stops_as_a_stop_id() -> None:
    assert find_end(rules(eos=(), stops=(EOS,)), 0, [EOS]) == (1, End(FinishReason.STOP, EOS))
    assert find_end(rules(eos=()), 0, [EOS, 10]) == (2, None)


@pytest.mark.parametrize(("num_generated", "ends"), [(9, False), (11, False), (12, True)])
def test_with_min_tokens_12_the_first_possible_end_is_token_13(num_generated: int, ends: bool) -> None:
    kept, end = find_end(rules(min_tokens=12), num_generated, [EOS])
    assert kept == 1
    assert (end is not None) == ends


def test_min_tokens_inside_a_run() -> None:
    assert find_end(rules(min_tokens=2), 0, [EOS, STOP, STOP, 10]) == (3, End(FinishReason.STOP, STOP))


def test_min_tokens_does_not_lift_max_tokens() -> None:
    assert find_end(rules(min_tokens=50, max_tokens=2), 0, [10, 11, 12]) == (2, End(FinishReason.LENGTH))


def test_the_context_limit_ends_with_length() -> None:
    assert find_end(rules(context=8, prompt=5), 1, [10, 11, 12]) == (2, End(FinishReason.LENGTH))


def test_no_tokens_end_nothing() -> None:
    assert find_end(rules(), 3, []) == (0, None)
