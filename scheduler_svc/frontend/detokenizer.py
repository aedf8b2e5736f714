"""Token ids to text, id by id: what is given out is final, and all of it equals decoding all ids at once."""

from __future__ import annotations

import codecs
import functools
import re
from typing import Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One sample's text so far."""

    def push(self, token_id: int, *, keep_special: bool = False) -> str:
        """Text that is final with this id, maybe "". `keep_special`: even if special tokens are skipped."""
        ...

    def peek(self) -> str:
        """What is not given out yet, if it would be whole characters were this id the last; else ""."""
        ...

    def flush(self) -> str:
        """The rest, at the end: a character that was cut becomes U+FFFD, as in decoding all ids."""
        ...


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: which byte each character of a byte-level token stands for (256 entries)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


class ByteLevelDetokenizer:
    """For byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): tokens are bytes, characters span them at will."""

    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int, *, keep_special: bool = False) -> str:
        """See Detokenizer. An incomplete character waits inside the UTF-8 decoder."""
        if token_id in self._skipped_ids and not keep_special:
            return ""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        table = _byte_of_character()
        try:
            data = bytes([table[character] for character in token])
        except KeyError:  # an added token is stored as plain text
            data = token.encode()
        return self._decoder.decode(data)

    def peek(self) -> str:
        """See Detokenizer; what waits here is never a whole character."""
        return ""

    def flush(self) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder (SentencePiece with byte fallback and the like): text depends on neighbours.

    Decodes the last given-out tokens together with the new ones and gives out what the new ones add. A run of
    byte tokens waits for its end, because the decoder replaces the whole run if any part is not UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        self._ids: list[int] = []
        self._context_start = 0  # ids[context_start:given_end] were given out last
        self._given_end = 0
        self._given = ""  # all text given out
        self._byte_run = bytearray()

    def push(self, token_id: int, *, keep_special: bool = False) -> str:
        """See Detokenizer."""
        token = self._tokenizer.id_to_token(token_id)
        # Tokens without text must not become context: a decoder that strips a first space would do it again.
        if not token or (token_id in self._skipped_ids and not keep_special):
            return ""
        self._ids.append(token_id)
        byte_token = _BYTE_TOKEN.fullmatch(token)
        if byte_token is not None:
            self._byte_run.append(int(byte_token[1], 16))
            return ""
        self._byte_run.clear()
        context = self._decode(self._context_start, self._given_end)
        text = self._decode(self._context_start, len(self._ids))
        if text.endswith(_REPLACEMENT):
            return ""
        added = text[len(context) :]
        self._context_start, self._given_end = self._given_end, len(self._ids)
        self._given += added
        return added

    def peek(self) -> str:
        """See Detokenizer; a run of byte tokens that is valid so far."""
        try:
            return self._byte_run.decode()
        except UnicodeDecodeError:
            return ""

    def flush(self) -> str:
        """See Detokenizer."""
        text = self._decode(0, len(self._ids))
        added = text[len(self._given) :]
        self._given = text
        return added

    def _decode(self, start: int, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:end], skip_special_tokens=False))
