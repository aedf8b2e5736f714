"""Prompts about documents: passages out of files, tasks that hold them, and conversations that begin with them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from gpu_worker.training import documents
from gpu_worker.training.document_answers import answered_turn
from gpu_worker.training.documents import DocumentPrompts
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.passages import Passage, read_passages

_SENTENCE = "In 1843 Ada Lovelace wrote Note G for the Analytical Engine of Charles Babbage. "


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text(f"{_SENTENCE * 3}\n\nshort\n\n{_SENTENCE * 20}\n", encoding="utf-8")
    (tmp_path / "sub" / "b.html").write_text(
        f"<html><head><title>never</title><body><p>{_SENTENCE * 4} &amp; more</p>"
        "<script>never()</script><table><tr><th>Year<th>Name</table><div>end of it</div></body></html>",
        encoding="utf-8",
    )
    functions = [f"def f{i}(value):\n    total = value + {i}\n\n    return total * {i}\n" for i in range(40)]
    (tmp_path / "c.py").write_text("\n\n".join(functions), encoding="utf-8")
    rows = "".join(f"| {i} | two |\n" for i in range(40))
    (tmp_path / "d.md").write_text(f"# Title\n\n| a | b |\n|---|---|\n{rows}", encoding="utf-8")
    (tmp_path / "d.bin").write_bytes(b"x" * 500)
    (tmp_path / "e.txt").write_bytes(b"\xff\xfe" * 300)
    return tmp_path


def test_passages_are_whole_and_of_a_bounded_length(library: Path) -> None:
    passages = read_passages(library)
    assert all(200 <= len(passage.text) <= 1100 for passage in passages)
    prose = [passage.text for passage in passages if not passage.kind]
    table = next(text for text in prose if "Title" in text)
    assert "\n| 7 | two |\n| 8 | two |\n" in table  # lines stay lines
    assert prose[0] == f"{(_SENTENCE * 3).strip()}\n\nshort"
    assert sum(text.count("Ada Lovelace") for text in prose[1:3]) >= 19  # 20 sentences, cut between words
    assert prose[-1].endswith("& more\n\nYear\n\nName\n\nend of it")
    assert not any("never" in text for text in prose)
    code = [passage.text for passage in passages if passage.kind == "python"]
    assert len(prose) + len(code) == len(passages)
    for text in code:  # definitions stay whole, blank lines inside them too
        assert text.startswith("def f")
        assert text.count("def ") == text.count("return total")
    assert sum(text.count("def ") for text in code) == 40


def test_passages_may_be_shorter(library: Path) -> None:
    passages = read_passages(library, 320)
    assert all(200 <= len(passage.text) <= 320 for passage in passages)
    assert len(passages) > len(read_passages(library))


def test_a_prompt_holds_its_passage_and_depends_on_the_rng_alone(library: Path) -> None:
    passages = read_passages(library)
    prompts = DocumentPrompts(passages)
    drawn = [prompts.draw(random.Random(seed)) for seed in range(400)]
    assert drawn == [prompts.draw(random.Random(seed)) for seed in range(400)]
    assert len(set(drawn)) > 50
    for prompt in drawn:
        assert any(
            passage.text in prompt or passage.text[: len(passage.text) // 3] in prompt for passage in passages
        )
        assert "{" not in prompt  # every field of a task was filled in
    tasks = (*documents._ABOUT_PROSE, *documents._ABOUT_PASSAGES, *documents._ABOUT_CODE)
    for task in tasks:
        words = max(re.split(r"{\w+}", task), key=len)
        assert any(words in prompt for prompt in drawn)


def test_braces_of_a_document_are_text() -> None:
    text = "a {language} {0} {unknown} } " * 20
    for kind in ("", "c"):
        prompts = DocumentPrompts([Passage(text, kind)])
        for seed in range(60):
            assert text[:100] in prompts.draw(random.Random(seed))


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="nowhere: no such directory"):
        read_passages(tmp_path / "nowhere")
    (tmp_path / "a.txt").write_text("short", encoding="utf-8")
    with pytest.raises(TrainingError, match="no passage of 200 characters"):
        read_passages(tmp_path)


def test_long_pieces_are_cut_at_lines(tmp_path: Path) -> None:
    lines = [f"    statement_{i}(with_an_argument)" for i in range(300)]
    (tmp_path / "long.py").write_text("class Long:\n" + "\n".join(lines), encoding="utf-8")
    text = "\n".join(passage.text for passage in read_passages(tmp_path))
    assert sum(line in text for line in lines) > 290


_PROSE = Passage(
    "Ada Lovelace met Charles Babbage in London. She wrote notes about the Analytical Engine. They hold a program for"
    " Bernoulli numbers. Many call her the first programmer."
)
_CODE = Passage(
    "def total(values):\n    found = 0\n    for value in values:\n        found = found + value\n    return found",
    "python",
)


def test_answers_are_made_of_the_passage(library: Path) -> None:
    answered = set()
    for seed in range(200):
        turn = answered_turn(_PROSE, random.Random(seed))
        assert turn == answered_turn(_PROSE, random.Random(seed))
        if turn is not None:
            answered.add(turn.prompt.split(_PROSE.text[:40])[0])
            words = re.findall(r"[A-Z]\w+", turn.answer)
            lead = {"About", "The"}  # of a quotation
            assert all(word in _PROSE.text or word in lead for word in words)
            assert "{" not in turn.prompt + turn.answer
    assert len(answered) >= 10  # tasks of several kinds
    prompts = DocumentPrompts(read_passages(library))
    assert all(prompts.draw_answered(random.Random(seed)) is not None for seed in range(50))


def test_code_is_finished_or_renamed_throughout() -> None:
    renamed = finished = 0
    for seed in range(100):
        turn = answered_turn(_CODE, random.Random(seed))
        assert turn is not None
        assert turn.answer.startswith("```python\n")
        assert turn.answer.endswith("\n```")
        if match := re.search(r"(?:Rename|Call) `(\w+)`(?: to)? `(\w+)`", turn.prompt):
            old, new = match.groups()
            renamed += 1
            assert not re.search(rf"\b{old}\b", turn.answer)
            assert (
                len(re.findall(rf"\b{new}\b", turn.answer)) == len(re.findall(rf"\b{old}\b", _CODE.text)) > 0
            )
        else:
            finished += 1
            assert "return found" in turn.answer
            assert "return found" not in turn.prompt
    assert renamed > 20
    assert finished > 20


def test_a_passage_without_an_answer_has_none() -> None:
    bare = Passage("lower case words without any end " * 8)
    found = [answered_turn(bare, random.Random(seed)) for seed in range(60)]
    assert None in found  # it has no names and no sentences to choose from
    assert any(turn is not None and turn.answer == bare.text for turn in found)
    only = DocumentPrompts([Passage("x = 1", "python")])
    assert any(only.draw_answered(random.Random(seed)) is None for seed in range(400))
