"""Options become exactly the protocol's fields, and what it cannot carry is refused by name."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields

import pytest
from draftline import Chat, GenerateOptions, InvalidArgumentError, Message
from draftline.channel import channel_options
from draftline.labels import ACCEPTANCE_RULES, METHODS, label_of
from draftline.requests import abort_request, generate_request, tokenize_request
from draftline.v1 import common_pb2

EVERY_OPTION = GenerateOptions(
    model="m",
    request_id="id-1",
    temperature=0.5,
    top_k=3,
    top_p=0.75,
    min_p=0.25,
    presence_penalty=1.0,
    frequency_penalty=0.5,
    repetition_penalty=1.25,
    logit_bias={5: -100.0},
    seed=2**63,
    max_tokens=9,
    min_tokens=2,
    stop=["a", "b"],
    stop_token_ids=[4],
    include_stop=True,
    ignore_eos=True,
    speculation="draft-model",
    num_draft_tokens=3,
    acceptance_rule="typical",
    typical_epsilon=0.125,
    typical_delta=0.5,
    threshold=0.75,
    skip_text=True,
    token_ids=True,
    logprobs=2,
    prompt_logprobs=0,
    min_tokens_per_message=8,
    speculation_steps=True,
    special_tokens=True,
    n=2,
    priority=-1,
    cache_salt="s",
)


def test_every_option_reaches_its_field():
    request = generate_request("hi", EVERY_OPTION)
    assert (request.model, request.request_id, request.prompt.text) == ("m", "id-1", "hi")
    for name in [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
    ]:
        assert request.sampling_params.HasField(name)
        assert getattr(request.sampling_params, name) == getattr(EVERY_OPTION, name)
    assert dict(request.sampling_params.logit_bias) == {5: -100.0}
    for name in ("max_tokens", "min_tokens", "include_stop", "ignore_eos"):
        assert getattr(request.stopping, name) == getattr(EVERY_OPTION, name)
    assert list(request.stopping.stop) == ["a", "b"]
    assert list(request.stopping.stop_token_ids) == [4]
    assert request.speculation.method == common_pb2.SPECULATION_METHOD_DRAFT_MODEL
    assert request.speculation.acceptance_rule == common_pb2.ACCEPTANCE_RULE_TYPICAL
    assert request.speculation.max_draft_tokens == 3
    assert request.speculation.typical_epsilon == 0.125
    assert request.speculation.typical_delta == 0.5
    assert request.speculation.threshold == 0.75
    for name in ["skip_text", "token_ids", "logprobs", "prompt_logprobs", "min_tokens_per_message"]:
        assert getattr(request.output, name) == getattr(EVERY_OPTION, name)
    assert request.output.speculation_steps
    assert request.output.special_tokens
    assert request.output.HasField("prompt_logprobs")
    assert (request.n, request.priority, request.cache_salt) == (2, -1, "s")


def test_no_option_is_left_at_its_default_in_the_test_above():
    default = GenerateOptions()
    for option in fields(GenerateOptions):
        if option.name != "timeout":  # of the call, not of the message
            assert getattr(EVERY_OPTION, option.name) != getattr(default, option.name), option.name


def test_unset_options_stay_unset():
    request = generate_request("hi", GenerateOptions())
    assert not request.sampling_params.ListFields()
    assert not request.stopping.ListFields()
    assert not request.speculation.ListFields()
    assert not request.output.ListFields()


def test_an_explicit_zero_is_sent():
    request = generate_request("hi", GenerateOptions(temperature=0, top_k=0, seed=0, max_tokens=0))
    assert all(request.sampling_params.HasField(name) for name in ("temperature", "top_k", "seed"))
    assert request.stopping.HasField("max_tokens")


def test_three_shapes_of_prompt():
    assert list(tokenize_request([1, 2], "").prompt.tokens.ids) == [1, 2]
    assert tokenize_request([], "").prompt.WhichOneof("content") == "tokens"
    assert tokenize_request("", "").prompt.WhichOneof("content") == "text"
    chat = Chat([Message("system", "s"), {"role": "user", "content": "u"}], {"thinking": True})
    prompt = tokenize_request(chat, "").prompt
    assert [(m.role, m.content) for m in prompt.chat.messages] == [("system", "s"), ("user", "u")]
    assert prompt.chat.template_variables["thinking"] is True
    empty = tokenize_request(Chat([]), "").prompt
    assert empty.WhichOneof("content") == "chat"
    assert not empty.chat.HasField("template_variables")


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("a\ud800b", {}, "prompt.text"),
        ([-1], {}, "prompt.tokens.ids"),
        ([2**32], {}, "prompt.tokens.ids"),
        (Chat([{"role": "user"}]), {}, "prompt.chat.messages[0]"),
        (Chat([Message("user", "\udfff")]), {}, "prompt.chat.messages[0].content"),
        (Chat([], {"x": object()}), {}, "prompt.chat.template_variables"),
        ("a", {"top_k": -1}, "sampling_params.top_k"),
        ("a", {"temperature": "hot"}, "sampling_params.temperature"),
        ("a", {"logit_bias": {-1: 1.0}}, "sampling_params.logit_bias"),
        ("a", {"stop_token_ids": [2**31, -1]}, "stopping.stop_token_ids"),
        ("a", {"max_tokens": -5}, "stopping.max_tokens"),
        ("a", {"speculation": "eagle9"}, "speculation.method"),
        ("a", {"acceptance_rule": "mostly"}, "speculation.acceptance_rule"),
        ("a", {"num_draft_tokens": -2}, "speculation.max_draft_tokens"),
        ("a", {"n": -1}, "n"),
    ],
)
def test_what_the_protocol_cannot_carry_is_refused_by_field(prompt, options, field):
    with pytest.raises(InvalidArgumentError) as caught:
        generate_request(prompt, GenerateOptions(**options))
    assert caught.value.field == field
    assert caught.value.code == "INVALID_ARGUMENT"
    assert caught.value.reason == "INVALID_FIELD"


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({"max_tokens": -5}, "stopping.max_tokens: -5 cannot be sent: must be in 0..4294967295"),
        ({"seed": 2**64}, "must be in 0..18446744073709551615"),
        ({"priority": 2**31}, "must be in -2147483648..2147483647"),
        ({"max_tokens": "many"}, "'many' cannot be sent: 'str' object"),
    ],
)
def test_an_integer_that_cannot_be_sent_comes_with_its_limits(options, limits):
    with pytest.raises(InvalidArgumentError, match=re.escape(limits)):
        generate_request("a", GenerateOptions(**options))


def test_labels_cover_the_enums():
    assert {"off", "ngram", "draft-model", "eagle", "eagle3", "mtp", "medusa", "portfolio"} == set(METHODS)
    assert {"coupled", "rejection", "block", "typical", "threshold"} == set(ACCEPTANCE_RULES)
    assert label_of(METHODS, 0) == ""
    assert label_of(METHODS, 999) == "999"


def test_importing_the_stubs_loads_no_client():
    code = """
import sys
import draftline.v1.generation_pb2_grpc
loaded = [m for m in sys.modules if m.startswith("draftline.") and not m.startswith("draftline.v1")]
assert not loaded, loaded
import draftline
draftline.Client
assert "draftline.client" in sys.modules
import draftline.cli.app
foreign = {"torch", "transformers", "scheduler_svc", "gpu_worker", "shared_mem", "numpy"} & set(sys.modules)
assert not foreign, foreign
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_resolves():
    import draftline

    assert all(getattr(draftline, name) for name in draftline.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        draftline.nonsense  # noqa: B018


def test_one_stop_may_be_given_as_it_is():
    assert list(generate_request("x", GenerateOptions(stop="abc")).stopping.stop) == ["abc"]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (5, "prompt"),
        (None, "prompt"),
        (b"text", "prompt"),
        (Chat([{"role": "user", "content": None}]), "prompt.chat.messages[0].content"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(prompt, field):
    with pytest.raises(InvalidArgumentError) as caught:
        generate_request(prompt, GenerateOptions())
    assert [violation.field for violation in caught.value.field_violations] == [field]


def test_a_list_among_request_ids_is_refused_by_name():
    with pytest.raises(InvalidArgumentError, match="request_ids"):
        abort_request((["x"],))


@pytest.mark.parametrize("address", ["", "127.0.0.1:65536", "[::1]:99999"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(InvalidArgumentError, match="address"):
        channel_options(address)


@pytest.mark.parametrize(
    "address", ["localhost", "127.0.0.1:65535", "unix:/tmp/s:99999", "dns:///host:50051"]
)
def test_addresses(address):
    assert channel_options(address)
