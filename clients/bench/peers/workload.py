"""Which prompts each load sends: evenly spread over the file, no prompt twice while there are enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Rendered = dict[str, Any]  # {id, text, token_ids}, as prepare.py gives it; long ones with {again: Rendered}


@dataclass(frozen=True)
class Load:
    """`prompts` in groups of `batch`, each group given to the engine at once."""

    batch: int
    max_tokens: int
    ignore_eos: bool
    prompts: tuple[Rendered, ...]

    @property
    def num_kv_tokens(self) -> int:
        """Most tokens in flight at once."""
        groups = (self.prompts[i : i + self.batch] for i in range(0, len(self.prompts), self.batch))
        return max(sum(len(row["token_ids"]) + self.max_tokens for row in group) for group in groups)


@dataclass(frozen=True)
class Workload:
    """All that one engine does in one round, in this order."""

    loads: tuple[Load, ...]
    long: tuple[Rendered, ...]

    @property
    def max_context(self) -> int:
        """Tokens of the longest prompt with its answer, and some room, in whole pages of 256."""
        lengths = [len(row["token_ids"]) + load.max_tokens for load in self.loads for row in load.prompts]
        longest = max([*lengths, *(len(row["token_ids"]) for row in self.long)])
        return -(-(longest + 16) // 256) * 256

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that a KV cache must hold: the largest load, and the prompts kept warm."""
        warm = sum(len(row["token_ids"]) for row in self.long)
        return max(load.num_kv_tokens for load in self.loads) + warm


def plan(
    prompts: Sequence[Rendered],
    long: Sequence[Rendered],
    *,
    batches: Sequence[int],
    num_single: int,
    num_batched: int,
    single_tokens: int,
    batch_tokens: int,
) -> tuple[Workload, bool]:
    """The workload, and whether some load repeats prompts of another for want of enough.

    Batch 1 answers `num_single` prompts until EOS or `single_tokens`; a larger one takes `num_batched` prompts
    (whole groups, one at least) to exactly `batch_tokens`.
    """
    left = list(prompts)
    repeats = False
    loads = []
    for batch in batches:
        wanted = num_single if batch == 1 else max(1, num_batched // batch) * batch
        if len(left) < wanted:
            left, repeats = list(prompts), bool(loads) or len(prompts) < wanted
        chosen = _spread(left, wanted)
        left = [row for row in left if row not in chosen]
        loads.append(Load(batch, single_tokens if batch == 1 else batch_tokens, batch > 1, tuple(chosen)))
    return Workload(tuple(loads), tuple(long)), repeats


def _spread(rows: Sequence[Rendered], count: int) -> list[Rendered]:
    """`count` rows at even distances; over again from the start where there are fewer."""
    if count >= len(rows):
        return [rows[i % len(rows)] for i in range(count)]
    return [rows[i * len(rows) // count] for i in range(count)]
