"""The served model's tokenizer and chat template, without torch: prompts become ids here, ids become text.

Reads the hub's layout: tokenizer.json, tokenizer_config.json, chat_template.jinja, special_tokens_map.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from scheduler_svc.errors import StartupError
from scheduler_svc.frontend.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that decides how to detokenise; the rest is skipped unparsed."""

    decoder: dict[str, Any] | None = None


class ServedTokenizer:
    """Encodes prompts and makes detokenizers. Immutable, so any thread may use it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        decoder: dict[str, Any] | None,
        template: str | None,
        specials: dict[str, str],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = specials
        self._is_byte_level = _is_byte_level(decoder)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # UTF-8 bytes of text that one token can stand for, at most. A vocabulary spells bytes with one or two bytes;
        # a normalizer may shorten text (composed characters), never by more than a factor of three.
        longest = max(len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True))
        self._max_token_bytes = longest * (1 if tokenizer.normalizer is None else 3)

    @classmethod
    def load(cls, directory: Path) -> ServedTokenizer:
        """Reads a tokenizer directory. Raises StartupError naming the file that is missing or broken."""
        path = directory / "tokenizer.json"
        try:
            data = path.read_bytes()
            tokenizer = Tokenizer.from_buffer(data)
            decoder = msgspec.json.decode(data, type=_TokenizerFile).decoder
        except OSError as error:
            raise StartupError(f"tokenizer {path}: {error.strerror}") from error
        except Exception as error:  # the library raises bare Exception for a file that it cannot read
            raise StartupError(f"tokenizer {path}: {error}") from error
        # Some files ask for both, left over from training; a server must never cut or pad a prompt.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(directory / "tokenizer_config.json")
        token_map = {**_read_json(directory / "special_tokens_map.json"), **config}
        specials = {}
        for name in _SPECIAL_TOKEN_NAMES:
            token = token_map.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                specials[name] = token
        return cls(tokenizer, decoder, _read_template(directory, config), specials)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works."""
        return self._template is not None

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`, without tokenising it."""
        return -(-len(text.encode()) // self._max_token_bytes)

    def most_bytes(self, num_tokens: int) -> int:
        """An upper bound of the UTF-8 bytes of a text of so many tokens: the inverse of `least_tokens`."""
        return num_tokens * self._max_token_bytes

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; with the tokenizer's own BOS and the like only where asked for."""
        # The batch call lets other threads run meanwhile, which `encode` does not, and skips offsets.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def render_chat(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """The conversation as the model's chat template (run in its sandbox) writes it.

        Raises whatever the template raises: jinja2.TemplateError from raise_exception, and TypeError or
        the like for variables it does not expect.
        """
        if self._template is None:
            raise ValueError("the model has no chat template")
        values = {"add_generation_prompt": True, **self._special_tokens, **variables}
        rendered, _ = render_jinja_template([messages], chat_template=self._template, **values)
        return str(rendered[0])

    def decode(self, token_ids: list[int], *, special_tokens: bool) -> str:
        """Text of all ids at once; ids without a token give nothing."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=not special_tokens))

    def detokenizer(self, *, special_tokens: bool) -> Detokenizer:
        """A fresh incremental detokenizer; its text adds up to `decode` of the ids pushed."""
        skipped = frozenset() if special_tokens else self._special_ids
        kind = ByteLevelDetokenizer if self._is_byte_level else WindowDetokenizer
        return kind(self._tokenizer, skipped)


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder.get("type") == "Sequence":
        decoders = decoder.get("decoders", [])
        return len(decoders) == 1 and _is_byte_level(decoders[0])
    return decoder.get("type") == "ByteLevel"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StartupError(f"tokenizer {path}: {error.strerror}") from error
    except ValueError as error:
        raise StartupError(f"tokenizer {path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"tokenizer {path}: not a JSON object")
    return content


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over the config, whose entry is a text or a list of named ones."""
    path = directory / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"chat template {path}: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
