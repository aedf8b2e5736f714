"""Chat turns as token ids for training data: the target's own template, whole conversations and open user turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from transformers import PreTrainedTokenizerFast

from gpu_worker.errors import ModelError

_MARK = "\u2402mark\u2402"  # stands for a user's text while the template is taken apart


class Message(TypedDict):
    """One turn, as chat templates take it."""

    role: str
    content: str


class ChatTemplate:
    """The served model's tokenizer and template. Immutable after construction."""

    def __init__(self, tokenizer_directory: Path) -> None:
        """Raises ModelError where the model has no chat template, or one that drops the user's text."""
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_directory)
        if self._tokenizer.chat_template is None:
            raise ModelError(
                f"{tokenizer_directory}: has no chat template, so nothing can be synthesized from it"
            )
        text = self._render([Message(role="user", content=_MARK)], answer=True)
        before, mark, after = text.partition(_MARK)
        if not mark:
            raise ModelError(f"{tokenizer_directory}: the chat template drops the user's text")
        self._before_user = before
        self._end_of_user = self._encode(after)[0]

    @property
    def end_of_user(self) -> int:
        """The token that follows a user's text: a model that writes a user's turn ends it with this."""
        return self._end_of_user

    def open_user_turn(self, messages: Sequence[Message], opening: str = "") -> list[int]:
        """Ids up to where the next user's text goes on behind `opening`; messages end with an answer, or are none.

        Blanks at the opening's end are left to what follows: tokens of words begin with theirs.
        """
        if not messages:
            return self._encode(self._before_user + opening.rstrip(" "))
        text = self._render([*messages, Message(role="user", content=_MARK)], answer=False)
        return self._encode(text.partition(_MARK)[0] + opening.rstrip(" "))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation that ends with a user's turn, up to where the answer begins."""
        return self._encode(self._render(messages, answer=True))

    def answered(self, messages: Sequence[Message]) -> tuple[list[int], int] | None:
        """Ids of a conversation that ends with an answer, up to the token that ends it, and where the answer begins.

        None where the template gives the answer other tokens before it than `prompt` does. The texts must be without
        control tokens.
        """
        prompt = self.prompt(messages[:-1])
        ids = self._encode(self._render(messages, answer=False))
        start = len(prompt)
        ends = set(self._tokenizer.all_special_ids)
        end = next((i for i in range(start, len(ids)) if ids[i] in ends), 0)
        return (ids[: end + 1], start) if ids[:start] == prompt and end else None

    def has_control_tokens(self, text: str) -> bool:
        """Whether the text would become more than a turn's content: it spells a token that structures conversations."""
        tokens = self._tokenizer.added_tokens_decoder.values()
        return any(token.special and token.content in text for token in tokens)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of ids without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _render(self, messages: Sequence[Message], *, answer: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=answer
            )
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
