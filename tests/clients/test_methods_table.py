"""The script that measures every drafting method: its sums by category and its tables."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from draftline.bench.measure import RequestRecord

BENCH = Path(__file__).parents[2] / "clients" / "bench"


@pytest.fixture
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))
    before = set(sys.modules)
    try:
        yield importlib.import_module("methods_table")
    finally:
        sys.path.remove(str(BENCH))
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("methods", "methods_table", "speed_table"):
                del sys.modules[name]


def record(
    category: str, drafted: tuple[int, ...], accepted: tuple[int, ...], **fields: object
) -> RequestRecord:
    """A request whose steps proposed and kept tokens by position as given."""
    return RequestRecord(
        id="r",
        category=category,
        sent=0.0,
        completion_tokens=30,
        num_steps=20,
        num_drafts=drafted[0] if drafted else 0,
        num_draft_tokens=sum(drafted),
        num_accepted_tokens=sum(accepted),
        num_draft_tokens_per_pos=drafted,
        num_accepted_tokens_per_pos=accepted,
        **fields,  # type: ignore[arg-type]
    )


def test_requests_add_up_by_category(script: ModuleType) -> None:
    records = [
        record("mt_bench/math", (10, 8), (5, 2)),
        record("mt_bench/coding", (10,), (7,)),
        record("qa", (), ()),
        record("qa", (99,), (99,), error="UNAVAILABLE"),
    ]
    tallies = script.by_category(records)
    assert list(tallies) == ["all", "mt_bench", "qa"]
    bench, qa, everything = tallies["mt_bench"], tallies["qa"], tallies["all"]
    assert bench.acceptance_by_position == [12 / 20, 2 / 8]
    assert bench.acceptance_length == 1 + 14 / 20
    assert (qa.num_requests, qa.num_errors, qa.acceptance_length) == (2, 1, None)
    assert qa.tokens_per_step == 1.5
    assert (everything.num_requests, everything.completion_tokens) == (4, 90)


def test_decoding_is_timed_behind_the_first_token(script: ModuleType) -> None:
    slow_prompt = record("qa", (), (), messages=[(9.0, 1), (9.5, 2), (10.0, 3)])
    quick = record("qa", (), (), messages=[(1.0, 4), (2.0, 3)])
    broken = record("qa", (), (), messages=[(1.0, 1), (99.0, 1)], error="UNAVAILABLE")
    assert script.decode_speed([slow_prompt, quick, broken]) == pytest.approx(8 / 2.0)
    assert script.decode_speed([record("qa", (), (), messages=[(9.0, 1)])]) is None


def test_speeds_are_compared_within_their_rounds(script: ModuleType) -> None:
    """Off: 10, then 20 tokens per second and 1, then 2 behind the first; MTP: 15 and 20, 2 and 3."""

    def run(method: str, speed: float, seconds_per_token: float, batch: int = 1) -> SimpleNamespace:
        messages = [(1.0, 1), (1.0 + 6 * seconds_per_token, 6)]
        return SimpleNamespace(
            load=SimpleNamespace(value=batch),
            speculation=method,
            figures={"tokens_per_second": speed},
            records=[record("qa", (), (), messages=messages)],
        )

    runs = [run("off", 10, 1), run("ngram", 5, 1), run("mtp", 15, 1 / 2)]
    runs += [run("off", 20, 1 / 2), run("ngram", 5, 1), run("mtp", 20, 1 / 3)]
    rows = {row["method"]: row for row in script.summarise(SimpleNamespace(runs=runs), "chain:1", 0.0)}
    assert rows["mtp"]["tokens_per_second"] == 17.5
    assert rows["mtp"]["speedup_over_off"] == pytest.approx((1.5 + 1.0) / 2)
    assert rows["mtp"]["speedup_over_ngram"] == pytest.approx(3.5)
    assert rows["mtp"]["decode_speedup_over_off"] == pytest.approx((2.0 + 1.5) / 2)
    assert rows["off"]["decode_speedup_over_off"] == 1.0
    runs = [run(method, 10, 1, batch=4) for method in ("off", "ngram")]
    of_four = script.summarise(SimpleNamespace(runs=runs), "chain:1", 0.0)
    assert [row["decode_speedup_over_off"] for row in of_four] == [None, None]  # others' prompts are in it


def test_tables_and_plot(script: ModuleType, tmp_path: Path) -> None:
    def row(method: str, shape: str, batch: float, *records: RequestRecord) -> dict[str, object]:
        tallies = script.by_category(records)
        return {
            "shape": shape, "temperature": 0.0, "batch": batch, "method": method, "tokens_per_second": 100.0,
            "speedup_over_off": 1.25, "speedup_over_ngram": 0.5, "decode_speedup_over_off": 1.75,
            "categories": {name: script._figures(tally) for name, tally in tallies.items()},
        }  # fmt: skip

    rows = [
        row("off", "", 1, record("qa", (), ())),
        row("mtp", "chain:4", 1, record("qa", (10, 10), (5, 1))),
        row("mtp", "chain:4", 4, record("qa", (10, 10), (5, 1))),
    ]
    overall = script.overall_table(rows)
    assert len(overall) == 5
    assert overall[3] == "| 1 | 0 | mtp | chain:4 | 0.50 0.10 | 1.60 | 1.50 | 100.0 | 1.25 | 0.50 | 1.75 |"
    assert script.category_table(rows) == [
        "| T | method | drafts | all | qa |",
        "|---|---|---|---|---|",
        "| 0 | mtp | chain:4 | 1.60 | 1.60 |",
    ]
    pytest.importorskip("matplotlib")
    script.draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
