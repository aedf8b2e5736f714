"""Main of the frontend process: settings in, a served port out, an orderly end on SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog
import uvloop

from scheduler_svc import logs
from scheduler_svc.config import ServerConfig
from scheduler_svc.errors import StartupError
from scheduler_svc.frontend.server import FrontendServer

log = structlog.get_logger()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a frontend. Exit code 0 after a drain, 2 when it cannot start (one line on stderr says why)."""
    parser = argparse.ArgumentParser(prog="frontend", description="The gRPC side of a Draftline service.")
    parser.add_argument("--config-json", type=Path, required=True, help="ServerConfig as a JSON file")
    parser.add_argument("--runtime-dir", type=Path, required=True, help="where the scheduler's sockets are")
    parser.add_argument(
        "--ready-fd", type=int, help="gets one JSON line with listen and model once it serves"
    )
    options = parser.parse_args(arguments)
    try:
        config = msgspec.json.decode(options.config_json.read_bytes(), type=ServerConfig)
        logs.configure("frontend", config.log_level)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(config, options.runtime_dir, options.ready_fd))
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


async def _run(config: ServerConfig, runtime_dir: Path, ready_fd: int | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = FrontendServer(config, runtime_dir)
    stopping = asyncio.create_task(stop.wait())
    serving = asyncio.create_task(_serve(server, ready_fd))
    try:
        await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        log.info("draining", grace_seconds=config.drain_grace_seconds)
        await server.drain_and_stop()
    except BaseException:
        await server.stop()
        raise
    finally:
        serving.cancel()
        stopping.cancel()


async def _serve(server: FrontendServer, ready_fd: int | None) -> None:
    """Starts, reports, and goes on until something breaks."""
    await server.start()
    model = await server.wait_serving()
    gc.freeze()  # what is here now stays: full collections need not walk over it
    log.info("serving", listen=server.listen, model=model)
    if ready_fd is not None:
        with os.fdopen(ready_fd, "wb") as pipe:
            pipe.write(msgspec.json.encode({"listen": server.listen, "model": model}) + b"\n")
    await server.wait_failed()


if __name__ == "__main__":
    sys.exit(main())
