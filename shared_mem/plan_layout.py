"""The bytes of a StepPlan: header, releases, admissions, page updates, rows, int32 pool, float32 pool."""

from __future__ import annotations

import numpy as np

from shared_mem.enums import AcceptanceRule, SpeculationMethod
from shared_mem.layout import (
    LAYOUT_VERSION,
    Float32Array,
    Int32Array,
    RecordReader,
    concatenate_floats,
    concatenate_ints,
    enum_value,
)
from shared_mem.plan import Admission, PageUpdate, RowPlan, SamplingRecord, SlotRelease, StepPlan

_PLAN_HEADER = np.dtype(
    [
        ("layout_version", "<u4"),
        ("num_releases", "<u4"),
        ("step_id", "<u8"),
        ("num_admissions", "<u4"),
        ("num_page_updates", "<u4"),
        ("num_rows", "<u4"),
        ("num_ints", "<u4"),
        ("num_floats", "<u4"),
        ("pad", "<u4"),
    ]
)
_RELEASE = np.dtype([("slot", "<i4"), ("epoch", "<u4")])
_ADMISSION = np.dtype(
    [
        ("seed", "<u8"),
        ("slot", "<i4"),
        ("epoch", "<u4"),
        ("num_prompt_tokens", "<i4"),
        ("num_tokens", "<i4"),
        ("num_cached_tokens", "<i4"),
        ("num_draft_cached_tokens", "<i4"),
        ("min_tokens", "<i4"),
        ("num_logprobs", "<i4"),
        ("num_prompt_logprobs", "<i4"),
        ("top_k", "<i4"),
        ("num_bias", "<i4"),
        ("num_end_ids", "<i4"),
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("repetition_penalty", "<f4"),
        ("typical_epsilon", "<f4"),
        ("typical_delta", "<f4"),
        ("threshold", "<f4"),
        ("acceptance_rule", "<u4"),
        ("methods", "<u4"),
        ("pad", "<u4"),
    ]
)
_PAGE_UPDATE = np.dtype([("slot", "<i4"), ("first_index", "<i4"), ("num_pages", "<i4"), ("pad", "<i4")])
_ROW = np.dtype(
    [
        ("slot", "<i4"),
        ("epoch", "<u4"),
        ("num_computed", "<i4"),
        ("num_query", "<i4"),
        ("num_draft_tokens", "<i4"),
        ("method", "<u1"),
        ("samples", "<u1"),
        ("pad", "<u2"),
    ]
)


def encode_plan(plan: StepPlan) -> bytes:
    """The plan as header + records + one int32 pool + one float32 pool."""
    releases = np.array([(r.slot, r.epoch) for r in plan.releases], dtype=_RELEASE)
    admissions = np.zeros(len(plan.admissions), dtype=_ADMISSION)
    updates = np.array(
        [(u.slot, u.first_index, len(u.page_ids), 0) for u in plan.page_updates], dtype=_PAGE_UPDATE
    )
    rows = np.array(
        [
            (r.slot, r.epoch, r.num_computed, r.num_query, r.num_draft_tokens, r.method, r.samples, 0)
            for r in plan.rows
        ],
        dtype=_ROW,
    )
    ints: list[Int32Array] = []
    floats: list[Float32Array] = []
    for i, admission in enumerate(plan.admissions):
        s = admission.sampling
        admissions[i] = (
            s.seed,
            admission.slot,
            admission.epoch,
            admission.num_prompt_tokens,
            len(admission.token_ids),
            admission.num_cached_tokens,
            admission.num_draft_cached_tokens,
            s.min_tokens,
            s.num_logprobs,
            s.num_prompt_logprobs,
            s.top_k,
            len(s.logit_bias),
            len(s.end_ids),
            s.temperature,
            s.top_p,
            s.min_p,
            s.presence_penalty,
            s.frequency_penalty,
            s.repetition_penalty,
            s.typical_epsilon,
            s.typical_delta,
            s.threshold,
            s.acceptance_rule,
            admission.methods,
            0,
        )
        ints.append(np.asarray(admission.token_ids, dtype=np.int32))
        ints.append(np.array([token for token, _ in s.logit_bias], dtype=np.int32))
        ints.append(np.array(s.end_ids, dtype=np.int32))
        floats.append(np.array([bias for _, bias in s.logit_bias], dtype=np.float32))
    ints.extend(np.asarray(u.page_ids, dtype=np.int32) for u in plan.page_updates)
    int_pool = concatenate_ints(ints)
    float_pool = concatenate_floats(floats)
    header = np.array(
        (
            LAYOUT_VERSION,
            len(releases),
            plan.step_id,
            len(admissions),
            len(updates),
            len(rows),
            len(int_pool),
            len(float_pool),
            0,
        ),
        dtype=_PLAN_HEADER,
    )
    parts = (header, releases, admissions, updates, rows, int_pool, float_pool)
    return b"".join(part.tobytes() for part in parts)


def decode_plan(data: bytes | memoryview) -> StepPlan:
    """The inverse of encode_plan. Raises LayoutError for another version or bytes that do not fit it."""
    reader = RecordReader(data, _PLAN_HEADER)
    header = reader.header
    releases = reader.take(_RELEASE, header["num_releases"]).tolist()
    admissions = reader.take(_ADMISSION, header["num_admissions"])
    updates = reader.take(_PAGE_UPDATE, header["num_page_updates"]).tolist()
    rows = reader.take(_ROW, header["num_rows"]).tolist()
    reader.take_pools(header["num_ints"], header["num_floats"])
    decoded_admissions = []
    for record in admissions:
        token_ids = reader.ints(record["num_tokens"])
        bias_ids = reader.ints(record["num_bias"]).tolist()
        end_ids = tuple(reader.ints(record["num_end_ids"]).tolist())
        bias = tuple(zip(bias_ids, reader.floats(record["num_bias"]).tolist(), strict=True))
        decoded_admissions.append(
            Admission(
                slot=int(record["slot"]),
                epoch=int(record["epoch"]),
                token_ids=token_ids,
                num_prompt_tokens=int(record["num_prompt_tokens"]),
                num_cached_tokens=int(record["num_cached_tokens"]),
                num_draft_cached_tokens=int(record["num_draft_cached_tokens"]),
                sampling=SamplingRecord(
                    temperature=float(record["temperature"]),
                    top_k=int(record["top_k"]),
                    top_p=float(record["top_p"]),
                    min_p=float(record["min_p"]),
                    presence_penalty=float(record["presence_penalty"]),
                    frequency_penalty=float(record["frequency_penalty"]),
                    repetition_penalty=float(record["repetition_penalty"]),
                    seed=int(record["seed"]),
                    min_tokens=int(record["min_tokens"]),
                    logit_bias=bias,
                    end_ids=end_ids,
                    num_logprobs=int(record["num_logprobs"]),
                    num_prompt_logprobs=int(record["num_prompt_logprobs"]),
                    acceptance_rule=enum_value(AcceptanceRule, record["acceptance_rule"]),
                    typical_epsilon=float(record["typical_epsilon"]),
                    typical_delta=float(record["typical_delta"]),
                    threshold=float(record["threshold"]),
                ),
                methods=int(record["methods"]),
            )
        )
    plan = StepPlan(
        step_id=int(header["step_id"]),
        releases=tuple(SlotRelease(slot, epoch) for slot, epoch in releases),
        admissions=tuple(decoded_admissions),
        page_updates=tuple(PageUpdate(slot, first, reader.ints(count)) for slot, first, count, _ in updates),
        rows=tuple(
            RowPlan(
                slot, epoch, computed, query, bool(samples), enum_value(SpeculationMethod, method), drafts
            )
            for slot, epoch, computed, query, drafts, method, samples, _ in rows
        ),
    )
    reader.finish()
    return plan
