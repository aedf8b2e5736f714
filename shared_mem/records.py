"""What crosses shared memory between scheduler and workers: a StepPlan out, a StepResult back.

The one place to import them from: what they say is in plan.py and result.py, their bytes in plan_layout.py
and result_layout.py, the rules that both layouts share in layout.py.
"""

from __future__ import annotations

from shared_mem.layout import LAYOUT_VERSION, Float32Array, Int32Array, LayoutError, UInt8Array
from shared_mem.plan import FOLLOWS, Admission, PageUpdate, RowPlan, SamplingRecord, SlotRelease, StepPlan
from shared_mem.plan_layout import decode_plan, encode_plan
from shared_mem.result import Logprobs, RowResult, StepResult
from shared_mem.result_layout import decode_result, encode_result

__all__ = [
    "FOLLOWS",
    "LAYOUT_VERSION",
    "Admission",
    "Float32Array",
    "Int32Array",
    "LayoutError",
    "Logprobs",
    "PageUpdate",
    "RowPlan",
    "RowResult",
    "SamplingRecord",
    "SlotRelease",
    "StepPlan",
    "StepResult",
    "UInt8Array",
    "decode_plan",
    "decode_result",
    "encode_plan",
    "encode_result",
]
