"""Prompts to ids: special tokens, chat templates and their failures, long texts off the event loop."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from draftline.v1 import generation_pb2
from tokenizers import Tokenizer, processors

from scheduler_svc.errors import DraftlineError, ErrorReason, InvalidFieldError
from scheduler_svc.frontend.prompt import read_prompt
from scheduler_svc.frontend.tokenizer import ServedTokenizer
from tests.frontend.fake_scheduler import VOCAB_SIZE


def chat(**fields: Any) -> generation_pb2.Prompt:
    message = generation_pb2.ChatMessage(role="user", content="The fox")
    return generation_pb2.Prompt(chat=generation_pb2.ChatPrompt(messages=[message], **fields))


@pytest.fixture
def bos_dir(tokenizer: Tokenizer, tokenizer_dir: Path, tmp_path: Path) -> Path:
    """The tokenizer made to begin every text with <|endoftext|>, leftover truncation switched on."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    copy.enable_truncation(4)
    copy.enable_padding(length=64)
    copy.save(str(tmp_path / "tokenizer.json"))
    config = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())
    config["bos_token"] = {"content": "<|endoftext|>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def write_template(directory: Path, template: str) -> ServedTokenizer:
    (directory / "chat_template.jinja").write_text(template)
    return ServedTokenizer.load(directory)


async def test_text_gets_the_tokenizers_special_tokens_and_chat_none_twice(
    bos_dir: Path, tokenizer: Tokenizer
) -> None:
    served = write_template(
        bos_dir, "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    )
    text_ids = await read_prompt(generation_pb2.Prompt(text="The fox jumps over"), served, VOCAB_SIZE, 8191)
    assert text_ids == (0, *tokenizer.encode("The fox jumps over").ids)
    chat_ids = await read_prompt(chat(), served, VOCAB_SIZE, 8191)
    assert chat_ids == (0, *tokenizer.encode("user: The fox").ids)


async def test_tokens_are_taken_as_they_are(served_tokenizer: ServedTokenizer) -> None:
    prompt = generation_pb2.Prompt(tokens=generation_pb2.TokenIds(ids=[7, 0, 299]))
    assert await read_prompt(prompt, served_tokenizer, VOCAB_SIZE, 8191) == (7, 0, 299)


async def test_chat_template_of_the_config(served_tokenizer: ServedTokenizer, tokenizer: Tokenizer) -> None:
    ids = await read_prompt(chat(), served_tokenizer, VOCAB_SIZE, 8191)
    text = "<|im_start|>user\nThe fox<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tuple(tokenizer.encode(text).ids)
    assert 1 in ids


async def test_named_templates(bos_dir: Path) -> None:
    path = bos_dir / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "default"},
    ]
    path.write_text(json.dumps(config))
    served = ServedTokenizer.load(bos_dir)
    assert served.render_chat([{"role": "user", "content": "x"}], {}) == "default"


async def test_variables_reach_the_template(bos_dir: Path) -> None:
    served = write_template(bos_dir, "{{ count }} {{ add_generation_prompt }} {{ deep.list[0] }} {{ half }}")
    prompt = chat()
    prompt.chat.template_variables.update(
        {"count": 3, "add_generation_prompt": False, "deep": {"list": [7]}, "half": 0.5}
    )
    ids = await read_prompt(prompt, served, VOCAB_SIZE, 8191)
    assert served.decode(list(ids), special_tokens=True) == "3 False 7 0.5"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].role }}", "template failed"),
        ("{{ messages + 1 }}", "template failed"),
        ("{% for x in range(10**12) %}{% endfor %}", "template failed"),
        ("{{ ''.__class__.__mro__ }}", "template failed"),
        ("{% if %}", "template failed"),
    ],
)
async def test_template_failures_name_the_field(bos_dir: Path, template: str, text: str) -> None:
    with pytest.raises(InvalidFieldError, match=text) as caught:
        await read_prompt(chat(), write_template(bos_dir, template), VOCAB_SIZE, 8191)
    assert caught.value.field == "prompt.chat"


async def test_a_template_that_gives_nothing(bos_dir: Path) -> None:
    with pytest.raises(InvalidFieldError, match=r"prompt\.chat: gives no tokens"):
        await read_prompt(chat(), write_template(bos_dir, "{# nothing #}"), VOCAB_SIZE, 8191)


async def test_a_model_without_a_template(tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dir / "tokenizer.json").read_bytes())
    with pytest.raises(InvalidFieldError, match=r"prompt\.chat: the model has no chat template"):
        await read_prompt(chat(), ServedTokenizer.load(tmp_path), VOCAB_SIZE, 8191)


async def test_ids_beyond_the_models_head_are_refused(served_tokenizer: ServedTokenizer) -> None:
    highest = max(served_tokenizer.encode("The fox", add_special_tokens=True))
    with pytest.raises(InvalidFieldError, match=r"prompt\.text\[\d\]: token id"):
        await read_prompt(generation_pb2.Prompt(text="The fox"), served_tokenizer, highest, 8191)


async def test_long_texts(served_tokenizer: ServedTokenizer, tokenizer: Tokenizer) -> None:
    text = "한국어 the fox " * 2000
    ids = await read_prompt(generation_pb2.Prompt(text=text), served_tokenizer, VOCAB_SIZE, 8191)
    assert ids == tuple(tokenizer.encode(text).ids)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    served_tokenizer: ServedTokenizer,
) -> None:
    text = "the fox " * 100
    least = served_tokenizer.least_tokens(text)
    assert 1 < least <= len(served_tokenizer.encode(text, add_special_tokens=False))
    prompt = generation_pb2.Prompt(text=text)
    assert await read_prompt(prompt, served_tokenizer, VOCAB_SIZE, least)
    with pytest.raises(DraftlineError) as caught:
        await read_prompt(prompt, served_tokenizer, VOCAB_SIZE, least - 1)
    assert caught.value.reason is ErrorReason.PROMPT_TOO_LONG


class WatchedTokenizer(ServedTokenizer):
    """Notes where chats are rendered."""

    render_threads: list[int]

    def render_chat(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        self.render_threads.append(threading.get_ident())
        return super().render_chat(messages, variables)


@pytest.fixture
def watched(tokenizer_dir: Path) -> WatchedTokenizer:
    tokenizer = WatchedTokenizer.load(tokenizer_dir)
    assert isinstance(tokenizer, WatchedTokenizer)
    tokenizer.render_threads = []
    return tokenizer


def messages_of(count: int, content: str = "") -> generation_pb2.Prompt:
    message = generation_pb2.ChatMessage(role="u", content=content)
    return generation_pb2.Prompt(chat=generation_pb2.ChatPrompt(messages=[message] * count))


async def test_more_ids_than_a_prompt_may_have_are_refused_before_they_are_looked_at(
    served_tokenizer: ServedTokenizer,
) -> None:
    prompt = generation_pb2.Prompt(tokens=generation_pb2.TokenIds(ids=[VOCAB_SIZE] * 21))
    with pytest.raises(DraftlineError, match="prompt: 21 tokens are above 20") as caught:
        await read_prompt(prompt, served_tokenizer, VOCAB_SIZE, 20)
    assert caught.value.reason is ErrorReason.PROMPT_TOO_LONG


@pytest.mark.parametrize("count_above", [False, True])
async def test_a_chat_that_cannot_fit_is_refused_before_it_is_rendered(
    watched: WatchedTokenizer, count_above: bool
) -> None:
    limit = watched.most_bytes(20)
    prompt, text = messages_of(21), r"prompt\.chat\.messages: 21 messages are above 20"
    if not count_above:
        prompt = messages_of(2, "x" * (limit // 2))
        size = 2 * (limit // 2 + 1)
        text = rf"prompt\.chat\.messages: {size} characters are above {limit}, the most that 20 tokens hold"
    with pytest.raises(DraftlineError, match=text) as caught:
        await read_prompt(prompt, watched, VOCAB_SIZE, 20)
    assert (caught.value.reason, caught.value.field) == (ErrorReason.PROMPT_TOO_LONG, "prompt")
    assert watched.render_threads == []


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"a": [[0] * 15, [0] * 15]}, "at least 21 values are above 20"),
        ({str(number): None for number in range(30)}, "at least 21 values are above 20"),
        ({"a": ["x" * 2000, "x" * 2000]}, r"\d+ characters are above \d+, the most that a prompt holds"),
        ({"x" * 4000: {}}, r"\d+ characters are above \d+, the most that a prompt holds"),
    ],
)
async def test_variables_that_cannot_fit_are_refused_before_they_are_read(
    watched: WatchedTokenizer, variables: dict[str, Any], text: str
) -> None:
    prompt = chat()
    prompt.chat.template_variables.update(variables)
    with pytest.raises(InvalidFieldError, match=text) as caught:
        await read_prompt(prompt, watched, VOCAB_SIZE, 20)
    assert caught.value.field == "prompt.chat.template_variables"
    assert watched.render_threads == []


async def test_a_variables_name_is_cut_in_an_errors_path(watched: WatchedTokenizer) -> None:
    prompt = chat()
    prompt.chat.template_variables.fields["x" * 3000].number_value = float("nan")
    with pytest.raises(InvalidFieldError, match="not a finite number") as caught:
        await read_prompt(prompt, watched, VOCAB_SIZE, 8191)
    assert caught.value.field is not None
    assert len(caught.value.field) < 200


async def test_only_a_small_chat_is_rendered_on_the_event_loop(watched: WatchedTokenizer) -> None:
    """What is large goes to a thread: other streams are served meanwhile."""
    here = threading.get_ident()
    await read_prompt(messages_of(3, "The fox"), watched, VOCAB_SIZE, 8191)
    assert watched.render_threads == [here]
    with_variables = messages_of(1)
    with_variables.chat.template_variables.update({"deep": [1]})
    for prompt in (messages_of(100), messages_of(1, "x" * 2000), with_variables):
        await read_prompt(prompt, watched, VOCAB_SIZE, 8191)
    assert here not in watched.render_threads[1:]
    assert len(watched.render_threads) == 4
