"""The worker's loop beside its scheduler: what it says when it fails, and that it never outlives a lost one."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from gpu_worker.config import WorkerConfig
from gpu_worker.errors import SchedulerGoneError
from gpu_worker.worker import Worker
from scheduler_svc.config import ServerConfig
from scheduler_svc.scheduler.scheduler import Scheduler
from scheduler_svc.scheduler.worker_group import WorkerGroup, WorkerLostError
from tests.scheduler.fake_worker import make_hello
from tests.scheduler.harness import make_limits, make_submit, prompt_of

LIMITS = make_limits()

HANGS = """
import sys, time, zmq
from gpu_worker import scheduler_watch
scheduler_watch._LAST_STEP_SECONDS = 0.2
control = zmq.Context().socket(zmq.DEALER)
watch = scheduler_watch.SchedulerWatch(control)
control.connect(sys.argv[1])
control.send(b"hello")
time.sleep(60)
"""


class Rank(threading.Thread):
    """A Worker without a model: every step fails with `failure`. Keeps what its run raised."""

    def __init__(self, address: str, failure: str) -> None:
        super().__init__(daemon=True)
        self._failure = failure
        self.context: zmq.Context[Any] = zmq.Context()
        engine: Any = SimpleNamespace(
            device="cpu",
            num_pages=LIMITS.num_pages,
            facts=make_hello(LIMITS).model,
            runner=SimpleNamespace(execute=self._execute),
        )
        config = WorkerConfig(control_address=address, page_size=LIMITS.page_size, max_running_requests=4)
        self._worker = Worker(config, engine, self.context)
        self.error: Exception | None = None

    def _execute(self, *_: object) -> None:
        raise RuntimeError(self._failure)

    def run(self) -> None:
        try:
            self._worker.run()
        except Exception as error:
            self.error = error


def test_a_step_that_fails_is_told_to_the_scheduler(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/control.sock"
    context: zmq.Context[Any] = zmq.Context()
    group = WorkerGroup(ServerConfig(page_size=LIMITS.page_size), address, f"test-{tmp_path.name}", context)
    rank = Rank(address, "no memory for 7 rows")
    rank.start()
    try:
        while not group.is_ready:
            assert group.control_socket.poll(5000)
            group.receive_control()
        scheduler = Scheduler(LIMITS)
        scheduler.submit(b"frontend", make_submit("r", prompt_of(5)))
        plan = scheduler.schedule(0.0)
        assert plan is not None
        group.send(plan)
        assert group.control_socket.poll(5000)
        with pytest.raises(WorkerLostError, match="worker 0: RuntimeError: no memory for 7 rows"):
            group.receive_control()
        rank.join(5)
        assert isinstance(rank.error, RuntimeError)
    finally:
        group.close()
        context.term()
        rank.context.destroy(0)


def test_a_scheduler_that_goes_before_it_answers_is_noticed(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/control.sock"
    context: zmq.Context[Any] = zmq.Context()
    scheduler = context.socket(zmq.ROUTER)
    scheduler.bind(address)
    rank = Rank(address, "")
    rank.start()
    assert scheduler.poll(5000)
    scheduler.close(linger=0)
    rank.join(5)
    assert isinstance(rank.error, SchedulerGoneError)
    context.term()
    rank.context.destroy(0)


def test_a_worker_that_hangs_ends_some_time_after_its_scheduler(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/control.sock"
    context: zmq.Context[Any] = zmq.Context()
    scheduler = context.socket(zmq.ROUTER)
    scheduler.bind(address)
    command = [sys.executable, "-c", HANGS, address]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
        assert scheduler.poll(20_000)
        scheduler.close(linger=0)
        _, stderr = worker.communicate(timeout=10)
    assert worker.returncode == 1
    assert stderr == "error: the scheduler is gone and the step at hand has not ended in 0.2 s\n"
    context.term()
