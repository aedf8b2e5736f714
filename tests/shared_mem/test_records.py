"""Plans and results as bytes: every field comes back, and what is not a record of this version is refused."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_mem.enums import AcceptanceRule, SpeculationMethod
from shared_mem.records import (
    LAYOUT_VERSION,
    Admission,
    LayoutError,
    Logprobs,
    PageUpdate,
    RowPlan,
    RowResult,
    SamplingRecord,
    SlotRelease,
    StepPlan,
    StepResult,
    decode_plan,
    decode_result,
    encode_plan,
    encode_result,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
COUNT = st.integers(0, 2**31 - 1)
UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)
INT32_ARRAY = st.lists(INT32, max_size=20).map(lambda ids: np.array(ids, dtype=np.int32))

SAMPLING = st.builds(
    SamplingRecord,
    temperature=FLOAT32,
    top_k=COUNT,
    top_p=FLOAT32,
    min_p=FLOAT32,
    presence_penalty=FLOAT32,
    frequency_penalty=FLOAT32,
    repetition_penalty=FLOAT32,
    seed=UINT64,
    min_tokens=COUNT,
    logit_bias=st.lists(st.tuples(INT32, FLOAT32), max_size=5).map(tuple),
    end_ids=st.lists(INT32, max_size=5).map(tuple),
    num_logprobs=INT32,
    num_prompt_logprobs=INT32,
    acceptance_rule=st.sampled_from(AcceptanceRule),
    typical_epsilon=FLOAT32,
    typical_delta=FLOAT32,
    threshold=FLOAT32,
)
PLANS = st.builds(
    StepPlan,
    step_id=UINT64,
    releases=st.lists(st.builds(SlotRelease, slot=INT32, epoch=UINT32), max_size=4).map(tuple),
    admissions=st.lists(
        st.builds(
            Admission,
            slot=INT32,
            epoch=UINT32,
            token_ids=INT32_ARRAY,
            num_prompt_tokens=COUNT,
            num_cached_tokens=COUNT,
            num_draft_cached_tokens=COUNT,
            sampling=SAMPLING,
            methods=UINT32,
        ),
        max_size=3,
    ).map(tuple),
    page_updates=st.lists(
        st.builds(PageUpdate, slot=INT32, first_index=COUNT, page_ids=INT32_ARRAY), max_size=4
    ).map(tuple),
    rows=st.lists(
        st.builds(
            RowPlan,
            slot=INT32,
            epoch=UINT32,
            num_computed=COUNT,
            num_query=COUNT,
            samples=st.booleans(),
            method=st.sampled_from(SpeculationMethod),
            num_draft_tokens=COUNT,
        ),
        max_size=6,
    ).map(tuple),
)


@st.composite
def logprobs(draw: st.DrawFn) -> Logprobs:
    shape = draw(st.tuples(st.integers(0, 4), st.integers(1, 5)))
    size = shape[0] * shape[1]
    ids = draw(st.lists(INT32, min_size=size, max_size=size))
    values = draw(st.lists(FLOAT32, min_size=size, max_size=size))
    return Logprobs(np.array(ids, np.int32).reshape(shape), np.array(values, np.float32).reshape(shape))


RESULTS = st.builds(
    StepResult,
    step_id=UINT64,
    rows=st.lists(
        st.builds(
            RowResult,
            slot=INT32,
            epoch=UINT32,
            token_ids=INT32_ARRAY,
            method=st.sampled_from(SpeculationMethod),
            num_draft_tokens=COUNT,
            draft_depth=COUNT,
            num_accepted_tokens=COUNT,
            num_draft_computed=COUNT,
            logprobs=st.none() | logprobs(),
            prompt_logprobs=st.none() | logprobs(),
        ),
        max_size=5,
    ).map(tuple),
    duration_us=UINT32,
)


def plain(value: Any) -> Any:
    """The same with arrays as (dtype, shape, list), so that == compares everything, types included."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tolist()
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if dataclasses.is_dataclass(value):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return type(value).__name__, fields
    if isinstance(value, msgspec.Struct):
        return type(value).__name__, {
            name: plain(item) for name, item in msgspec.structs.asdict(value).items()
        }
    return type(value).__name__, value


PLAN = StepPlan(
    step_id=5,
    releases=(SlotRelease(3, 8),),
    admissions=(
        Admission(
            slot=3,
            epoch=9,
            token_ids=np.array([5, 6, 7], np.int32),
            num_prompt_tokens=2,
            num_cached_tokens=1,
            num_draft_cached_tokens=0,
            sampling=SamplingRecord(logit_bias=((4, -100.0),), end_ids=(2, 0)),
            methods=SpeculationMethod.NGRAM.bit | SpeculationMethod.EAGLE3.bit,
        ),
    ),
    page_updates=(PageUpdate(3, 0, np.array([11, 12], np.int32)),),
    rows=(RowPlan(3, 9, 1, 2, True, SpeculationMethod.NGRAM, 4),),
)
RESULT = StepResult(
    step_id=5,
    rows=(
        RowResult(
            slot=3,
            epoch=9,
            token_ids=np.array([1, 2], np.int32),
            method=SpeculationMethod.NGRAM,
            num_draft_tokens=4,
            draft_depth=4,
            num_accepted_tokens=1,
            logprobs=Logprobs(
                np.array([[1, 5], [2, 1]], np.int32), np.array([[-1, -2], [-3, -4]], np.float32)
            ),
        ),
    ),
    duration_us=77,
)


@settings(deadline=None)
@given(PLANS)
def test_plans_come_back(plan: StepPlan) -> None:
    assert plain(decode_plan(encode_plan(plan))) == plain(plan)


@settings(deadline=None)
@given(RESULTS)
def test_results_come_back(result: StepResult) -> None:
    assert plain(decode_result(memoryview(encode_result(result)))) == plain(result)


def test_bytes_are_fixed() -> None:
    """The layout is a contract with workers in other languages: whoever changes it raises LAYOUT_VERSION."""
    assert LAYOUT_VERSION == 2
    assert (len(encode_plan(StepPlan(0))), len(encode_result(StepResult(0, ())))) == (40, 32)
    data = encode_plan(PLAN)
    assert len(data) == 40 + 8 + 104 + 16 + 24 + 4 * (3 + 1 + 2 + 2) + 4
    assert data[:48].hex() == (
        "02000000" "01000000" "0500000000000000" "01000000" "01000000" "01000000"
        "08000000" "01000000" "00000000" "03000000" "08000000"
    )  # fmt: skip
    result = encode_result(RESULT)
    assert len(result) == 32 + 48 + 4 * (2 + 4) + 4 * 4
    assert result[:32].hex() == (
        "02000000" "01000000" "0500000000000000" "06000000" "04000000" "4d000000" "00000000"
    )  # fmt: skip


CODECS = pytest.mark.parametrize(
    ("data", "decode"),
    [(encode_plan(PLAN), decode_plan), (encode_result(RESULT), decode_result)],
    ids=["plan", "result"],
)


@CODECS
def test_every_truncation_and_extension_is_refused(data: bytes, decode: Any) -> None:
    for length in range(len(data)):
        with pytest.raises(LayoutError, match=f"record of {length} bytes"):
            decode(data[:length])
    with pytest.raises(LayoutError, match="4 bytes too many"):
        decode(data + bytes(4))


@CODECS
def test_another_version_is_refused(data: bytes, decode: Any) -> None:
    with pytest.raises(LayoutError, match="layout version 9, this process speaks 2"):
        decode((9).to_bytes(4, "little") + data[4:])


@CODECS
def test_random_damage_is_refused_or_harmless(data: bytes, decode: Any) -> None:
    """Whatever byte is wrong, decoding gives a record or a LayoutError, nothing else and never a crash."""
    for place in range(len(data)):
        for bit in (0, 7):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            with contextlib.suppress(LayoutError):
                decode(bytes(damaged))


@pytest.mark.parametrize(
    ("offset", "number", "what"),
    [
        (48 + 20, -1, "owns -1 numbers from 0 on of a int32 pool of 8"),  # num_tokens of the admission
        (48 + 20, 9, "owns 9 numbers from 0 on of a int32 pool of 8"),
        (48 + 20, 2, "int32 pool holds 8 numbers, its records own 7"),
        (48 + 92, 9, "9 is not a valid AcceptanceRule"),
        (168 + 20, 99, "99 is not a valid SpeculationMethod"),
    ],
)
def test_records_that_contradict_their_header_are_refused(offset: int, number: int, what: str) -> None:
    data = encode_plan(PLAN)
    with pytest.raises(LayoutError, match=what):
        decode_plan(data[:offset] + number.to_bytes(4, "little", signed=True) + data[offset + 4 :])


def test_decoded_arrays_do_not_alias_the_caller() -> None:
    data = bytearray(encode_plan(PLAN))
    plan = decode_plan(memoryview(data))
    data[:] = bytes(len(data))
    assert plan.admissions[0].token_ids.tolist() == [5, 6, 7]
