"""The load generator: arithmetic by hand, loops and reports against the scripted service."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from draftline.bench.measure import RequestRecord, percentile, run_figures
from draftline.bench.report import report_object, summaries
from draftline.bench.runner import Observer, run_bench, run_order
from draftline.bench.settings import BenchSettings
from draftline.bench.trace import TraceRow, read_trace, trace_items
from draftline.bench.workload import WorkloadError, poisson_arrivals, read_prompts
from draftline.cli.app import build_app
from typer.testing import CliRunner

from tests.clients.fake_service import DRAFT_MODEL, NGRAM, OFF, Failure, FakeService


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": n, "category": "qa", "turns": [f"question {n}", "again"]} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "raw"}]), encoding="utf-8")
    return path


@pytest.fixture
def settings(service: FakeService, prompts: Path) -> BenchSettings:
    return BenchSettings(
        server=service.address,
        prompts=prompts,
        speculation=("off", "ngram"),
        concurrency=(1, 3),
        max_tokens=9,
    )


def test_percentiles_interpolate_between_the_closest_ranks():
    numpy = pytest.importorskip("numpy")
    values = [5.0, 1.0, 4.0, 2.5]
    for percent in (0, 1, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))
    assert percentile([3.0], 99) == 3.0
    assert percentile([], 50) is None


def test_figures_of_two_requests_by_hand():
    first = RequestRecord(
        id="a",
        category="",
        sent=1.0,
        messages=[(1.5, 1), (2.5, 4), (3.0, 1)],
        ended=3.0,
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=6,
        num_steps=3,
        num_drafts=2,
        num_draft_tokens=8,
        num_accepted_tokens=3,
    )
    second = replace(
        first, id="b", sent=0.0, messages=[(0.25, 1)], ended=0.5, completion_tokens=1, num_steps=1
    )
    second = replace(second, num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0)
    failed = RequestRecord(
        id="c", category="", sent=0.0, error="UNAVAILABLE/WORKER_LOST", completion_tokens=99
    )
    assert first.time_to_first_token == 0.5
    assert first.inter_token_seconds() == [0.25] * 4 + [0.5]
    figures = run_figures([first, second, failed], 3.5)
    assert figures["tokens_per_second"] == 2.0
    assert figures["acceptance_length"] == 2.5
    assert figures["acceptance_rate"] == 0.375
    assert figures["tokens_per_step"] == 1.75
    assert figures["time_to_first_token_p50"] == 0.375
    assert figures["inter_token_p50"] == 0.25
    assert figures["inter_token_p99"] == pytest.approx(0.49)
    assert figures["inter_message_p50"] == 0.75
    assert figures["latency_p99"] == pytest.approx(1.985)
    assert (figures["num_requests"], figures["num_errors"]) == (3, 1)
    assert figures["errors"] == {"UNAVAILABLE/WORKER_LOST": 1}


def test_figures_of_nothing():
    figures = run_figures([RequestRecord(id="a", category="", sent=0.0, error="INTERNAL")], 1.0)
    assert figures["acceptance_length"] is None
    assert figures["inter_token_p50"] is None
    assert figures["tokens_per_second"] == 0


def test_prompts_of_both_forms(prompts: Path):
    rows = read_prompts(prompts)
    assert [row.id for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert rows[0].prompt.messages[0].content == rows[0].text == "question 0"
    assert rows[5].prompt == "raw"
    assert [row.id for row in read_prompts(prompts, 2)] == ["0", "3"]  # spread over the file


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "no prompts"),
        ('{"prompt": "a"}\nnonsense\n', ":2: not JSON"),
        ("[1]\n", ":1: not an object"),
        ('{"turns": []}\n', ":1: neither"),
        ('{"turns": "abc"}\n', ":1: neither"),
    ],
)
def test_unusable_prompts_name_their_line(tmp_path: Path, content: str, fault: str):
    (tmp_path / "p.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(WorkloadError, match=fault):
        read_prompts(tmp_path / "p.jsonl")


def test_poisson_arrivals_have_the_rate_and_the_seed():
    times = poisson_arrivals(4000, 5.0, seed=3)
    assert times == poisson_arrivals(4000, 5.0, seed=3)
    assert times != poisson_arrivals(4000, 5.0, seed=4)
    assert times[0] == 0.0
    assert times == sorted(times)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(0.04, rel=0.15)  # exponential: the deviation equals the mean


def test_trace_rows(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,396,109\n",
        encoding="utf-8",
    )
    assert read_trace(path) == [TraceRow(0.0, 374, 44), TraceRow(4.0, 396, 109)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n10.5,1,2\n12,3,4\n", encoding="utf-8")
    assert [row.arrival for row in read_trace(path)] == [0.0, 1.5]
    assert len(read_trace(path, 1)) == 1
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match=r":2: .*noon"):
        read_trace(path)
    path.write_text("TIMESTAMP,Tokens\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match="no column ContextTokens"):
        read_trace(path)


def test_trace_lengths_are_kept_or_clipped_to_the_context():
    rows = [
        TraceRow(0, 30, 20),
        TraceRow(2, 95, 20),
        TraceRow(4, 90, 5),
        TraceRow(6, 50, 500),
        TraceRow(8, 0, 0),
    ]
    items, clipped = trace_items(
        rows, list(range(40)), speed=4, max_prompt_tokens=80, max_context_tokens=100, seed=1
    )
    assert [(len(item.prompt), item.max_tokens) for item in items] == [
        (30, 20),
        (80, 20),
        (80, 5),
        (1, 99),
        (1, 1),
    ]
    assert clipped == 3
    assert [item.arrival for item in items] == [0, 0.5, 1, 1.5, 2]
    assert all(item.ignore_eos for item in items)
    start = items[0].prompt[0]
    assert items[0].prompt == [(start + offset) % 40 for offset in range(30)]  # running text, not random ids


def test_settings_take_turns():
    settings = BenchSettings(
        server="", prompts=Path(), speculation=("off", "ngram", "draft-model"), concurrency=(1, 4), rounds=2
    )
    order = [(number, load.value, method) for number, load, method in run_order(settings)]
    assert order[:6] == [(0, level, method) for level in (1, 4) for method in ("off", "ngram", "draft-model")]
    assert order[6:9] == [(1, 1, "ngram"), (1, 1, "draft-model"), (1, 1, "off")]


async def test_closed_loop(service: FakeService, settings: BenchSettings):
    service.script.step_seconds = 0.002
    result = await run_bench(replace(settings, rounds=2, warmup=1))
    assert len(result.runs) == 8
    assert len(service.requests) == 2 + 8 * 6
    assert service.most_running == 3
    for run in result.runs:
        assert run.figures["num_requests"] == 6
        assert run.figures["completion_tokens"] == 6 * 9
        assert run.figures["tokens_per_step"] == (1.0 if run.speculation == "off" else 3.0)
        assert run.figures["acceptance_length"] == (None if run.speculation == "off" else 4.0)
        assert 0 < run.figures["time_to_first_token_p50"] <= run.figures["latency_p50"]
    found = {(entry["load"]["value"], entry["speculation"]): entry for entry in summaries(result)}
    assert found[1, "off"]["speedup"] == 1.0
    assert found[1, "ngram"]["speedup"] > 1.2  # a third of the messages, each as slow as one of the others
    measured = service.requests[2:]
    assert {request.speculation.method for request in measured} == {OFF, NGRAM}
    assert len({request.cache_salt for request in measured}) == 8  # no run finds another one's prefixes
    assert measured[0].prompt.chat.messages[0].content == "question 0"


async def test_open_loop_does_not_wait_for_answers(service: FakeService, settings: BenchSettings):
    service.script.step_seconds = 0.03
    result = await run_bench(replace(settings, concurrency=(), rate=200.0, speculation=("off",), warmup=0))
    assert service.most_running == 6  # all arrive before the first is answered
    sent = sorted(record.sent for record in result.runs[0].records)
    expected = poisson_arrivals(6, 200.0, 0)
    assert all(late >= planned for late, planned in zip(sent, expected, strict=True))


async def test_trace_replay(service: FakeService, settings: BenchSettings, tmp_path: Path):
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n0,20,3\n1,7,5\n2,500,4\n3,9,9\n", encoding="utf-8"
    )
    result = await run_bench(
        replace(
            settings, concurrency=(), trace=trace, trace_speed=20.0, speculation=("draft-model",), limit=3
        )
    )
    measured = service.requests[1:]
    assert sorted((len(request.prompt.tokens.ids), request.stopping.max_tokens) for request in measured) == [
        (7, 5),
        (20, 3),
        (80, 4),
    ]
    assert all(request.stopping.ignore_eos for request in measured)
    assert {request.speculation.method for request in measured} == {DRAFT_MODEL}
    assert result.num_clipped == 1
    assert report_object(result)["num_clipped"] == 1
    assert result.runs[0].figures["seconds"] >= 0.1


async def test_errors_are_counted_and_the_run_goes_on(service: FakeService, settings: BenchSettings):
    lost = Failure(grpc.StatusCode.UNAVAILABLE, reason="WORKER_LOST", after_events=2)

    class FailTwice(Observer):
        def begin(self, total_requests):
            service.script.failures.extend([lost, lost])

    only = replace(settings, concurrency=(1,), speculation=("off",), warmup=0)
    result = await run_bench(only, FailTwice())
    figures = result.runs[0].figures
    assert (figures["num_requests"], figures["num_errors"]) == (6, 2)
    assert figures["errors"] == {"UNAVAILABLE/WORKER_LOST": 2}
    assert figures["completion_tokens"] == 4 * 9
    assert summaries(result)[0]["num_errors"] == 2


def invoke(service: FakeService, *arguments: str):
    return CliRunner().invoke(build_app(), ["bench", "--server", service.address, *arguments])


def test_the_command_prints_a_table_and_writes_every_figure(
    service: FakeService, prompts: Path, tmp_path: Path
):
    out = tmp_path / "out.json"
    flags = ["--concurrency", "1,2", "--speculation", "off,ngram", "--max-tokens", "5", "--limit", "4"]
    flags += ["--rounds", "2", "--temperature", "0", "--seed", "3", "--ignore-eos", "--json", str(out)]
    result = invoke(service, "--prompts", str(prompts), *flags)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    lines = result.stdout.splitlines()
    assert any("tokens/s" in line and "acceptance length" in line for line in lines[:2])
    assert sum("at a time" in line for line in lines) == 4
    assert result.stderr == ""
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["settings"]["concurrency"] == [1, 2]
    assert report["settings"]["prompts"] == str(prompts)
    assert report["model"]["model"] == "fake"
    assert len(report["summaries"]) == 4
    assert len(report["runs"]) == 8
    row = report["runs"][0]["requests"][0]
    assert row["completion_tokens"] == 5
    assert row["error"] == ""
    request = service.requests[-1]
    assert (request.sampling_params.temperature, request.sampling_params.seed) == (0, 3)
    assert request.stopping.ignore_eos


def test_a_method_that_is_not_loaded_is_told_before_the_load(service: FakeService, prompts: Path):
    service.script.drafters = (NGRAM,)
    result = invoke(service, "--prompts", str(prompts), "--speculation", "off,draft-model")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: FAILED_PRECONDITION: speculation draft-model is not loaded; loaded: ngram, off\n"
    )
    assert not service.requests


def test_a_service_that_is_not_ready_is_exit_code_1(service: FakeService, prompts: Path):
    service.script.failures.append(Failure(grpc.StatusCode.UNAVAILABLE, "starting", reason="NOT_SERVING"))
    result = invoke(service, "--prompts", str(prompts))
    assert result.exit_code == 1
    assert result.stderr == "error: UNAVAILABLE (NOT_SERVING): starting\n"


@pytest.mark.parametrize(
    "flags",
    [
        ["--concurrency", "0"],
        ["--concurrency", "1,x"],
        ["--concurrency", "2,2"],
        ["--concurrency", "1", "--rate", "2"],
        ["--rate", "-1"],
        ["--rate", "nan"],
        ["--trace", "/nowhere", "--trace-speed", "0"],
        ["--trace", "/nowhere"],
        ["--speculation", "off,off"],
        ["--speculation", "eagle9"],
        ["--json", "/nowhere/at/all.json"],
        ["--rounds", "0"],
    ],
)
def test_wrong_flags(service: FakeService, prompts: Path, flags):
    result = invoke(service, "--prompts", str(prompts), *flags)
    assert result.exit_code == 2, result.output
    assert not service.requests
