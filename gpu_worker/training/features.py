"""Between extract and fit: the target's hidden states and next-token laws on disk, read through memory maps.

One shard `features-NNNNN.safetensors` per shard of conversations, its C conversations laid end to end, N tokens in all:

    offsets [C + 1] int64        where each conversation begins, and where the last ends
    token_ids [N] int32
    answer [N] uint8             1: this token is to be learnt, as (part of) an answer
    hidden [N, h] bfloat16       behind the final norm
    captured [N, n*h] bfloat16   outputs of `feature_layers`, side by side
    law_offsets [C + 1] int64    the same for the rows of the two tensors below
    top_ids [M, k] int32         the k likeliest ids behind each row whose next token belongs to an answer
    top_probs [M, k] float16     their probabilities, by the softmax over the whole vocabulary
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gpu_worker.training.errors import TrainingError
from gpu_worker.training.whole_file import whole_file

_META = "meta.json"
_GLOB = "features-*.safetensors"
_SOURCE = "conversations"  # key in a shard's metadata


@dataclass(frozen=True)
class FeatureMeta:
    """Of which target, and what was kept of it; the same for all shards of a directory."""

    target: str  # the spec that resolve_model takes; "" is the embedded model
    revision: str
    precision: str  # that the target was run with
    hidden_size: int
    vocab_size: int
    feature_layers: tuple[int, ...]  # 0-based
    top_k: int

    @property
    def bytes_per_token(self) -> int:
        """On disk, without the law of the next token."""
        return 2 * self.hidden_size * (1 + len(self.feature_layers)) + 4 + 1

    @property
    def bytes_per_law(self) -> int:
        """On disk, for one row whose next token belongs to an answer."""
        return (4 + 2) * self.top_k

    def write(self, directory: Path) -> None:
        """Creates the directory and its meta.json; raises TrainingError if it holds features of another kind."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / _META
        if path.exists():
            theirs = FeatureMeta.read(directory)
            for name, mine in asdict(self).items():
                if getattr(theirs, name) != mine:
                    raise TrainingError(f"{path}: {name} is {getattr(theirs, name)!r}, not {mine!r}")
            return
        with whole_file(path) as unfinished:
            unfinished.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> FeatureMeta:
        """Raises TrainingError where the directory holds no features."""
        path = directory / _META
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**fields, "feature_layers": tuple(fields["feature_layers"])})
        except OSError as error:
            raise TrainingError(f"{path}: no extracted features: {error.strerror}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise TrainingError(f"{path}: no extracted features: {error}") from error


def feature_path(directory: Path, index: int) -> Path:
    """Where the features of conversation shard `index` lie; a file of this name is whole."""
    return directory / f"features-{index:05d}.safetensors"


def feature_paths(directory: Path) -> list[Path]:
    """The shards of a directory in order. Raises TrainingError if there are none."""
    paths = sorted(directory.glob(_GLOB))
    if not paths:
        raise TrainingError(f"{directory}: holds no {_GLOB}")
    return paths


def law_rows(answer: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Rows whose next token belongs to an answer, from the last prompt row on: what losses look at."""
    return np.flatnonzero(answer[1:]).astype(np.int64)


def write_features(path: Path, tensors: dict[str, torch.Tensor], source: str) -> None:
    """An interrupted run leaves no half shard. source: digest of the conversations, see features_source."""
    with whole_file(path) as unfinished:
        save_file(tensors, unfinished, metadata={_SOURCE: source})


def features_source(path: Path) -> str | None:
    """What write_features was told of the conversations; "" where it was told nothing, None where there is no shard."""
    try:
        with safe_open(path, framework="pt") as file:
            return str((cast(Any, file).metadata() or {}).get(_SOURCE, ""))
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{path}: not a feature shard: {error}") from error


@dataclass(frozen=True)
class ConversationFeatures:
    """One conversation of T tokens with M law rows; what was not asked for is None."""

    token_ids: torch.Tensor  # [T] int64
    rows: torch.Tensor  # [M] int64, see law_rows
    hidden: torch.Tensor | None  # [T, h] bfloat16
    captured: torch.Tensor | None  # [T, n*h] bfloat16
    top_ids: torch.Tensor  # [M, k] int64
    top_probs: torch.Tensor  # [M, k] float32


class FeatureShard:
    """One file, opened once; reads copy only what they return."""

    def __init__(self, path: Path) -> None:
        """Raises TrainingError for a file that is no feature shard."""
        try:
            self._file = cast(Any, safe_open(path, framework="pt"))  # its methods carry no types
            self.offsets = self._file.get_tensor("offsets").numpy()
            self.law_offsets = self._file.get_tensor("law_offsets").numpy()
            self.token_ids = self._file.get_tensor("token_ids").numpy()  # [N]
            self.answer = self._file.get_tensor("answer").numpy()  # [N]
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"{path}: not a feature shard: {error}") from error
        self._slices = {
            name: self._file.get_slice(name) for name in ("hidden", "captured", "top_ids", "top_probs")
        }

    @property
    def num_conversations(self) -> int:
        return len(self.offsets) - 1

    def num_law_rows(self, index: int) -> int:
        """M of a conversation."""
        return int(self.law_offsets[index + 1] - self.law_offsets[index])

    def read(self, index: int, *, hidden: bool, captured: bool) -> ConversationFeatures:
        """A conversation of this shard."""
        first, end = int(self.offsets[index]), int(self.offsets[index + 1])
        law_first, law_end = int(self.law_offsets[index]), int(self.law_offsets[index + 1])
        return ConversationFeatures(
            torch.from_numpy(self.token_ids[first:end].astype(np.int64)),
            torch.from_numpy(law_rows(self.answer[first:end])),
            self._slices["hidden"][first:end] if hidden else None,
            self._slices["captured"][first:end] if captured else None,
            self._slices["top_ids"][law_first:law_end].long(),
            self._slices["top_probs"][law_first:law_end].float(),
        )
