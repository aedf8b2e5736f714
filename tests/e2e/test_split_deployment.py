"""Scheduler, frontend and worker started one by one: each can be lost and started again."""

from __future__ import annotations

import time
from pathlib import Path

from draftline import Client

from tests.harness.parts import Parts
from tests.harness.service import leftovers


def _settings(model: Path, directory: Path) -> str:
    return (
        f'model = "{model}"\nlisten = "unix:{directory}/api.sock"\ndtype = "float32"\n'
        'speculation = ["off"]\nnum_pages = 200\nnum_threads = 1\n'
    )


def _answer(address: str) -> list[int]:
    """Tokens of one request; tries again while the service is not there yet."""
    with Client(address) as client:
        until = time.monotonic() + 60
        while client.health() != "SERVING" and time.monotonic() < until:
            time.sleep(0.1)
        stream = client.generate([5, 6, 7], temperature=0, max_tokens=8, ignore_eos=True, token_ids=True)
        return stream.completion().samples[0].token_ids


def test_after_a_killed_scheduler_the_worker_leaves_and_a_new_pair_serves(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    before = leftovers()
    with Parts(tmp_path, _settings(tiny_model_dir, tmp_path)) as parts:
        worker, frontend, scheduler = (parts.start(role) for role in ("worker", "frontend", "scheduler"))
        frontend.wait_for("READY ")
        address = f"unix:{tmp_path}/api.sock"
        tokens = _answer(address)
        assert len(tokens) == 8

        scheduler.part().kill()
        assert worker.process.wait(10) == 1
        errors = [line for line in worker.output().splitlines() if line.startswith("error: ")]
        assert errors == [f"error: control ipc://{tmp_path}/control.sock: the scheduler is gone"]
        assert "Traceback" not in worker.output()
        assert scheduler.process.wait(10) == 1
        assert leftovers() <= before

        parts.start("scheduler")
        new_worker = parts.start("worker")
        new_worker.wait_for("worker attached")
        assert _answer(address) == tokens
    assert leftovers() <= before
