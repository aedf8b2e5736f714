"""A worker process: loads its rank, shakes hands with the scheduler, then executes plans until told to stop."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import sys
import tomllib
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import structlog
import torch
import typer
import zmq

from gpu_worker import logs
from gpu_worker.config import WorkerConfig
from gpu_worker.engine import Engine, build_engine
from gpu_worker.errors import WorkerError
from shared_mem import control
from shared_mem.channel import ChannelReader, ChannelWriter
from shared_mem.drafting_defaults import with_drafting_defaults
from shared_mem.enums import SpeculationMethod
from shared_mem.heartbeat import HeartbeatWriter
from shared_mem.records import LAYOUT_VERSION, StepResult, decode_plan, encode_result

_RESULT_TIMEOUT_SECONDS = 10.0
_HANDSHAKE_TIMEOUT_MS = 30_000

log = structlog.get_logger()


class Worker:
    """One rank's loop: a plan in, a step run, its result out. Waits on ZeroMQ only; never spins."""

    def __init__(self, config: WorkerConfig, engine: Engine, context: zmq.Context[Any]) -> None:
        self._config = config
        self._engine = engine
        self._context = context
        self._stopping = False
        self._control = context.socket(zmq.DEALER)
        self._control.setsockopt(zmq.LINGER, 1000)
        self._control.setsockopt(zmq.IDENTITY, f"worker-{config.rank}-{os.getpid()}".encode())
        self._control.connect(config.control_address)

    def stop(self) -> None:
        """Asks the loop to end after the step at hand."""
        self._stopping = True

    def run(self) -> None:
        """Handshake, then plans until Shutdown (or stop). Raises WorkerError when the scheduler refuses."""
        welcome = self._shake_hands()
        plans = ChannelReader.attach(
            welcome.plan_ring, self._config.rank, welcome.plan_doorbell, self._context
        )
        results = None
        if self._config.rank == 0:
            results = ChannelWriter.attach(welcome.result_ring, welcome.result_doorbell, self._context)
        heartbeat = HeartbeatWriter.attach(welcome.heartbeat, self._config.rank)
        try:
            self._control.send(control.encode(control.WorkerAttached(self._config.rank)))
            log.info("worker attached", rank=self._config.rank, num_pages=self._engine.num_pages)
            gc.freeze()  # the collector need not walk over libraries and model at every full collection
            self._serve(plans, results, heartbeat)
        finally:
            heartbeat.close()
            plans.close()
            if results is not None:
                results.close()
            self._control.close()

    def _shake_hands(self) -> control.Welcome:
        engine, config = self._engine, self._config
        hello = control.WorkerHello(
            rank=config.rank,
            world_size=config.world_size,
            pid=os.getpid(),
            device=str(engine.device),
            layout_version=LAYOUT_VERSION,
            page_size=config.page_size,
            num_pages=engine.num_pages,
            num_slots=config.max_running_requests,
            model=engine.facts,
        )
        self._control.send(control.encode(hello))
        if not self._control.poll(_HANDSHAKE_TIMEOUT_MS):
            raise WorkerError(f"control {config.control_address}: no scheduler answered within 30 s")
        answer = control.decode_scheduler_message(self._control.recv())
        if isinstance(answer, control.Refused):
            raise WorkerError(f"control {config.control_address}: the scheduler refused: {answer.message}")
        if not isinstance(answer, control.Welcome):
            raise WorkerError(f"control {config.control_address}: unexpected answer {type(answer).__name__}")
        return answer

    def _serve(self, plans: ChannelReader, results: ChannelWriter | None, heartbeat: HeartbeatWriter) -> None:
        def publish(result: StepResult) -> None:
            if results is not None:
                results.send(encode_result(result), _RESULT_TIMEOUT_SECONDS)

        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(plans.socket, zmq.POLLIN)
        num_steps = 0
        while not self._stopping:
            # While plans lie ahead nobody has to ring: it would only wake this process for what it reads anyway.
            data = plans.take()
            # also after a wait that timed out: a doorbell may be lost, a message never is
            messages = plans.drain() if data is None else [data]
            for message in messages:
                self._engine.runner.execute(decode_plan(message), publish)
                num_steps += 1
                heartbeat.beat(num_steps)
            if messages:
                continue
            ready = dict(poller.poll(1000))
            if self._control in ready:
                order = control.decode_scheduler_message(self._control.recv())
                if isinstance(order, control.Shutdown):
                    return

    def report_failure(self, message: str) -> None:
        """Tells the scheduler why this rank cannot go on."""
        if not self._control.closed:
            self._control.send(control.encode(control.WorkerFailed(self._config.rank, message)))


def load_worker_config(path: Path, runtime_dir: Path, rank: int) -> WorkerConfig:
    """The worker's part of the service's settings, from the same TOML file (or its JSON form).

    Raises WorkerError naming the file and the field.
    """
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise WorkerError(f"config {path}: {error.strerror}") from error
    except ValueError as error:
        raise WorkerError(f"config {path}: {error}") from error
    fields = {field.name for field in dataclasses.fields(WorkerConfig)}
    values = {key: value for key, value in with_drafting_defaults(raw).items() if key in fields}
    values |= {"control_address": f"ipc://{runtime_dir}/control.sock", "rank": rank}
    try:
        methods = values["speculation"]
        labels = [_method(method) for method in methods]
        values["speculation"] = [method for method in labels if method is not SpeculationMethod.DISABLED]
        heads = values.get("heads", {})
        pairs = heads.items() if isinstance(heads, dict) else heads
        values["heads"] = [(_method(method), path) for method, path in pairs]
        return msgspec.convert(values, WorkerConfig)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise WorkerError(f"config {path}: {error}") from error


def _method(value: str | int) -> SpeculationMethod:
    """A method by label (TOML) or number (JSON)."""
    return SpeculationMethod.from_label(value) if isinstance(value, str) else SpeculationMethod(value)


def _serve(config: WorkerConfig) -> None:
    logs.configure(f"worker-{config.rank}", config.log_level)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    engine = build_engine(config)
    context: zmq.Context[Any] = zmq.Context()
    worker = Worker(config, engine, context)

    def on_sigterm(signum: int, frame: FrameType | None) -> None:
        worker.stop()

    # Ctrl-C reaches the whole process group; live streams still need this worker until the scheduler says Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        worker.run()
    except Exception as error:
        worker.report_failure(f"{type(error).__name__}: {error}")
        raise
    finally:
        context.destroy(linger=1000)


def _command(
    config: Annotated[
        Path, typer.Option("--config", "--config-json", help="The service's settings (TOML or JSON).")
    ],
    runtime_dir: Annotated[Path, typer.Option(help="Where the scheduler's sockets live.")],
    rank: Annotated[int, typer.Option(help="This worker's rank.")] = 0,
) -> None:
    """Runs one worker of a Draftline service until its scheduler says stop."""
    try:
        _serve(load_worker_config(config, runtime_dir, rank))
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def main() -> None:
    """Entry point of `draftline-worker`. Exit code 2: cannot start, one line on stderr says why."""
    typer.run(_command)


if __name__ == "__main__":
    main()
