"""The bytes of a StepResult: header, row records, int32 pool, float32 pool."""

from __future__ import annotations

import struct

import numpy as np

from shared_mem.enums import SpeculationMethod
from shared_mem.layout import (
    LAYOUT_VERSION,
    Float32Array,
    Int32Array,
    LayoutError,
    RecordReader,
    concatenate_floats,
    concatenate_ints,
    enum_value,
)
from shared_mem.result import Logprobs, RowResult, StepResult

# Little-endian, without padding but what is named so.
_RESULT_HEADER = struct.Struct(
    "<IIQIIII"
)  # layout_version, num_rows, step_id, num_ints, num_floats, duration_us, pad
# slot, epoch, num_tokens, num_draft_tokens, draft_depth, num_accepted_tokens, num_draft_computed; columns and rows of
# the log-probabilities and of the prompt's; method, pad
_ROW_RESULT = struct.Struct("<iIiiiiiiiiiB3x")


def encode_result(result: StepResult) -> bytes:
    """The result as header + records + one int32 pool + one float32 pool."""
    rows = [
        _ROW_RESULT.pack(
            row.slot,
            row.epoch,
            len(row.token_ids),
            row.num_draft_tokens,
            row.draft_depth,
            row.num_accepted_tokens,
            row.num_draft_computed,
            *_shape(row.logprobs),
            *_shape(row.prompt_logprobs),
            row.method,
        )
        for row in result.rows
    ]
    ints: list[Int32Array] = []
    floats: list[Float32Array] = []
    for row in result.rows:
        ints.append(row.token_ids)
        for logprobs in (row.logprobs, row.prompt_logprobs):
            if logprobs is not None:
                ints.append(logprobs.token_ids.astype(np.int32).ravel())
                floats.append(logprobs.values.astype(np.float32).ravel())
    int_pool = concatenate_ints(ints)
    float_pool = concatenate_floats(floats)
    header = _RESULT_HEADER.pack(
        LAYOUT_VERSION, len(rows), result.step_id, len(int_pool), len(float_pool), result.duration_us, 0
    )
    return b"".join((header, *rows, int_pool.tobytes(), float_pool.tobytes()))


def decode_result(data: bytes | memoryview) -> StepResult:
    """The inverse of encode_result. Raises LayoutError for another version or bytes that do not fit it."""
    reader = RecordReader(data, _RESULT_HEADER)
    num_rows, step_id, num_ints, num_floats, duration_us, _ = reader.header
    rows = reader.take(_ROW_RESULT, num_rows)
    reader.take_pools(num_ints, num_floats)
    decoded = []
    for slot, epoch, num_tokens, num_drafts, depth, num_accepted, num_draft_computed, *shapes, method in rows:
        decoded.append(
            RowResult(
                slot=slot,
                epoch=epoch,
                token_ids=reader.ints(num_tokens),
                method=enum_value(SpeculationMethod, method),
                num_draft_tokens=num_drafts,
                draft_depth=depth,
                num_accepted_tokens=num_accepted,
                num_draft_computed=num_draft_computed,
                logprobs=_logprobs(reader, *shapes[:2]),
                prompt_logprobs=_logprobs(reader, *shapes[2:]),
            )
        )
    reader.finish()
    return StepResult(step_id, tuple(decoded), duration_us)


def _shape(logprobs: Logprobs | None) -> tuple[int, int]:
    """(columns, rows), in the order of the record's fields."""
    return (0, 0) if logprobs is None else (logprobs.token_ids.shape[1], logprobs.token_ids.shape[0])


def _logprobs(reader: RecordReader, num_columns: int, num_rows: int) -> Logprobs | None:
    if num_columns == 0:
        return None
    if num_rows < 0 or num_columns < 0:
        raise LayoutError(f"log-probabilities of {num_rows} rows and {num_columns} columns")
    shape = (num_rows, num_columns)
    size = num_rows * num_columns
    return Logprobs(reader.ints(size).reshape(shape), reader.floats(size).reshape(shape))
