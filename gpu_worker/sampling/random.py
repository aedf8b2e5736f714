"""Counter-based random numbers: every draw of sampling and acceptance is a pure function of what it is for.

No generator has state, so a draw is the same alone or in a batch, on a fresh or an aged server, after a
preemption, and whatever was drawn before it. Coupled noise depends on (seed, position, token id); every other
draw on (seed, first position of its round, row, purpose, child rank). Keying those by position alone would
meet the same number again in the next round and bias the rules that look at later rows.

The mixing is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014),
its 64-bit words held in int64 tensors: additions and products wrap alike, logical shifts are masked
arithmetic ones.
"""

from __future__ import annotations

import enum

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # odd increment of the SplitMix64 stream
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
# 52 bits and a half: exactly representable in float64, never 0 and never 1.
_UNIFORM_BITS = 52
# Rows whose noise is computed together, in elements: the int64 words stay in the cache.
_CHUNK = 1 << 17


class Purpose(enum.IntEnum):
    """What a draw decides; separates the streams of one seed."""

    COUPLED = 1  # the target's own token under the coupled rule, and whatever is coupled to it
    ACCEPT = 2  # accept or reject one draft token
    TARGET = 3  # the target's own token after the accepted run under the rejection rule
    DRAFT = 4  # a draft token that is sampled under the rejection rule


def coupled_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[N] int64 keys of the coupled noise at `positions` [N] of sequences with `seeds` [N] (both int64)."""
    return _absorb(_absorb(seeds.clone(), int(Purpose.COUPLED)), positions)


def round_keys(
    seeds: torch.Tensor, first_positions: torch.Tensor, rows: torch.Tensor, purpose: Purpose, child: int = 0
) -> torch.Tensor:
    """[N] int64 keys of a draw of one round: all arguments [N] int64 but the purpose and the child rank."""
    key = _absorb(_absorb(seeds.clone(), int(purpose)), first_positions)
    return _absorb(_absorb(key, rows), child)


def uniform(
    seeds: torch.Tensor, first_positions: torch.Tensor, rows: torch.Tensor, purpose: Purpose, child: int = 0
) -> torch.Tensor:
    """[N] float64 in (0, 1), keyed by (seed, first position of the round, row, purpose, child rank)."""
    return _to_unit(_mix(round_keys(seeds, first_positions, rows, purpose, child)))


def keyed_gumbel(keys: torch.Tensor, token_ids: torch.Tensor | int) -> torch.Tensor:
    """Gumbel(0, 1) noise [N, K] float32 of tokens under keys [N] int64.

    token_ids: [N, K] int64, or V for the ids 0 .. V - 1 of every row. A token's noise depends on its key and
    id alone: it is computed in float64 and rounded once, since a vector and a scalar logarithm may differ in
    the last bit of float32.
    """
    width = token_ids if isinstance(token_ids, int) else token_ids.shape[1]
    noise = torch.empty(keys.shape[0], width, dtype=torch.float32, device=keys.device)
    rows = max(1, _CHUNK // max(1, width))
    if isinstance(token_ids, int):
        steps = (torch.arange(width, device=keys.device) + 1).mul_(_GOLDEN)
    for start in range(0, keys.shape[0], rows):
        part = slice(start, start + rows)
        if not isinstance(token_ids, int):
            steps = (token_ids[part] + 1).mul_(_GOLDEN)
        u = _to_unit(_mix(steps + keys[part, None]))
        # u near 0 is the upper tail, the one that decides an argmax: log1p keeps its precision.
        noise[part] = u.neg_().log1p_().neg_().log_().neg_()
    return noise


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | int) -> torch.Tensor:
    """Coupled noise [N, V] (or [N, K] for given token_ids) float32: a function of (seed, position, token id).

    seeds [N] int64 (the bits of a uint64), positions [N] int64; token_ids as in keyed_gumbel.
    """
    return keyed_gumbel(coupled_keys(seeds, positions), token_ids)


def _absorb(key: torch.Tensor, word: torch.Tensor | int) -> torch.Tensor:
    """Mixes one more word into keys [N]; overwrites `key`."""
    if isinstance(word, int):
        return _mix(key.add_(_wrap((word + 1) * _GOLDEN)))
    return _mix(key.add_((word + 1).mul_(_GOLDEN)))


def _mix(z: torch.Tensor) -> torch.Tensor:
    """The SplitMix64 finaliser, in place."""
    z.bitwise_xor_(_shift(z, 30)).mul_(_MIX_1)
    z.bitwise_xor_(_shift(z, 27)).mul_(_MIX_2)
    return z.bitwise_xor_(_shift(z, 31))


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of 64-bit words."""
    return z.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)


def _to_unit(z: torch.Tensor) -> torch.Tensor:
    """float64 in (0, 1) from the upper bits of 64-bit words."""
    return _shift(z, 64 - _UNIFORM_BITS).to(torch.float64).add_(0.5).mul_(2.0**-_UNIFORM_BITS)


def _wrap(word: int) -> int:
    """The int64 whose bits are the low 64 of `word`."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >= 1 << 63 else word
