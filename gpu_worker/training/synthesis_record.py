"""Beside the shards that `synthesize.py` writes: what they were made from, so that no two kinds are taken for one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gpu_worker.training.errors import TrainingError
from gpu_worker.training.whole_file import whole_file

_FILE = "synthesis.json"


class ShardRecord(msgspec.Struct, frozen=True):
    """One shard that is there."""

    count: int  # conversations that were asked for: shards hold more (quoting) or fewer (prompts that are too long)
    prompts: str = ""  # digest of the given users' turns


class SynthesisRecord(msgspec.Struct):
    """made_from: target and settings that every shard of the directory has in common."""

    made_from: dict[str, Any]
    shards: dict[int, ShardRecord] = {}

    @classmethod
    def open(cls, directory: Path, made_from: Mapping[str, Any]) -> SynthesisRecord:
        """The directory's record, or a new one where it has none.

        Raises TrainingError naming the first fact that differs: its shards would not go with those to be written.
        """
        path = directory / _FILE
        if not path.exists():
            return cls(dict(made_from))
        try:
            record = msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise TrainingError(f"{path}: cannot be read: {error}") from error
        for name, mine in made_from.items():
            if (theirs := record.made_from.get(name)) != mine:
                raise TrainingError(
                    f"{path}: its conversations were made with {name} {theirs!r}, not {mine!r}:"
                    " give --conversations another directory"
                )
        return record

    def add(self, directory: Path, index: int, shard: ShardRecord) -> None:
        """Writes that shard `index` is there."""
        self.shards[index] = shard
        with whole_file(directory / _FILE) as unfinished:
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))
