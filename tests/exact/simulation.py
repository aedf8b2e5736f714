"""Many speculating sequences over a five-token vocabulary, driven through the production Sampler.

The "models" are tables of logits by last token, so that a rule that looks at the wrong node's law is found
out, and the exact joint law of a sequence is a product of table entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import stats

from gpu_worker.draft_tree import DraftTree, chain_tree
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.sampling.verification import Verification
from shared_mem.enums import AcceptanceRule
from shared_mem.records import SamplingRecord

VOCABULARY = 5
# Under temperature 0.7, top-k 3 and top-p 0.8 three tokens are left in most rows, two in the third.
TARGET = torch.tensor(
    [
        [1.0, 0.8, 0.6, -0.5, -1.0],
        [-0.4, 0.5, 0.9, 0.7, -2.0],
        [0.1, -1.0, 0.2, 1.4, 0.9],
        [0.6, 0.5, -1.5, -0.2, 0.4],
        [-0.3, 0.9, -0.6, 0.8, 1.0],
    ]
)
DRAFT = torch.tensor(
    [
        [0.6, 1.0, 0.2, 0.9, -1.0],
        [0.9, 0.5, 0.8, -0.7, 0.1],
        [0.4, 0.3, -0.2, 0.8, 0.2],
        [0.9, -0.5, 0.5, 0.2, 0.6],
        [0.3, 0.2, -0.6, 0.5, 0.4],
    ]
)
FILTERED = SamplingRecord(temperature=0.7, top_k=3, top_p=0.8)


def filtered_law(logits: torch.Tensor) -> np.ndarray:
    """[V, V] the law of each row of `logits` under FILTERED, written out by hand."""
    laws = np.zeros(logits.shape)
    for row, values in enumerate(logits.double().numpy()):
        weights = np.exp(values / 0.7)
        kept = np.argsort(-weights)[:3]
        mass = weights[kept] / weights[kept].sum()
        kept = kept[np.cumsum(mass) - mass < 0.8]
        laws[row, kept] = weights[kept] / weights[kept].sum()
    return laws


@dataclass(frozen=True)
class Round:
    """One verify call over M sequences."""

    last_tokens: list[int]  # the roots
    tree: DraftTree
    verification: Verification


Drafter = Callable[[Sampler, list[int], list[int], list[int]], DraftTree]
"""(sampler, slots, last tokens, num_tokens) -> trees of any shape, one per sequence."""


def regular_tree(
    roots: list[int], drafts: torch.Tensor, parents: list[int], q: torch.Tensor | None = None
) -> DraftTree:
    """The same shape for every sequence: drafts [M, n] behind each root, `parents` of the drafts in 0 .. n.

    q [M, n, V]: the laws the drafts were drawn from.
    """
    m, n = drafts.shape
    base = torch.arange(m)[:, None] * (n + 1)
    shape = torch.tensor([0, *parents])
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    rows = None if q is None else torch.cat([torch.zeros(m, 1, q.shape[2]), q], dim=1).view(m * (n + 1), -1)
    return DraftTree.of_tensors(
        indptr=(np.arange(m + 1) * (n + 1)).astype(np.int32),
        tokens=torch.cat([torch.tensor(roots)[:, None], drafts], dim=1).flatten(),
        parents=(base + shape[None, :]).flatten(),
        depths=torch.tensor(depths).repeat(m),
        q=rows,
    )


def no_drafts(sampler: Sampler, slots: list[int], last: list[int], num_tokens: list[int]) -> DraftTree:
    """Plain decoding."""
    return regular_tree(last, torch.zeros(len(last), 0, dtype=torch.int64), [])


def model_chain(logits: torch.Tensor, length: int) -> Drafter:
    """Chains that a draft model with table `logits` proposes through Sampler.propose."""

    def draft(sampler: Sampler, slots: list[int], last: list[int], num_tokens: list[int]) -> DraftTree:
        drafted: list[list[int]] = [[] for _ in slots]
        current = last
        laws = []
        for step in range(length):
            positions = [n + step for n in num_tokens]
            current, q = sampler.propose(logits[current], slots, positions, drafted)
            drafted = [[*path, token] for path, token in zip(drafted, current, strict=True)]
            laws.append(q)
        q_rows = None if laws[0] is None else torch.stack(laws, dim=1)
        return regular_tree(last, torch.tensor(drafted), list(range(length)), q_rows)

    return draft


def uneven_chains(logits: torch.Tensor, length: int) -> Drafter:
    """Chains of 0 to `length` drafts: s % (length + 1) in slot s. Every third one ends with a deterministic draft."""
    whole = model_chain(logits, length)

    def draft(sampler: Sampler, slots: list[int], last: list[int], num_tokens: list[int]) -> DraftTree:
        tree = whole(sampler, slots, last, num_tokens)
        assert tree.q is not None
        tokens = tree.tokens.view(len(slots), length + 1).clone()
        q = tree.q.view(len(slots), length + 1, -1).clone()
        fixed = torch.tensor(slots) % 3
        for node in range(1, length + 1):
            # Only the last node may change: what follows was drawn behind the old one.
            here = (fixed == 0) & (torch.tensor(slots) % (length + 1) == node)
            tokens[here, node] = logits[tokens[here, node - 1]].argmax(dim=-1)
            q[here, node] = 0.0
        counts = [slot % (length + 1) for slot in slots]
        chains = chain_tree(last, [row[1 : n + 1] for row, n in zip(tokens.tolist(), counts, strict=True)])
        kept = torch.cat([q[r, : n + 1] for r, n in enumerate(counts)])
        return DraftTree.of_tensors(chains.indptr, chains.tokens, chains.parents, chains.depths, kept)

    return draft


def point_mass_chain(sampler: Sampler, slots: list[int], last: list[int], num_tokens: list[int]) -> DraftTree:
    """The drafts of lookup_chain as if they had been drawn from point masses."""
    tree = lookup_chain(sampler, slots, last, num_tokens)
    q = torch.nn.functional.one_hot(tree.tokens, VOCABULARY).float()
    q[tree.depths == 0] = 0.0
    return DraftTree.of_tensors(tree.indptr, tree.tokens, tree.parents, tree.depths, q)


def lookup_chain(sampler: Sampler, slots: list[int], last: list[int], num_tokens: list[int]) -> DraftTree:
    """Two deterministic drafts, as an n-gram lookup gives them: always likely, never certain."""
    first = TARGET[last].argmax(dim=1)
    second = (first + torch.tensor(num_tokens)) % VOCABULARY
    return regular_tree(last, torch.stack([first, second], dim=1), [0, 1])


def best_children_tree(
    sampler: Sampler, slots: list[int], last: list[int], num_tokens: list[int]
) -> DraftTree:
    """The draft's three best tokens, and behind each of them its two best."""
    first = DRAFT[last].topk(3).indices  # [M, 3]
    second = DRAFT[first].topk(2).indices.flatten(1)  # [M, 6]
    return regular_tree(last, torch.cat([first, second], dim=1), [0, 0, 0, 1, 1, 2, 2, 3, 3])


def sampled_siblings_tree(seed: int) -> Drafter:
    """Two children drawn without replacement and one draw behind each, by a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    laws = torch.softmax(DRAFT, dim=-1)

    def draft(sampler: Sampler, slots: list[int], last: list[int], num_tokens: list[int]) -> DraftTree:
        q_1 = laws[last]  # [M, V]
        elder = torch.multinomial(q_1, 1, generator=generator)
        q_2 = q_1.scatter(1, elder, 0.0)
        q_2 = q_2 / q_2.sum(dim=1, keepdim=True)
        younger = torch.multinomial(q_2, 1, generator=generator)
        q_3, q_4 = laws[elder[:, 0]], laws[younger[:, 0]]
        grandchildren = [torch.multinomial(q, 1, generator=generator) for q in (q_3, q_4)]
        drafts = torch.cat([elder, younger, *grandchildren], dim=1)
        return regular_tree(last, drafts, [0, 0, 1, 2], torch.stack([q_1, q_2, q_3, q_4], dim=1))

    return draft


def simulate(
    drafter: Drafter,
    rule: AcceptanceRule,
    *,
    num_sequences: int,
    num_tokens: int = 6,
    target: torch.Tensor = TARGET,
    record: SamplingRecord = FILTERED,
    first_position: int = 1,
    min_rounds: int = 3,
) -> tuple[np.ndarray, list[Round]]:
    """Speculates until every sequence has num_tokens tokens, at least `min_rounds` rounds.

    Returns the first num_tokens tokens of each [M, num_tokens] and all rounds. Every sequence starts at token
    0; seeds are 0 .. M - 1, the case that a weak mixing of the seed would fail.
    """
    sampler = Sampler(num_sequences, target.shape[1], "cpu")
    for slot in range(num_sequences):
        sampler.admit(slot, replace(record, seed=slot, acceptance_rule=rule), [0], 1)
    slots = list(range(num_sequences))
    generated: list[list[int]] = [[] for _ in slots]
    last = [0] * num_sequences
    rounds: list[Round] = []
    while len(rounds) < min_rounds or min(map(len, generated)) < num_tokens:
        known = [first_position + len(tokens) for tokens in generated]
        tree = drafter(sampler, slots, last, known)
        verification = sampler.verify(tree, target[tree.tokens], slots, known)
        rounds.append(Round(last, tree, verification))
        for tokens, new in zip(generated, verification.token_ids, strict=True):
            tokens += new
        last = [tokens[-1] for tokens in generated]
    return np.array([tokens[:num_tokens] for tokens in generated]), rounds


def assert_joint_law(tokens: np.ndarray, laws: np.ndarray, first_token: int = 0) -> None:
    """Chi-square of whole sequences [M, L] against the product of laws [V, V] (row: the token before)."""
    size, length = laws.shape[0], tokens.shape[1]
    joint = np.ones(1)
    before = np.array([first_token])
    for _ in range(length):
        joint = (joint[:, None] * laws[before]).ravel()
        before = np.tile(np.arange(size), len(before))
    cells = tokens @ size ** np.arange(length - 1, -1, -1)
    observed = np.bincount(cells, minlength=size**length)
    assert observed[joint == 0].sum() == 0, "a token that truncation removed was emitted"
    assert_counts(observed[joint > 0], joint[joint > 0] * len(tokens))


def assert_counts(observed: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square, cells with fewer than 5 expected pooled."""
    rare = expected < 5
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    expected = expected * (observed.sum() / expected.sum())
    result = stats.chisquare(observed, expected)
    assert result.pvalue > 1e-3, result
