"""Hidden states of inner layers, copied inside the forward pass for draft heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker.kernels.native import KernelError
from tests.gpu_worker.kernels import reference
from tests.gpu_worker.kernels.conftest import BuildModel
from tests.gpu_worker.kernels.schedules import Rows, Sequence, make_batch


@pytest.mark.parametrize("rows", [1, 7, 40, 300])
@pytest.mark.parametrize("threads", [1, 3])
def test_captured_streams_are_those_of_truncated_models(build: BuildModel, rows: int, threads: int) -> None:
    """Normed, the stream after a layer is what the model up to that layer returns; in the order that was asked for."""
    model = build("q4_1", threads, num_layers=3)
    final_norm = model._parts[4]
    ids = np.random.default_rng(rows).integers(0, 300, rows).tolist()
    pages = list(range(-(-rows // 16)))

    def batch() -> object:
        return make_batch([Rows(Sequence(ids, pages), rows)], 16)

    h = model.config.hidden_size
    layers = (2, 0, 1, 0)
    hidden, captured = model.forward_capturing(batch(), model.new_pool(len(pages), 16), None, layers)
    assert captured.shape == (rows, 4 * h)
    assert torch.equal(hidden, model.forward(batch(), model.new_pool(len(pages), 16)))
    for part, layer in zip(captured.split(h, dim=1), layers, strict=True):
        short = model.truncated(layer + 1)
        expected = short.forward(batch(), short.new_pool(len(pages), 16))
        normed = reference.rms_norm(part.double().numpy(), final_norm, model.config.rms_norm_eps)
        torch.testing.assert_close(torch.from_numpy(normed).float(), expected, rtol=1e-5, atol=1e-6)


def test_captured_rows_do_not_depend_on_other_rows(build: BuildModel) -> None:
    """Decoding one by one gives the bits of one pass over all rows."""
    model = build("q4_1", 2, num_layers=3)
    ids = np.random.default_rng(0).integers(0, 300, 40).tolist()
    pool = model.new_pool(3, 16)
    batch = make_batch([Rows(Sequence(ids, [0, 1, 2]), 40)], 16)
    _, together = model.forward_capturing(batch, pool, None, (0, 2))
    alone, sequence = [], Sequence(ids, [0, 1, 2])
    for _ in ids:
        batch = make_batch([Rows(sequence, 1)], 16)
        alone.append(model.forward_capturing(batch, pool, None, (0, 2))[1])
        sequence.num_computed += 1
    assert torch.equal(torch.cat(alone), together)


def test_layers_to_capture_must_exist(build: BuildModel) -> None:
    model = build("q4_1", 2, num_layers=3)
    batch = make_batch([Rows(Sequence([1], [0]), 1)], 16)
    with pytest.raises(KernelError, match=r"capture: 3 is not in 0\.\.2"):
        model.forward_capturing(batch, model.new_pool(1, 16), None, (3,))
