"""Training on another device than the CPU, as far as it can be told without one: a step mixes no devices.

Tensors of the meta device have no values, so that whatever would wait for one fails too.
"""

from __future__ import annotations

import pytest
import torch

from gpu_worker.models.heads.config import HeadKind
from gpu_worker.training.batches import collate
from gpu_worker.training.features import ConversationFeatures
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.modules.draft_model import DraftModel
from gpu_worker.training.muon import Muon
from tests.gpu_worker.training.samples import draft_objective

_STEPS = 3


def _conversation(target: FrozenTarget, length: int) -> ConversationFeatures:
    h = target.config.hidden_size
    rows = torch.arange(3, length - 1)
    return ConversationFeatures(
        token_ids=torch.randint(3, 100, (length,)),
        rows=rows,
        top_ids=torch.randint(3, 100, (len(rows), 4)),
        top_probs=torch.full((len(rows), 4), 0.2),
        hidden=torch.randn(length, h).bfloat16(),
        captured=torch.randn(length, 2 * h).bfloat16(),
    )


@pytest.mark.parametrize(
    "kind", [HeadKind.EAGLE3, HeadKind.EAGLE, HeadKind.MTP, HeadKind.MEDUSA, "draft-model"]
)
@pytest.mark.parametrize("loss", ["cross-entropy", "hybrid"])
def test_a_step_stays_on_its_device(kind: HeadKind | str, loss: str, frozen: FrozenTarget) -> None:
    of_head = HeadKind.EAGLE if kind == "draft-model" else HeadKind(kind)
    module, vocabulary = draft_objective(of_head, frozen, loss=loss, own_lm_head=kind is HeadKind.MEDUSA)
    if kind == "draft-model":
        module.head = DraftModel(frozen.config, 2)
    captured = kind is HeadKind.EAGLE3
    conversations = [_conversation(frozen, length) for length in (12, 9)]
    batch = collate(conversations, vocabulary, torch.float32, from_captured=captured)
    module, batch = module.to("meta"), batch.to(torch.device("meta"))
    outcome = module(batch, _STEPS)
    assert outcome.loss.device.type == outcome.sums.device.type == "meta"
    outcome.loss.backward()
    matrices = [p for p in module.parameters() if p.requires_grad and p.dim() == 2]
    assert matrices
    assert all(p.grad is not None and p.grad.device.type == "meta" for p in matrices)
    Muon(matrices, lr=0.01).step()


def test_what_a_device_would_be_waited_for_is_noticed() -> None:
    rows = torch.zeros(3, device="meta")
    for wait in (rows.nonzero, rows.sum().item, rows.tolist):
        with pytest.raises((NotImplementedError, RuntimeError)):
            wait()
    with pytest.raises(RuntimeError):
        rows + torch.zeros(3)
