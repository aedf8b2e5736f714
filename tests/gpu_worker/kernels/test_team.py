"""The thread team: no CPU while idle, no lost or doubled work, several teams side by side."""

from __future__ import annotations

import threading
import time

import torch

from gpu_worker.kernels.linear import PackedLinear, WeightFormat
from gpu_worker.kernels.native import ThreadTeam
from tests.gpu_worker.kernels.conftest import installed


def small_linear() -> PackedLinear:
    linear = PackedLinear(installed(), WeightFormat.Q8_0, 4096, 64)
    linear.pack_floats(torch.randn(4096, 64, generator=torch.Generator().manual_seed(0)))
    return linear


def test_idle_teams_use_no_cpu() -> None:
    linear, team = small_linear(), ThreadTeam(installed(), 4)
    linear.run(team, torch.ones(2, 64))
    time.sleep(0.05)
    started = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - started < 0.04


def test_thousands_of_calls_with_more_threads_than_cores() -> None:
    """Every output of every call is written, whatever thread came late."""
    linear, x = small_linear(), torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    expected = linear.run(ThreadTeam(installed(), 1), x)
    team = ThreadTeam(installed(), 7)
    for _ in range(400):
        assert torch.equal(linear.run(team, x), expected)


def test_teams_of_several_callers() -> None:
    linear = small_linear()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    expected = linear.run(ThreadTeam(installed(), 1), x)
    failures: list[int] = []

    def call(number: int) -> None:
        team = ThreadTeam(installed(), 2)
        for _ in range(60):
            if not torch.equal(linear.run(team, x), expected):
                failures.append(number)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not failures
    assert not any(caller.is_alive() for caller in callers)


def test_a_team_ends_with_its_last_reference() -> None:
    before = settled_threads()
    team = ThreadTeam(installed(), 5)
    assert settled_threads() == before + 4
    del team
    assert settled_threads() == before


def settled_threads() -> int:
    """Threads of this process; one that was joined may still be counted for a moment."""
    counts = [-1]
    for _ in range(200):
        with open("/proc/self/status", encoding="ascii") as status:
            counts.append(next(int(line.split()[1]) for line in status if line.startswith("Threads:")))
        if len(counts) > 20 and len(set(counts[-20:])) == 1:
            break
        time.sleep(0.002)
    return counts[-1]
