"""What crosses shared memory between scheduler and workers: a StepPlan out, a StepResult back.

Both are written as fixed-layout numpy records behind a header (no pickling), so that a worker on any host,
in any language, can read them. `LAYOUT_VERSION` is compared in the handshake (control.py).

Indices: `position` and token counts are 0-based counts of tokens of one sequence (prompt + generated).
A sequence with n tokens has KV for its first `num_computed` tokens; a decoding one has num_computed == n - 1,
since the token sampled last has no KV yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared_mem.enums import AcceptanceRule, SpeculationMethod

LAYOUT_VERSION = 1

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

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
_RESULT_HEADER = np.dtype(
    [
        ("layout_version", "<u4"),
        ("num_rows", "<u4"),
        ("step_id", "<u8"),
        ("num_ints", "<u4"),
        ("num_floats", "<u4"),
        ("duration_us", "<u4"),
        ("pad", "<u4"),
    ]
)
_ROW_RESULT = np.dtype(
    [
        ("slot", "<i4"),
        ("epoch", "<u4"),
        ("num_tokens", "<i4"),
        ("num_draft_tokens", "<i4"),
        ("draft_depth", "<i4"),
        ("num_accepted_tokens", "<i4"),
        ("num_draft_computed", "<i4"),
        ("num_logprob_columns", "<i4"),
        ("num_logprob_rows", "<i4"),
        ("num_prompt_logprob_columns", "<i4"),
        ("num_prompt_logprob_rows", "<i4"),
        ("method", "<u1"),
        ("pad", "V3"),
    ]
)


@dataclass(frozen=True)
class SamplingRecord:
    """How a slot's next tokens are chosen; resolved values only, nothing is unset here.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0, presence 0, frequency 0 and repetition 1 are off.
    `end_ids` (EOS and stop ids) get probability 0 until `min_tokens` tokens were generated; they are empty
    when min_tokens is 0 or nothing may end the sequence: ends themselves are the scheduler's to find.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    end_ids: tuple[int, ...] = ()
    num_logprobs: int = -1  # alternatives per generated token; -1: no logprobs at all
    num_prompt_logprobs: int = -1  # the same for prompt tokens
    acceptance_rule: AcceptanceRule = AcceptanceRule.COUPLED
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    threshold: float = 0.5


@dataclass(frozen=True)
class SlotRelease:
    """The sequence in `slot` (of `epoch`) ended, was aborted or preempted: forget its state."""

    slot: int
    epoch: int


@dataclass(frozen=True)
class Admission:
    """A sequence takes `slot`: everything the worker will ever need to know of it but its pages."""

    slot: int
    epoch: int
    token_ids: Int32Array  # [n] prompt, then what was generated before a preemption
    num_prompt_tokens: int
    num_cached_tokens: int  # leading tokens whose target KV the given pages already hold
    num_draft_cached_tokens: int  # the same for the draft model's KV
    sampling: SamplingRecord


@dataclass(frozen=True)
class PageUpdate:
    """Pages `page_ids` are the slot's logical pages first_index, first_index + 1, ... from now on."""

    slot: int
    first_index: int
    page_ids: Int32Array  # [k]


@dataclass(frozen=True)
class RowPlan:
    """What one sequence does in this step.

    Target rows are the sequence's tokens num_computed .. num_computed + num_query - 1. `samples` says that the
    last of them is the sequence's last known token, so that the next token is drawn behind it. A decoding
    row has num_query 1 and may carry up to num_draft_tokens draft tokens of `method`; the worker may propose
    fewer. Pages cover num_computed + num_query + num_draft_tokens + 1 tokens.
    """

    slot: int
    epoch: int
    num_computed: int
    num_query: int
    samples: bool
    method: SpeculationMethod = SpeculationMethod.DISABLED
    num_draft_tokens: int = 0


@dataclass(frozen=True)
class StepPlan:
    """One step for every rank. Applied in this order: releases, admissions, page updates, rows."""

    step_id: int
    releases: tuple[SlotRelease, ...] = ()
    admissions: tuple[Admission, ...] = ()
    page_updates: tuple[PageUpdate, ...] = ()
    rows: tuple[RowPlan, ...] = ()


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of m consecutive tokens: column 0 is the token itself, then the alternatives, best first."""

    token_ids: Int32Array  # [m, 1 + num_logprobs]
    values: Float32Array  # [m, 1 + num_logprobs]


@dataclass(frozen=True)
class RowResult:
    """What one row of the plan came to.

    token_ids holds the accepted draft tokens and then the one that the target drew itself (empty for a prefill
    chunk that does not sample). num_draft_tokens counts proposed tree nodes, draft_depth the deepest of them.
    num_draft_computed: leading tokens whose draft-model KV is valid once this step's catch-up is done.
    """

    slot: int
    epoch: int
    token_ids: Int32Array  # [a + 1] or [0]
    method: SpeculationMethod = SpeculationMethod.DISABLED
    num_draft_tokens: int = 0
    draft_depth: int = 0
    num_accepted_tokens: int = 0
    num_draft_computed: int = 0
    logprobs: Logprobs | None = None  # one row per token of token_ids
    prompt_logprobs: Logprobs | None = None  # of tokens num_computed + 1 .. num_computed + num_query (prompt only)


@dataclass(frozen=True)
class StepResult:
    """Published by the leader before the draft catch-up runs; rows in the order of the plan."""

    step_id: int
    rows: tuple[RowResult, ...]
    duration_us: int = field(default=0, compare=False)  # wall time of the step on the leader up to here


class LayoutError(ValueError):
    """Bytes that are not a record of this layout version."""


def encode_plan(plan: StepPlan) -> bytes:
    """The plan as header + records + one int32 pool + one float32 pool (pools in the order of the records)."""
    releases = np.array([(r.slot, r.epoch) for r in plan.releases], dtype=_RELEASE)
    admissions = np.zeros(len(plan.admissions), dtype=_ADMISSION)
    updates = np.array([(u.slot, u.first_index, len(u.page_ids), 0) for u in plan.page_updates], dtype=_PAGE_UPDATE)
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
        )
        ints.append(np.asarray(admission.token_ids, dtype=np.int32))
        ints.append(np.array([token for token, _ in s.logit_bias], dtype=np.int32))
        ints.append(np.array(s.end_ids, dtype=np.int32))
        floats.append(np.array([bias for _, bias in s.logit_bias], dtype=np.float32))
    ints.extend(np.asarray(u.page_ids, dtype=np.int32) for u in plan.page_updates)
    int_pool = _concatenate(ints, np.int32)
    float_pool = _concatenate(floats, np.float32)
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
    """The inverse of encode_plan. Raises LayoutError for another version or a wrong length."""
    reader = _Reader(data, _PLAN_HEADER)
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
                    acceptance_rule=AcceptanceRule(int(record["acceptance_rule"])),
                    typical_epsilon=float(record["typical_epsilon"]),
                    typical_delta=float(record["typical_delta"]),
                    threshold=float(record["threshold"]),
                ),
            )
        )
    return StepPlan(
        step_id=int(header["step_id"]),
        releases=tuple(SlotRelease(slot, epoch) for slot, epoch in releases),
        admissions=tuple(decoded_admissions),
        page_updates=tuple(PageUpdate(slot, first, reader.ints(count)) for slot, first, count, _ in updates),
        rows=tuple(
            RowPlan(slot, epoch, computed, query, bool(samples), SpeculationMethod(method), drafts)
            for slot, epoch, computed, query, drafts, method, samples, _ in rows
        ),
    )


def encode_result(result: StepResult) -> bytes:
    """The result as header + records + one int32 pool + one float32 pool (pools in the order of the rows)."""
    rows = np.zeros(len(result.rows), dtype=_ROW_RESULT)
    ints: list[Int32Array] = []
    floats: list[Float32Array] = []
    for i, row in enumerate(result.rows):
        record = rows[i]
        record["slot"] = row.slot
        record["epoch"] = row.epoch
        record["num_tokens"] = len(row.token_ids)
        record["num_draft_tokens"] = row.num_draft_tokens
        record["draft_depth"] = row.draft_depth
        record["num_accepted_tokens"] = row.num_accepted_tokens
        record["num_draft_computed"] = row.num_draft_computed
        record["method"] = row.method
        ints.append(np.asarray(row.token_ids, dtype=np.int32))
        for prefix, logprobs in (("", row.logprobs), ("prompt_", row.prompt_logprobs)):
            if logprobs is not None:
                record[f"num_{prefix}logprob_rows"], record[f"num_{prefix}logprob_columns"] = logprobs.token_ids.shape
                ints.append(logprobs.token_ids.astype(np.int32).ravel())
                floats.append(logprobs.values.astype(np.float32).ravel())
    int_pool = _concatenate(ints, np.int32)
    float_pool = _concatenate(floats, np.float32)
    header = np.array(
        (LAYOUT_VERSION, len(rows), result.step_id, len(int_pool), len(float_pool), result.duration_us, 0),
        dtype=_RESULT_HEADER,
    )
    return b"".join(part.tobytes() for part in (header, rows, int_pool, float_pool))


def decode_result(data: bytes | memoryview) -> StepResult:
    """The inverse of encode_result. Raises LayoutError for another version or a wrong length."""
    reader = _Reader(data, _RESULT_HEADER)
    header = reader.header
    rows = reader.take(_ROW_RESULT, header["num_rows"])
    reader.take_pools(header["num_ints"], header["num_floats"])
    decoded = []
    for record in rows:
        token_ids = reader.ints(record["num_tokens"])
        decoded.append(
            RowResult(
                slot=int(record["slot"]),
                epoch=int(record["epoch"]),
                token_ids=token_ids,
                method=SpeculationMethod(int(record["method"])),
                num_draft_tokens=int(record["num_draft_tokens"]),
                draft_depth=int(record["draft_depth"]),
                num_accepted_tokens=int(record["num_accepted_tokens"]),
                num_draft_computed=int(record["num_draft_computed"]),
                logprobs=reader.logprobs(record["num_logprob_rows"], record["num_logprob_columns"]),
                prompt_logprobs=reader.logprobs(
                    record["num_prompt_logprob_rows"], record["num_prompt_logprob_columns"]
                ),
            )
        )
    return StepResult(int(header["step_id"]), tuple(decoded), int(header["duration_us"]))


def _concatenate(parts: list[npt.NDArray[np.generic]] | list[Int32Array] | list[Float32Array], dtype: type) -> npt.NDArray:  # type: ignore[type-arg]
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype=dtype)


class _Reader:
    """Walks one encoded record: header, record arrays, then the int and float pools."""

    def __init__(self, data: bytes | memoryview, header_dtype: np.dtype[np.void]) -> None:
        self._data = bytes(data)
        self._offset = 0
        if len(self._data) < header_dtype.itemsize:
            raise LayoutError(f"record of {len(self._data)} bytes is shorter than its header ({header_dtype.itemsize})")
        self.header = self.take(header_dtype, 1)[0]
        version = int(self.header["layout_version"])
        if version != LAYOUT_VERSION:
            raise LayoutError(f"record has layout version {version}, this process speaks {LAYOUT_VERSION}")
        self._ints: Int32Array = np.zeros(0, dtype=np.int32)
        self._floats: Float32Array = np.zeros(0, dtype=np.float32)
        self._next_int = self._next_float = 0

    def take(self, dtype: np.dtype, count: int) -> npt.NDArray:  # type: ignore[type-arg]
        size = dtype.itemsize * int(count)
        if self._offset + size > len(self._data):
            raise LayoutError(f"record of {len(self._data)} bytes ends before offset {self._offset + size}")
        array = np.frombuffer(self._data, dtype=dtype, count=int(count), offset=self._offset)
        self._offset += size
        return array

    def take_pools(self, num_ints: int, num_floats: int) -> None:
        self._ints = self.take(np.dtype(np.int32), num_ints)
        self._floats = self.take(np.dtype(np.float32), num_floats)
        if self._offset != len(self._data):
            raise LayoutError(f"record of {len(self._data)} bytes has {len(self._data) - self._offset} too many")

    def ints(self, count: int) -> Int32Array:
        start, self._next_int = self._next_int, self._next_int + int(count)
        return self._ints[start : self._next_int]

    def floats(self, count: int) -> Float32Array:
        start, self._next_float = self._next_float, self._next_float + int(count)
        return self._floats[start : self._next_float]

    def logprobs(self, num_rows: int, num_columns: int) -> Logprobs | None:
        if num_columns == 0:
            return None
        shape = (int(num_rows), int(num_columns))
        size = shape[0] * shape[1]
        return Logprobs(self.ints(size).reshape(shape), self.floats(size).reshape(shape))
