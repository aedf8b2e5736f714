"""Builds every request message, for the sync and the async client alike: options in, protobuf out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtoMessage

from draftline.errors import invalid_field
from draftline.labels import ACCEPTANCE_RULES, METHODS, number_of
from draftline.options import Chat, GenerateOptions, Message, Prompt
from draftline.v1 import generation_pb2

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
)
_STOPPING = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop", "ignore_eos")
_OUTPUT = (
    "skip_text",
    "token_ids",
    "logprobs",
    "prompt_logprobs",
    "min_tokens_per_message",
    "speculation_steps",
    "special_tokens",
)
_INTEGERS = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
}


def generate_request(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """The message of one generation. Raises InvalidArgumentError for what the protocol cannot carry."""
    request = generation_pb2.GenerateRequest()
    _set_prompt(request.prompt, prompt)
    for name in ("request_id", "model", "n", "priority", "cache_salt"):
        set_field(request, name, getattr(options, name), "")
    for name in _SAMPLING:
        set_field(request.sampling_params, name, getattr(options, name), "sampling_params.")
    for name in _STOPPING:
        value = getattr(options, name)
        if name == "stop" and isinstance(value, str):  # else a sequence of its letters
            value = (value,)
        set_field(request.stopping, name, value, "stopping.")
    for name in _OUTPUT:
        set_field(request.output, name, getattr(options, name), "output.")
    speculation = request.speculation
    if options.speculation is not None:
        speculation.method = number_of(METHODS, options.speculation, "speculation.method")
    if options.acceptance_rule is not None:
        field = "speculation.acceptance_rule"
        speculation.acceptance_rule = number_of(ACCEPTANCE_RULES, options.acceptance_rule, field)
    set_field(speculation, "max_draft_tokens", options.num_draft_tokens, "speculation.")
    for name in ("typical_epsilon", "typical_delta", "threshold"):
        set_field(speculation, name, getattr(options, name), "speculation.")
    return request


def tokenize_request(prompt: Prompt, model: str) -> generation_pb2.TokenizeRequest:
    """The message that asks for a prompt's ids. Raises as generate_request does."""
    request = generation_pb2.TokenizeRequest()
    _set_prompt(request.prompt, prompt)
    set_field(request, "model", model, "")
    return request


def detokenize_request(
    token_ids: Sequence[int], special_tokens: bool, model: str
) -> generation_pb2.DetokenizeRequest:
    """The message that asks for the text of ids. Raises as generate_request does."""
    request = generation_pb2.DetokenizeRequest()
    set_field(request, "token_ids", token_ids, "")
    set_field(request, "special_tokens", special_tokens, "")
    set_field(request, "model", model, "")
    return request


def abort_request(request_ids: Sequence[str]) -> generation_pb2.AbortRequest:
    """The message that ends requests. Raises as generate_request does."""
    request = generation_pb2.AbortRequest()
    set_field(request, "request_ids", request_ids, "")
    return request


def _set_prompt(message: generation_pb2.Prompt, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        set_field(message, "text", prompt, "prompt.")
    elif isinstance(prompt, Chat):
        message.chat.SetInParent()
        for position, turn in enumerate(prompt.messages):
            _add_turn(message.chat, turn, f"prompt.chat.messages[{position}]")
        try:
            message.chat.template_variables.update(dict(prompt.template_variables))
        except (TypeError, ValueError) as error:
            raise invalid_field("prompt.chat.template_variables", str(error)) from error
        if not prompt.template_variables:
            message.chat.ClearField("template_variables")
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise invalid_field("prompt", f"{_short(prompt)} is neither text, a Chat nor a list of token ids")
    else:
        message.tokens.SetInParent()  # an empty list is still a list: the service says what is wrong with it
        set_field(message.tokens, "ids", prompt, "prompt.tokens.")


def _add_turn(chat: generation_pb2.ChatPrompt, turn: Message | Mapping[str, str], path: str) -> None:
    if isinstance(turn, Mapping):
        unknown = set(turn) ^ {"role", "content"}
        if unknown:
            raise invalid_field(path, f"a turn has `role` and `content`, not {sorted(turn)}")
        turn = Message(turn["role"], turn["content"])
    for name in ("role", "content"):
        if getattr(turn, name) is None:
            raise invalid_field(f"{path}.{name}", "None is no text")
    added = chat.messages.add()
    set_field(added, "role", turn.role, f"{path}.")
    set_field(added, "content", turn.content, f"{path}.")


def set_field(message: ProtoMessage, name: str, value: Any, path: str) -> None:
    """Sets a scalar, repeated or map field; None leaves it unset. The error names field and value."""
    if value is None:
        return
    try:
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (AttributeError, TypeError, ValueError) as error:
        # a wrong type, one that is out of the integer's range, a lone surrogate
        reason = _range(message, name) if isinstance(error, ValueError) else ""
        raise invalid_field(path + name, f"{_short(value)} cannot be sent: {reason or error}") from error


def _range(message: ProtoMessage, name: str) -> str:
    """What an integer field holds, in words; empty for a field of another type, or a map."""
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.type not in _INTEGERS:
        return ""
    low, high = _INTEGERS[field.type]
    return f"must be in {low}..{high}"


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
