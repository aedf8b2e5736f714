"""Turns the tokenizer inside a GGUF file into the content of tokenizer.json and tokenizer_config.json.

Byte-level BPE ("gpt2" in GGUF) and SentencePiece BPE ("llama"). GGUF names only the kind of pre-tokenizer;
the patterns behind the names are those of the hub's own tokenizer.json files.
"""

from __future__ import annotations

from typing import Any

from gpu_worker.errors import ModelError
from gpu_worker.weights.gguf_file import GGUFFile

Json = dict[str, Any]

_PREFIX = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # values of token_type that matter here
_SPACE = "\u2581"  # how SentencePiece writes a space

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> Json:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


_GPT2 = _byte_level(use_regex=True)
_SINGLE_DIGITS: Json = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2],
}

# tokenizer.ggml.pre -> the pre-tokenizer of tokenizer.json.
_PRE_TOKENIZERS: dict[str, Json] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "llama-bpe": _split(_LLAMA3_SPLIT),
    "llama3": _split(_LLAMA3_SPLIT),
    "llama-v3": _split(_LLAMA3_SPLIT),
    "qwen2": _split(_QWEN2_SPLIT),
    "deepseek-r1-qwen": _split(_QWEN2_SPLIT),
    "tekken": _split(_TEKKEN_SPLIT),
}
_NFC = ("qwen2", "deepseek-r1-qwen")  # their tokenizer.json normalises text
# A piece that is a token is taken whole, without merges; text starts with BOS unless the file says no.
_LLAMA3_LIKE = ("llama-bpe", "llama3", "llama-v3", "tekken")

# What of the metadata shapes the exported files: the key of their cache.
TOKENIZER_KEYS = (
    "tokenizer.chat_template",
    *(
        _PREFIX + key
        for key in (
            "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id",
            "unknown_token_id", "padding_token_id", "add_bos_token", "add_eos_token", "add_space_prefix",
        )
    ),
)  # fmt: skip


def convert_tokenizer(file: GGUFFile) -> tuple[Json, Json]:
    """The contents of tokenizer.json and tokenizer_config.json.

    Raises ModelError naming the file when it has no tokenizer or one of an unknown kind.
    """
    return _Converter(file).convert()


class _Converter:
    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._tokens: list[str] = self._get("tokens", [])
        self._kinds: list[int] = self._get("token_type", [_NORMAL] * len(self._tokens))
        if not self._tokens or len(self._kinds) != len(self._tokens):
            raise ModelError(
                f"{file.path}: no usable tokenizer: {len(self._tokens)} tokens and {len(self._kinds)} types"
            )
        # Unused entries only pad the embedding; the hub's tokenizer.json does not have them.
        self._vocab = {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self._tokens, self._kinds, strict=True))
            if kind != _UNUSED
        }

    def convert(self) -> tuple[Json, Json]:
        kind = self._get("model", None)
        if kind == "gpt2":
            parts, bos_by_default = self._byte_level_bpe()
        elif kind == "llama":
            parts, bos_by_default = self._sentencepiece_bpe(), True
        else:
            raise ModelError(
                f"{self._file.path}: metadata tokenizer.ggml.model is {kind!r}, supported are gpt2, llama"
            )
        add_bos = bool(self._get("add_bos_token", bos_by_default))
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            **parts,
            "post_processor": self._post_processor(parts["pre_tokenizer"], add_bos),
        }
        config: Json = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": add_bos,
            "clean_up_tokenization_spaces": False,
        }
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = self._get(f"{key}_token_id", None)
            if token_id is not None and 0 <= token_id < len(self._tokens):
                config[f"{name}_token"] = self._tokens[token_id]
        template = self._file.metadata.get("tokenizer.chat_template")
        if template is not None:
            config["chat_template"] = template
        return tokenizer, config

    def _byte_level_bpe(self) -> tuple[Json, bool]:
        pre = self._get("pre", "default")
        if pre not in _PRE_TOKENIZERS:
            raise ModelError(
                f"{self._file.path}: metadata tokenizer.ggml.pre is {pre!r}, supported are"
                f" {', '.join(sorted(_PRE_TOKENIZERS))}"
            )
        if not self._get("merges", []):
            raise ModelError(f"{self._file.path}: metadata tokenizer.ggml.merges is missing or empty")
        parts = {
            "normalizer": {"type": "NFC"} if pre in _NFC else None,
            "pre_tokenizer": _PRE_TOKENIZERS[pre],
            "decoder": _byte_level(use_regex=True),
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": pre in _LLAMA3_LIKE,
                "vocab": self._vocab,
                "merges": [merge.split(" ") for merge in self._get("merges", [])],
            },
        }
        return parts, pre in _LLAMA3_LIKE

    def _sentencepiece_bpe(self) -> Json:
        normalizers: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
        decoders: list[Json] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if self._get("add_space_prefix", True):
            normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self._get("unknown_token_id", None)
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None if unknown is None else self._tokens[unknown],
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": self._vocab,
                "merges": self._merges_by_score(),
            },
        }

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """SentencePiece joins the neighbours that give the best-scored token: as a list, best score first."""
        scores = self._get("scores", [])
        if len(scores) != len(self._tokens):
            raise ModelError(
                f"{self._file.path}: metadata tokenizer.ggml.scores has {len(scores)} entries for"
                f" {len(self._tokens)} tokens"
            )
        vocab = self._vocab
        found = []
        for token, token_id in vocab.items():
            if self._kinds[token_id] not in (_NORMAL, _USER_DEFINED):
                continue
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocab and right in vocab:
                    found.append((-scores[token_id], vocab[left], vocab[right], left, right))
        return [(left, right) for *_, left, right in sorted(found)]

    def _added_tokens(self) -> list[Json]:
        """Tokens that are found in text before anything is split: control tokens, and those users defined."""
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == _CONTROL,
            }
            for token_id, (token, kind) in enumerate(zip(self._tokens, self._kinds, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ]

    def _post_processor(self, pre_tokenizer: Json | None, add_bos: bool) -> Json | None:
        bos_id = self._get("bos_token_id", None)
        if not add_bos or bos_id is None:
            return _byte_level(use_regex=True) if pre_tokenizer is not None else None
        bos = {"SpecialToken": {"id": self._tokens[bos_id], "type_id": 0}}
        first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
        return {
            "type": "TemplateProcessing",
            "single": [bos, first],
            "pair": [bos, first, bos, second],
            "special_tokens": {
                self._tokens[bos_id]: {
                    "id": self._tokens[bos_id],
                    "ids": [bos_id],
                    "tokens": [self._tokens[bos_id]],
                }
            },
        }

    def _get(self, key: str, default: Any) -> Any:
        return self._file.metadata.get(_PREFIX + key, default)
