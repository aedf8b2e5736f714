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
_INLINE_CHARACTERS = 2000  # tokenising more than this would hold up other streams: it goes to a thread


async def read_prompt(
    prompt: generation_pb2.Prompt,
    tokenizer: ServedTokenizer,
    vocab_size: int,
    max_prompt_tokens: int,
    field: str = "prompt",
) -> tuple[int, ...]:
    """Token ids of a prompt, at least one.

    Raises InvalidFieldError naming the field under `field`, or DraftlineError PROMPT_TOO_LONG for a text that cannot
    be of max_prompt_tokens tokens.
    """
    kind = prompt.WhichOneof("content")
    if kind is None:
        raise InvalidFieldError(field, "one of text, tokens, chat must be set")
    if kind == "tokens":
        if not prompt.tokens.ids:
            raise InvalidFieldError(f"{field}.tokens.ids", "must not be empty")
        return checks.token_ids(f"{field}.tokens.ids", prompt.tokens.ids, vocab_size)
    if kind == "text":
        if not prompt.text:
            raise InvalidFieldError(f"{field}.text", "must not be empty")
        text, add_special_tokens = prompt.text, True
    else:
        text, add_special_tokens = _render(prompt.chat, tokenizer, f"{field}.chat"), False
    # Tokenising megabytes only to refuse them would cost seconds that belong to others.
    if (least := tokenizer.least_tokens(text)) > max_prompt_tokens:
        raise DraftlineError(
            ErrorReason.PROMPT_TOO_LONG,
            f"{field}: at least {least} tokens are above {max_prompt_tokens}",
            field=field,
        )
    ids = await _encode(tokenizer, text, add_special_tokens)
    if not ids:
        raise InvalidFieldError(f"{field}.{kind}", "gives no tokens")
    return checks.token_ids(f"{field}.{kind}", ids, vocab_size)


async def _encode(tokenizer: ServedTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) <= _INLINE_CHARACTERS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _render(chat: generation_pb2.ChatPrompt, tokenizer: ServedTokenizer, field: str) -> str:
    """The conversation as text; special tokens are the template's to write."""
    if not tokenizer.has_chat_template:
        raise InvalidFieldError(field, "the model has no chat template")
    if not chat.messages:
        raise InvalidFieldError(f"{field}.messages", "must not be empty")
    messages = []
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidFieldError(f"{field}.messages[{index}].role", "must not be empty")
        messages.append({"role": message.role, "content": message.content})
    variables = _variables(chat, f"{field}.template_variables")
    try:
        text = tokenizer.render_chat(messages, variables)
        text.encode()  # a template may build what is no text, such as half of a surrogate pair
        return text
    except Exception as error:  # a template is a program of the model's, run on the caller's values
        raise InvalidFieldError(field, f"the chat template failed: {error}") from error


def _variables(chat: generation_pb2.ChatPrompt, field: str) -> dict[str, Any]:
    for name in chat.template_variables.fields:
        if name in _RESERVED_VARIABLES:
            raise InvalidFieldError(f"{field}.{name}", "the name is the template's own")
    return {name: _plain(value, f"{field}.{name}") for name, value in chat.template_variables.fields.items()}


def _plain(value: struct_pb2.Value, field: str) -> Any:
    """A Struct's value as Python has it; whole numbers as int, so that a template prints 2 as `2`, not `2.0`."""
    kind = value.WhichOneof("kind")
    if kind is None:
        raise InvalidFieldError(field, "has no value")
    if kind == "null_value":
        return None
    if kind == "struct_value":
        return {name: _plain(item, f"{field}.{name}") for name, item in value.struct_value.fields.items()}
    if kind == "list_value":
        return [_plain(item, f"{field}[{index}]") for index, item in enumerate(value.list_value.values)]
    if kind == "number_value":
        number = value.number_value
        if not math.isfinite(number):
            raise InvalidFieldError(field, f"{number} is not a finite number")
        return int(number) if number.is_integer() else number
    return getattr(value, kind)
