"""The whole path: client, frontend, scheduler, shared memory, worker, and back, on a tiny model."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from draftline import AsyncClient, Client, DraftlineError
from draftline.info import Load
from draftline.v1 import common_pb2, generation_pb2, generation_pb2_grpc

from tests.harness.service import Service, leftovers, run_client, run_server
from tests.models import make_tiny_llama

PROMPTS = [[5, 6, 7, 8, 9] * 3, [40, 41, 42], list(range(100, 130)), [200] * 9]


def _generate(address: str, prompt: list[int], **fields: object) -> tuple[list[int], str]:
    """Ids and text of one raw call, straight through the stubs."""
    with grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(
            prompt=generation_pb2.Prompt(tokens=generation_pb2.TokenIds(ids=prompt)),
            output=generation_pb2.OutputOptions(token_ids=True),
            **fields,  # type: ignore[arg-type]
        )
        ids: list[int] = []
        text = ""
        for response in stub.Generate(request, timeout=60):
            ids += response.delta.token_ids
            text += response.delta.text
        return ids, text


def _speculation(method: int) -> common_pb2.SpeculationParams:
    return common_pb2.SpeculationParams(method=method)  # type: ignore[arg-type]


OFF = common_pb2.SPECULATION_METHOD_DISABLED
NGRAM = common_pb2.SPECULATION_METHOD_NGRAM
DRAFT_MODEL = common_pb2.SPECULATION_METHOD_DRAFT_MODEL
GREEDY = common_pb2.SamplingParams(temperature=0)
SEEDED = common_pb2.SamplingParams(temperature=1, seed=42)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_methods_agree_alone_and_together(service: Service, sampling: common_pb2.SamplingParams) -> None:
    stopping = common_pb2.StoppingCriteria(max_tokens=40, ignore_eos=True)
    fields = {"sampling_params": sampling, "stopping": stopping}
    plain = [_generate(service.address, p, speculation=_speculation(OFF), **fields) for p in PROMPTS]
    assert all(len(ids) == 40 for ids, _ in plain)
    for method in (NGRAM, DRAFT_MODEL):
        alone = [_generate(service.address, p, speculation=_speculation(method), **fields) for p in PROMPTS]
        assert alone == plain

    async def together() -> list[tuple[list[int], str]]:
        loop = asyncio.get_running_loop()
        jobs = [
            loop.run_in_executor(
                None, lambda p=p, m=m: _generate(service.address, p, speculation=_speculation(m), **fields)
            )
            for p in PROMPTS
            for m in (OFF, NGRAM, DRAFT_MODEL)
        ]
        return await asyncio.gather(*jobs)

    assert asyncio.run(together()) == [result for result in plain for _ in range(3)]


def test_usage_statistics_and_events_agree(service: Service) -> None:
    with Client(service.address) as client:
        before = client.load()
        completion = client.generate(
            PROMPTS[0], temperature=0, max_tokens=30, ignore_eos=True, speculation="ngram", token_ids=True
        ).completion()
        after = client.load()
    sample = completion.samples[0]
    assert len(sample.token_ids) == sample.usage.completion_tokens == 30
    assert after.num_generated_tokens - before.num_generated_tokens == 30
    assert sample.finish_reason == "length"
    assert sample.speculation.num_accepted_tokens <= sample.speculation.num_draft_tokens


def test_command_line_prints_one_object(service: Service) -> None:
    done = run_client(
        "generate", "--server", service.address, "--chat", "hello there", "--max-tokens", "12", "--temperature", "0",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {"text", "token_ids", "finish_reason", "usage", "speculation", "timing"} <= set(answer)
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])


def test_bad_requests_do_not_disturb_a_neighbour(service: Service) -> None:
    stopping = common_pb2.StoppingCriteria(max_tokens=40, ignore_eos=True)
    reference = _generate(service.address, PROMPTS[2], sampling_params=GREEDY, stopping=stopping)
    with grpc.insecure_channel(service.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        neighbour = stub.Generate(
            generation_pb2.GenerateRequest(
                prompt=generation_pb2.Prompt(tokens=generation_pb2.TokenIds(ids=PROMPTS[2])),
                output=generation_pb2.OutputOptions(token_ids=True),
                sampling_params=GREEDY,
                stopping=stopping,
            )
        )
        bad = [
            {"prompt": generation_pb2.Prompt(text="")},
            {"prompt": generation_pb2.Prompt(tokens=generation_pb2.TokenIds(ids=[]))},
            {"prompt": generation_pb2.Prompt(tokens=generation_pb2.TokenIds(ids=[2**31 - 1]))},
            {"prompt": generation_pb2.Prompt(tokens=generation_pb2.TokenIds(ids=[300]))},
            {"stopping": common_pb2.StoppingCriteria(max_tokens=0)},
            {"stopping": common_pb2.StoppingCriteria(stop_token_ids=[320])},
            {"sampling_params": common_pb2.SamplingParams(logit_bias={2**31 - 1: 1.0})},
        ]
        for fields in bad:
            request = {"prompt": generation_pb2.Prompt(tokens=generation_pb2.TokenIds(ids=[5]))} | fields
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(generation_pb2.GenerateRequest(**request)))  # type: ignore[arg-type]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
        ids = [token for response in neighbour for token in response.delta.token_ids]
    assert ids == reference[0]


def test_a_deadline_behind_a_long_queue_is_kept_and_frees_its_place(service: Service) -> None:
    """64 samples at 8 slots; a prompt of more tokens than all of theirs tells whether it still waits."""
    with Client(service.address) as client:
        with client.generate([40, 41, 42], n=64, temperature=1, max_tokens=400, ignore_eos=True) as queue:
            next(queue)
            late = client.generate([7] * 400, max_tokens=4, timeout=0.3)
            started = time.monotonic()
            while client.load().num_waiting_tokens < 400:
                assert time.monotonic() - started < 0.3, "the request never waited"
            with pytest.raises(DraftlineError) as caught:
                late.completion()
            elapsed = time.monotonic() - started
            assert caught.value.code == "DEADLINE_EXCEEDED"
            assert 0.2 < elapsed < 2
            _wait_for(client, lambda load: load.num_waiting_tokens < 400)
            assert client.load().num_waiting_tokens > 0, "the queue before it had not moved on"
        _wait_for(client, lambda load: load.num_running_requests == load.num_waiting_requests == 0)
        assert client.load().num_used_pages == 0
        assert client.generate([5], max_tokens=2, ignore_eos=True, timeout=20).completion()


def _wait_for(client: Client, holds: Callable[[Load], bool], seconds: float = 5) -> None:
    """Returns once what the service says of its load satisfies `holds`."""
    until = time.monotonic() + seconds
    while not holds(load := client.load()):
        assert time.monotonic() < until, load
        time.sleep(0.02)


def test_cancelled_streams_give_everything_back(service: Service) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:

            async def abandon(prompt: list[int]) -> None:
                stream = client.generate(prompt, temperature=1, max_tokens=400, ignore_eos=True)
                async with stream:
                    async for _ in stream:
                        break

            await asyncio.gather(*(abandon(prompt) for prompt in PROMPTS * 4))
            for _ in range(100):
                load = await client.load()
                if load.num_running_requests == load.num_waiting_requests == 0:
                    break
                await asyncio.sleep(0.05)
            assert load.num_running_requests == load.num_waiting_requests == 0
            assert load.num_used_pages == 0

    asyncio.run(run())


def test_neither_frontend_nor_scheduler_has_torch_loaded(service: Service) -> None:
    """What a process maps tells what it loaded."""
    for role in ("frontend", "scheduler"):
        maps = Path(f"/proc/{service.children()[role]}/maps").read_text(encoding="utf-8")
        assert "libtorch" not in maps
    assert "libtorch" in Path(f"/proc/{service.children()['worker']}/maps").read_text(encoding="utf-8")
    scheduler_maps = Path(f"/proc/{service.children()['scheduler']}/maps").read_text(encoding="utf-8")
    assert "cygrpc" not in scheduler_maps


def test_an_idle_service_uses_no_cpu(service: Service) -> None:
    processes = [psutil.Process(pid) for pid in (service.process.pid, *service.children().values())]

    def used() -> float:
        return sum(process.cpu_times().user + process.cpu_times().system for process in processes)

    time.sleep(0.5)
    before, started = used(), time.monotonic()
    time.sleep(4)
    share = (used() - before) / (time.monotonic() - started)
    assert share < 0.03, f"{share:.1%} of a core for {len(processes)} processes"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_cleanly(signum: signal.Signals, tiny_model_dir: Path) -> None:
    """Live streams finish, the exit code is 0, and neither processes nor segments nor sockets remain."""
    before = leftovers()
    with Service("--model", str(tiny_model_dir), "--dtype", "float32", "--num-pages", "200") as service:
        pids = list(service.children().values())
        assert len(pids) == 3
        with Client(service.address) as client:
            stream = client.generate([5, 6, 7], max_tokens=300, ignore_eos=True, token_ids=True)
            next(stream)
            ended = service.stop(signum)
            completion = stream.completion()
    assert ended.code == 0, ended.stderr
    assert len(completion.samples[0].token_ids) == 300
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert leftovers() <= before


class TestBadStarts:
    """One clear message that says what and where, exit code 2, nothing left behind."""

    def _fails(self, *flags: str, says: tuple[str, ...]) -> None:
        before = leftovers()
        ended = run_server("--listen", "127.0.0.1:0", *flags)
        assert ended.code == 2, ended.stderr
        assert ended.stdout == ""
        lines = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, ended.stderr
        for word in says:
            assert word in lines[0]
        assert "Traceback" not in ended.stderr
        assert leftovers() <= before

    def test_no_such_directory(self, tmp_path: Path) -> None:
        self._fails("--model", str(tmp_path / "nowhere"), says=(str(tmp_path / "nowhere"),))

    def test_directory_without_config(self, tmp_path: Path) -> None:
        self._fails("--model", str(tmp_path), says=(str(tmp_path), "config.json"))

    def test_gguf_cut_short(self, tmp_path: Path, embedded_model: Path) -> None:
        short = tmp_path / "short.gguf"
        short.write_bytes(embedded_model.read_bytes()[:50_000_000])
        self._fails("--model", str(short), says=(str(short),))

    def test_unknown_architecture(self, tmp_path: Path) -> None:
        make_tiny_llama(tmp_path)
        config = tmp_path / "config.json"
        config.write_text(config.read_text().replace("LlamaForCausalLM", "MysteryForCausalLM"))
        self._fails("--model", str(tmp_path), says=("config.json", "MysteryForCausalLM"))

    def test_port_in_use(self, service: Service, tiny_model_dir: Path) -> None:
        self._fails(
            "--model", str(tiny_model_dir), "--listen", service.address, says=(service.address, "in use")
        )

    def test_draft_with_another_token_map(self, tmp_path: Path, tiny_model_dir: Path) -> None:
        draft = make_tiny_llama(tmp_path / "draft", num_layers=1, permuted_tokenizer=True)
        self._fails(
            "--model", str(tiny_model_dir), "--speculation", "draft-model", "--draft-model", str(draft),
            says=(str(draft), "'a'"),
        )  # fmt: skip

    def test_flags_out_of_range(self, tiny_model_dir: Path) -> None:
        self._fails("--model", str(tiny_model_dir), "--page-size", "0", says=("page_size", "0"))
        self._fails("--model", str(tiny_model_dir), "--dtype", "float8", says=("dtype", "float8"))


def test_a_huge_prompt_is_refused_without_holding_up_others(service: Service) -> None:
    """A text that cannot fit is not even tokenised; bytes that are no request get a status of ours."""
    with Client(service.address) as client:
        started = time.monotonic()
        with pytest.raises(DraftlineError) as caught:
            client.generate("x y" * 8_000_000).completion()
        assert caught.value.reason == "PROMPT_TOO_LONG"
        assert time.monotonic() - started < 5
    with grpc.insecure_channel(service.address) as channel:
        call = channel.unary_stream("/draftline.v1.GenerationService/Generate")
        with pytest.raises(grpc.RpcError) as raised:
            list(call(b"\xff\xff\xff"))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be decoded" in raised.value.details()


def test_a_dead_worker_ends_streams_with_unavailable(tiny_model_dir: Path) -> None:
    before = leftovers()
    flags = ["--model", str(tiny_model_dir), "--dtype", "float32", "--num-pages", "200"]
    with Service(*flags) as service, grpc.insecure_channel(service.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stream = stub.Generate(
            generation_pb2.GenerateRequest(
                prompt=generation_pb2.Prompt(tokens=generation_pb2.TokenIds(ids=[5, 6])),
                stopping=common_pb2.StoppingCriteria(max_tokens=500, ignore_eos=True),
            )
        )
        next(stream)
        psutil.Process(service.children()["worker"]).kill()
        killed = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "worker is lost" in caught.value.details()
        assert time.monotonic() - killed < 4  # seen by its closed connection, before its heartbeat is missed
        ended = service.wait_ended()
    assert ended.code == 1
    assert leftovers() <= before


def test_a_second_signal_is_a_shutdown_not_a_lost_worker(tiny_model_dir: Path) -> None:
    before = leftovers()
    flags = ["--model", str(tiny_model_dir), "--dtype", "float32", "--num-pages", "4000"]
    with Service(*flags) as service, Client(service.address) as client:
        prompt = [5, 6, 7]
        stream = client.generate(prompt, n=32, max_tokens=500, ignore_eos=True, temperature=1, seed=1)
        next(stream)
        service.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        ended = service.stop()
        with pytest.raises(DraftlineError) as caught:
            stream.completion()
    assert caught.value.reason == "NOT_SERVING", ended.stderr
    assert "workers_lost" not in ended.stderr
    assert ended.code == 0
    assert leftovers() <= before


def test_padded_vocabularies_of_one_tokenizer_work_together(tmp_path: Path) -> None:
    """304 and 320 rows over the same 300 tokens: only ids below 300 come out."""
    target = make_tiny_llama(tmp_path / "target", vocab_size=320)
    draft = make_tiny_llama(tmp_path / "draft", vocab_size=304, num_layers=1, seed=1)
    flags = [
        "--model",
        str(target),
        "--speculation",
        "draft-model",
        "--draft-model",
        str(draft),
        "--dtype",
        "float32",
    ]
    sampling = common_pb2.SamplingParams(temperature=2, seed=1)
    stopping = common_pb2.StoppingCriteria(max_tokens=200, ignore_eos=True)
    with Service(*flags, "--num-pages", "200") as running:
        ids, _ = _generate(running.address, [5, 6, 7], sampling_params=sampling, stopping=stopping)
        plain, _ = _generate(
            running.address,
            [5, 6, 7],
            sampling_params=sampling,
            stopping=stopping,
            speculation=_speculation(OFF),
        )
    assert ids == plain
    assert len(np.unique(ids)) > 50
    assert max(ids) < 300
