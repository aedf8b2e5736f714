"""Muon: torch's update, in float32 where the processor does not multiply bfloat16."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.training import muon
from gpu_worker.training.muon import Muon, orthogonalised

_COEFFICIENTS = (3.4445, -4.775, 2.0315)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (1, 7)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    found = orthogonalised(matrix, _COEFFICIENTS, 5, 1e-7)
    assert found.shape == shape
    left, _values, right = torch.linalg.svd(matrix, full_matrices=False)
    kept = left.T @ found @ right.T
    assert (kept.diagonal() > 0.5).all()
    assert (kept.diagonal() < 1.3).all()
    assert (kept - kept.diagonal().diag()).abs().max() < 1e-3


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_torch(precision: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "resolve_dtype", lambda name, device: precision)
    torch.manual_seed(1)
    ours, theirs = (torch.nn.Parameter(torch.zeros(24, 40)) for _ in range(2))
    options = {"lr": 0.01, "weight_decay": 0.1, "nesterov": nesterov}
    mine = Muon([ours], **options)
    reference = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **options)
    for _ in range(4):
        ours.grad = torch.randn(24, 40)
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
    difference = (ours - theirs).norm() / theirs.norm()
    assert difference < (1e-6 if precision == "bfloat16" else 2e-2)  # bfloat16 has 8 bits
    assert ours.dtype == torch.float32
    reference.load_state_dict(
        mine.state_dict()
    )  # the same state, so checkpoints of either go on in the other


def test_without_bfloat16_instructions_nothing_is_multiplied_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.weights.loader._cpu_has_bfloat16", lambda: False)
    seen: list[torch.dtype] = []
    inner = muon.orthogonalised

    def spied(matrix: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(matrix.dtype)
        return inner(matrix, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(muon, "orthogonalised", spied)
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    parameter.grad = torch.ones(4, 6)
    Muon([parameter], lr=0.1).step()
    monkeypatch.setattr("gpu_worker.weights.loader._cpu_has_bfloat16", lambda: True)
    Muon([parameter], lr=0.1).step()
    assert seen == [torch.float32, torch.bfloat16]
