"""The side-by-side benchmark without other engines: its plan, its figures, its child processes, our own runner."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import typer
from typer.testing import CliRunner

from tests.clients.fake_service import FakeService
from tests.gpu_worker.gguf_models import write_gguf
from tests.models import make_tiny_llama

BENCH = Path(__file__).parents[2] / "clients" / "bench"

# An engine in a few lines: a prompt's answer counts up from its last id.
COUNTING_ENGINE = """
import os, sys, time
from runner import Answer, UnsupportedError, serve

class Counting:
    version = "1.0"
    memory_pid = os.getpid()
    def __init__(self, settings):
        print("a library's chatter")
        self.step = settings["lookup_tokens"] or 1
    def tokenize(self, text):
        return [ord(letter) for letter in text]
    def generate(self, prompts, max_tokens, ignore_eos):
        if len(prompts) == 3:
            raise UnsupportedError("three is a crowd")
        ids = [[prompt[-1] + self.step * i for i in range(1, max_tokens + 1)] for prompt in prompts]
        return [Answer(row, 0.5, 0.1 if len(prompts) == 1 else None) for row in ids]
    def close(self):
        pass

serve(Counting)
"""
DYING_ENGINE = """
import sys
from runner import serve
def load(settings):
    sys.exit("no such instruction")
serve(load)
"""
HANGING_ENGINE = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
print(child.pid, file=sys.stderr, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def bench(monkeypatch) -> SimpleNamespace:
    """The modules of clients/bench/peers, found as the script finds them."""
    monkeypatch.syspath_prepend(str(BENCH))
    names = ("catalogue", "child", "figures", "machine", "report", "rounds", "workload")
    return SimpleNamespace(**{name: importlib.import_module(f"peers.{name}") for name in names})


@pytest.fixture
def script(bench) -> ModuleType:
    """peers.py itself."""
    spec = importlib.util.spec_from_file_location("peers_script", BENCH / "peers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rendered(number: int) -> dict:
    """A prompt of one letter, and its id."""
    return {"id": str(number), "text": chr(97 + number), "token_ids": [97 + number]}


def small_setup(bench, batches=(1, 2), count=8):
    """A setup over one-letter prompts, two of them long."""
    long = [{**rendered(20 + i), "again": rendered(22 + i)} for i in range(2)]
    workload, _ = bench.workload.plan(
        [rendered(i) for i in range(count)],
        long,
        batches=batches,
        num_single=2,
        num_batched=4,
        single_tokens=5,
        batch_tokens=3,
    )
    return bench.rounds.Setup(
        workload=workload,
        gguf="model.gguf",
        checkpoint="",
        eos_token_ids=(2,),
        kv_bytes_per_token=1024,
        threads=1,
        dtype="float32",
        timeout=20,
    )


def measurement(bench, peer: str, number: int, tokens: int, seconds: float, memory: int = 100, ids=None):
    """One round of an engine: an answer of `tokens` tokens after a first one at 0.5 s, and a load of batch 4."""
    answer = {
        "token_ids": ids or list(range(tokens)),
        "seconds": 0.5 + seconds,
        "time_to_first_token": 0.5,
    }
    group = [{**answer, "time_to_first_token": None}] * 4
    return bench.rounds.Measurement(
        peer,
        number,
        "1.0",
        1.0,
        loads={1: bench.rounds.LoadResult(seconds, [answer]), 4: bench.rounds.LoadResult(seconds, group)},
        long_cold=[seconds],
        long_warm=[seconds / 10],
        memory={"batch 1": memory - 10, "batch 4": memory},
    )


def test_loads_share_no_prompt_while_there_are_enough(bench):
    arguments = {"num_single": 4, "num_batched": 8, "single_tokens": 256, "batch_tokens": 128}
    rows = [rendered(i) for i in range(24)]
    workload, repeats = bench.workload.plan(rows, [], batches=[1, 4, 12], **arguments)
    assert [(load.batch, len(load.prompts)) for load in workload.loads] == [(1, 4), (4, 8), (12, 12)]
    assert [(load.max_tokens, load.ignore_eos) for load in workload.loads] == [
        (256, False),
        (128, True),
        (128, True),
    ]
    assert len({row["id"] for load in workload.loads for row in load.prompts}) == 24
    assert not repeats
    assert [row["id"] for row in workload.loads[0].prompts] == ["0", "6", "12", "18"]
    assert workload.num_kv_tokens == 12 * 129

    few, repeats = bench.workload.plan(rows[:5], [], batches=[1, 8], **arguments)
    assert repeats
    assert len(few.loads[1].prompts) == 8


def test_every_round_has_every_engine_and_begins_with_the_next(bench):
    peers = [bench.catalogue.PEERS[name] for name in ("ours", "openvino", "vllm")]
    order = [(number, peer.name) for number, peer in bench.rounds.run_order(peers, 4)]
    assert order[:3] == [(0, "ours"), (0, "openvino"), (0, "vllm")]
    assert [name for number, name in order if number == 1] == ["openvino", "vllm", "ours"]
    assert len(set(order)) == 12
    assert order[-3] == (3, "ours")


def test_figures_of_a_round(bench):
    figures = bench.figures.round_figures(measurement(bench, "ours", 0, tokens=11, seconds=2.0))
    assert figures["decode"] == pytest.approx(5.0)  # ten tokens after the first in two seconds
    assert figures["batch_4"] == pytest.approx(22.0)  # 44 tokens in two seconds
    assert (figures["ttft"], figures["long_cold"], figures["memory"]) == (0.5, 2.0, 100)


def test_ratios_are_taken_within_a_round(bench):
    # The machine halves its speed in the second round: the ratio does not move, a ratio of medians would.
    rounds = [
        measurement(bench, "ours", 0, 101, 1.0),
        measurement(bench, "openvino", 0, 101, 2.0, memory=50),
        measurement(bench, "ours", 1, 101, 2.0),
        measurement(bench, "openvino", 1, 101, 4.0, memory=50),
        measurement(bench, "ours", 2, 101, 1.0),
        measurement(bench, "llamacpp", 2, 101, 5.0, memory=40),
        measurement(bench, "ours-ngram", 0, 101, 0.5),
        measurement(bench, "openvino-lookup", 0, 101, 0.25),
    ]
    summary = bench.figures.summary(rounds)
    assert summary["ours"]["decode"] == {"median": 100.0, "ratio": 1.0}
    assert summary["openvino"]["decode"] == {"median": 37.5, "ratio": 0.5}
    found = {entry["what"]: entry for entry in bench.figures.comparisons(rounds, [1, 4])}
    plain = found["batch 1, no speculation"]
    assert (plain["best"], plain["times"]) == ("openvino", 2.0)
    lookup = found["batch 4, prompt lookup"]
    assert (lookup["ours"], lookup["best"], lookup["times"]) == ("ours-ngram", "openvino-lookup", 0.5)
    memory = found["resident memory"]
    assert (memory["best"], memory["times"]) == ("llamacpp", 0.4)  # ours takes 2.5 times as much


def test_texts_that_differ_from_ours_are_counted(bench):
    rounds = [
        measurement(bench, "ours", 0, 5, 1.0),
        measurement(bench, "ours-ngram", 0, 5, 1.0),
        measurement(bench, "ours", 1, 5, 1.0),
        measurement(bench, "ours-ngram", 1, 5, 1.0, ids=[0, 1, 2, 3, 9]),
    ]
    assert bench.figures.differing(rounds, "ours-ngram", 1) == (1, 2)
    assert bench.figures.differing(rounds, "ours-ngram", 4) == (4, 8)
    assert bench.figures.differing(rounds, "vllm", 1) is None


def start_with(bench, tmp_path: Path, scripts: dict[str, str]):
    """A `start` for run_rounds that runs the given scripts instead of the real runners."""

    def start(peer):
        path = tmp_path / f"{peer.name}.py"
        path.write_text(scripts[peer.name], encoding="utf-8")
        environment = {"PYTHONPATH": str(BENCH / "peers")}
        return bench.child.started([sys.executable, str(path)], tmp_path / f"{peer.name}.log", environment)

    return start


def test_rounds_of_child_processes_become_a_report(bench, tmp_path: Path):
    setup = small_setup(bench, batches=(1, 2, 3), count=12)
    peers = [bench.catalogue.PEERS[name] for name in ("ours", "ours-ngram", "vllm")]
    scripts = {"ours": COUNTING_ENGINE, "ours-ngram": COUNTING_ENGINE, "vllm": DYING_ENGINE}
    told: list[str] = []
    measurements, failures = bench.rounds.run_rounds(
        peers, 2, setup, start_with(bench, tmp_path, scripts), told.append
    )
    assert [(m.peer, m.round) for m in measurements] == [
        ("ours", 0),
        ("ours-ngram", 0),
        ("ours-ngram", 1),
        ("ours", 1),
    ]
    assert "ended with code 1" in failures["vllm"]
    assert "no such instruction" in failures["vllm"]
    assert [line for line in told if line.endswith(": vllm")] == ["round 1/2: vllm"]
    first = measurements[0]
    assert [answer["token_ids"] for answer in first.loads[1].answers] == [
        [98, 99, 100, 101, 102],
        [104, 105, 106, 107, 108],
    ]
    assert len(first.loads[2].answers) == 4
    assert first.unsupported == {3: "three is a crowd"}
    assert len(first.long_cold) == len(first.long_warm) == 2
    assert first.memory["batch 1"] > 1 << 20
    assert first.num_tokenized_otherwise == 0

    outcome = bench.report.Outcome(
        peers=["ours", "ours-ngram", "vllm", "openvino"],
        skipped={"openvino": "not installed"},
        failures=failures,
        measurements=measurements,
        setup=setup,
        machine=bench.machine.machine_facts(),
        arguments={},
    )
    text = bench.report.markdown(outcome)
    table = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in table}) == 1
    assert [line[0].strip() for line in table[2:]] == ["ours", "ours-ngram", "vllm", "openvino"]
    assert table[2][1].strip() == "10.0 (1.00×)"  # four tokens in 0.4 s
    assert table[4][1].strip() == "failed"
    assert table[5][1].strip() == "not installed"
    assert "`ours-ngram` at batch 1: 4 of 4 texts differ from `ours`." in text
    assert "`ours` at batch 3: three is a crowd." in text
    report = json.loads(json.dumps(bench.report.report_object(outcome)))
    assert report["differing_from_ours"]["ours"]["1"] == [0, 4]
    assert report["measurements"][0]["figures"]["decode"] == pytest.approx(10.0)


def test_a_hanging_engine_is_ended_with_its_children(bench, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(bench.child, "_FAILED_STOP_SECONDS", 0.1)
    setup = small_setup(bench)
    start = start_with(bench, tmp_path, {"ours": HANGING_ENGINE})
    with (
        pytest.raises(bench.child.PeerFailedError, match=r"no answer within 2 s"),
        start(bench.catalogue.PEERS["ours"]) as child,
    ):
        child.ask(setup.settings(bench.catalogue.PEERS["ours"]), timeout=2)
    grandchild = int((tmp_path / "ours.log").read_text(encoding="utf-8"))
    deadline = time.monotonic() + 10
    while _runs(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)  # the signal is sent; the kernel takes its time
    assert not _runs(grandchild)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_our_runner_asks_the_service_for_a_batch_at_once(bench, service: FakeService, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH / "peers"))
    module = importlib.import_module("run_draftline")
    flags: list[tuple[str, ...]] = []

    @contextlib.contextmanager
    def instead_of_a_server(*arguments):
        flags.append(arguments)
        with subprocess.Popen(["sleep", "60"]) as process:
            yield service.address
            process.kill()

    monkeypatch.setattr(module, "local_server", instead_of_a_server)
    settings = {"gguf": "model.gguf", "lookup_tokens": 4, "server_flags": ["--dtype", "int8"]}
    engine = module.Draftline(settings)
    try:
        service.script.step_seconds = 0.01
        answers = engine.generate([[1, 2], [3], [4, 5, 6]], 9, True)
        assert engine.tokenize("ab") == [97, 98]
    finally:
        engine.close()
    assert flags == [
        ("--speculation", "ngram", "--num-draft-tokens", "4", "--model", "model.gguf", "--dtype", "int8")
    ]
    assert service.most_running == 3
    assert [len(answer.token_ids) for answer in answers] == [9, 9, 9]
    assert all(0 < answer.time_to_first_token < answer.seconds for answer in answers)
    sent = {tuple(request.prompt.tokens.ids): request for request in service.requests}
    assert set(sent) == {(1, 2), (3,), (4, 5, 6)}
    assert sent[3,].sampling_params.temperature == 0.0
    assert sent[3,].stopping.ignore_eos


def test_memory_of_a_tree_and_load_of_others(bench):
    own, kind = bench.machine.tree_memory(os.getpid())
    assert own > 10 << 20
    assert kind in ("pss", "rss")
    others = bench.machine.OtherLoad(os.getpid())
    sum(range(300_000))
    assert 0 <= others.cores() <= os.cpu_count() + 0.5


def test_nothing_installed_is_an_error_and_an_unknown_engine_wrong_usage(script, tmp_path: Path):
    app = typer.Typer()
    app.command()(script.measure)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    flags = ["--prompts", str(tmp_path / "prompts.jsonl"), "--envs", str(tmp_path)]
    wrong = CliRunner().invoke(app, [*flags, "--peers", "ours,gpt"])
    assert wrong.exit_code == 2
    nothing = CliRunner().invoke(app, [*flags, "--peers", "openvino,vllm"])
    assert isinstance(nothing.exception, script.PreparationError)
    assert "vllm: not installed, skipped" in nothing.output


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model's directory, and the same model as a GGUF file."""
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(directory / "model")
    return directory / "model", write_gguf(directory / "model", directory / "tiny.gguf")


def test_prompts_are_rendered_once_and_the_checkpoint_is_the_gguf_again(tiny_gguf, tmp_path: Path):
    directory, gguf = tiny_gguf
    request = {
        "model": str(gguf),
        "cache": str(tmp_path),
        "write_checkpoint": True,
        "prompts": [{"id": "a", "text": "Hello", "chat": True}, {"id": "b", "text": "raw", "chat": False}],
        "num_long": 2,
        "long_tokens": 40,
    }
    run = subprocess.run(
        [sys.executable, str(BENCH / "peers" / "prepare.py")],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(run.stdout)
    assert answer["gguf"] == str(gguf)
    assert answer["prompts"][0]["text"] == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert answer["prompts"][0]["token_ids"][0] == 1
    assert answer["prompts"][1]["text"] == "raw"
    long, other = answer["long"]
    assert long["token_ids"][:20] == long["again"]["token_ids"][:20]
    assert long["token_ids"] != long["again"]["token_ids"]
    assert long["token_ids"][:20] != other["token_ids"][:20]
    assert len(long["token_ids"]) > 40

    import torch
    from safetensors.torch import load_file

    written = load_file(Path(answer["checkpoint"]) / "model.safetensors")
    original = load_file(directory / "model.safetensors")
    assert written.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(written[name], tensor.to(torch.bfloat16)), name
    config = json.loads((Path(answer["checkpoint"]) / "config.json").read_text(encoding="utf-8"))
    theirs = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "rope_theta", "rms_norm_eps"):
        assert config[key] == pytest.approx(theirs[key], rel=1e-6), key
    assert (Path(answer["checkpoint"]) / "tokenizer.json").is_file()
