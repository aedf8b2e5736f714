"""Log-probabilities for clients: of the model's raw logits, before penalties, temperature and truncation."""

from __future__ import annotations

import numpy as np
import torch

from shared_mem.records import Logprobs

# Rows whose log-softmax is held at once; a prompt chunk may have many hundred.
_ROWS_AT_ONCE = 64


def raw_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_alternatives: int) -> Logprobs:
    """Log-probabilities of token_ids [m] under logits [m, V] and of the best num_alternatives >= 0 tokens.

    Column 0 is the token itself, then the alternatives, best first (the token may be among them).
    """
    num_rows, num_tokens = logits.shape
    width = 1 + min(num_alternatives, num_tokens)
    ids = np.empty((num_rows, width), dtype=np.int32)
    values = np.empty((num_rows, width), dtype=np.float32)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        all_values = torch.log_softmax(logits[part], dim=-1, dtype=torch.float32)
        own = token_ids[part, None]
        best_values, best_ids = all_values.topk(width - 1, dim=-1)
        ids[part] = torch.cat([own, best_ids], dim=1).cpu().numpy()
        values[part] = torch.cat([all_values.gather(1, own), best_values], dim=1).cpu().numpy()
    return Logprobs(ids, values)


def rows_of(logprobs: Logprobs, start: int, end: int, num_alternatives: int) -> Logprobs:
    """Rows start .. end - 1 with at most num_alternatives alternatives."""
    columns = 1 + num_alternatives
    return Logprobs(logprobs.token_ids[start:end, :columns], logprobs.values[start:end, :columns])
