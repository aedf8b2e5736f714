"""What an operator changes while requests run, and from which step on it holds."""

from __future__ import annotations

import pytest

from scheduler_svc.errors import DraftlineError, ErrorReason
from scheduler_svc.messages import SetSpeculation, SpeculationInForce
from shared_mem.enums import SpeculationMethod
from shared_mem.records import RowPlan
from tests.scheduler.harness import Harness, make_limits, make_submit, prompt_of
from tests.scheduler.simulated_worker import model_text

DISABLED, NGRAM = SpeculationMethod.DISABLED, SpeculationMethod.NGRAM
MTP, PORTFOLIO = SpeculationMethod.MTP, SpeculationMethod.PORTFOLIO


def running(**submits: SpeculationMethod | None) -> Harness:
    """Requests `name=method` that have begun to decode."""
    harness = Harness(acceptance=0.0, proposes_all=True)
    for i, (name, method) in enumerate(submits.items()):
        harness.submit(
            make_submit(name, prompt_of(5, i), max_tokens=30, method=method, max_draft_tokens=None)
        )
    harness.step()
    return harness


def next_rows(harness: Harness) -> list[RowPlan]:
    plan = harness.step()
    assert plan is not None
    return sorted(plan.rows, key=lambda row: row.slot)


def finish(harness: Harness) -> None:
    """Runs to the end; no change of settings changed a text."""
    prompts = {
        request.request_id: request.submit.token_ids for request in harness.scheduler._requests.values()
    }
    harness.run()
    assert {name: harness.output(name).tokens for name in prompts} == {
        name: model_text(prompt, 1, 30) for name, prompt in prompts.items()
    }


def test_in_force_from_the_next_step_on() -> None:
    harness = running(a=None)
    reply = harness.scheduler.set_speculation(SetSpeculation(7, max_draft_tokens=3))
    assert reply == SpeculationInForce(7, NGRAM, 3, 0, effective_step=2)
    (row,) = next_rows(harness)
    assert (row.method, row.num_draft_tokens) == (NGRAM, 3)
    assert harness.plans[-1].step_id == reply.effective_step
    assert harness.scheduler.speculation_in_force(8) == SpeculationInForce(8, NGRAM, 3, 0, effective_step=3)
    finish(harness)


def test_a_new_default_is_for_those_who_are_admitted_later() -> None:
    harness = running(default=None, own=MTP)
    harness.scheduler.set_speculation(SetSpeculation(1, method=PORTFOLIO))
    harness.submit(make_submit("late", prompt_of(5, 9), max_tokens=30, max_draft_tokens=2))
    assert [row.method for row in next_rows(harness)] == [NGRAM, MTP, PORTFOLIO]
    (late,) = harness.plans[-1].admissions
    assert late.methods == sum(method.bit for method in harness.limits.drafters)
    # whoever has the new default among its followers changes at once
    harness.scheduler.set_speculation(SetSpeculation(1, method=MTP))
    rows = next_rows(harness)
    assert [row.method for row in rows] == [NGRAM, MTP, MTP]
    assert rows[2].num_draft_tokens == 2
    finish(harness)


def test_off_by_default_stops_all_who_asked_for_nothing_else() -> None:
    harness = running(default=None, own=MTP)
    harness.scheduler.set_speculation(SetSpeculation(1, method=DISABLED))
    rows = next_rows(harness)
    assert [(row.method, row.num_draft_tokens > 0) for row in rows] == [(DISABLED, False), (MTP, True)]
    harness.scheduler.set_speculation(SetSpeculation(1, method=NGRAM))
    assert [row.num_draft_tokens > 0 for row in next_rows(harness)] == [True, True]
    finish(harness)


def test_nobody_drafts_in_a_batch_of_the_given_size() -> None:
    harness = running(a=None, b=MTP)
    harness.scheduler.set_speculation(SetSpeculation(1, disable_at_batch_size=2))
    assert [row.num_draft_tokens for row in next_rows(harness)] == [0, 0]
    harness.cancel("a")
    assert [row.num_draft_tokens > 0 for row in next_rows(harness)] == [True]
    harness.submit(make_submit("c", prompt_of(5, 8), max_tokens=30))
    next_rows(harness)
    assert [row.num_draft_tokens for row in next_rows(harness)] == [0, 0]
    harness.scheduler.set_speculation(SetSpeculation(1, disable_at_batch_size=0))
    assert all(row.num_draft_tokens > 0 for row in next_rows(harness))
    harness.run()


def test_nothing_changes_when_one_field_is_refused() -> None:
    harness = Harness(make_limits())
    before = harness.scheduler.speculation_in_force(1)
    for change, reason, field in (
        (
            SetSpeculation(1, SpeculationMethod.MEDUSA, disable_at_batch_size=4),
            ErrorReason.PRECONDITION,
            "method",
        ),
        (SetSpeculation(1, MTP, max_draft_tokens=17), ErrorReason.INVALID_FIELD, "max_draft_tokens"),
        (SetSpeculation(1, MTP, max_draft_tokens=0), ErrorReason.INVALID_FIELD, "max_draft_tokens"),
    ):
        with pytest.raises(DraftlineError) as caught:
            harness.scheduler.set_speculation(change)
        assert (caught.value.reason, caught.value.field) == (reason, field)
        assert caught.value.message.startswith(f"{field}: ")
    assert harness.scheduler.speculation_in_force(1) == before


def test_a_flush_counts_what_it_freed_and_leaves_held_pages() -> None:
    harness = Harness()
    harness.submit(make_submit("done", prompt_of(13), max_tokens=1))
    harness.run()
    harness.submit(make_submit("running", prompt_of(9, 2), max_tokens=20))
    harness.step()
    assert harness.scheduler.flush_prefix_cache() == 3
    assert harness.scheduler.flush_prefix_cache() == 0
    harness.scheduler.check_integrity()
    harness.run()
    assert harness.output("running").tokens == model_text(prompt_of(9, 2), 1, 20)
