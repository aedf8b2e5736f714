"""Draft heads on the CPU kernels: a few decoder layers over pairs of a token and a hidden state of the target.

One class covers the forms of EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858), EAGLE-3 (2503.01840) and multi-token
prediction (DeepSeek-V3, 2412.19437); DraftHeadWeights says which parts a head has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.kernels.decoder import (
    DecoderLayerWeights,
    DecoderShape,
    describe,
    marshal,
    norm_pointer,
)
from gpu_worker.kernels.draft_trees import GrownTrees, TreeStart, grow
from gpu_worker.kernels.kv_pool import NativeKVPool
from gpu_worker.kernels.linear import PackedLinear
from gpu_worker.kernels.native import (
    DraftInputStruct,
    NativeKernels,
    RowsStruct,
    ThreadTeam,
    pointer,
)


@dataclass(frozen=True)
class DraftHeadWeights:
    """A row is a token's embedding e and a feature row f: of the target, or recycled from the step before.

    f' = fuse(f), or f where there is no fuse or f is recycled. x = [embedding_norm(e), feature_norm(f')], or the other
    way round. With `combine` the residual stream begins as combine(x). Without, x is the input of layers[0].qkv, whose
    in_features are 2h and whose attn_norm is None, and the residual stream begins as f'. Norms are float32 [h].

    EAGLE-1 and 2: combine (fc). MTP: combine (eh_proj) and both norms. EAGLE-3: fuse (fc) and both norms.
    """

    layers: Sequence[DecoderLayerWeights]
    fuse: PackedLinear | None = None  # F -> h
    combine: PackedLinear | None = None  # 2h -> h
    embedding_norm: torch.Tensor | None = None
    feature_norm: torch.Tensor | None = None
    embedding_first: bool = True
    residual_is_normed: bool = False  # without combine: the residual stream begins as feature_norm(f')
    final_norm: torch.Tensor | None = None
    recycles_normed: bool = False  # the next step's features are the output after final_norm, not before


class NativeDraftHead:
    """A draft head with the target's embedding; its KV is in a pool of its own. Not for use by two threads at once."""

    def __init__(
        self,
        kernels: NativeKernels,
        shape: DecoderShape,
        embedding: torch.Tensor | PackedLinear,
        cos: torch.Tensor,
        sin: torch.Tensor,
        weights: DraftHeadWeights,
    ) -> None:
        """Tables as in NativeDecoder. Raises KernelError naming what does not fit."""
        self.shape = shape
        self.weights = weights
        self._kernels = kernels
        h = shape.hidden_size
        self._description = describe(shape, embedding, cos, sin, weights.layers, weights.final_norm)
        draft_input = DraftInputStruct(
            None if weights.fuse is None else weights.fuse.handle.address,
            None if weights.combine is None else weights.combine.handle.address,
            norm_pointer("embedding_norm", weights.embedding_norm, h),
            norm_pointer("feature_norm", weights.feature_norm, h),
            weights.embedding_first,
            weights.residual_is_normed,
            weights.recycles_normed,
        )
        self._handle = kernels.create(
            "dl_model_create",
            ctypes.byref(self._description.struct),
            ctypes.byref(draft_input),
            int(kernels.isa),
        )

    @property
    def num_layers(self) -> int:
        return len(self.weights.layers)

    @property
    def feature_size(self) -> int:
        """F: the width of the target's feature rows."""
        fuse = self.weights.fuse
        return self.shape.hidden_size if fuse is None else fuse.in_features

    def new_pool(self, num_pages: int, page_size: int) -> NativeKVPool:
        """A pool for this head's KV."""
        shape = self.shape
        return NativeKVPool(
            self._kernels, self.num_layers, num_pages, page_size, shape.num_kv_heads, shape.head_dim
        )

    def forward(
        self,
        batch: ForwardBatch,
        pool: NativeKVPool,
        team: ThreadTeam,
        features: torch.Tensor,
        recycled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the batch's T rows, causal or trees, and writes their KV. A row's bits do not depend on the other rows.

        features float32: [T, F] of the target, or, if recycled, [T, h] as an earlier call returned them. Returns
        (recycled_out [T, h], normed [T, h]): the next step's features, and what the language model head reads; they are
        one tensor if recycles_normed.

        Raises KernelError for a batch that names tokens, positions or slots that do not exist, or features of another
        shape.
        """
        crossing = marshal(batch, pool)
        num_rows, h = batch.num_rows, self.shape.hidden_size
        width = h if recycled else self.feature_size
        address = pointer("features", features, torch.float32, (num_rows, width))
        normed = torch.empty(num_rows, h)
        residual = normed if self.weights.recycles_normed else torch.empty(num_rows, h)
        residual_address = None if residual is normed else residual.data_ptr()
        rows = RowsStruct(address, recycled, 0, None, normed.data_ptr(), residual_address, None)
        if num_rows > 0:
            self._kernels.call(
                "dl_model_forward",
                self._handle.address,
                team.handle.address,
                pool.handle.address,
                ctypes.byref(crossing.struct),
                ctypes.byref(rows),
            )
        return residual, normed

    def tree(
        self,
        start: TreeStart,
        pool: NativeKVPool,
        team: ThreadTeam,
        lm_head: PackedLinear,
        target_ids: torch.Tensor | None = None,
    ) -> GrownTrees:
        """See draft_trees.grow."""
        return grow(self._kernels, self._handle, start, pool, team, lm_head, target_ids)
