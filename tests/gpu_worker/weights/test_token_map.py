"""A draft model must speak the target's ids: maps count, sizes do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_worker.errors import ModelError
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from gpu_worker.weights.token_map import check_same_token_map, read_token_map, usable_vocabulary
from tests.gpu_worker.forwarding import prompt_logits
from tests.models import make_tiny_llama, make_tokenizer


def test_padded_vocabularies_over_one_tokenizer_fit(tmp_path: Path) -> None:
    target_dir = make_tiny_llama(tmp_path / "target", vocab_size=320, seed=1)
    draft_dir = make_tiny_llama(tmp_path / "draft", vocab_size=304, seed=2)
    assert check_same_token_map(target_dir, draft_dir) == 300
    for directory, rows in ((target_dir, 320), (draft_dir, 304)):
        model = load_model(resolve_model(str(directory)), "float32", "cpu")
        assert (model.config.vocab_size, model.config.num_embeddings) == (300, rows)
        logits = prompt_logits(model, range(300))
        assert logits.shape == (300, 300)
        assert logits.isfinite().all()


def test_head_smaller_than_the_tokenizer_limits_the_ids(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path, vocab_size=290)
    assert load_model(resolve_model(str(directory)), "float32", "cpu").config.vocab_size == 290


def test_permuted_tokenizer_of_the_same_size_is_refused(tmp_path: Path) -> None:
    target = make_tokenizer(tmp_path / "target")
    draft = make_tokenizer(tmp_path / "draft", permuted=True)
    a, b = read_token_map(target)["a"], read_token_map(target)["b"]
    with pytest.raises(
        ModelError, match=rf"token 'a' has id {b} in the draft and {a} in the target \(2 tokens"
    ):
        check_same_token_map(target, draft)


def test_longer_tokenizer_is_refused(tmp_path: Path) -> None:
    target, draft = make_tokenizer(tmp_path / "target", 300), make_tokenizer(tmp_path / "draft", 302)
    with pytest.raises(ModelError, match=r"token '.*' has id 300 in the draft and none in the target"):
        check_same_token_map(target, draft)
    with pytest.raises(ModelError, match=r"token '.*' has id none in the draft and 300 in the target"):
        check_same_token_map(draft, target)


def test_added_tokens_count(tmp_path: Path) -> None:
    target, draft = make_tokenizer(tmp_path / "target"), make_tokenizer(tmp_path / "draft")
    path = draft / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["added_tokens"].append({**content["added_tokens"][0], "id": 300, "content": "<|tool|>"})
    path.write_text(json.dumps(content), encoding="utf-8")
    assert usable_vocabulary(read_token_map(draft)) == 301
    with pytest.raises(
        ModelError, match=r"token '<\|tool\|>' has id 300 in the draft and none in the target"
    ):
        check_same_token_map(target, draft)


def test_same_directory_fits(tmp_path: Path) -> None:
    assert check_same_token_map(make_tokenizer(tmp_path), tmp_path / ".") == 300


@pytest.mark.parametrize("content", [None, "", "{}", "not json"])
def test_unusable_tokenizer_names_its_file(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        read_token_map(tmp_path)
