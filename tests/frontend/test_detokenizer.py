"""Incremental detokenisation equals decoding everything at once, wherever the cuts fall."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from scheduler_svc.errors import StartupError
from scheduler_svc.frontend.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer
from scheduler_svc.frontend.tokenizer import ServedTokenizer
from tests.frontend.conftest import byte_ids

MIXED = "héllo 한국어 🎉👩‍👩‍👧 done 中文 🇰🇷"


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Decodes like Llama 2's: `▁` is a space, unknown characters are runs of byte tokens, one space is stripped."""
    words = ["▁", "▁the", "▁fox", "the", "s", "▁▁", "한", "!", "x"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    vocab.update({word: 259 + index for index, word in enumerate(words)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    directory = tmp_path_factory.mktemp("sentencepiece")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]


def test_mixed_text_of_byte_tokens(served_tokenizer: ServedTokenizer, tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, MIXED)
    parts = pieces(served_tokenizer.detokenizer(special_tokens=False), ids)
    assert "".join(parts) == MIXED == tokenizer.decode(ids)
    assert not any("\ufffd" in part for part in parts)
    # Whole characters: each part is given out by the token that completes it.
    assert parts[: len("hé".encode())] == ["h", "", "é"]


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_cut_emoji_is_flushed_once(
    served_tokenizer: ServedTokenizer, tokenizer: Tokenizer, cut: int
) -> None:
    ids = byte_ids(tokenizer, "ok 🎉")[: 3 + cut]
    detokenizer = served_tokenizer.detokenizer(special_tokens=False)
    parts = pieces(detokenizer, ids)
    assert "".join(parts[:-1]) == "ok "
    assert "".join(parts) == tokenizer.decode(ids) == "ok \ufffd"
    assert detokenizer.flush() == ""


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 305), max_size=40), special_tokens=st.booleans())
def test_any_byte_level_ids(
    served_tokenizer: ServedTokenizer, tokenizer: Tokenizer, ids: list[int], special_tokens: bool
) -> None:
    detokenizer = served_tokenizer.detokenizer(special_tokens=special_tokens)
    assert isinstance(detokenizer, ByteLevelDetokenizer)
    text = "".join(pieces(detokenizer, ids))
    assert text == tokenizer.decode(ids, skip_special_tokens=not special_tokens)
    assert text == served_tokenizer.decode(ids, special_tokens=special_tokens)


_WORDS = st.integers(259, 267)
_KOREAN_BYTES = st.sampled_from([3 + byte for byte in "한🎉é".encode()])


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.one_of(_WORDS, _WORDS, _KOREAN_BYTES, st.integers(0, 275)), max_size=40))
def test_any_sentencepiece_ids(sentencepiece: Path, ids: list[int]) -> None:
    served = ServedTokenizer.load(sentencepiece)
    detokenizer = served.detokenizer(special_tokens=False)
    assert isinstance(detokenizer, WindowDetokenizer)
    assert "".join(pieces(detokenizer, ids)) == served.decode(ids, special_tokens=False)


def test_sentencepiece_streams_words_and_whole_byte_runs(sentencepiece: Path) -> None:
    served = ServedTokenizer.load(sentencepiece)
    emoji = [3 + byte for byte in "🎉".encode()]
    detokenizer = served.detokenizer(special_tokens=False)
    assert [detokenizer.push(token_id) for token_id in (260, 261, 263)] == ["the", " fox", "s"]
    assert [detokenizer.push(token_id) for token_id in emoji] == ["", "", "", ""]
    assert detokenizer.peek() == "🎉"
    assert detokenizer.push(266) == "🎉!"
    assert detokenizer.flush() == ""


def test_decoder_of_one_in_a_sequence_is_byte_level(tokenizer_dir: Path, tmp_path: Path) -> None:
    content = json.loads((tokenizer_dir / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    served = ServedTokenizer.load(tmp_path)
    assert isinstance(served.detokenizer(special_tokens=False), ByteLevelDetokenizer)
    assert not served.has_chat_template


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json: No such file"):
        ServedTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"tokenizer\.json: "):
        ServedTokenizer.load(tmp_path)


def test_broken_config_is_named(tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dir / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(StartupError, match=r"tokenizer_config\.json: not valid JSON"):
        ServedTokenizer.load(tmp_path)
