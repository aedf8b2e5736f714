"""One sample's events: where output ends, what is counted, when messages are sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from scheduler_svc.frontend.sample_output import (
    OutputWishes,
    SampleDelta,
    SampleFinished,
    SampleItem,
    SampleOutput,
    SampleStarted,
)
from scheduler_svc.frontend.text_stream import TextStream
from scheduler_svc.frontend.tokenizer import ServedTokenizer
from scheduler_svc.messages import Finished, Started, Step, TokenEvent
from scheduler_svc.metrics import FrontendMetrics
from shared_mem.enums import FinishReason, SpeculationMethod
from tests.frontend.conftest import byte_ids
from tests.frontend.fake_scheduler import EOS_ID, make_events

WISHES = OutputWishes(
    send_text=True,
    send_token_ids=True,
    send_logprobs=True,
    send_speculation_steps=True,
    special_tokens=False,
    min_tokens_per_message=0,
    min_tokens=0,
    stops=(),
    include_stop=False,
)
ARRIVAL = 1000.0


class Sample:
    """A SampleOutput, everything that came out of it, and its metrics."""

    def __init__(self, served: ServedTokenizer, **wishes: Any) -> None:
        self.wishes = replace(WISHES, **wishes)
        self.metrics = FrontendMetrics()
        detokenizer = served.detokenizer(special_tokens=self.wishes.special_tokens)
        text = TextStream(detokenizer, self.wishes.stops, self.wishes.include_stop)
        self.output = SampleOutput(self.wishes, text, 7, ARRIVAL, self.metrics)
        self.items: list[SampleItem] = []

    def accept(self, events: list[TokenEvent]) -> Sample:
        for number, event in enumerate(events):
            self.items += self.output.accept(event, ARRIVAL + 1 + number)
        return self

    @property
    def deltas(self) -> list[SampleDelta]:
        return [item for item in self.items if isinstance(item, SampleDelta)]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def finished(self) -> SampleFinished:
        (finished,) = [item for item in self.items if isinstance(item, SampleFinished)]
        assert self.items[-1] is finished
        assert isinstance(self.items[0], SampleStarted)
        assert finished.completion_tokens == self.metrics.registry.get_sample_value(
            "draftline_generated_tokens_total"
        )
        return finished


@pytest.fixture
def fox(tokenizer: Tokenizer) -> list[int]:
    return byte_ids(tokenizer, "the fox jumps")


@pytest.mark.parametrize("drafts", range(8))
@pytest.mark.parametrize("text", ["안녕 🎉 hello 👩‍👩‍👧", "🎉" * 5, "plain"])
def test_deltas_join_to_the_whole_text(
    served_tokenizer: ServedTokenizer, tokenizer: Tokenizer, drafts: int, text: str
) -> None:
    ids = byte_ids(tokenizer, text)
    sample = Sample(served_tokenizer).accept(make_events("r", 0, ids, drafts=drafts, num_logprobs=1))
    assert sample.text == text == tokenizer.decode(ids)
    assert all("\ufffd" not in delta.text for delta in sample.deltas)
    assert sample.ids == ids
    assert [each.token_id for delta in sample.deltas for each in delta.logprobs] == ids
    assert sample.finished.completion_tokens == len(ids)
    assert sample.finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", range(8, 13))
def test_max_tokens_may_cut_an_emoji(
    served_tokenizer: ServedTokenizer, tokenizer: Tokenizer, max_tokens: int
) -> None:
    ids = byte_ids(tokenizer, "안녕 🎉🎉")[:max_tokens]
    sample = Sample(served_tokenizer).accept(make_events("r", 0, ids, drafts=4))
    assert sample.text == tokenizer.decode(ids)
    assert sample.text.count("\ufffd") == (0 if max_tokens == 11 else 1)
    assert "\ufffd" not in "".join(delta.text for delta in sample.deltas[:-1])
    assert sample.finished.completion_tokens == max_tokens


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("drafts", range(8))
def test_a_stop_string_ends_everything_at_its_last_token(
    served_tokenizer: ServedTokenizer, fox: list[int], drafts: int, include_stop: bool
) -> None:
    events = make_events("r", 0, fox, drafts=drafts, num_logprobs=2)
    sample = Sample(served_tokenizer, stops=("fo",), include_stop=include_stop).accept(events)
    assert sample.text == ("the fo" if include_stop else "the ")
    assert sample.ids == fox[:6]
    assert sum(len(delta.logprobs) for delta in sample.deltas) == 6
    finished = sample.finished
    assert (finished.reason, finished.stop, finished.stop_token_id) == (FinishReason.STOP, "fo", None)
    assert finished.completion_tokens == 6
    steps = [step for delta in sample.deltas for step in delta.steps]
    size = drafts + 1
    full, rest = divmod(6, size)
    accepted = full * drafts + min(drafts, rest)
    assert sum(step.num_accepted_tokens for step in steps) == accepted
    assert finished.num_steps == len(steps) == full + (rest > 0)
    if drafts:
        assert finished.speculation is not None
        assert finished.speculation.num_accepted_tokens == accepted
        assert sum(finished.speculation.num_accepted_tokens_per_pos) == accepted
        assert len(finished.speculation.num_draft_tokens_per_pos) == drafts
    else:
        assert finished.speculation is None
        assert {step.method for step in steps} == {SpeculationMethod.DISABLED}
    # Only a stop that the scheduler does not know of needs to be told.
    assert sample.output.ended_by_stop_string == (len(events) > len(steps))


@pytest.mark.parametrize("size", range(1, 8))
def test_a_stop_string_split_anywhere_never_leaks(
    served_tokenizer: ServedTokenizer, tokenizer: Tokenizer, size: int
) -> None:
    ids = byte_ids(tokenizer, "go <한🎉> on")
    sample = Sample(served_tokenizer, stops=("<한🎉>",)).accept(make_events("r", 0, ids, drafts=size - 1))
    assert sample.text == "go "
    assert sample.ids == ids[: 3 + len("<한🎉>".encode())]


def test_a_half_matched_stop_at_the_end_is_delivered(
    served_tokenizer: ServedTokenizer, fox: list[int]
) -> None:
    sample = Sample(served_tokenizer, stops=("jumps over",)).accept(make_events("r", 0, fox, drafts=2))
    assert sample.text == "the fox jumps"
    assert sample.finished.stop is None


def test_nothing_follows_a_stop(served_tokenizer: ServedTokenizer, fox: list[int]) -> None:
    sample = Sample(served_tokenizer, stops=("the",)).accept(make_events("r", 0, fox))
    assert sample.finished.completion_tokens == 3
    assert sample.items[-1] is sample.finished


@pytest.mark.parametrize("special_tokens", [False, True])
def test_eos_is_counted_but_its_text_is_a_wish(
    served_tokenizer: ServedTokenizer, fox: list[int], special_tokens: bool
) -> None:
    ids = [*fox, EOS_ID]
    events = make_events("r", 0, ids, drafts=3, finish=FinishReason.EOS)
    sample = Sample(served_tokenizer, special_tokens=special_tokens).accept(events)
    assert sample.text == ("the fox jumps<|im_end|>" if special_tokens else "the fox jumps")
    assert sample.ids == ids
    assert sample.finished.completion_tokens == len(ids)


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("stop_id", [EOS_ID, 80])
def test_stop_token_ids(
    served_tokenizer: ServedTokenizer, tokenizer: Tokenizer, fox: list[int], stop_id: int, include_stop: bool
) -> None:
    events = make_events("r", 0, [*fox, stop_id], finish=FinishReason.STOP, stop_token_id=stop_id)
    sample = Sample(served_tokenizer, include_stop=include_stop).accept(events)
    stop_text = tokenizer.decode([stop_id], skip_special_tokens=False)
    assert sample.text == "the fox jumps" + (stop_text if include_stop else "")
    assert sample.ids[-1] == stop_id
    assert (sample.finished.stop, sample.finished.stop_token_id) == (None, stop_id)


def test_a_stop_string_completed_by_the_last_token_is_a_stop(
    served_tokenizer: ServedTokenizer, fox: list[int]
) -> None:
    sample = Sample(served_tokenizer, stops=("mps",)).accept(make_events("r", 0, fox))
    assert (sample.finished.reason, sample.finished.stop) == (FinishReason.STOP, "mps")
    assert not sample.output.ended_by_stop_string


def test_stops_wait_for_min_tokens(served_tokenizer: ServedTokenizer, tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "ababab")
    sample = Sample(served_tokenizer, stops=("ab",), min_tokens=3).accept(make_events("r", 0, ids, drafts=5))
    assert (sample.text, sample.finished.completion_tokens) == ("ab", 4)


@pytest.mark.parametrize(
    ("minimum", "sizes"), [(0, [1] * 13), (1, [1] * 13), (5, [5, 5, 3]), (2**32 - 1, [13])]
)
def test_min_tokens_per_message(
    served_tokenizer: ServedTokenizer, fox: list[int], minimum: int, sizes: list[int]
) -> None:
    sample = Sample(served_tokenizer, min_tokens_per_message=minimum).accept(make_events("r", 0, fox))
    assert [len(delta.token_ids) for delta in sample.deltas] == sizes
    assert sample.text == "the fox jumps"


def test_what_is_not_wished_is_not_sent(served_tokenizer: ServedTokenizer, tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "a🎉")
    sample = Sample(
        served_tokenizer, send_token_ids=False, send_logprobs=False, send_speculation_steps=False
    ).accept(make_events("r", 0, ids, num_logprobs=1))
    assert sample.deltas == [SampleDelta("a"), SampleDelta("🎉")]  # no message for half a character
    silent = Sample(
        served_tokenizer, send_text=False, send_logprobs=False, send_speculation_steps=False, stops=("🎉",)
    ).accept(make_events("r", 0, ids))
    assert silent.text == ""
    assert silent.finished.stop == "🎉"


def test_times_and_counts(served_tokenizer: ServedTokenizer, fox: list[int]) -> None:
    step = Step(SpeculationMethod.NGRAM, 3, 2, 1)
    events = [
        TokenEvent("r", 0, tuple(fox[:2]), step, started=Started(4, ARRIVAL + 0.5)),
        TokenEvent("r", 0, tuple(fox[2:3]), Step(SpeculationMethod.NGRAM, 2, 2, 0)),
        TokenEvent("r", 0, (), None, finished=Finished(FinishReason.ABORTED, None, 9, 2)),
    ]
    sample = Sample(served_tokenizer).accept(events)
    assert sample.items[0] == SampleStarted(7, 4, None)
    finished = sample.finished
    assert (finished.queue_seconds, finished.first_token_seconds, finished.total_seconds) == (0.5, 1.0, 2.0)
    assert (finished.reason, finished.num_steps, finished.num_preemptions) == (FinishReason.ABORTED, 9, 2)
    assert (finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens) == (7, 4, 3)
    speculation = finished.speculation
    assert speculation is not None
    assert (speculation.num_drafts, speculation.num_draft_tokens, speculation.num_accepted_tokens) == (
        2,
        5,
        1,
    )
    assert speculation.num_draft_tokens_per_pos == [2, 2]
    assert speculation.num_accepted_tokens_per_pos == [1, 0]
    values = sample.metrics.registry.get_sample_value
    assert values("draftline_draft_tokens_total", {"method": "ngram"}) == 5
    assert values("draftline_accepted_tokens_total", {"method": "ngram"}) == 1
    assert values("draftline_time_to_first_token_seconds_sum") == 1.0
    assert values("draftline_inter_token_seconds_count") == 1


def test_an_abort_in_the_queue_still_starts_and_finishes(served_tokenizer: ServedTokenizer) -> None:
    event = TokenEvent("r", 0, (), finished=Finished(FinishReason.ABORTED, None, 0, 0))
    sample = Sample(served_tokenizer).accept([event])
    assert len(sample.items) == 2
    assert sample.finished.first_token_seconds is None
    assert sample.finished.queue_seconds is None
