"""Every acceptance rule in one place: which drafts of a step are kept, and the token the target adds itself.

All rules are vectorised over the requests they are given and walk down the trees level by level. A tree of
one node (plain decoding) accepts nothing and takes its token from the root, by the same code.

Greedy sequences have no rule of their own: their law is one-hot at the argmax, under which every rule accepts
exactly the drafts that equal it (typical and threshold too, so they are lossless at temperature 0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.sampling.law import Law
from gpu_worker.sampling.random import Purpose, round_keys, uniform
from gpu_worker.sampling.slot_states import Int64Array
from gpu_worker.sampling.tree_walk import HostTree


@dataclass(frozen=True)
class Decision:
    """What a rule decided for r requests."""

    last_nodes: Int64Array  # [r] the deepest accepted node; the root if no draft was accepted
    tokens: Int64Array  # [r] the target's own token behind it


def follow_drawn(tree: HostTree, requests: Int64Array, drawn: Int64Array) -> Decision:
    """Keeps drafts as long as the token drawn at a node is one of its children (coupled rule, greedy).

    drawn [N]: the target's token at every node of `requests` [r]. Lossless for any drafter, since the emitted
    tokens are the drawn ones whatever the drafts are.
    """
    nodes = tree.roots[requests]
    while tree.children.shape[1]:
        children = tree.children[nodes]  # [r, C]
        hits = (children >= 0) & (tree.tokens[children] == drawn[nodes][:, None])
        advances = hits.any(axis=1)
        if not advances.any():
            break
        nodes = np.where(advances, children[np.arange(len(nodes)), hits.argmax(axis=1)], nodes)
    return Decision(nodes, drawn[nodes])


def accept_by_rejection(
    tree: HostTree,
    requests: Int64Array,
    law: Law,
    law_rows: Int64Array,
    seeds: torch.Tensor,
    first_positions: torch.Tensor,
    q: torch.Tensor | None,
) -> Decision:
    """Speculative sampling: the emitted tokens have the law p exactly, whatever the drafts.

    law: p of the requests' nodes; law_rows [N]: its row by node. seeds, first_positions [r] int64 (position
    of the round's first new token). q [N, V]: the law each draft was really drawn from, zero rows where it
    was chosen deterministically (a point mass).

    Children of a node are tried in order against g, at first p. A sampled one is accepted with min(1,
    g(x)/q(x)), else g becomes norm(max(g - q, 0)) (Leviathan et al., arXiv 2211.17192, algorithm 1; several
    siblings: Miao et al., arXiv 2305.09781, section 4.3). A deterministic one is accepted with g(x), else x
    is taken out of g. When none is accepted the target's token is drawn from g. Siblings sampled without
    replacement carry in q the law without their elder siblings, renormalised, for that is what they were
    drawn from.
    """
    nodes = tree.roots[requests].copy()
    tokens = np.zeros(len(requests), dtype=np.int64)
    device = law.log_weights.device
    sampled = None if q is None else q.any(dim=1)  # [N]
    active = np.arange(len(requests))  # requests still walking down
    while len(active):
        at = nodes[active]
        here = torch.from_numpy(active).to(device)
        seed, first = seeds[here], first_positions[here]
        depth = torch.from_numpy(tree.depths[at]).to(device)
        local = law.select(torch.from_numpy(law_rows[at]).to(device))
        g = local.probabilities()  # [a, K]
        accepted = torch.full((len(active),), -1, dtype=torch.int64, device=device)
        children = torch.from_numpy(tree.children[at]).to(device)  # [a, C]
        for rank in range(children.shape[1]):
            child = children[:, rank]
            tried = (child >= 0) & (accepted < 0)
            if not bool(tried.any()):
                break
            child = child.clamp(min=0)
            token = torch.from_numpy(tree.tokens).to(device)[child]
            is_token = local.matches(token)
            mass = (g * is_token).sum(dim=1)  # g(x); 0 for a token that truncation removed
            u = uniform(seed, first, depth, Purpose.ACCEPT, rank)
            drawn_with = torch.ones_like(mass)
            rest = g.masked_fill(is_token, 0.0)
            if q is not None and sampled is not None:
                q_rows = q[child]
                from_q = sampled[child]
                drawn_with = torch.where(from_q, q_rows.gather(1, token[:, None])[:, 0], drawn_with)
                residual = (g - local.at_candidates(q_rows)).clamp_(min=0.0)
                rest = torch.where(from_q[:, None], residual, rest)
            takes = tried & (mass > 0) & (u * drawn_with <= mass)
            accepted = torch.where(takes, child, accepted)
            total = rest.sum(dim=1, keepdim=True)
            # No residual is left only where g equals q up to rounding: then g itself is the law.
            rejects = (tried & ~takes)[:, None] & (total > 0)
            g = torch.where(rejects, rest / total, g)
        own = Law(g.log(), local.token_ids).draw(round_keys(seed, first, depth, Purpose.TARGET))
        taken = accepted.cpu().numpy()
        stays = taken < 0
        tokens[active[stays]] = own.cpu().numpy()[stays]
        nodes[active[~stays]] = taken[~stays]
        active = active[~stays]
    return Decision(nodes, tokens)


def accept_by_block(
    tree: HostTree,
    requests: Int64Array,
    law: Law,
    law_rows: Int64Array,
    seeds: torch.Tensor,
    first_positions: torch.Tensor,
    q: torch.Tensor,
) -> Decision:
    """Block verification of chains: the law p exactly, and never fewer accepted drafts than rejection, on average.

    Arguments as in accept_by_rejection; every tree of `requests` must be a chain. A zero row of q is taken as a
    point mass at its draft.

    Sun et al., Block Verification Accelerates Speculative Decoding, arXiv 2403.10444, algorithm 2. p_i = min(1,
    p_{i-1} P_{i-1}(x_i) / Q_{i-1}(x_i)) with p_0 = 1 is how much of the first i drafts' mass the target has kept;
    prefix i stands with probability h_i = r_i / (r_i + 1 - p_i), where r_i = sum(max(p_i P_i - Q_i, 0)) is what is
    left for other tokens behind it (the whole block with p_g), and the longest standing prefix is kept. The token
    behind it is drawn from max(p_i P_i - Q_i, 0), behind the whole block from P_g.
    """
    device = law.log_weights.device
    roots = tree.roots[requests]
    lengths = np.bincount(tree.owner, minlength=len(tree.roots))[requests] - 1  # drafts of each chain
    tokens = torch.from_numpy(tree.tokens).to(device)
    kept = np.zeros(len(requests), dtype=np.int64)
    mass_kept = torch.ones(len(requests), dtype=torch.float64, device=device)  # p_i
    mass_at_kept = mass_kept.clone()  # p_i of the longest prefix that stands

    def behind(active: Int64Array, depth: int) -> tuple[Law, torch.Tensor]:
        """P of each active chain's node at `depth`, and its probabilities [a, K] float64."""
        local = law.select(torch.from_numpy(law_rows[roots[active] + depth]).to(device))
        return local, local.probabilities().double()

    def draft(active: Int64Array, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token [a] of each active chain's draft at `depth`, and the law [a, V] it was drawn from."""
        nodes = torch.from_numpy(roots[active] + depth).to(device)
        drawn_from, token = q[nodes], tokens[nodes]
        chosen = ~drawn_from.any(dim=1)
        if bool(chosen.any()):
            drawn_from[chosen] = 0.0
            drawn_from[chosen, token[chosen]] = 1.0
        return token, drawn_from.double()

    def residual(
        local: Law, p: torch.Tensor, mass: torch.Tensor, active: Int64Array, depth: int
    ) -> torch.Tensor:
        """max(p_i P_i - Q_i, 0) [a, K] behind each active chain's node at `depth`."""
        return (mass[:, None] * p - local.at_candidates(draft(active, depth + 1)[1])).clamp_(min=0.0)

    for depth in range(1, int(lengths.max(initial=0)) + 1):
        active = np.flatnonzero(lengths >= depth)
        here = torch.from_numpy(active).to(device)
        local, p = behind(active, depth - 1)
        token, drawn_from = draft(active, depth)
        ratio = (p * local.matches(token)).sum(dim=1) / drawn_from.gather(1, token[:, None])[:, 0]
        # a draft that underflowed in q was drawn all the same; one that the target cannot draw ends the block
        mass = (mass_kept[here] * ratio.nan_to_num(nan=0.0)).clamp_(max=1.0)
        mass_kept[here] = mass
        stands = mass.clone()
        inner = np.flatnonzero(lengths[active] > depth)
        if len(inner):
            within = torch.from_numpy(inner).to(device)
            local, p = behind(active[inner], depth)
            left = residual(local, p, mass[within], active[inner], depth).sum(dim=1)
            total = left + 1.0 - mass[within]
            stands[within] = torch.where(total > 0, left / total, 1.0)
        u = uniform(seeds[here], first_positions[here], torch.full_like(here, depth - 1), Purpose.ACCEPT)
        keeps = u <= stands
        kept[active[keeps.cpu().numpy()]] = depth
        mass_at_kept[here[keeps]] = mass[keeps]
    everyone = np.arange(len(requests))
    local = law.select(torch.from_numpy(law_rows[roots + kept]).to(device))
    weights = local.probabilities().double()
    for depth in np.unique(kept[kept < lengths]).tolist():
        cut = everyone[(kept == depth) & (kept < lengths)]
        here = torch.from_numpy(cut).to(device)
        rest = residual(local.select(here), weights[here], mass_at_kept[here], cut, depth)
        # Nothing is left only where both laws are equal up to rounding: then P itself is the law.
        weights[here] = torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, weights[here])
    last = torch.from_numpy(kept).to(device)
    keys = round_keys(seeds, first_positions, last, Purpose.TARGET)
    own = Law(weights.log().float(), local.token_ids).draw(keys)
    return Decision(roots + kept, own.cpu().numpy())


def accept_by_bound(
    tree: HostTree,
    requests: Int64Array,
    law: Law,
    law_rows: Int64Array,
    accepts: Callable[[torch.Tensor, torch.Tensor, Int64Array], torch.Tensor],
    draw: Callable[[Law, Int64Array, Int64Array], torch.Tensor],
) -> Decision:
    """Keeps the deepest path whose every draft passes `accepts`; the token behind it is drawn from p.

    accepts(p(x) [m], entropy of p [m], request of each [m]) -> [m] bool. Of several deepest paths the one
    whose last node comes first is kept. draw(law of the last nodes [r], requests, last nodes) -> [r].
    """
    nodes = np.flatnonzero((tree.depths > 0) & np.isin(tree.owner, requests))
    last_nodes = tree.roots[requests].copy()
    device = law.log_weights.device
    if len(nodes):
        parents = torch.from_numpy(law_rows[tree.parents[nodes]]).to(device)
        of_parents = law.select(parents)
        p = of_parents.probabilities()
        mass = (p * of_parents.matches(torch.from_numpy(tree.tokens[nodes]).to(device))).sum(dim=1)
        entropy = torch.special.entr(p).sum(dim=1)
        passes = np.zeros(len(tree.parents), dtype=np.bool_)
        passes[tree.roots] = True
        passes[nodes] = accepts(mass, entropy, tree.owner[nodes]).cpu().numpy()
        for depth in range(1, int(tree.depths[nodes].max()) + 1):
            level = nodes[tree.depths[nodes] == depth]
            passes[level] &= passes[tree.parents[level]]
        kept = nodes[passes[nodes]]
        # Sorted so that the last entry of an owner is its deepest node, and of those the first in the tree.
        kept = kept[np.lexsort((-kept, tree.depths[kept], tree.owner[kept]))]
        best = tree.roots.copy()
        best[tree.owner[kept]] = kept  # the last write of an owner stays
        last_nodes = best[requests]
    own = draw(law.select(torch.from_numpy(law_rows[last_nodes]).to(device)), requests, last_nodes)
    return Decision(last_nodes, own.cpu().numpy())


def typical_bound(entropy: torch.Tensor, epsilon: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """[m] the probability a draft must exceed: min(epsilon, delta * exp(-H)), H in nats.

    Typical acceptance (Cai et al., Medusa, arXiv 2401.10774, section 2.3.1). It changes the law of the
    output.
    """
    return torch.minimum(epsilon, delta * torch.exp(-entropy))
