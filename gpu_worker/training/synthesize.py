"""Step one of training: the target writes prompts and answers for itself, batched, in resumable shards.

A user's turn is sampled behind the chat template's opening of one, most often led into some kind of task
(openings.py), and then answered: what a head meets in service is the target's own text, so that is what it learns
from, and no data set is needed. Users' turns may also be given, or be about given documents (documents.py).
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_worker.training.batch_generator import BatchGenerator, Generation, GenerationRequest
from gpu_worker.training.chat import ChatTemplate, Message
from gpu_worker.training.conversations import Conversation, shard_path, write_shard
from gpu_worker.training.document_answers import AnsweredTurn
from gpu_worker.training.documents import DocumentPrompts
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.openings import first_opening, later_opening, quoting_opening
from gpu_worker.training.synthesis_record import ShardRecord, SynthesisRecord
from gpu_worker.training.synthesis_settings import SynthesisSettings
from shared_mem.records import SamplingRecord

_MIN_PROMPT_CHARS = 12


@dataclass
class _Draft:
    """A conversation that is being written."""

    serial: tuple[int, int]  # of the conversation, and whether it quotes that one
    messages: list[Message]
    rng: random.Random
    greedy: bool
    goes_on: bool
    token_ids: list[int]
    answers: list[tuple[int, int]]
    given: list[str] | None = None  # users' turns still to come; None: the target writes them
    opening: str = ""  # of the user's turn that is being written


@dataclass
class _Shard:
    """A file of conversations that is being written."""

    index: int
    path: Path
    count: int
    serial: int = 0  # of the next conversation that is begun
    drafts: dict[int, _Draft] = field(default_factory=dict)  # by id of the request in flight
    seen: set[bytes] = field(default_factory=set)  # digests of its prompts
    conversations: dict[tuple[int, int], Conversation] = field(default_factory=dict)  # by serial


class Synthesizer:
    """Writes one shard after the other; a shard depends on the settings, what is given, and its own number alone."""

    def __init__(
        self,
        generator: BatchGenerator,
        chat: ChatTemplate,
        end_ids: frozenset[int],
        settings: SynthesisSettings,
        prompts: Sequence[Sequence[str]] | None = None,
        documents: DocumentPrompts | None = None,
        target: Mapping[str, str] | None = None,
    ) -> None:
        """end_ids end an answer: the model's EOS ids. prompts: users' turns of each conversation, at least as many.

        documents: what the document_share of those conversations is about whose turns are not given. target: facts
        of the model that the directory's other shards must share.
        """
        self._generator = generator
        self._chat = chat
        self._end_ids = end_ids
        self._settings = settings
        self._prompts = prompts
        self._documents = documents
        self._made_from = {**(target or {}), **settings.of_every_shard}

    def write(self, directory: Path, report: Callable[[int, int, float], None]) -> int:
        """Writes the shards that `directory` lacks, or has shorter; returns the number of answer tokens written.

        report(conversations there so far, answer tokens written so far, seconds) is called after each shard. The next
        shard is begun while the last texts of one end, so that the batch stays full. Raises TrainingError where the
        directory's shards were made from something else.
        """
        directory.mkdir(parents=True, exist_ok=True)
        record = SynthesisRecord.open(directory, self._made_from)
        started, tokens = time.monotonic(), 0
        waiting, conversations = self._missing(directory, record)
        running: list[_Shard] = []
        owners: dict[int, _Shard] = {}  # by id of the request in flight
        while waiting or running:
            while waiting and self._generator.num_pending < 2 * self._generator.num_slots:
                shard = waiting.popleft()
                running.append(shard)
                self._begin(shard, owners)
                if not shard.drafts:
                    break  # nothing is left to write for it: it goes to the disk before the next one is begun
            for generation in self._generator.step():
                shard = owners.pop(id(generation.request))
                self._advance(shard, shard.drafts.pop(id(generation.request)), generation, owners)
            for shard in [shard for shard in running if not shard.drafts]:
                running.remove(shard)
                written = [shard.conversations[serial] for serial in sorted(shard.conversations)]
                write_shard(shard.path, written)
                record.add(
                    directory,
                    shard.index,
                    ShardRecord(shard.count, self._prompts_digest(shard.index, shard.count)),
                )
                conversations += len(written)
                tokens += sum(conversation.num_answer_tokens for conversation in written)
                report(conversations, tokens, time.monotonic() - started)
        return tokens

    def _missing(self, directory: Path, record: SynthesisRecord) -> tuple[deque[_Shard], int]:
        """The shards to write, and how many conversations those that are there count for.

        A shard that was asked for fewer conversations than now is written anew. What the record does not know, as a
        file that was put there by hand, is left alone.
        """
        settings = self._settings
        missing: deque[_Shard] = deque()
        there = 0
        for index in range(-(-settings.num_conversations // settings.shard_size)):
            path = shard_path(directory, index)
            count = min(settings.shard_size, settings.num_conversations - index * settings.shard_size)
            known = record.shards.get(index)
            if known is not None and self._prompts_digest(index, known.count) != known.prompts:
                raise TrainingError(
                    f"{path}: answers other prompts than are given now: give --conversations another directory"
                )
            if path.exists() and (known is None or known.count >= count):
                there += count
            else:
                missing.append(_Shard(index, path, count))
        return missing, there

    def _prompts_digest(self, index: int, count: int) -> str:
        """Of the users' turns that a shard is given; empty where the target writes them."""
        if self._prompts is None:
            return ""
        turns = [list(turns) for turns in self._given(index, count)]
        return hashlib.blake2b(json.dumps(turns).encode(), digest_size=16).hexdigest()

    def _given(self, index: int, count: int) -> Sequence[Sequence[str]]:
        """The users' turns of the first `count` conversations of a shard."""
        assert self._prompts is not None
        first = index * self._settings.shard_size
        return self._prompts[first : first + count]

    def _begin(self, shard: _Shard, owners: dict[int, _Shard]) -> None:
        """Submits the first turn of each of the shard's conversations."""
        if self._prompts is None:
            for _ in range(shard.count):
                if not self._start_with_document(shard, owners):
                    self._start(shard, owners)
            return
        for turns in self._given(shard.index, shard.count):
            draft = self._draft(shard)
            draft.goes_on, draft.given = True, list(turns)
            self._ask(shard, draft, owners)

    def _start(self, shard: _Shard, owners: dict[int, _Shard]) -> None:
        draft = self._draft(shard)
        if draft.rng.random() < self._settings.opening_share:
            draft.opening = first_opening(draft.rng)
        self._submit(shard, draft, self._prompt_request(draft), owners)

    def _start_with_document(self, shard: _Shard, owners: dict[int, _Shard]) -> bool:
        """Begins a conversation about a document; False where it is to be one without, or no use of this text."""
        if self._documents is None:
            return False
        draft = self._draft(shard)
        if draft.rng.random() >= self._settings.document_share:
            return False
        if draft.rng.random() < self._settings.answered_share:
            return self._add_answered(shard, draft, self._documents.draw_answered(draft.rng))
        text = self._documents.draw(draft.rng)
        if not self._is_new(shard, text) or self._chat.has_control_tokens(text):
            return False
        draft.given = [text]
        return self._ask(shard, draft, owners)

    def _add_answered(self, shard: _Shard, draft: _Draft, turn: AnsweredTurn | None) -> bool:
        """Adds a whole conversation to its shard; False where it is of no use, or too long."""
        if turn is None or not self._is_new(shard, turn.prompt):
            return False
        if self._chat.has_control_tokens(turn.prompt + turn.answer):
            return False
        found = self._chat.answered(
            [Message(role="user", content=turn.prompt), Message(role="assistant", content=turn.answer)]
        )
        if found is None or len(found[0]) > self._settings.max_context_tokens:
            return False
        draft.token_ids, start = found
        draft.answers, draft.greedy = [(start, len(draft.token_ids))], False
        if self._settings.learn_passages:
            draft.answers.insert(0, (len(self._chat.open_user_turn([])), start))
        self._finish(shard, draft)
        return True

    def _quote(self, shard: _Shard, quoted: _Draft, owners: dict[int, _Shard]) -> None:
        """Begins one more conversation, whose prompt is long: it quotes the first answer of another."""
        number = quoted.serial[0]
        rng = random.Random(f"{self._settings.seed}/{shard.index}/{number}/quoted")
        greedy = rng.random() < self._settings.greedy_share
        opening = quoting_opening(rng, quoted.messages[1]["content"])
        draft = _Draft((number, 1), [], rng, greedy, False, [], [], opening=opening)
        self._submit(shard, draft, self._prompt_request(draft), owners)

    def _draft(self, shard: _Shard) -> _Draft:
        rng = random.Random(f"{self._settings.seed}/{shard.index}/{shard.serial}")
        shard.serial += 1
        greedy = rng.random() < self._settings.greedy_share
        return _Draft(
            (shard.serial, 0), [], rng, greedy, rng.random() < self._settings.second_turn_share, [], []
        )

    def _ask(self, shard: _Shard, draft: _Draft, owners: dict[int, _Shard]) -> bool:
        """Submits the next given turn; False where the context has no room for it and an answer."""
        assert draft.given
        draft.messages.append(Message(role="user", content=draft.given.pop(0)))
        request = self._answer_request(draft)
        if len(request.token_ids) + request.max_tokens > self._settings.max_context_tokens:
            return False
        self._submit(shard, draft, request, owners)
        return True

    def _advance(
        self, shard: _Shard, draft: _Draft, generation: Generation, owners: dict[int, _Shard]
    ) -> None:
        """Goes on to the next turn, or adds the conversation that is whole to its shard.

        One that comes to nothing (an empty or repeated prompt) is begun anew. Of given prompts there may be fewer
        conversations: one that is too long for the context has none.
        """
        if draft.given is not None:
            self._take_answer(draft, generation)
            if not (generation.ended and draft.given and self._ask(shard, draft, owners)):
                self._finish(shard, draft)
            return
        if draft.messages and draft.messages[-1]["role"] == "user":
            self._take_answer(draft, generation)
            if generation.ended and draft.goes_on and len(draft.answers) == 1:
                looks_back = draft.rng.random() < self._settings.opening_share
                draft.opening = later_opening(draft.rng) if looks_back else ""
                self._submit(shard, draft, self._prompt_request(draft), owners)
            else:
                self._finish(shard, draft)
                if not draft.serial[1] and draft.rng.random() < self._settings.quoting_share:
                    self._quote(shard, draft, owners)
            return
        text = (draft.opening.rstrip(" ") + self._chat.text(generation.token_ids)).strip()
        if generation.ended and len(text) >= _MIN_PROMPT_CHARS and self._is_new(shard, text):
            draft.messages.append(Message(role="user", content=text))
            self._submit(shard, draft, self._answer_request(draft), owners)
        elif draft.answers:
            self._finish(shard, draft)
        elif not draft.serial[1]:
            self._start(shard, owners)

    def _is_new(self, shard: _Shard, prompt: str) -> bool:
        """Whether the shard has no such prompt yet; it has from now on."""
        digest = hashlib.blake2b(prompt.lower().encode(), digest_size=16).digest()
        known = digest in shard.seen
        shard.seen.add(digest)
        return not known

    def _take_answer(self, draft: _Draft, generation: Generation) -> None:
        start, before = len(generation.request.token_ids), draft.token_ids
        draft.token_ids = [*generation.request.token_ids, *generation.token_ids]
        # Spans of an earlier answer hold only where the template renders it to the very ids that were drawn.
        draft.answers = [
            (a, b) for a, b in draft.answers if b <= start and draft.token_ids[a:b] == before[a:b]
        ]
        draft.answers.append((start, len(draft.token_ids)))
        content = self._chat.text(generation.token_ids)
        draft.messages.append(Message(role="assistant", content=content))

    def _finish(self, shard: _Shard, draft: _Draft) -> None:
        conversation = Conversation(tuple(draft.token_ids), tuple(draft.answers), draft.greedy)
        shard.conversations[draft.serial] = conversation

    def _prompt_request(self, draft: _Draft) -> GenerationRequest:
        return GenerationRequest(
            tuple(self._chat.open_user_turn(draft.messages, draft.opening)),
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

    def _submit(
        self, shard: _Shard, draft: _Draft, request: GenerationRequest, owners: dict[int, _Shard]
    ) -> None:
        shard.drafts[id(request)] = draft
        owners[id(request)] = shard
        self._generator.submit(request)
