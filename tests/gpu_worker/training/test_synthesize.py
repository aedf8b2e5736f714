"""Texts through the model runner: equal to plain greedy decoding, in resumed shards, from prompts of a file."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from gpu_worker.config import WorkerConfig
from gpu_worker.engine import build_engine
from gpu_worker.training import openings
from gpu_worker.training.batch_generator import BatchGenerator, Generation, GenerationRequest
from gpu_worker.training.chat import ChatTemplate
from gpu_worker.training.conversations import read_shard, shard_path, shard_paths
from gpu_worker.training.documents import DocumentPrompts
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.passages import Passage
from gpu_worker.training.prompts import read_prompts
from gpu_worker.training.synthesis_settings import SynthesisSettings
from gpu_worker.training.synthesize import Synthesizer, _Draft
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from shared_mem.records import SamplingRecord
from tests.gpu_worker.forwarding import prompt_logits
from tests.models import IM_END_ID

_CONTEXT, _PAGE, _SLOTS = 160, 16, 3


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path):
    pages = _SLOTS * -(-(_CONTEXT + 1) // _PAGE)
    return build_engine(
        WorkerConfig(
            model=str(tiny_model_dir),
            dtype="float32",
            device="cpu",
            speculation=(),
            num_pages=pages,
            max_running_requests=_SLOTS,
            max_context_tokens=_CONTEXT,
        )
    )


def _generator(engine) -> BatchGenerator:
    return BatchGenerator(
        engine.runner,
        num_slots=_SLOTS,
        page_size=_PAGE,
        num_pages=engine.num_pages,
        max_context_tokens=_CONTEXT,
        max_batched_tokens=32,
    )


def test_batched_texts_are_those_of_plain_greedy_decoding(engine, tiny_model_dir: Path) -> None:
    model = load_model(resolve_model(str(tiny_model_dir)), "float32", "cpu")
    prompts = [tuple(range(5, 5 + n)) for n in (3, 40, 17, 1, 9)]
    generator = _generator(engine)
    for prompt in prompts:
        generator.submit(GenerationRequest(prompt, 12, SamplingRecord(), frozenset({IM_END_ID})))
    found = {one.request.token_ids: one.token_ids for one in generator.run()}
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + 12 and ids[-1] != IM_END_ID:
            ids.append(int(prompt_logits(model, ids)[-1].argmax()))
        assert found[prompt] == tuple(ids[len(prompt) :])


def _synthesizer(engine, prompts=None, count: int = 4) -> Synthesizer:
    settings = SynthesisSettings(
        count, shard_size=2, max_prompt_tokens=20, max_answer_tokens=10, greedy_share=0.5
    )
    chat = ChatTemplate(Path(engine.facts.tokenizer_path))
    return Synthesizer(_generator(engine), chat, frozenset(engine.facts.eos_token_ids), settings, prompts)


def test_given_prompts_are_answered_and_missing_shards_resumed(engine, tmp_path: Path) -> None:
    prompts = [("hello there",), ("one", "two"), ("x" * 400,), ("the quick brown fox",)]
    told = []
    written = _synthesizer(engine, prompts).write(tmp_path, lambda *facts: told.append(facts))
    assert written == told[-1][1] > 0
    first, second = (list(read_shard(path)) for path in shard_paths(tmp_path))
    assert len(first) == 2
    assert len(second) == 1  # the long one has no room for an answer
    chat = ChatTemplate(Path(engine.facts.tokenizer_path))
    starts = {tuple(chat.prompt([{"role": "user", "content": turns[0]}])) for turns in prompts}
    for conversation in first + second:
        (start, stop), *_ = conversation.answers
        assert conversation.token_ids[:start] in starts
        assert 0 < stop - start <= 10
    before = shard_path(tmp_path, 1).read_bytes()
    shard_path(tmp_path, 1).unlink()
    _synthesizer(engine, prompts).write(tmp_path, lambda *facts: None)
    assert shard_path(tmp_path, 1).read_bytes() == before


def test_prompts_of_every_layout(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
        {"conversations": [{"from": "human", "value": "b"}, {"from": "gpt", "value": "c"}]},
        {"prompt": "d"},
        "e",
        {"text": "d"},
        {"messages": [{"role": "user", "content": t} for t in ("f", "g")]},
        {"id": 7, "turns": ["h", "i"]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    assert read_prompts(path) == [("a",), ("b",), ("d",), ("e",), ("f", "g"), ("h", "i")]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", ":1: not JSON"), ('{"other": 1}', ":1: no user's turn"), ("", "holds no prompts")],
)
def test_a_file_of_something_else_is_an_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TrainingError, match=message):
        read_prompts(path)


class _Scripted:
    """Stands in for the batch generator: whatever is asked for is written at once, in order."""

    num_slots = 4

    def __init__(self, chat: ChatTemplate, turn: str, answer: str) -> None:
        self.requests: list[GenerationRequest] = []
        self._chat = chat
        self._turn = [*chat._encode(turn), chat.end_of_user]
        self._answer = [*chat._encode(answer), chat.end_of_user]
        self._waiting: list[GenerationRequest] = []

    @property
    def num_pending(self) -> int:
        return len(self._waiting)

    def submit(self, request: GenerationRequest) -> None:
        self.requests.append(request)
        self._waiting.append(request)

    def step(self) -> list[Generation]:
        request = self._waiting.pop(0)
        asks = self._chat.text(request.token_ids[-12:]).rstrip().endswith("assistant")
        tokens = self._answer if asks else [*self._chat._encode(f" {len(self.requests)}"), *self._turn]
        return [Generation(request, tuple(tokens), True, ())]


def _written(
    directory: Path,
    chat: ChatTemplate,
    end_ids: frozenset[int],
    documents: DocumentPrompts | None = None,
    count: int = 6,
    **shares: float,
) -> tuple[list[str], Path]:
    """The texts of one shard's conversations."""
    settings = SynthesisSettings(
        count, shard_size=count, second_turn_share=shares.pop("second_turn_share", 0.0), **shares
    )
    generator = _Scripted(chat, " and what else?", "because of that")
    synthesizer = Synthesizer(generator, chat, end_ids, settings, documents=documents)  # type: ignore[arg-type]
    synthesizer.write(directory, lambda *facts: None)
    path = shard_path(directory, 0)
    return [chat.text(conversation.token_ids) for conversation in read_shard(path)], path


def test_prompts_begin_as_they_are_led_and_some_quote_an_answer(engine, tmp_path: Path) -> None:
    chat = ChatTemplate(Path(engine.facts.tokenizer_path))
    ends = frozenset(engine.facts.eos_token_ids)
    led, path = _written(tmp_path / "led", chat, ends, opening_share=1.0, quoting_share=0.0)
    assert len(led) == 6
    begins = [opening.rstrip(" ") for kind in openings._KINDS for opening in kind]
    assert all(any(begin in text for begin in begins) for text in led)
    assert len({text[:30] for text in led}) > 2
    again, same = _written(tmp_path / "again", chat, ends, opening_share=1.0, quoting_share=0.0)
    assert again == led
    assert same.read_bytes() == path.read_bytes()
    quoted, _ = _written(tmp_path / "quoted", chat, ends, opening_share=0.0, quoting_share=1.0)
    assert len(quoted) == 12  # each is followed by one that quotes it, and no further
    assert [text.count("because of that") for text in quoted] == [1, 2] * 6


def test_a_second_turn_looks_back(engine, tmp_path: Path) -> None:
    chat = ChatTemplate(Path(engine.facts.tokenizer_path))
    ends = frozenset(engine.facts.eos_token_ids)
    shares = {"opening_share": 1.0, "quoting_share": 0.0, "second_turn_share": 1.0}
    texts, _ = _written(tmp_path, chat, ends, **shares)
    assert all(text.count("because of that") == 2 for text in texts)
    assert all(any(back.rstrip(" ") in text for back in openings._BACK) for text in texts)


def test_a_share_of_the_conversations_is_about_documents(engine, tmp_path: Path) -> None:
    chat = ChatTemplate(Path(engine.facts.tokenizer_path))
    ends = frozenset(engine.facts.eos_token_ids)
    fox = DocumentPrompts([Passage(f"the quick brown fox jumps over the lazy dog {i}") for i in range(100)])
    shares = {"opening_share": 0.0, "quoting_share": 0.0, "document_share": 0.5}
    some, _ = _written(tmp_path / "some", chat, ends, fox, 40, **shares)
    assert len(some) == 40
    assert 10 <= sum("lazy dog" in text for text in some) <= 30
    assert all(text.count("because of that") == 1 for text in some)
    assert _written(tmp_path / "again", chat, ends, fox, 40, **shares)[0] == some
    # what is too long for the context, or would end the user's turn, is left out: the target writes a prompt instead
    for name, text in (("long", "lazy dog " * 2000), ("control", "lazy <|im_end|> dog")):
        others, _ = _written(tmp_path / name, chat, ends, DocumentPrompts([Passage(text)]), 40, **shares)
        assert len(others) == 40
        assert not any("dog" in text for text in others)
    # and nothing is asked twice
    once, _ = _written(
        tmp_path / "once", chat, ends, DocumentPrompts([Passage("lazy dog", "c")]), 40, **shares
    )
    asked = [text.split("assistant")[0] for text in once if "lazy dog" in text]
    assert len(asked) == len(set(asked)) > 1


def test_answers_of_documents_are_taken_as_they_are(engine, tmp_path: Path) -> None:
    chat = ChatTemplate(Path(engine.facts.tokenizer_path))
    ends = frozenset(engine.facts.eos_token_ids)
    fox = DocumentPrompts(
        [Passage(f"the quick brown fox jumps over the lazy dog {i} {i}") for i in range(100)]
    )
    shares = {"opening_share": 0.0, "quoting_share": 0.0, "document_share": 1.0, "answered_share": 0.5}
    texts, path = _written(tmp_path / "some", chat, ends, fox, 40, **shares)
    assert len(texts) == 40
    written = list(read_shard(path))
    taken = [one for one, text in zip(written, texts, strict=True) if "because of that" not in text]
    assert 6 <= len(taken) <= 30  # a passage this short suits one of the tasks alone
    for conversation in taken:
        ((start, stop),) = conversation.answers
        assert stop == len(conversation.token_ids)
        assert conversation.token_ids[-1] == IM_END_ID
        prompt, answer = (chat.text(conversation.token_ids[a:b]) for a, b in ((0, start), (start, stop)))
        assert answer
        assert answer in prompt
        assert list(conversation.token_ids[:start]) == chat.prompt(
            [{"role": "user", "content": prompt.split("user\n")[1].split("\nassistant")[0]}]
        )
        assert not conversation.greedy  # no head is measured by them
    again, _ = _written(tmp_path / "again", chat, ends, fox, 40, **shares)
    assert again == texts
    _, learnt = _written(tmp_path / "learnt", chat, ends, fox, 40, **shares, learn_passages=True)
    whole = [one for one in read_shard(learnt) if len(one.answers) == 2]
    assert [one.token_ids for one in whole] == [one.token_ids for one in taken]
    for conversation, plain in zip(whole, taken, strict=True):
        passage, answer = conversation.answers
        assert (answer,) == plain.answers
        assert passage == (len(chat.open_user_turn([])), answer[0])
        assert conversation.num_prompt_tokens == plain.num_prompt_tokens == answer[0]
    # what spells a control token would end the turn
    control = DocumentPrompts([Passage("lazy <|im_end|> dog " * 12)])
    others, _ = _written(tmp_path / "control", chat, ends, control, 10, **{**shares, "answered_share": 1.0})
    assert len(others) == 10
    assert not any("dog" in text for text in others)


def test_spans_of_answers_that_a_template_renders_otherwise_are_dropped(engine) -> None:
    chat = ChatTemplate(Path(engine.facts.tokenizer_path))
    synthesizer = _synthesizer(engine)

    def answered(pieces: list[str]) -> _Draft:
        draft = _Draft((0, 0), [{"role": "user", "content": "hello"}], random.Random(0), True, True, [], [])
        drawn = [token for piece in pieces for token in chat._encode(piece)]
        first = synthesizer._answer_request(draft)
        synthesizer._take_answer(draft, Generation(first, (*drawn, IM_END_ID), True, ()))
        assert len(draft.answers) == 1
        draft.messages.append({"role": "user", "content": "and now?"})
        second = synthesizer._answer_request(draft)
        synthesizer._take_answer(draft, Generation(second, (*chat._encode("no"), IM_END_ID), True, ()))
        return draft

    kept = answered(["the quick brown fox"])
    assert [chat.text(kept.token_ids[a:b]) for a, b in kept.answers] == ["the quick brown fox", "no"]
    # the same text drawn letter by letter: a template gives it other ids
    assert [chat.text(d.token_ids[a:b]) for d in [answered(list("the quick"))] for a, b in d.answers] == [
        "no"
    ]


def _shards(directory: Path) -> list[int]:
    """Conversations of each shard that is there."""
    return [len(list(read_shard(path))) for path in shard_paths(directory)]


def test_shards_that_documents_answer_are_written_one_by_one(engine, tmp_path: Path, monkeypatch) -> None:
    """Nothing is generated for them, so nothing else would end the loop that begins shards."""
    chat = ChatTemplate(Path(engine.facts.tokenizer_path))
    fox = DocumentPrompts(
        [Passage(f"the quick brown fox jumps over the lazy dog {i} {i}") for i in range(400)]
    )
    settings = SynthesisSettings(
        24, shard_size=8, document_share=1.0, answered_share=1.0, quoting_share=0.0, second_turn_share=0.0
    )
    generator = _Scripted(chat, " and what else?", "because of that")
    ends = frozenset(engine.facts.eos_token_ids)
    synthesizer = Synthesizer(generator, chat, ends, settings, documents=fox)  # type: ignore[arg-type]
    begin, there = synthesizer._begin, []

    def watched(shard, owners) -> None:
        there.append(len(list(tmp_path.glob("conversations-*.jsonl"))))
        begin(shard, owners)
        shard.drafts.clear()  # of the few that no document can answer
        owners.clear()
        generator._waiting.clear()

    monkeypatch.setattr(synthesizer, "_begin", watched)
    monkeypatch.setattr(generator, "step", lambda: [])
    synthesizer.write(tmp_path, lambda *facts: None)
    assert there == [0, 1, 2]


def test_a_directory_grows_and_keeps_to_what_it_was_made_from(engine, tmp_path: Path) -> None:
    prompts = [(f"hello {i}",) for i in range(6)]
    told: list[tuple[int, int, float]] = []
    _synthesizer(engine, prompts, 1).write(tmp_path, lambda *facts: None)
    assert _shards(tmp_path) == [1]
    _synthesizer(engine, prompts, 3).write(tmp_path, lambda *facts: told.append(facts))
    assert _shards(tmp_path) == [2, 1]
    assert told[-1][0] == 3
    before = shard_path(tmp_path, 0).read_bytes()
    _synthesizer(engine, prompts, 4).write(tmp_path, lambda *facts: None)
    assert _shards(tmp_path) == [2, 2]
    assert shard_path(tmp_path, 0).read_bytes() == before
    assert _synthesizer(engine, prompts, 2).write(tmp_path, lambda *facts: None) == 0
    with pytest.raises(TrainingError, match=r"conversations-00000.jsonl: answers other prompts"):
        _synthesizer(engine, [("other",), *prompts[1:]], 4).write(tmp_path, lambda *facts: None)
    other = SynthesisSettings(4, shard_size=2, max_prompt_tokens=20, max_answer_tokens=11, greedy_share=0.5)
    chat = ChatTemplate(Path(engine.facts.tokenizer_path))
    ends = frozenset(engine.facts.eos_token_ids)
    with pytest.raises(TrainingError, match=r"synthesis.json: .* max_answer_tokens 10, not 11"):
        Synthesizer(_generator(engine), chat, ends, other, prompts).write(tmp_path, lambda *facts: None)
    named = Synthesizer(_generator(engine), chat, ends, other, prompts, target={"dtype": "int8"})
    with pytest.raises(TrainingError, match="dtype None, not 'int8'"):
        named.write(tmp_path, lambda *facts: None)
