"""The worker's settings; parsed by gpu_worker/worker.py's command line, passed on explicitly. A leaf module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared_mem.enums import SpeculationMethod

LayerIdsName = Literal["inputs", "outputs"]  # of layers: see weights/heads/eagle3.py


@dataclass(frozen=True)
class WorkerConfig:
    """Settings of one rank; the meaning of each field is the service flag's of the same name."""

    model: str = ""
    model_name: str = ""
    dtype: str = "auto"
    device: str = "auto"
    speculation: tuple[SpeculationMethod, ...] = (SpeculationMethod.NGRAM,)
    num_draft_tokens: int = 4
    draft_model: str = ""
    heads: tuple[tuple[SpeculationMethod, str], ...] = ()
    eagle3_layer_ids: LayerIdsName = "inputs"
    draft_shape: str = "chain"
    max_draft_depth: int = 4
    min_draft_probability: float = 0.2
    suffix_store: bool = False
    page_size: int = 16
    num_pages: int = 0
    max_running_requests: int = 64
    max_batched_tokens: int = 512
    max_context_tokens: int = 0
    num_threads: int = 0
    control_address: str = ""  # ZeroMQ address of the scheduler's control socket
    rank: int = 0
    world_size: int = 1
    log_level: str = "info"
