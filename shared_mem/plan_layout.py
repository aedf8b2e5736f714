"""The bytes of a StepPlan: header, releases, admissions, page updates, rows, int32 pool, float32 pool."""

from __future__ import annotations

import struct

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

# Little-endian, without padding but what is named so.
_PLAN_HEADER = struct.Struct("<IIQIIIIII")  # layout_version, num_releases, step_id, and then the numbers of
# admissions, page updates, rows, ints and floats; pad
_RELEASE = struct.Struct("<iI")  # slot, epoch
_ADMISSION_FIELDS = (
    ("seed", "Q"),
    ("slot", "i"),
    ("epoch", "I"),
    ("num_prompt_tokens", "i"),
    ("num_tokens", "i"),
    ("num_cached_tokens", "i"),
    ("num_draft_cached_tokens", "i"),
    ("min_tokens", "i"),
    ("num_logprobs", "i"),
    ("num_prompt_logprobs", "i"),
    ("top_k", "i"),
    ("num_bias", "i"),
    ("num_end_ids", "i"),
    ("temperature", "f"),
    ("top_p", "f"),
    ("min_p", "f"),
    ("presence_penalty", "f"),
    ("frequency_penalty", "f"),
    ("repetition_penalty", "f"),
    ("typical_epsilon", "f"),
    ("typical_delta", "f"),
    ("threshold", "f"),
    ("acceptance_rule", "I"),
    ("methods", "I"),
    ("salt_id", "I"),
)
_ADMISSION = struct.Struct("<" + "".join(code for _, code in _ADMISSION_FIELDS))
_PAGE_UPDATE = struct.Struct("<iiii")  # slot, first_index, num_pages, pad
_ROW = struct.Struct(
    "<iIiiiBBH"
)  # slot, epoch, num_computed, num_query, num_draft_tokens, method, samples, pad


def encode_plan(plan: StepPlan) -> bytes:
    """The plan as header + records + one int32 pool + one float32 pool."""
    parts = [_RELEASE.pack(r.slot, r.epoch) for r in plan.releases]
    ints: list[Int32Array] = []
    floats: list[Float32Array] = []
    for admission in plan.admissions:
        s = admission.sampling
        record = (
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
            admission.salt_id,
        )
        parts.append(_ADMISSION.pack(*record))
        ints.append(np.asarray(admission.token_ids, dtype=np.int32))
        ints.append(np.array([token for token, _ in s.logit_bias], dtype=np.int32))
        ints.append(np.array(s.end_ids, dtype=np.int32))
        floats.append(np.array([bias for _, bias in s.logit_bias], dtype=np.float32))
    for u in plan.page_updates:
        parts.append(_PAGE_UPDATE.pack(u.slot, u.first_index, len(u.page_ids), 0))
        ints.append(np.asarray(u.page_ids, dtype=np.int32))
    parts += [
        _ROW.pack(r.slot, r.epoch, r.num_computed, r.num_query, r.num_draft_tokens, r.method, r.samples, 0)
        for r in plan.rows
    ]
    int_pool = concatenate_ints(ints)
    float_pool = concatenate_floats(floats)
    header = _PLAN_HEADER.pack(
        LAYOUT_VERSION,
        len(plan.releases),
        plan.step_id,
        len(plan.admissions),
        len(plan.page_updates),
        len(plan.rows),
        len(int_pool),
        len(float_pool),
        0,
    )
    return b"".join((header, *parts, int_pool.tobytes(), float_pool.tobytes()))


def decode_plan(data: bytes | memoryview) -> StepPlan:
    """The inverse of encode_plan. Raises LayoutError for another version or bytes that do not fit it."""
    reader = RecordReader(data, _PLAN_HEADER)
    num_releases, step_id, num_admissions, num_updates, num_rows, num_ints, num_floats, _ = reader.header
    releases = reader.take(_RELEASE, num_releases)
    admissions = reader.take(_ADMISSION, num_admissions)
    updates = reader.take(_PAGE_UPDATE, num_updates)
    rows = reader.take(_ROW, num_rows)
    reader.take_pools(num_ints, num_floats)
    decoded_admissions = []
    for values in admissions:
        record = {name: value for (name, _), value in zip(_ADMISSION_FIELDS, values, strict=True)}
        token_ids = reader.ints(record["num_tokens"])
        bias_ids = reader.ints(record["num_bias"]).tolist()
        end_ids = tuple(reader.ints(record["num_end_ids"]).tolist())
        bias = tuple(zip(bias_ids, reader.floats(record["num_bias"]).tolist(), strict=True))
        decoded_admissions.append(
            Admission(
                slot=record["slot"],
                epoch=record["epoch"],
                token_ids=token_ids,
                num_prompt_tokens=record["num_prompt_tokens"],
                num_cached_tokens=record["num_cached_tokens"],
                num_draft_cached_tokens=record["num_draft_cached_tokens"],
                sampling=SamplingRecord(
                    temperature=record["temperature"],
                    top_k=record["top_k"],
                    top_p=record["top_p"],
                    min_p=record["min_p"],
                    presence_penalty=record["presence_penalty"],
                    frequency_penalty=record["frequency_penalty"],
                    repetition_penalty=record["repetition_penalty"],
                    seed=record["seed"],
                    min_tokens=record["min_tokens"],
                    logit_bias=bias,
                    end_ids=end_ids,
                    num_logprobs=record["num_logprobs"],
                    num_prompt_logprobs=record["num_prompt_logprobs"],
                    acceptance_rule=enum_value(AcceptanceRule, record["acceptance_rule"]),
                    typical_epsilon=record["typical_epsilon"],
                    typical_delta=record["typical_delta"],
                    threshold=record["threshold"],
                ),
                methods=record["methods"],
                salt_id=record["salt_id"],
            )
        )
    plan = StepPlan(
        step_id=step_id,
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
