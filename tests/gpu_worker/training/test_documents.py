"""Prompts about documents: passages out of files, tasks that hold them, and conversations that begin with them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from gpu_worker.training import documents
from gpu_worker.training.documents import DocumentPrompts, Passage, read_passages
from gpu_worker.training.errors import TrainingError

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
