"""Fixtures for segments, rings and channels: unique names, spawned peers, a look for leftovers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from shared_mem.segment import DEFAULT_DIRECTORY, segment_name

REPOSITORY = Path(__file__).parents[2]
INSTANCE = f"test{os.getpid()}"

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After the last test no segment and no doorbell file of this run is in /dev/shm."""
    yield
    assert not list(DEFAULT_DIRECTORY.glob(f"draftline-{INSTANCE}*"))


_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    """A segment name that no other test uses."""
    return segment_name(f"{INSTANCE}-{next(_numbers)}", "ring")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a peer and wait until it says that it is ready; whatever still runs at the end is killed."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.shared_mem.peer", *map(str, arguments)],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready"), process.communicate()[1]
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
