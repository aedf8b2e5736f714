"""A rank in a thread that speaks the real control messages and channels, a simulated worker inside."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

import zmq

from scheduler_svc.scheduler.limits import Limits
from shared_mem import control
from shared_mem.channel import ChannelReader, ChannelWriter
from shared_mem.heartbeat import HeartbeatWriter
from shared_mem.records import LAYOUT_VERSION, decode_plan, encode_result
from tests.scheduler.simulated_worker import SimulatedWorker


def make_hello(limits: Limits, **changes: Any) -> control.WorkerHello:
    """What a rank of a tiny model says of itself."""
    facts = control.ModelFacts(
        name="tiny",
        model_path="/models/tiny",
        revision="r1",
        architecture="LlamaForCausalLM",
        dtype="float32",
        kv_cache_dtype="float32",
        vocab_size=40,
        max_context_tokens=limits.max_context_tokens,
        eos_token_ids=tuple(limits.eos_token_ids),
        tokenizer_path="/models/tiny",
        sampling_defaults=control.SamplingDefaults(),
        drafters=tuple(limits.drafters.values()),
    )
    fields: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "pid": os.getpid(),
        "device": "cpu",
        "layout_version": LAYOUT_VERSION,
        "page_size": limits.page_size,
        "num_pages": limits.num_pages,
        "num_slots": limits.max_running_requests,
        "model": facts,
    }
    return control.WorkerHello(**(fields | changes))


class FakeWorker(threading.Thread):
    """Answers plans until Shutdown; `leave` ends it without a word, `hold` keeps results back, `fail` gives up."""

    def __init__(self, runtime_dir: Path, limits: Limits, context: zmq.Context[Any]) -> None:
        super().__init__(name="fake-worker", daemon=True)
        self._runtime_dir = runtime_dir
        self._limits = limits
        self._context = context
        self.go_on = threading.Event()
        self.go_on.set()
        self.leave = threading.Event()  # looked at while a result is held back
        self.failure = ""
        self.reads_ahead = True  # False: while a result is held back plans stay in the ring
        self.num_plans_ready = 0  # when a result was held back last: plans for the steps behind it
        self.got_shutdown = False
        self.refused = ""

    def hold(self) -> None:
        self.go_on.clear()

    def run(self) -> None:
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(f"ipc://{self._runtime_dir}/control.sock")
            socket.send(control.encode(make_hello(self._limits)))
            answer = control.decode_scheduler_message(socket.recv())
            if isinstance(answer, control.Welcome):
                self._serve(socket, answer)
            elif isinstance(answer, control.Refused):
                self.refused = answer.message

    def _serve(self, socket: zmq.Socket[bytes], welcome: control.Welcome) -> None:
        plans = ChannelReader.attach(welcome.plan_ring, 0, welcome.plan_doorbell, self._context)
        results = ChannelWriter.attach(welcome.result_ring, welcome.result_doorbell, self._context)
        heartbeat = HeartbeatWriter.attach(welcome.heartbeat, 0)
        simulated = SimulatedWorker(self._limits)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(plans.socket, zmq.POLLIN)
        socket.send(control.encode(control.WorkerAttached(0)))
        try:
            while True:
                ready = deque(plans.drain())
                while ready:
                    data = ready.popleft()
                    if self.failure:
                        socket.send(control.encode(control.WorkerFailed(0, self.failure)))
                        continue
                    result = simulated.execute(decode_plan(data))
                    while not self.go_on.wait(0.01):
                        if self.reads_ahead:
                            ready += plans.drain()
                        self.num_plans_ready = len(ready)
                        if self.leave.is_set():
                            return
                        if socket.poll(0):
                            break
                    results.send(encode_result(result), 5.0)
                if socket in dict(poller.poll(1000)):
                    message = control.decode_scheduler_message(socket.recv())
                    self.got_shutdown = isinstance(message, control.Shutdown)
                    return
        finally:
            heartbeat.close()
            plans.close()
            results.close()
