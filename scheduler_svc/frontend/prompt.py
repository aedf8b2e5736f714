"""A Prompt message to token ids; used by Generate and Tokenize alike, so that both agree."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from draftline.v1 import generation_pb2
from google.protobuf import struct_pb2

from scheduler_svc.errors import DraftlineError, ErrorReason, InvalidFieldError
from scheduler_svc.frontend import checks
from scheduler_svc.frontend.tokenizer import ServedTokenizer

# Names that the renderer itself gives to the template or takes as arguments.
_RESERVED_VARIABLES = frozenset(
    {"messages", "conversations", "chat_template", "return_assistant_tokens_mask"}
)
# Rendering or tokenising more than this would hold up other streams: it goes to a thread.
_INLINE_CHARACTERS = 2000
_INLINE_MESSAGES = 64
_PATH_CHARACTERS = 80  # of a variable's name in the path of an error


async def read_prompt(
    prompt: generation_pb2.Prompt,
    tokenizer: ServedTokenizer,
    vocab_size: int,
    max_prompt_tokens: int,
    field: str = "prompt",
) -> tuple[int, ...]:
    """Token ids of a prompt, at least one.

    Raises InvalidFieldError naming the field under `field`, or DraftlineError PROMPT_TOO_LONG for ids above
    max_prompt_tokens and for what cannot be so few tokens. That much is told before anything is copied, rendered or
    tokenised, which could cost seconds that belong to others.
    """
    kind = prompt.WhichOneof("content")
    if kind is None:
        raise InvalidFieldError(field, "one of text, tokens, chat must be set")
    if kind == "tokens":
        if not prompt.tokens.ids:
            raise InvalidFieldError(f"{field}.tokens.ids", "must not be empty")
        if len(prompt.tokens.ids) > max_prompt_tokens:
            raise _too_long(field, f"{field}: {len(prompt.tokens.ids)} tokens are above {max_prompt_tokens}")
        return checks.token_ids(f"{field}.tokens.ids", prompt.tokens.ids, vocab_size)
    if kind == "text":
        if not prompt.text:
            raise InvalidFieldError(f"{field}.text", "must not be empty")
        text, add_special_tokens = prompt.text, True
    else:
        text, add_special_tokens = await _read_chat(prompt.chat, tokenizer, max_prompt_tokens, field), False
    if (least := tokenizer.least_tokens(text)) > max_prompt_tokens:
        raise _too_long(field, f"{field}: at least {least} tokens are above {max_prompt_tokens}")
    ids = await _encode(tokenizer, text, add_special_tokens)
    if not ids:
        raise InvalidFieldError(f"{field}.{kind}", "gives no tokens")
    return checks.token_ids(f"{field}.{kind}", ids, vocab_size)


async def _encode(tokenizer: ServedTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) <= _INLINE_CHARACTERS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


async def _read_chat(
    chat: generation_pb2.ChatPrompt, tokenizer: ServedTokenizer, max_prompt_tokens: int, prompt_field: str
) -> str:
    """The rendered conversation. A message counts as one token at least, whatever the template makes of it."""
    field = f"{prompt_field}.chat"
    if not tokenizer.has_chat_template:
        raise InvalidFieldError(field, "the model has no chat template")
    if not chat.messages:
        raise InvalidFieldError(f"{field}.messages", "must not be empty")
    if len(chat.messages) > max_prompt_tokens:
        raise _too_long(
            prompt_field, f"{field}.messages: {len(chat.messages)} messages are above {max_prompt_tokens}"
        )
    if (
        len(chat.messages) <= _INLINE_MESSAGES
        and not chat.template_variables.fields
        and _num_characters(chat) <= _INLINE_CHARACTERS
    ):
        return _render(chat, tokenizer, max_prompt_tokens, prompt_field)
    return await asyncio.to_thread(_render, chat, tokenizer, max_prompt_tokens, prompt_field)


def _num_characters(chat: generation_pb2.ChatPrompt) -> int:
    return sum(len(message.role) + len(message.content) for message in chat.messages)


def _too_long(prompt_field: str, message: str) -> DraftlineError:
    return DraftlineError(ErrorReason.PROMPT_TOO_LONG, message, field=prompt_field)


def _render(
    chat: generation_pb2.ChatPrompt, tokenizer: ServedTokenizer, max_prompt_tokens: int, prompt_field: str
) -> str:
    """The conversation as text; special tokens are the template's to write."""
    field = f"{prompt_field}.chat"
    limit = tokenizer.most_bytes(max_prompt_tokens)
    if (size := _num_characters(chat)) > limit:  # characters are never more than bytes
        raise _too_long(
            prompt_field,
            f"{field}.messages: {size} characters are above {limit}, the most that {max_prompt_tokens} tokens hold",
        )
    messages = []
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidFieldError(f"{field}.messages[{index}].role", "must not be empty")
        messages.append({"role": message.role, "content": message.content})
    reader = _VariablesReader(f"{field}.template_variables", max_prompt_tokens, limit)
    variables = reader.read(chat.template_variables)
    try:
        text = tokenizer.render_chat(messages, variables)
        text.encode()  # a template may build what is no text, such as half of a surrogate pair
        return text
    except Exception as error:  # a template is a program of the model's, run on the caller's values
        raise InvalidFieldError(field, f"the chat template failed: {error}") from error


class _VariablesReader:
    """A Struct as Python has it, as long as it holds no more than a prompt could: it may be megabytes of values."""

    def __init__(self, field: str, max_values: int, max_characters: int) -> None:
        self._field = field
        self._max_values = max_values
        self._max_characters = max_characters
        self._num_values = 0
        self._num_characters = 0

    def read(self, variables: struct_pb2.Struct) -> dict[str, Any]:
        """The variables by name. Raises InvalidFieldError."""
        for name in _RESERVED_VARIABLES:
            if name in variables.fields:
                raise InvalidFieldError(f"{self._field}.{name}", "the name is the template's own")
        return self._struct(variables, self._field)

    def _struct(self, struct: struct_pb2.Struct, path: str) -> dict[str, Any]:
        values = {}
        for name, value in struct.fields.items():
            self._count_text(name)
            values[name] = self._plain(value, f"{path}.{name[:_PATH_CHARACTERS]}")
        return values

    def _plain(self, value: struct_pb2.Value, path: str) -> Any:
        """One value; whole numbers as int, so that a template prints 2 as `2`, not `2.0`."""
        self._num_values += 1
        if self._num_values > self._max_values:
            raise InvalidFieldError(
                self._field, f"at least {self._num_values} values are above {self._max_values}"
            )
        kind = value.WhichOneof("kind")
        if kind is None:
            raise InvalidFieldError(path, "has no value")
        if kind == "null_value":
            return None
        if kind == "struct_value":
            return self._struct(value.struct_value, path)
        if kind == "list_value":
            items = value.list_value.values
            return [self._plain(item, f"{path}[{index}]") for index, item in enumerate(items)]
        if kind == "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise InvalidFieldError(path, f"{number} is not a finite number")
            return int(number) if number.is_integer() else number
        if kind == "string_value":
            self._count_text(value.string_value)
        return getattr(value, kind)

    def _count_text(self, text: str) -> None:
        self._num_characters += len(text)
        if self._num_characters > self._max_characters:
            raise InvalidFieldError(
                self._field,
                f"{self._num_characters} characters are above {self._max_characters}, the most that a prompt holds",
            )
