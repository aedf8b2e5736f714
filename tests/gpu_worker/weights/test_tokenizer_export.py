"""The tokenizer exported from a GGUF file is the model's own: ids, special tokens, chat template."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from gpu_worker.errors import ModelError
from gpu_worker.weights.resolve import resolve_model
from gpu_worker.weights.token_map import read_token_map
from gpu_worker.weights.tokenizer_export import export_tokenizer
from tests.gpu_worker.gguf_models import write_gguf
from tests.models import CHATML_TEMPLATE, make_tiny_llama

TEXTS = (
    "Hello, world! It's 1234.56 or 7e-8; don't I'll WE'VE",
    "naïve café — Zürich, Straße, Ångström",
    "Привет, мир! Γειά σου Κόσμε",
    "日本語のテキストです。你好，世界 안녕하세요",
    "مرحبا بالعالم שלום हिन्दी ไทย",
    "🙂 👩‍👩‍👧 🇩🇪 ✨",
    "def f(x):\n\treturn x ** 2  # 100%\n\n\n    y = {'a': [1, 2]}\r\n",
    "  two  spaces   three    four ",
    "<|im_start|>user\nHi<|im_end|>\n",
    "e\u0301 \u00a0 \u200b \ufeff",
    "",
)


@pytest.fixture(scope="module")
def embedded_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tokenizer(resolve_model(""), tmp_path_factory.mktemp("cache"))


def test_embedded_tokenizer_equals_transformers_conversion(
    embedded_tokenizer: Path, embedded_model: Path
) -> None:
    ours = AutoTokenizer.from_pretrained(embedded_tokenizer)
    theirs = AutoTokenizer.from_pretrained(embedded_model.parent, gguf_file=embedded_model.name)
    assert ours.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids, text
    assert ours.chat_template == theirs.chat_template


@pytest.mark.parametrize("text", TEXTS)
def test_embedded_tokenizer_round_trips(embedded_tokenizer: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(embedded_tokenizer / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_embedded_special_tokens_are_single_ids(embedded_tokenizer: Path) -> None:
    tokenizer = Tokenizer.from_file(str(embedded_tokenizer / "tokenizer.json"))
    for token, token_id in (("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)):
        assert tokenizer.encode(token).ids == [token_id]
        assert tokenizer.encode(f"a{token}b").ids[1] == token_id
    assert tokenizer.decode([1, 2, 0]) == "", "special tokens are skipped unless asked for"
    config = json.loads((embedded_tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_embedded_digits_are_split_one_by_one(embedded_tokenizer: Path) -> None:
    tokenizer = Tokenizer.from_file(str(embedded_tokenizer / "tokenizer.json"))
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("in 1234")]
    assert pieces == ["in", "Ġ", "1", "2", "3", "4"]


def test_embedded_chat_template_is_the_files(embedded_tokenizer: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_tokenizer)
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("num_padding_tokens", [0, 20])
def test_exported_tokenizer_is_the_one_the_file_was_made_from(
    tiny_model_dir: Path, tmp_path: Path, num_padding_tokens: int
) -> None:
    path = write_gguf(tiny_model_dir, tmp_path / "model.gguf", num_padding_tokens=num_padding_tokens)
    exported = export_tokenizer(resolve_model(str(path)), tmp_path / "cache")
    assert read_token_map(exported) == read_token_map(tiny_model_dir)
    ours, original = (
        Tokenizer.from_file(str(directory / "tokenizer.json")) for directory in (exported, tiny_model_dir)
    )
    for text in TEXTS:
        assert ours.encode(text).ids == original.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    config = json.loads((exported / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == CHATML_TEMPLATE


def test_beginning_of_text_follows_the_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    ids = {}
    for add_bos in (True, False):
        path = tmp_path / f"{add_bos}.gguf"
        write_gguf(tiny_model_dir, path, extra={"tokenizer.ggml.add_bos_token": add_bos})
        exported = export_tokenizer(resolve_model(str(path)), tmp_path / "cache")
        ids[add_bos] = Tokenizer.from_file(str(exported / "tokenizer.json")).encode("The dog").ids
    assert ids[True] == [1, *ids[False]]


def test_llama3_pieces_hold_up_to_three_digits_and_start_with_bos(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    path = write_gguf(tiny_model_dir, tmp_path / "model.gguf", pre="llama-bpe")
    exported = export_tokenizer(resolve_model(str(path)), tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("I'M 12345 tokens\n\nx")]
    assert pieces == ["I", "'M", "Ġ", "123", "45", "Ġtokens", "ĊĊ", "x"]
    assert tokenizer.encode("x").ids[0] == 1


def test_qwen2_text_is_normalised(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny_model_dir, tmp_path / "model.gguf", pre="qwen2")
    exported = export_tokenizer(resolve_model(str(path)), tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("12 a")] == ["1", "2", "Ġa"]


def write_sentencepiece_gguf(path: Path) -> Path:
    """A SentencePiece vocabulary of letters, a few words, and every byte."""
    words = [("▁h", -1.0), ("el", -2.0), ("lo", -3.0), ("▁hel", -4.0), ("▁hello", -5.0), ("ell", -6.0)]
    letters = [(letter, -20.0 - number) for number, letter in enumerate("▁helowrd")]
    entries = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    entries += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    entries += [(token, score, 1) for token, score in words + letters]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _, _ in entries])
    writer.add_token_scores([score for _, score, _ in entries])
    writer.add_token_types([kind for _, _, kind in entries])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    path = write_sentencepiece_gguf(tmp_path / "model.gguf")
    exported = export_tokenizer(resolve_model(str(path)), tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    # "el" is joined before "ell" could be, because its score is better; then "▁hel" and "▁hello".
    assert tokenizer.encode("hello world").tokens == ["<s>", "▁hello", "▁", "w", "o", "r", "l", "d"]
    assert tokenizer.encode("ä").tokens == ["<s>", "▁", "<0xC3>", "<0xA4>"]
    for text in TEXTS[:7]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_conversion_happens_once(tiny_model_dir: Path, tmp_path: Path) -> None:
    source = resolve_model(str(write_gguf(tiny_model_dir, tmp_path / "model.gguf")))
    first = export_tokenizer(source, tmp_path / "cache")
    (first / "tokenizer.json").write_text("kept", encoding="utf-8")
    assert export_tokenizer(source, tmp_path / "cache") == first
    assert (first / "tokenizer.json").read_text(encoding="utf-8") == "kept"


def test_another_chat_template_is_another_export(tiny_model_dir: Path, tmp_path: Path) -> None:
    source = resolve_model(str(write_gguf(tiny_model_dir, tmp_path / "a.gguf")))
    changed = write_gguf(tiny_model_dir, tmp_path / "b.gguf", extra={"tokenizer.ggml.add_bos_token": True})
    assert export_tokenizer(source, tmp_path / "cache") != export_tokenizer(
        resolve_model(str(changed)), tmp_path / "cache"
    )


def test_exports_at_the_same_time_leave_one_whole_directory(tiny_model_dir: Path, tmp_path: Path) -> None:
    source = resolve_model(str(write_gguf(tiny_model_dir, tmp_path / "model.gguf")))
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(export_tokenizer(source, tmp_path / "cache")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [found[0].name]
    assert read_token_map(found[0]) == read_token_map(tiny_model_dir)


def test_directory_with_tokenizer_is_used_as_it_is(tiny_model_dir: Path, tmp_path: Path) -> None:
    source = resolve_model(str(tiny_model_dir))
    assert export_tokenizer(source, tmp_path / "cache") == tiny_model_dir
    assert not (tmp_path / "cache").exists()


def test_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    source = resolve_model(str(make_tiny_llama(tmp_path, tokenizer_vocab_size=None)))
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        export_tokenizer(source, tmp_path)


def test_gguf_file_without_tokenizer_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "model", tokenizer_vocab_size=None)
    source = resolve_model(str(write_gguf(directory, tmp_path / "model.gguf")))
    with pytest.raises(ModelError, match=r"model\.gguf: no usable tokenizer: 0 tokens"):
        export_tokenizer(source, tmp_path / "cache")


def test_unknown_kinds_are_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny_model_dir, tmp_path / "a.gguf", pre="viking")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre is 'viking', supported are .*default, "):
        export_tokenizer(resolve_model(str(path)), tmp_path / "cache")
    path = write_gguf(tiny_model_dir, tmp_path / "b.gguf", tokenizer_model="t5")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.model is 't5', supported are gpt2, llama"):
        export_tokenizer(resolve_model(str(path)), tmp_path / "cache")


def test_cache_that_cannot_be_written_is_an_error(tiny_model_dir: Path, tmp_path: Path) -> None:
    source = resolve_model(str(write_gguf(tiny_model_dir, tmp_path / "model.gguf")))
    (tmp_path / "cache").write_text("a file where the directory should be", encoding="utf-8")
    with pytest.raises(ModelError, match=r"cache/\w+: the tokenizer cannot be written"):
        export_tokenizer(source, tmp_path / "cache")
