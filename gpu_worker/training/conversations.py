"""Training texts on disk: conversations as token ids with the spans that the target wrote, in shards of JSON lines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from gpu_worker.errors import ModelError


class Conversation(msgspec.Struct, frozen=True):
    """One training text. answers: [start, stop) index pairs of token_ids, what the target wrote as an answer.

    Where a passage in the prompt is to be learnt too, it is a span of its own, right before that of the answer.
    """

    token_ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]
    greedy: bool  # how the answers were drawn

    @property
    def token_array(self) -> npt.NDArray[np.int32]:
        """[T], as feature shards hold them."""
        return np.array(self.token_ids, dtype=np.int32)

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
    """Writes beside the target and renames, so that an interrupted run leaves no half shard."""
    unfinished = path.with_suffix(".partial")
    encode = msgspec.json.Encoder().encode
    unfinished.write_bytes(b"".join(encode(conversation) + b"\n" for conversation in conversations))
    os.replace(unfinished, path)


def shard_paths(directory: Path) -> list[Path]:
    """The shards of a directory in order. Raises ModelError if there are none."""
    paths = sorted(directory.glob("conversations-*.jsonl"))
    if not paths:
        raise ModelError(f"{directory}: holds no conversations-*.jsonl")
    return paths


def read_shard(path: Path) -> Iterator[Conversation]:
    """The conversations of one shard. Raises ModelError naming file and line for a line that is none."""
    decode = msgspec.json.Decoder(Conversation).decode
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield decode(line)
            except msgspec.MsgspecError as error:
                raise ModelError(f"{path}:{number}: not a conversation: {error}") from error
