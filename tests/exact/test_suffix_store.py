"""N-gram drafts from other requests' outputs: faster, the same text, and never across salts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpu_worker.drafting.ngram import NgramDrafter
from gpu_worker.drafting.suffix_store import SuffixStore
from gpu_worker.models.base import CausalLM
from scheduler_svc.messages import Sampling
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission
from tests.harness.engine import GREEDY, InProcessEngine

SAMPLED = Sampling(0.9, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 5)


def engine(tiny: CausalLM, salt_of: Callable[[Admission], int], **settings: int) -> InProcessEngine:
    def drafter(table):  # type: ignore[no-untyped-def]
        return NgramDrafter(table, store=SuffixStore(max_tokens=500), salt_of=salt_of)

    return InProcessEngine(tiny, scripted={SpeculationMethod.NGRAM: drafter}, **settings)


def run(made: InProcessEngine, prompts: list[list[int]], sampling: Sampling) -> tuple[list[list[int]], int]:
    """Texts, and how many draft tokens were accepted."""
    requests = [made.submit(prompt, max_tokens=24, sampling=sampling) for prompt in prompts]
    outputs = made.run()
    of_requests = [outputs[request, 0] for request in requests]
    return [o.token_ids for o in of_requests], sum(o.num_accepted_tokens for o in of_requests)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_an_output_that_comes_again_is_drafted_from_the_store(
    sampling: Sampling, tiny: CausalLM, prompts: list[list[int]]
) -> None:
    plain, _ = run(InProcessEngine(tiny), prompts, sampling)
    _, without_store = run(InProcessEngine(tiny, ngram=True), prompts, sampling)
    made = engine(tiny, lambda admission: 0)
    first, _ = run(made, prompts, sampling)
    second, accepted = run(made, prompts, sampling)
    assert first == plain
    assert second == plain
    assert accepted > without_store + 5 * len(prompts)


def test_other_salts_see_nothing(tiny: CausalLM, prompts: list[list[int]]) -> None:
    """Each sequence with a salt of its own: drafts are those without a store."""
    _, without_store = run(InProcessEngine(tiny, ngram=True), prompts, GREEDY)
    salts = iter(range(1000))
    made = engine(tiny, lambda admission: next(salts))
    _, first = run(made, prompts, GREEDY)
    _, second = run(made, prompts, GREEDY)
    assert first == second == without_store


def test_preempted_sequences_store_what_they_wrote(tiny: CausalLM, prompts: list[list[int]]) -> None:
    made = engine(tiny, lambda admission: 0, num_pages=24)
    plain, _ = run(InProcessEngine(tiny), prompts, GREEDY)
    for _ in range(2):
        assert run(made, prompts, GREEDY)[0] == plain
    drafter = made.drafters[SpeculationMethod.NGRAM]
    assert made.scheduler.counters.num_preemptions > 0
    assert len(drafter._outputs) <= 1  # type: ignore[attr-defined]  # the last release comes with the next plan
    finished = (2 * len(prompts) - 1) * (24 + 1)  # every output with the break behind it
    assert drafter._store.num_tokens >= min(finished, 500)  # type: ignore[attr-defined]


def test_the_salts_of_requests_decide_who_sees_what(tiny: CausalLM, prompts: list[list[int]]) -> None:
    """From the request through the plan to the store."""
    made = engine(tiny, lambda admission: admission.salt_id)

    def accepted(salt: str) -> int:
        requests = [made.submit(prompt, max_tokens=24, cache_salt=salt) for prompt in prompts]
        outputs = made.run()
        return sum(outputs[request, 0].num_accepted_tokens for request in requests)

    first = accepted("a")
    assert accepted("b") == first
    assert accepted("") == first
    assert accepted("a") > first + 5 * len(prompts)
