"""Step one of training: the target writes prompts and answers for itself, batched, in resumable shards.

A user's turn is sampled behind the chat template's opening of one, and then answered: what a head meets in service is
the target's own text, so that is what it learns from, and no data set is needed. Users' turns may also be given.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_worker.training.batch_generator import BatchGenerator, Generation, GenerationRequest
from gpu_worker.training.chat import ChatTemplate, Message
from gpu_worker.training.conversations import Conversation, shard_path, write_shard
from shared_mem.records import SamplingRecord

_MIN_PROMPT_CHARS = 12


@dataclass(frozen=True)
class SynthesisSettings:
    """How many conversations of what kind; lengths are tokens."""

    num_conversations: int
    shard_size: int = 512
    seed: int = 1
    max_prompt_tokens: int = 320
    max_answer_tokens: int = 448
    greedy_share: float = 0.6  # of the answers; the others are sampled
    second_turn_share: float = 0.25  # of the conversations go on for a second prompt and answer
    prompt_temperature: float = 0.8  # at 1 a small model's prompts fall apart
    answer_temperature: float = 1.0  # of the answers that are sampled
    top_k: int = 100  # noise for the whole vocabulary would cost more than the model's own step

    @property
    def max_context_tokens(self) -> int:
        """Room for two turns and the template around them."""
        return 2 * (self.max_prompt_tokens + self.max_answer_tokens) + 128


@dataclass
class _Draft:
    """A conversation that is being written."""

    messages: list[Message]
    rng: random.Random
    greedy: bool
    goes_on: bool
    token_ids: list[int]
    answers: list[tuple[int, int]]
    given: list[str] | None = None  # users' turns still to come; None: the target writes them


class Synthesizer:
    """Writes one shard after the other; a shard depends on the seed and its own number alone."""

    def __init__(
        self,
        generator: BatchGenerator,
        chat: ChatTemplate,
        end_ids: frozenset[int],
        settings: SynthesisSettings,
        prompts: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """end_ids end an answer: the model's EOS ids. prompts: users' turns of each conversation, at least as many."""
        self._generator = generator
        self._chat = chat
        self._end_ids = end_ids
        self._settings = settings
        self._prompts = prompts

    def write(self, directory: Path, report: Callable[[int, int, float], None]) -> int:
        """Writes the shards that are missing in `directory`; returns the number of answer tokens written.

        report(conversations there so far, answer tokens written so far, seconds) is called after each shard.
        """
        directory.mkdir(parents=True, exist_ok=True)
        settings = self._settings
        started, conversations, tokens = time.monotonic(), 0, 0
        for index in range(-(-settings.num_conversations // settings.shard_size)):
            path = shard_path(directory, index)
            count = min(settings.shard_size, settings.num_conversations - index * settings.shard_size)
            if path.exists():
                conversations += count
                continue
            shard = list(self._shard(index, count))
            write_shard(path, shard)
            conversations += len(shard)
            tokens += sum(conversation.num_answer_tokens for conversation in shard)
            report(conversations, tokens, time.monotonic() - started)
        return tokens

    def _shard(self, index: int, count: int) -> Iterator[Conversation]:
        """`count` conversations; those that come to nothing (empty or repeated prompts) are begun anew.

        Of given prompts there may be fewer: one that is too long for the context has no conversation.
        """
        if self._prompts is not None:
            yield from self._answered(self._prompts[index * self._settings.shard_size :][:count], index)
            return
        drafts: dict[int, _Draft] = {}  # by id of the request in flight
        seen: set[bytes] = set()
        serial = 0
        missing = count
        while missing or drafts:
            while len(drafts) < missing and len(drafts) < 2 * self._settings.shard_size:
                rng = random.Random(f"{self._settings.seed}/{index}/{serial}")
                serial += 1
                greedy = rng.random() < self._settings.greedy_share
                goes_on = rng.random() < self._settings.second_turn_share
                draft = _Draft([], rng, greedy, goes_on, [], [])
                self._submit(drafts, draft, self._prompt_request(draft))
            for generation in self._generator.step():
                draft = drafts.pop(id(generation.request))
                conversation = self._advance(drafts, draft, generation, seen)
                if conversation is not None:
                    missing -= 1
                    yield conversation

    def _answered(self, prompts: Sequence[Sequence[str]], index: int) -> Iterator[Conversation]:
        drafts: dict[int, _Draft] = {}
        for serial, turns in enumerate(prompts):
            rng = random.Random(f"{self._settings.seed}/{index}/{serial}")
            greedy = rng.random() < self._settings.greedy_share
            self._ask(drafts, _Draft([], rng, greedy, True, [], [], given=list(turns)))
        while drafts:
            for generation in self._generator.step():
                draft = drafts.pop(id(generation.request))
                self._take_answer(draft, generation)
                if not (generation.ended and draft.given and self._ask(drafts, draft)):
                    yield self._finished(draft)

    def _ask(self, drafts: dict[int, _Draft], draft: _Draft) -> bool:
        """Submits the next given turn; False where the context has no room for it and an answer."""
        assert draft.given
        draft.messages.append(Message(role="user", content=draft.given.pop(0)))
        request = self._answer_request(draft)
        if len(request.token_ids) + request.max_tokens > self._settings.max_context_tokens:
            return False
        self._submit(drafts, draft, request)
        return True

    def _advance(
        self, drafts: dict[int, _Draft], draft: _Draft, generation: Generation, seen: set[bytes]
    ) -> Conversation | None:
        """Goes on to the next turn, or gives the conversation that is whole."""
        answering = bool(draft.messages) and draft.messages[-1]["role"] == "user"
        if answering:
            self._take_answer(draft, generation)
            if generation.ended and draft.goes_on and len(draft.answers) == 1:
                self._submit(drafts, draft, self._prompt_request(draft))
                return None
            return self._finished(draft)
        text = self._chat.text(generation.token_ids).strip()
        digest = hashlib.blake2b(text.lower().encode(), digest_size=16).digest()
        if not generation.ended or len(text) < _MIN_PROMPT_CHARS or digest in seen:
            return self._finished(draft) if draft.answers else None
        seen.add(digest)
        draft.messages.append(Message(role="user", content=text))
        self._submit(drafts, draft, self._answer_request(draft))
        return None

    def _take_answer(self, draft: _Draft, generation: Generation) -> None:
        start = len(generation.request.token_ids)
        draft.token_ids = [*generation.request.token_ids, *generation.token_ids]
        # Spans of an earlier answer hold only where the template renders it to the very ids that were drawn.
        draft.answers = [(a, b) for a, b in draft.answers if b <= start]
        draft.answers.append((start, len(draft.token_ids)))
        content = self._chat.text(generation.token_ids)
        draft.messages.append(Message(role="assistant", content=content))

    def _finished(self, draft: _Draft) -> Conversation:
        return Conversation(tuple(draft.token_ids), tuple(draft.answers), draft.greedy)

    def _prompt_request(self, draft: _Draft) -> GenerationRequest:
        return GenerationRequest(
            tuple(self._chat.open_user_turn(draft.messages)),
            self._settings.max_prompt_tokens,
            self._sampled(draft, self._settings.prompt_temperature),
            frozenset({self._chat.end_of_user}) | self._end_ids,
        )

    def _answer_request(self, draft: _Draft) -> GenerationRequest:
        sampling = (
            SamplingRecord() if draft.greedy else self._sampled(draft, self._settings.answer_temperature)
        )
        prompt = tuple(self._chat.prompt(draft.messages))
        return GenerationRequest(prompt, self._settings.max_answer_tokens, sampling, self._end_ids)

    def _sampled(self, draft: _Draft, temperature: float) -> SamplingRecord:
        return SamplingRecord(
            temperature=temperature,
            top_k=self._settings.top_k,
            seed=draft.rng.getrandbits(63),
        )

    def _submit(self, drafts: dict[int, _Draft], draft: _Draft, request: GenerationRequest) -> None:
        drafts[id(request)] = draft
        self._generator.submit(request)
