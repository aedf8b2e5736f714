"""The process as the launcher starts it, between a frontend's socket and a worker's channels."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from scheduler_svc.config import ServerConfig
from scheduler_svc.errors import ErrorReason
from scheduler_svc.messages import (
    Abort,
    AbortReply,
    CacheFlushed,
    CallRefused,
    Cancel,
    FlushCache,
    FrontendHello,
    LoadQuery,
    LoadReply,
    Rejected,
    ServerQuery,
    ServerReply,
    ServiceStatus,
    SetSpeculation,
    SpeculationInForce,
    Submit,
    TokenEvents,
    decode_scheduler_message,
    encode,
)
from shared_mem.enums import FinishReason, SpeculationMethod
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.harness import make_limits, make_submit, prompt_of
from tests.scheduler.simulated_worker import model_text

LIMITS = make_limits()
CONFIG = ServerConfig(
    model_name="served",
    page_size=LIMITS.page_size,
    num_pages=LIMITS.num_pages,
    max_running_requests=LIMITS.max_running_requests,
    max_batched_tokens=LIMITS.max_batched_tokens,
    drain_grace_seconds=20.0,
)
# The wall clock of the process stands an hour ahead once the file `jumped` is there.
PROGRAM_WITH_A_JUMP = """
import sys, time
from pathlib import Path
wall, flag = time.time, Path(sys.argv[sys.argv.index("--runtime-dir") + 1], "jumped")
time.time = lambda: wall() + (3600 if flag.exists() else 0)
from scheduler_svc.scheduler.process import main
sys.exit(main())
"""


SMALL_RING = """
import sys
from scheduler_svc.scheduler import process, worker_group
worker_group._RING_BYTES = 4096
sys.exit(process.main(sys.argv[1:]))
"""


def segments_of(pid: int) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"draftline-{pid}-*")]


class Service:
    """One scheduler process with a frontend (this test) and, once started, a worker."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.worker = FakeWorker(directory, LIMITS, self.context)
        self.process: subprocess.Popen[str] | None = None
        self._events: list[Any] = []

    def start(
        self, config: ServerConfig = CONFIG, code: str = "", **popen_options: Any
    ) -> subprocess.Popen[str]:
        """Starts the scheduler; `code` stands for its module's entry point."""
        path = self.directory / "config.json"
        path.write_bytes(msgspec.json.encode(config))
        command = [sys.executable, *(["-c", code] if code else ["-m", "scheduler_svc.scheduler.process"])]
        command += ["--config-json", str(path), "--runtime-dir", str(self.directory)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen_options
        )
        self.socket.connect(f"ipc://{self.directory}/scheduler.sock")
        return self.process

    def serve(self, config: ServerConfig = CONFIG, code: str = "") -> ServiceStatus:
        self.start(config, code)
        self.send(FrontendHello())
        status = self.receive(ServiceStatus)
        assert (status.state, status.model) == ("starting", None)
        self.worker.start()
        status = self.receive(ServiceStatus)
        assert status.state == "serving"
        return status

    def send(self, message: Any) -> None:
        self.socket.send(encode(message))

    def receive(self, kind: type, timeout: float = 15.0) -> Any:
        assert self.socket.poll(timeout * 1000), f"no {kind.__name__} came"
        message = decode_scheduler_message(self.socket.recv())
        assert isinstance(message, kind), message
        return message

    def collect(self, submit: Submit) -> list[int]:
        """The tokens of one request with one sample, to its end."""
        self.send(submit)
        tokens: list[int] = []
        while True:
            for event in self.receive(TokenEvents).events:
                tokens += event.token_ids
                if event.finished is not None:
                    return tokens

    def wait(self) -> tuple[int, str]:
        """Exit code and stderr of the process; nothing of it may be left in /dev/shm."""
        assert self.process is not None
        stdout, stderr = self.process.communicate(timeout=15)
        assert stdout == ""
        assert segments_of(self.process.pid) == []
        return self.process.returncode, stderr

    def close(self) -> None:
        self.worker.go_on.set()
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.terminate()
            self.process.communicate(timeout=15)
        self.socket.close()
        if self.worker.is_alive():
            self.worker.join(timeout=5)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    service.close()


def test_an_operator_changes_speculation_and_flushes_the_cache(service: Service) -> None:
    service.start()
    service.send(FrontendHello())
    service.receive(ServiceStatus)
    for early in (SetSpeculation(1), FlushCache(1)):
        service.send(early)
        assert service.receive(CallRefused).reason is ErrorReason.NOT_SERVING
    service.worker.start()
    service.receive(ServiceStatus)
    service.send(SetSpeculation(2, SpeculationMethod.DISABLED))
    assert service.receive(SpeculationInForce) == SpeculationInForce(2, SpeculationMethod.DISABLED, 4, 0, 1)
    submit = make_submit("r", prompt_of(10), max_tokens=20)
    assert service.collect(submit) == model_text(submit.token_ids, 1, 20)
    service.send(LoadQuery(3))
    load = service.receive(LoadReply)
    assert (load.num_steps, load.speculation) == (20, ())
    service.send(SetSpeculation(4, SpeculationMethod.MEDUSA))
    refused = service.receive(CallRefused)
    assert (refused.call_id, refused.reason, refused.field) == (4, ErrorReason.PRECONDITION, "method")
    service.send(FlushCache(5))
    assert service.receive(CacheFlushed) == CacheFlushed(5, load.num_cached_pages)
    assert load.num_cached_pages == 7


def test_serves_answers_queries_and_drains(service: Service) -> None:
    model = service.serve().model
    assert (model.name, model.max_context_tokens, model.max_prompt_tokens) == ("served", 64, 63)
    assert model.default_method is SpeculationMethod.NGRAM
    for i in range(3):
        submit = make_submit(f"r{i}", prompt_of(10 + i, i), max_tokens=20)
        assert service.collect(submit) == model_text(submit.token_ids, 1, 20)

    service.send(LoadQuery(4))
    load = service.receive(LoadReply)
    assert (load.call_id, load.num_generated_tokens, load.num_running_requests) == (4, 60, 0)
    service.send(ServerQuery(5))
    reply = service.receive(ServerReply)
    assert (reply.state, reply.num_pages, reply.max_batched_tokens) == ("serving", 64, 32)
    assert reply.workers[0].device == "cpu"
    assert reply.speculation is not None
    # a step that was planned ahead for a request which then ended may still be on its way
    step = reply.speculation.effective_step
    assert step in (load.num_steps + 1, load.num_steps + 2)
    assert reply.speculation == SpeculationInForce(5, SpeculationMethod.NGRAM, 4, 0, step)
    assert reply.workers[0].heartbeat_age < 5

    service.worker.hold()
    service.send(make_submit("live", prompt_of(5), max_tokens=30))
    service.send(make_submit("aborted", prompt_of(5), max_tokens=30))
    service.send(Abort(6, ("aborted",)))
    (aborted,) = service.receive(TokenEvents).events
    assert aborted.finished.reason is FinishReason.ABORTED
    assert service.receive(AbortReply).aborted_request_ids == ("aborted",)

    service.process.send_signal(signal.SIGTERM)
    assert service.receive(ServiceStatus).state == "draining"
    service.send(make_submit("late", prompt_of(5)))
    assert service.receive(Rejected).reason is ErrorReason.NOT_SERVING
    service.worker.go_on.set()
    tokens: list[int] = []
    while len(tokens) < 30:
        for event in service.receive(TokenEvents).events:
            assert event.request_id == "live"
            tokens += event.token_ids
    assert tokens == model_text(prompt_of(5), 1, 30)
    code, _ = service.wait()
    assert code == 0
    service.worker.join(timeout=5)
    assert service.worker.got_shutdown


def test_a_jump_of_the_wall_clock_expires_nothing(service: Service) -> None:
    service.serve(code=PROGRAM_WITH_A_JUMP)
    service.worker.hold()
    submit = make_submit("r", prompt_of(5), max_tokens=30, deadline=time.time() + 600)
    service.send(submit)
    service.send(LoadQuery(1))
    assert service.receive(LoadReply).time < time.time() + 60
    (service.directory / "jumped").touch()
    for call_id in (2, 3):  # each is a turn of the loop
        service.send(LoadQuery(call_id))
        load = service.receive(LoadReply)
    assert load.time > time.time() + 1800
    assert load.num_running_requests == 1
    service.worker.go_on.set()
    tokens: list[int] = []
    while len(tokens) < 30:
        for event in service.receive(TokenEvents).events:
            tokens += event.token_ids
    assert tokens == model_text(submit.token_ids, 1, 30)


def test_a_running_request_past_its_deadline_hears_of_it(service: Service) -> None:
    service.serve()
    service.worker.hold()
    service.send(make_submit("r", prompt_of(5), max_tokens=30, deadline=time.time() + 0.3))
    rejected = service.receive(Rejected)
    assert (rejected.request_id, rejected.reason) == ("r", ErrorReason.EXPIRED_IN_QUEUE)
    service.worker.go_on.set()


def test_while_a_step_runs_the_next_plan_is_there(service: Service) -> None:
    service.serve()
    service.worker.hold()
    service.send(make_submit("r", prompt_of(5), max_tokens=30))
    until = time.monotonic() + 10
    while not service.worker.num_plans_ready and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)
    assert service.worker.num_plans_ready == 1
    service.send(Cancel("r"))
    service.worker.go_on.set()
    submit = make_submit("next", prompt_of(6), max_tokens=20)
    service.send(submit)
    tokens: list[int] = []
    while len(tokens) < 20:
        tokens += [
            t
            for event in service.receive(TokenEvents).events
            if event.request_id == "next"
            for t in event.token_ids
        ]
    assert tokens == model_text(submit.token_ids, 1, 20)


def test_before_the_worker_is_there_requests_are_told_so(service: Service) -> None:
    service.start()
    service.send(make_submit("early", prompt_of(5)))
    rejected = service.receive(Rejected)
    assert rejected.reason is ErrorReason.NOT_SERVING
    assert rejected.retry_after > 0
    service.send(LoadQuery(1))
    assert service.receive(LoadReply).num_steps == 0
    service.send(Abort(2, ("early",)))
    assert service.receive(AbortReply).aborted_request_ids == ()
    service.process.send_signal(signal.SIGTERM)
    assert service.wait()[0] == 0


def test_after_the_grace_the_rest_is_aborted(service: Service) -> None:
    service.serve(replace(CONFIG, drain_grace_seconds=0.3))
    service.worker.hold()
    service.send(make_submit("live", prompt_of(5), max_tokens=30))
    service.send(LoadQuery(1))
    service.receive(LoadReply)
    service.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert service.receive(ServiceStatus).state == "draining"
    (event,) = service.receive(TokenEvents).events
    assert event.finished.reason is FinishReason.ABORTED
    assert service.wait()[0] == 0
    assert 0.25 < time.monotonic() - began < 5


def test_a_second_sigterm_ends_at_once_but_sigint_before_it_does_not_count(service: Service) -> None:
    service.serve()
    service.worker.hold()
    service.send(make_submit("live", prompt_of(5), max_tokens=30))
    service.send(LoadQuery(0))
    service.receive(LoadReply)
    service.process.send_signal(signal.SIGINT)
    assert service.receive(ServiceStatus).state == "draining"
    service.process.send_signal(signal.SIGTERM)
    service.send(LoadQuery(1))
    assert service.receive(LoadReply).num_running_requests == 1
    service.process.send_signal(signal.SIGTERM)
    (event,) = service.receive(TokenEvents).events
    assert event.finished.reason is FinishReason.ABORTED
    assert service.wait()[0] == 0


def test_a_worker_that_ends_during_the_drain_is_part_of_the_shutdown(service: Service) -> None:
    """A second signal to the launcher reaches the worker while the scheduler still drains."""
    service.serve()
    service.worker.hold()
    service.send(make_submit("live", prompt_of(5), max_tokens=30))
    service.send(LoadQuery(0))
    service.receive(LoadReply)
    service.process.send_signal(signal.SIGTERM)
    assert service.receive(ServiceStatus).state == "draining"
    service.worker.leave.set()
    rejected = service.receive(Rejected)
    assert (rejected.request_id, rejected.reason) == ("live", ErrorReason.NOT_SERVING)
    assert service.wait()[0] == 0


def test_a_worker_that_ends_before_is_lost(service: Service) -> None:
    service.serve()
    service.worker.hold()
    service.send(make_submit("live", prompt_of(5), max_tokens=30))
    service.send(LoadQuery(0))
    service.receive(LoadReply)
    service.worker.leave.set()
    rejected = service.receive(Rejected)
    assert (rejected.request_id, rejected.reason) == ("live", ErrorReason.WORKER_LOST)
    assert service.receive(ServiceStatus).state == "failed"
    assert service.wait()[0] == 1


def test_a_failing_worker_ends_requests_and_process(service: Service) -> None:
    service.serve()
    service.worker.failure = "rank 0: out of memory"
    service.send(make_submit("live", prompt_of(5), max_tokens=30))
    rejected = service.receive(Rejected)
    assert rejected.reason is ErrorReason.WORKER_LOST
    assert "out of memory" in rejected.message
    status = service.receive(ServiceStatus)
    assert status.state == "failed"
    assert "out of memory" in status.detail
    assert service.wait()[0] == 1


def test_a_worker_whose_step_never_ends_is_lost_though_it_beats(service: Service) -> None:
    service.serve(replace(CONFIG, step_timeout_seconds=1.5))
    service.worker.hold()
    service.send(make_submit("live", prompt_of(5), max_tokens=30))
    rejected = service.receive(Rejected)
    assert rejected.reason is ErrorReason.WORKER_LOST
    assert "worker 0: step 1 has no result after" in rejected.message
    assert "(step_timeout_seconds: 1.5)" in rejected.message
    assert service.receive(ServiceStatus).state == "failed"
    assert service.wait()[0] == 1


def test_a_plan_larger_than_the_ring_waits_for_a_long_step_and_holds_up_nothing(service: Service) -> None:
    limits = make_limits(max_context_tokens=4096, num_pages=2048, max_batched_tokens=4096)
    service.worker = FakeWorker(service.directory, limits, service.context)
    service.worker.reads_ahead = False
    config = replace(CONFIG, num_pages=limits.num_pages, max_batched_tokens=limits.max_batched_tokens)
    service.serve(config, SMALL_RING)
    service.worker.hold()
    service.send(make_submit("first", prompt_of(5), max_tokens=1))  # nothing to plan ahead for it
    service.send(LoadQuery(0))
    service.receive(LoadReply)  # its step has gone out
    submit = make_submit("large", prompt_of(3000), max_tokens=20)  # 12,000 bytes of tokens
    service.send(submit)
    for call_id in range(1, 13):  # for 6 seconds
        service.send(LoadQuery(call_id))
        service.receive(LoadReply, timeout=0.5)
        time.sleep(0.5)
    service.worker.go_on.set()
    tokens: dict[str, list[int]] = {"first": [], "large": []}
    while len(tokens["large"]) < 20:
        for event in service.receive(TokenEvents).events:
            tokens[event.request_id] += event.token_ids
    assert tokens["large"] == model_text(submit.token_ids, 1, 20)


def test_an_idle_service_sleeps(service: Service) -> None:
    service.serve()
    service.collect(make_submit("r", prompt_of(5)))
    process = psutil.Process(service.process.pid)
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(1.5)
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    assert used < 0.01 * (time.monotonic() - began) + 0.01  # one tick of the kernel's clock may fall into it


def test_garbage_and_frontends_that_leave_do_no_harm(service: Service) -> None:
    service.serve()
    service.socket.send(b"not a message")
    with service.context.socket(zmq.DEALER) as other:
        other.linger = 500
        other.connect(f"ipc://{service.directory}/scheduler.sock")
        other.send(encode(FrontendHello()))
        assert other.poll(5000)
        other.send(encode(make_submit("abandoned", prompt_of(6), max_tokens=50)))
        assert other.poll(5000)
    submit = make_submit("mine", prompt_of(7), max_tokens=20)
    assert service.collect(submit) == model_text(submit.token_ids, 1, 20)


def test_a_wrong_page_size_is_refused(service: Service) -> None:
    service.start(replace(CONFIG, page_size=8))
    service.worker.start()
    service.worker.join(timeout=10)
    assert service.worker.refused == "page_size 4, this scheduler has 8"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"page_size": "many"}', "page_size"),
        (b"{", "--config-json"),
        (b'{"num_draft_tokens": 0}', "num_draft_tokens: 0 is below 1"),
    ],
)
def test_a_bad_config_is_one_line_and_exit_code_2(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    command = [sys.executable, "-m", "scheduler_svc.scheduler.process"]
    command += ["--config-json", str(path), "--runtime-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_a_full_dev_shm_is_one_line_and_exit_code_2(service: Service) -> None:
    limit = (1 << 20, 1 << 20)  # a ring needs more: to the process, its files cannot grow so far
    service.start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    code, stderr = service.wait()
    assert code == 2
    errors = [line for line in stderr.splitlines() if not line.startswith("{")]
    assert len(errors) == 1
    assert errors[0].startswith("error: cannot allocate segment /dev/shm/draftline-")


def test_two_schedulers_do_not_share_a_runtime_directory(service: Service) -> None:
    service.serve()
    second = Service(service.directory)
    second.start()
    code, stderr = second.wait()
    second.close()
    assert code == 2
    assert "another scheduler runs here" in stderr
    submit = make_submit("still", prompt_of(7))
    assert service.collect(submit) == model_text(submit.token_ids, 1, 8)


def test_neither_torch_nor_grpc_is_loaded() -> None:
    heavy = ("torch", "grpc", "transformers", "tokenizers", "google.protobuf", "draftline")
    code = f"import sys, scheduler_svc.scheduler.process; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "[]"
