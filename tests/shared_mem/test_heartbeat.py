"""Heartbeats: ages grow when a process dies or is stopped, and stay small while it runs."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

import pytest

from shared_mem.errors import SharedMemoryError
from shared_mem.heartbeat import BEAT_SECONDS, HeartbeatReader, HeartbeatWriter
from shared_mem.segment import Segment
from tests.shared_mem.conftest import Spawn


def wait_until(seen: object, seconds: float) -> None:
    assert callable(seen)
    deadline = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_records_say_what_each_rank_wrote(name: str, tmp_path: Path) -> None:
    reader = HeartbeatReader.create(name, 3, tmp_path)
    assert reader.ages() == [math.inf] * 3
    writer = HeartbeatWriter.attach(name, 1, epoch=4, directory=tmp_path)
    writer.beat(17)
    ages = reader.ages()
    assert ages[0] == ages[2] == math.inf
    assert 0 <= ages[1] < 5
    record = reader.records()[1]
    assert (record.pid, record.num_steps, record.epoch) == (os.getpid(), 17, 4)
    writer.beat()
    assert reader.records()[1].num_steps == 17
    writer.close()
    writer.close()
    reader.close()
    reader.close()
    assert not list(tmp_path.iterdir())


def test_the_thread_beats_without_help_and_ends_with_close(name: str, tmp_path: Path) -> None:
    reader = HeartbeatReader.create(name, 1, tmp_path)
    writer = HeartbeatWriter.attach(name, 0, directory=tmp_path)
    youngest = math.inf
    start = time.monotonic()
    while time.monotonic() < start + 2.5 * BEAT_SECONDS:
        (age,) = reader.ages()
        assert age < 4 * BEAT_SECONDS
        if time.monotonic() > start + 1.5 * BEAT_SECONDS:
            youngest = min(youngest, age)
        time.sleep(0.01)
    assert youngest < BEAT_SECONDS / 2
    writer.close()
    time.sleep(1.2 * BEAT_SECONDS)
    assert reader.ages()[0] > 1.1 * BEAT_SECONDS
    reader.close()


def test_ages_grow_while_a_process_is_stopped_and_after_it_is_killed(name: str, spawn: Spawn) -> None:
    reader = HeartbeatReader.create(name, 2)
    processes = [spawn("beat", name, rank, 9) for rank in range(2)]
    assert [r.pid for r in reader.records()] == [p.pid for p in processes]
    assert [(r.num_steps, r.epoch) for r in reader.records()] == [(7, 9), (7, 9)]
    processes[0].send_signal(signal.SIGSTOP)
    processes[1].kill()
    wait_until(lambda: min(reader.ages()) > 2 * BEAT_SECONDS, 10)
    processes[0].send_signal(signal.SIGCONT)
    wait_until(lambda: reader.ages()[0] < BEAT_SECONDS, 10)
    assert reader.ages()[1] > 2 * BEAT_SECONDS
    out, err = processes[0].communicate(timeout=20)
    assert (out, err, processes[0].returncode) == ("", "", 0)
    reader.close()


def test_faults_name_the_segment(name: str, tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryError, match="world size must be at least 1, not 0"):
        HeartbeatReader.create(name, 0, tmp_path)
    with pytest.raises(SharedMemoryError, match="No such file"):
        HeartbeatWriter.attach(name, 0, directory=tmp_path)
    for size, problem in ((64, "too small"), (128, "something else")):
        with Segment.create(name, size, tmp_path), pytest.raises(SharedMemoryError, match=problem):
            HeartbeatWriter.attach(name, 0, directory=tmp_path)
    reader = HeartbeatReader.create(name, 2, tmp_path)
    for rank in (-1, 2):
        with pytest.raises(SharedMemoryError, match=f"no rank {rank} in a world of 2"):
            HeartbeatWriter.attach(name, rank, directory=tmp_path)
    with Segment.attach(name, tmp_path) as attached, attached.buffer.cast("Q") as words:
        words[1] = 9
    with pytest.raises(SharedMemoryError, match="layout version 9, this process speaks 1"):
        HeartbeatWriter.attach(name, 0, directory=tmp_path)
    reader.close()
