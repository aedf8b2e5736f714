"""Every field of GenerateRequest: what is refused, with the field's path, and what is made of the rest."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from draftline.v1 import common_pb2, generation_pb2
from google.protobuf import struct_pb2

from scheduler_svc.errors import DraftlineError, ErrorReason
from scheduler_svc.frontend import checks
from scheduler_svc.frontend.convert import GenerationCall, read_generate, sample_seed
from scheduler_svc.frontend.tokenizer import ServedTokenizer
from scheduler_svc.messages import Model
from shared_mem.enums import AcceptanceRule, SpeculationMethod
from tests.frontend.conftest import request_of
from tests.frontend.fake_scheduler import MAX_CONTEXT, VOCAB_SIZE, make_model

NAN, INF = float("nan"), float("inf")
ODD = "prompt.chat.template_variables.odd"


@pytest.fixture
def model(tokenizer_dir: Path) -> Model:
    return make_model(tokenizer_dir, default_temperature=0.6, default_top_k=40, default_top_p=0.9)


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling_params": common_pb2.SamplingParams(**fields)}


def stopping(**fields: Any) -> dict[str, Any]:
    return {"stopping": common_pb2.StoppingCriteria(**fields)}


def speculation(**fields: Any) -> dict[str, Any]:
    return {"speculation": common_pb2.SpeculationParams(**fields)}


def tokens(*ids: int) -> dict[str, Any]:
    return {"prompt": generation_pb2.Prompt(tokens=generation_pb2.TokenIds(ids=ids))}


def chat(*messages: tuple[str, str], variables: dict[str, Any] | None = None) -> dict[str, Any]:
    prompt = generation_pb2.ChatPrompt(
        messages=[generation_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    )
    if variables is not None:
        prompt.template_variables.update(variables)
    return {"prompt": generation_pb2.Prompt(chat=prompt)}


def odd_variable(value: struct_pb2.Value) -> dict[str, Any]:
    request = chat(("user", "hi"))
    request["prompt"].chat.template_variables.fields["odd"].CopyFrom(value)
    return request


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "other"}, "model", "'other' is not served; 'scripted' is"),
    ({"n": 65}, "n", "65 is above 64"),
    ({"cache_salt": "s" * 257}, "cache_salt", "257 characters are above 256"),
    ({"prompt": None}, "prompt", "one of text, tokens, chat must be set"),
    ({"prompt": generation_pb2.Prompt(text="")}, "prompt.text", "must not be empty"),
    (tokens(), "prompt.tokens.ids", "must not be empty"),
    (tokens(5, VOCAB_SIZE), "prompt.tokens.ids[1]", f"token id {VOCAB_SIZE} is not in 0..{VOCAB_SIZE - 1}"),
    (tokens(2**32 - 1), "prompt.tokens.ids[0]", "token id 4294967295 is not in 0..299"),
    (tokens(2**31 - 1), "prompt.tokens.ids[0]", "token id 2147483647 is not in 0..299"),
    (chat(), "prompt.chat.messages", "must not be empty"),
    (chat(("user", "a"), ("", "b")), "prompt.chat.messages[1].role", "must not be empty"),
    (odd_variable(struct_pb2.Value(number_value=NAN)), ODD, "nan is not a finite number"),
    (odd_variable(struct_pb2.Value(number_value=-INF)), ODD, "-inf is not a finite number"),
    (odd_variable(struct_pb2.Value()), ODD, "has no value"),
    (
        odd_variable(struct_pb2.Value(list_value=struct_pb2.ListValue(values=[struct_pb2.Value()]))),
        f"{ODD}[0]",
        "has no value",
    ),
    (
        chat(("user", "a"), variables={"messages": []}),
        "prompt.chat.template_variables.messages",
        "the name is the template's own",
    ),
    (
        chat(("user", "a"), variables={"chat_template": "x"}),
        "prompt.chat.template_variables.chat_template",
        "the name is the template's own",
    ),
    (chat(("user", "a"), variables={"tools": ["no object"]}), "prompt.chat", "the chat template failed: "),
    (sampling(temperature=-0.1), "sampling_params.temperature", "-0.1 is not in [0, 2]"),
    (sampling(temperature=2.1), "sampling_params.temperature", "2.1 is not in [0, 2]"),
    (sampling(temperature=NAN), "sampling_params.temperature", "nan is not in [0, 2]"),
    (sampling(temperature=INF), "sampling_params.temperature", "inf is not in [0, 2]"),
    (sampling(top_p=0), "sampling_params.top_p", "0 is not in (0, 1]"),
    (sampling(top_p=1.1), "sampling_params.top_p", "1.1 is not in (0, 1]"),
    (sampling(top_p=NAN), "sampling_params.top_p", "nan is not in (0, 1]"),
    (sampling(min_p=-1), "sampling_params.min_p", "-1 is not in [0, 1]"),
    (sampling(min_p=1.5), "sampling_params.min_p", "1.5 is not in [0, 1]"),
    (sampling(presence_penalty=2.5), "sampling_params.presence_penalty", "2.5 is not in [-2, 2]"),
    (sampling(frequency_penalty=-2.5), "sampling_params.frequency_penalty", "-2.5 is not in [-2, 2]"),
    (sampling(frequency_penalty=NAN), "sampling_params.frequency_penalty", "nan is not in [-2, 2]"),
    (sampling(repetition_penalty=0), "sampling_params.repetition_penalty", "0 is not in [0.01, 100]"),
    (
        sampling(repetition_penalty=0.0099),
        "sampling_params.repetition_penalty",
        "0.0099 is not in [0.01, 100]",
    ),
    (sampling(repetition_penalty=INF), "sampling_params.repetition_penalty", "inf is not in [0.01, 100]"),
    (
        sampling(logit_bias={7: 1.0, VOCAB_SIZE: 1.0}),
        f"sampling_params.logit_bias[{VOCAB_SIZE}]",
        "token id 300 is not in 0..299",
    ),
    (sampling(logit_bias={7: 101}), "sampling_params.logit_bias[7]", "101 is not in [-100, 100]"),
    (sampling(logit_bias={7: NAN}), "sampling_params.logit_bias[7]", "nan is not in [-100, 100]"),
    (
        sampling(logit_bias=dict.fromkeys(range(1025), 0.0)),
        "sampling_params.logit_bias",
        "1025 entries are above 1024",
    ),
    (stopping(max_tokens=0), "stopping.max_tokens", "0 is below 1"),
    (stopping(max_tokens=5, min_tokens=6), "stopping.min_tokens", "6 is above max_tokens, 5"),
    (stopping(min_tokens=257), "stopping.min_tokens", "257 is above 256"),
    (stopping(stop=["a", "b", ""]), "stopping.stop[2]", "must not be empty"),
    (stopping(stop=["a"] * 17), "stopping.stop", "17 entries are above 16"),
    (stopping(stop=["a" * 1025]), "stopping.stop[0]", "1025 characters are above 1024"),
    (stopping(stop_token_ids=[1, 300]), "stopping.stop_token_ids[1]", "token id 300 is not in 0..299"),
    (stopping(stop_token_ids=[1] * 257), "stopping.stop_token_ids", "257 entries are above 256"),
    (speculation(method=9), "speculation.method", "9 is no SpeculationMethod"),
    (speculation(acceptance_rule=9), "speculation.acceptance_rule", "9 is no AcceptanceRule"),
    (speculation(typical_epsilon=-1), "speculation.typical_epsilon", "-1 is not in [0, 1]"),
    (speculation(typical_delta=NAN), "speculation.typical_delta", "nan is not in [0, 1]"),
    (speculation(threshold=0), "speculation.threshold", "0 is not in (0, 1]"),
    ({"output": generation_pb2.OutputOptions(logprobs=21)}, "output.logprobs", "21 is above 20"),
    (
        {"output": generation_pb2.OutputOptions(prompt_logprobs=21)},
        "output.prompt_logprobs",
        "21 is above 20",
    ),
]


async def read(model: Model, served: ServedTokenizer, /, **fields: Any) -> GenerationCall:
    return await read_generate(request_of(request_id="r", **fields), model, served, 1000.0, None)


@pytest.mark.parametrize(("fields", "path", "text"), REFUSED, ids=lambda value: str(value)[:40])
async def test_refused(
    model: Model, served_tokenizer: ServedTokenizer, fields: dict[str, Any], path: str, text: str
) -> None:
    with pytest.raises(DraftlineError) as caught:
        await read(model, served_tokenizer, **fields)
    assert caught.value.reason is ErrorReason.INVALID_FIELD
    assert caught.value.field == path
    assert caught.value.message.startswith(f"{path}: {text}")


@pytest.mark.parametrize("length", [MAX_CONTEXT, MAX_CONTEXT + 1])
async def test_a_prompt_without_room(model: Model, served_tokenizer: ServedTokenizer, length: int) -> None:
    with pytest.raises(DraftlineError, match=f"prompt: {length} tokens are above 255") as caught:
        await read(model, served_tokenizer, **tokens(*[5] * length))
    assert (caught.value.reason, caught.value.field) == (ErrorReason.PROMPT_TOO_LONG, "prompt")


async def test_max_tokens_is_capped_by_the_context(model: Model, served_tokenizer: ServedTokenizer) -> None:
    for wished, expected in ((None, 56), (1000, 56), (56, 56), (9, 9)):
        criteria = stopping(min_tokens=9) if wished is None else stopping(max_tokens=wished, min_tokens=9)
        call = await read(model, served_tokenizer, **tokens(*[5] * 200), **criteria)
        assert (call.submit.stopping.max_tokens, call.submit.stopping.min_tokens) == (expected, 9)
    call = await read(model, served_tokenizer, **tokens(*[5] * 250), **stopping(min_tokens=9))
    assert (call.submit.stopping.max_tokens, call.submit.stopping.min_tokens) == (6, 6)


async def test_a_method_that_is_not_loaded(model: Model, served_tokenizer: ServedTokenizer) -> None:
    with pytest.raises(DraftlineError, match=r"draft-model is not loaded \(loaded: ngram\)") as caught:
        await read(model, served_tokenizer, **speculation(method=common_pb2.SPECULATION_METHOD_DRAFT_MODEL))
    assert (caught.value.reason, caught.value.field) == (ErrorReason.PRECONDITION, "speculation.method")


async def test_unset_fields_are_the_models_defaults(model: Model, served_tokenizer: ServedTokenizer) -> None:
    submit = (await read(model, served_tokenizer)).submit
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.top_p) == (0.6, 40, 0.9)
    assert (submit.sampling.min_p, submit.sampling.repetition_penalty) == (0.0, 1.0)
    assert len(submit.seeds) == 1
    assert submit.seeds[0] == submit.sampling.seed < 2**63
    assert submit.speculation.method is None
    assert submit.speculation.acceptance_rule is AcceptanceRule.COUPLED
    assert (submit.num_logprobs, submit.num_prompt_logprobs) == (None, None)
    other = (await read(model, served_tokenizer)).submit
    assert other.sampling.seed != submit.sampling.seed


async def test_an_explicit_zero_is_not_unset(model: Model, served_tokenizer: ServedTokenizer) -> None:
    output = generation_pb2.OutputOptions(logprobs=0, prompt_logprobs=0)
    call = await read(
        model,
        served_tokenizer,
        output=output,
        **sampling(temperature=0, top_k=0, seed=0),
        **speculation(max_draft_tokens=0, method=common_pb2.SPECULATION_METHOD_DISABLED),
    )
    submit = call.submit
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.seed) == (0.0, 0, 0)
    assert (submit.num_logprobs, submit.num_prompt_logprobs) == (0, 0)
    assert submit.speculation.max_draft_tokens == 0
    assert submit.speculation.method is SpeculationMethod.DISABLED
    assert call.wishes.send_logprobs


async def test_every_field_arrives(model: Model, served_tokenizer: ServedTokenizer) -> None:
    call = await read(
        model,
        served_tokenizer,
        model="scripted",
        n=3,
        priority=-7,
        cache_salt="tenant",
        output=generation_pb2.OutputOptions(
            skip_text=True, token_ids=True, logprobs=2, prompt_logprobs=3, min_tokens_per_message=4,
            speculation_steps=True, special_tokens=True,
        ),
        **tokens(5, 6, 7),
        **sampling(
            temperature=1.5, top_k=9, top_p=0.5, min_p=0.25, presence_penalty=-1, frequency_penalty=1,
            repetition_penalty=1.5, logit_bias={9: -100, 3: 0.5}, seed=2**64 - 1,
        ),
        **stopping(
            max_tokens=12, min_tokens=2, stop=["x", "y"], stop_token_ids=[8, 9, 8], include_stop=True,
            ignore_eos=True,
        ),
        **speculation(
            method=common_pb2.SPECULATION_METHOD_NGRAM, max_draft_tokens=3,
            acceptance_rule=common_pb2.ACCEPTANCE_RULE_TYPICAL, typical_epsilon=0.5, typical_delta=0.25,
            threshold=0.75,
        ),
    )  # fmt: skip
    submit, wishes = call.submit, call.wishes
    assert submit.token_ids == (5, 6, 7)
    assert (submit.request_id, submit.arrival_time, submit.deadline) == ("r", 1000.0, None)
    assert (submit.priority, submit.cache_salt) == (-7, "tenant")
    values = submit.sampling
    assert (values.temperature, values.top_k, values.top_p, values.min_p) == (1.5, 9, 0.5, 0.25)
    assert (values.presence_penalty, values.frequency_penalty, values.repetition_penalty) == (-1, 1, 1.5)
    assert (values.logit_bias, values.seed) == (((3, 0.5), (9, -100.0)), 2**64 - 1)
    assert submit.seeds[0] == 2**64 - 1
    assert len(set(submit.seeds)) == 3
    ends = submit.stopping
    assert (ends.max_tokens, ends.min_tokens, ends.stop_token_ids, ends.ignore_eos) == (12, 2, (8, 9), True)
    wish = submit.speculation
    assert (wish.method, wish.max_draft_tokens) == (SpeculationMethod.NGRAM, 3)
    assert wish.acceptance_rule is AcceptanceRule.TYPICAL
    assert (wish.typical_epsilon, wish.typical_delta, wish.threshold) == (0.5, 0.25, 0.75)
    assert (submit.num_logprobs, submit.num_prompt_logprobs) == (2, 3)
    assert (wishes.stops, wishes.include_stop, wishes.min_tokens) == (("x", "y"), True, 2)
    assert not wishes.send_text
    assert wishes.send_token_ids
    assert wishes.send_logprobs
    assert wishes.send_speculation_steps
    assert wishes.special_tokens
    assert wishes.min_tokens_per_message == 4


async def test_temperatures_too_small_for_float32_are_greedy(
    model: Model, served_tokenizer: ServedTokenizer
) -> None:
    assert (
        await read(model, served_tokenizer, **sampling(temperature=1e-6))
    ).submit.sampling.temperature == 0
    kept = (await read(model, served_tokenizer, **sampling(temperature=1e-3))).submit.sampling.temperature
    assert kept == pytest.approx(1e-3)


async def test_a_top_k_of_the_whole_vocabulary_is_off(
    model: Model, served_tokenizer: ServedTokenizer
) -> None:
    assert (await read(model, served_tokenizer, **sampling(top_k=VOCAB_SIZE))).submit.sampling.top_k == 0
    assert (await read(model, served_tokenizer, **sampling(top_k=299))).submit.sampling.top_k == 299


def test_seeds_of_samples() -> None:
    seeds = [sample_seed(42, index) for index in range(64)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 64
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(42, 1) == seeds[1] != sample_seed(43, 1)


def test_the_least_repetition_penalty_is_within_its_range_as_a_float32_too() -> None:
    assert checks.in_range("f", struct.unpack("f", struct.pack("f", 0.01))[0], 0.01, 100) < 0.01
