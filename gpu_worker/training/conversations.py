"""Training texts on disk: conversations as token ids with the spans to be learnt, in shards of JSON lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from gpu_worker.errors import ModelError
from gpu_worker.training.whole_file import whole_file

_MAX_IDS = 1 << 31  # feature shards hold ids as int32


class Conversation(msgspec.Struct, frozen=True):
    """One training text. answers: [start, stop) index pairs of token_ids: what is learnt, in ascending order.

    That is what the target wrote as an answer, or what a document gave as one.

    Where a passage in the prompt is to be learnt too, it is a span of its own, right before that of the answer.
    """

    token_ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]
    greedy: bool  # whether the target wrote the answers without sampling; heads are measured by those

    @property
    def token_array(self) -> npt.NDArray[np.int32]:
        """[T], as feature shards hold them."""
        return np.array(self.token_ids, dtype=np.int32)

    @property
    def answer_mask(self) -> npt.NDArray[np.uint8]:
        """[T] 1 for the tokens that are learnt, as feature shards hold it."""
        mask = np.zeros(len(self.token_ids), dtype=np.uint8)
        for start, stop in self.answers:
            mask[start:stop] = 1
        return mask

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first answer, a learnt passage included."""
        start, stop = self.answers[0]
        for following, end in self.answers[1:]:
            if following != stop:
                break
            start, stop = following, end
        return start

    @property
    def num_answer_tokens(self) -> int:
        return sum(stop - start for start, stop in self.answers)


def shard_path(directory: Path, index: int) -> Path:
    """Where shard `index` lies; a file of this name is whole."""
    return directory / f"conversations-{index:05d}.jsonl"


def write_shard(path: Path, conversations: Sequence[Conversation]) -> None:
    """An interrupted run leaves no half shard."""
    encode = msgspec.json.Encoder().encode
    with whole_file(path) as unfinished:
        unfinished.write_bytes(b"".join(encode(conversation) + b"\n" for conversation in conversations))


def shard_paths(directory: Path) -> list[Path]:
    """The shards of a directory in order. Raises ModelError if there are none."""
    paths = sorted(directory.glob("conversations-*.jsonl"))
    if not paths:
        raise ModelError(f"{directory}: holds no conversations-*.jsonl")
    return paths


def read_shard(path: Path, vocab_size: int = _MAX_IDS) -> Iterator[Conversation]:
    """The conversations of one shard. Raises ModelError naming file and line for a line that is none.

    vocab_size: all ids must lie below it.
    """
    decode = msgspec.json.Decoder(Conversation).decode
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                conversation = decode(line)
            except msgspec.MsgspecError as error:
                raise ModelError(f"{path}:{number}: not a conversation: {error}") from error
            _check(conversation, vocab_size, f"{path}:{number}")
            yield conversation


def _check(conversation: Conversation, vocab_size: int, where: str) -> None:
    ids, end = conversation.token_ids, 0
    for start, stop in conversation.answers:
        if not end <= start < stop <= len(ids):
            raise ModelError(
                f"{where}: answers has [{start}, {stop}], must begin at {end} or later, end behind its beginning and"
                f" within {len(ids)} tokens"
            )
        end = stop
    for extreme in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= extreme < vocab_size:
            raise ModelError(f"{where}: token_ids has {extreme}, not in 0..{vocab_size - 1}")
