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
from gpu_worker.errors import SchedulerGoneError, WorkerError
from gpu_worker.scheduler_watch import SchedulerWatch
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
        self._watch = SchedulerWatch(self._control)
        self._control.connect(config.control_address)

    def stop(self) -> None:
        """Asks the loop to end after the step at hand."""
        self._stopping = True

    def run(self) -> None:
        """Handshake, then plans until Shutdown (or stop); use once.

        Raises WorkerError when the scheduler refuses, SchedulerGoneError when it ends without a Shutdown.
        """
        try:
            self._serve(self._shake_hands())
        finally:
            self._watch.close()
            self._control.close()

    def _serve(self, welcome: control.Welcome) -> None:
        """Attaches to what the scheduler names and executes plans. Tells the scheduler why when it cannot go on."""
        config, context = self._config, self._context
        plans = ChannelReader.attach(welcome.plan_ring, config.rank, welcome.plan_doorbell, context)
        results = None
        if config.rank == 0:
            results = ChannelWriter.attach(welcome.result_ring, welcome.result_doorbell, context)
        heartbeat = HeartbeatWriter.attach(welcome.heartbeat, config.rank)
        try:
            self._control.send(control.encode(control.WorkerAttached(config.rank)))
            log.info("worker attached", rank=config.rank, num_pages=self._engine.num_pages)
            gc.freeze()  # the collector need not walk over libraries and model at every full collection
            self._execute_plans(plans, results, heartbeat)
        except SchedulerGoneError:
            raise  # and nobody to tell: the socket may have reached the next scheduler by now
        except Exception as error:
            failed = control.WorkerFailed(config.rank, f"{type(error).__name__}: {error}")
            self._control.send(control.encode(failed))
            raise
        finally:
            heartbeat.close()
            plans.close()
            if results is not None:
                results.close()

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
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._watch.wake_fd, zmq.POLLIN)
        poller.poll(_HANDSHAKE_TIMEOUT_MS)
        answer = self._receive_control()
        if answer is None:
            raise WorkerError(f"control {config.control_address}: no scheduler answered within 30 s")
        if isinstance(answer, control.Refused):
            raise WorkerError(f"control {config.control_address}: the scheduler refused: {answer.message}")
        if not isinstance(answer, control.Welcome):
            raise WorkerError(f"control {config.control_address}: unexpected answer {type(answer).__name__}")
        return answer

    def _receive_control(self) -> control.SchedulerMessage | None:
        """The scheduler's next message if there is one. Raises SchedulerGoneError when none can come any more."""
        is_gone = self._watch.is_gone
        if self._control.poll(0):
            return control.decode_scheduler_message(self._control.recv())
        if is_gone:
            raise SchedulerGoneError(f"control {self._config.control_address}: the scheduler is gone")
        return None

    def _execute_plans(
        self, plans: ChannelReader, results: ChannelWriter | None, heartbeat: HeartbeatWriter
    ) -> None:
        def publish(result: StepResult) -> None:
            if results is not None:
                results.send(encode_result(result), _RESULT_TIMEOUT_SECONDS)

        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(plans.socket, zmq.POLLIN)
        poller.register(self._watch.wake_fd, zmq.POLLIN)
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
            is_told = self._control in ready or self._watch.wake_fd in ready
            if is_told and isinstance(self._receive_control(), control.Shutdown):
                return


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
        raise typer.Exit(1 if isinstance(error, SchedulerGoneError) else 2) from error


def main() -> None:
    """Entry point of `draftline-worker`. Exit code 2: cannot start, 1: the scheduler is gone; one line says why."""
    typer.run(_command)


if __name__ == "__main__":
    main()
