"""The only reader of GenerateRequest: checks every field, fills in defaults, gives what is submitted."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any

from draftline.v1 import common_pb2, generation_pb2

from scheduler_svc.errors import DraftlineError, ErrorReason, InvalidFieldError
from scheduler_svc.frontend import checks
from scheduler_svc.frontend.prompt import read_prompt
from scheduler_svc.frontend.sample_output import OutputWishes
from scheduler_svc.frontend.tokenizer import ServedTokenizer
from scheduler_svc.messages import Model, Sampling, Speculation, Stopping, Submit
from shared_mem.enums import AcceptanceRule, SpeculationMethod

MAX_SAMPLES = 64
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_SALT_CHARACTERS = 256
# Logits divided by less overflow float32 before the softmax; so close to 0 sampling is greedy anyway.
_GREEDY_BELOW = 1e-4
_SEED_BITS = 63


@dataclass(frozen=True)
class GenerationCall:
    """A request as the rest of the frontend needs it."""

    submit: Submit
    wishes: OutputWishes


async def read_generate(
    request: generation_pb2.GenerateRequest,
    model: Model,
    tokenizer: ServedTokenizer,
    arrival_time: float,
    deadline: float | None,
) -> GenerationCall:
    """Checks and resolves a request whose request_id is set. Times are seconds of the wall clock.

    Raises InvalidFieldError with the field's path, or DraftlineError PROMPT_TOO_LONG or PRECONDITION.
    """
    check_model(request.model, model)
    num_samples = checks.at_most("n", request.n, MAX_SAMPLES) or 1
    sampling = _read_sampling(request.sampling_params, model)
    speculation = _read_speculation(request.speculation, model)
    output = request.output
    for field in ("logprobs", "prompt_logprobs"):
        checks.at_most(f"output.{field}", getattr(output, field), MAX_LOGPROBS)
    if len(request.cache_salt) > MAX_SALT_CHARACTERS:
        raise InvalidFieldError(
            "cache_salt", f"{len(request.cache_salt)} characters are above {MAX_SALT_CHARACTERS}"
        )
    _check_stopping(request.stopping, model)
    token_ids = await read_prompt(request.prompt, tokenizer, model.vocab_size, model.max_prompt_tokens)
    stopping = _read_stopping(request.stopping, model, len(token_ids))
    submit = Submit(
        request_id=request.request_id,
        token_ids=token_ids,
        sampling=sampling,
        stopping=stopping,
        speculation=speculation,
        arrival_time=arrival_time,
        seeds=tuple(sample_seed(sampling.seed, index) for index in range(num_samples)),
        deadline=deadline,
        priority=request.priority,
        cache_salt=request.cache_salt,
        num_logprobs=_optional(output, "logprobs", None),
        num_prompt_logprobs=_optional(output, "prompt_logprobs", None),
    )
    return GenerationCall(submit, _read_wishes(request, stopping.min_tokens))


def check_model(name: str, model: Model) -> None:
    """Raises InvalidFieldError when a request names another model than the one served; "" names any."""
    if name and name != model.name:
        raise InvalidFieldError("model", f"{name[:80]!r} is not served; {model.name!r} is")


def sample_seed(seed: int, index: int) -> int:
    """Seed of one of n samples: the first draws as n=1 would, the others each their own way."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def _optional(message: Any, field: str, default: Any) -> Any:
    """An explicit value, even 0, or the default."""
    return getattr(message, field) if message.HasField(field) else default


def _read_sampling(params: common_pb2.SamplingParams, model: Model) -> Sampling:
    def value(field: str, default: float) -> float:
        return float(_optional(params, field, default))

    def path(field: str) -> str:
        return f"sampling_params.{field}"

    temperature = checks.in_range(path("temperature"), value("temperature", model.default_temperature), 0, 2)
    top_k = int(value("top_k", model.default_top_k))
    biases = params.logit_bias
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidFieldError(path("logit_bias"), f"{len(biases)} entries are above {MAX_LOGIT_BIASES}")
    for token_id, bias in biases.items():
        field = path(f"logit_bias[{token_id}]")
        checks.token_id(field, token_id, model.vocab_size)
        checks.in_range(field, bias, -100, 100)
    return Sampling(
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=0 if top_k >= model.vocab_size else top_k,
        top_p=checks.above(path("top_p"), value("top_p", model.default_top_p), 0, 1),
        min_p=checks.in_range(path("min_p"), value("min_p", model.default_min_p), 0, 1),
        presence_penalty=checks.in_range(path("presence_penalty"), value("presence_penalty", 0), -2, 2),
        frequency_penalty=checks.in_range(path("frequency_penalty"), value("frequency_penalty", 0), -2, 2),
        repetition_penalty=checks.in_range(
            path("repetition_penalty"),
            value("repetition_penalty", model.default_repetition_penalty),
            0.01,
            100,
        ),
        seed=params.seed if params.HasField("seed") else secrets.randbits(_SEED_BITS),
        logit_bias=tuple(sorted(biases.items())),
    )


def _check_stopping(criteria: common_pb2.StoppingCriteria, model: Model) -> None:
    """What can be checked before the prompt is tokenised."""
    if criteria.HasField("max_tokens"):
        if criteria.max_tokens == 0:
            raise InvalidFieldError("stopping.max_tokens", "0 is below 1")
        if criteria.min_tokens > criteria.max_tokens:
            raise InvalidFieldError(
                "stopping.min_tokens", f"{criteria.min_tokens} is above max_tokens, {criteria.max_tokens}"
            )
    checks.at_most("stopping.min_tokens", criteria.min_tokens, model.max_context_tokens)
    if len(criteria.stop) > MAX_STOPS:
        raise InvalidFieldError("stopping.stop", f"{len(criteria.stop)} entries are above {MAX_STOPS}")
    for index, stop in enumerate(criteria.stop):
        field = f"stopping.stop[{index}]"
        if not stop:
            raise InvalidFieldError(field, "must not be empty")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise InvalidFieldError(field, f"{len(stop)} characters are above {MAX_STOP_CHARACTERS}")
    if len(criteria.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidFieldError(
            "stopping.stop_token_ids",
            f"{len(criteria.stop_token_ids)} entries are above {MAX_STOP_TOKEN_IDS}",
        )
    checks.token_ids("stopping.stop_token_ids", criteria.stop_token_ids, model.vocab_size)


def _read_stopping(criteria: common_pb2.StoppingCriteria, model: Model, num_prompt_tokens: int) -> Stopping:
    room = model.max_context_tokens - num_prompt_tokens
    if room < 1 or num_prompt_tokens > model.max_prompt_tokens:
        limit = min(model.max_prompt_tokens, model.max_context_tokens - 1)
        raise DraftlineError(
            ErrorReason.PROMPT_TOO_LONG,
            f"prompt: {num_prompt_tokens} tokens are above {limit}",
            field="prompt",
        )
    max_tokens = min(_optional(criteria, "max_tokens", room), room)
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=min(criteria.min_tokens, max_tokens),
        stop_token_ids=tuple(dict.fromkeys(criteria.stop_token_ids)),
        ignore_eos=criteria.ignore_eos,
    )


def _read_speculation(params: common_pb2.SpeculationParams, model: Model) -> Speculation:
    method: SpeculationMethod | None = None
    if params.method != common_pb2.SPECULATION_METHOD_UNSPECIFIED:
        try:
            method = SpeculationMethod(params.method)
        except ValueError as error:
            raise InvalidFieldError(
                "speculation.method", f"{params.method} is no SpeculationMethod"
            ) from error
        loaded = [drafter.method for drafter in model.drafters]
        if method is not SpeculationMethod.DISABLED and method not in loaded:
            names = ", ".join(each.label for each in loaded) or "none"
            raise DraftlineError(
                ErrorReason.PRECONDITION,
                f"speculation.method: {method.label} is not loaded (loaded: {names})",
                field="speculation.method",
            )
    rule = AcceptanceRule.COUPLED
    if params.acceptance_rule != common_pb2.ACCEPTANCE_RULE_UNSPECIFIED:
        try:
            rule = AcceptanceRule(params.acceptance_rule)
        except ValueError as error:
            raise InvalidFieldError(
                "speculation.acceptance_rule", f"{params.acceptance_rule} is no AcceptanceRule"
            ) from error

    defaults = Speculation()

    def value(field: str) -> float:
        return float(_optional(params, field, getattr(defaults, field)))

    return Speculation(
        method=method,
        max_draft_tokens=_optional(params, "max_draft_tokens", None),
        acceptance_rule=rule,
        typical_epsilon=checks.in_range("speculation.typical_epsilon", value("typical_epsilon"), 0, 1),
        typical_delta=checks.in_range("speculation.typical_delta", value("typical_delta"), 0, 1),
        threshold=checks.above("speculation.threshold", value("threshold"), 0, 1),
    )


def _read_wishes(request: generation_pb2.GenerateRequest, min_tokens: int) -> OutputWishes:
    output, stopping = request.output, request.stopping
    return OutputWishes(
        send_text=not output.skip_text,
        send_token_ids=output.token_ids,
        send_logprobs=output.HasField("logprobs"),
        send_speculation_steps=output.speculation_steps,
        special_tokens=output.special_tokens,
        min_tokens_per_message=output.min_tokens_per_message,
        min_tokens=min_tokens,
        stops=tuple(stopping.stop),
        include_stop=stopping.include_stop,
    )
