"""The host reads nothing between a step's start and the follow-up's launch, then tokens and lengths, and only once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_worker.drafters import head_drafter_class
from gpu_worker.drafting.base import FollowsWithoutLengths
from gpu_worker.drafting.hidden_state import HiddenStateDrafter
from gpu_worker.drafting.mtp_one import OneTokenDrafter
from gpu_worker.models.base import CausalLM
from gpu_worker.transfers import HostCopy
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from scheduler_svc.messages import Sampling
from shared_mem.enums import SpeculationMethod
from shared_mem.records import StepResult, decode_plan, decode_result, encode_plan, encode_result
from tests.harness.engine import GREEDY, InProcessEngine
from tests.harness.host_reads import host_reads
from tests.harness.tiny_heads import tiny_head

MTP = SpeculationMethod.MTP
MARKS = ("verify", "propose", "head", "catch_up", "follow", "publish")
SEEDED = Sampling(0.8, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 5)
TRUNCATED = Sampling(0.8, 5, 0.9, 0.0, 0.0, 0.0, 1.0, 5)


@pytest.fixture(scope="module")
def target(tiny_model_dir: Path) -> CausalLM:
    """The tiny model in torch."""
    return load_model(resolve_model(str(tiny_model_dir)), "float32", torch.device("cpu"))


class EventfulStep:
    """One engine, whose steps give what happened in them, in order."""

    def __init__(
        self, target: CausalLM, drafter: type[HiddenStateDrafter], kind: str, patch: pytest.MonkeyPatch
    ) -> None:
        heads = {MTP: tiny_head(kind, target)}
        self.engine = InProcessEngine(target, heads=heads, head_drafter=drafter, num_draft_tokens=1)
        self.events: list[str] = []
        head_drafter = self.engine.drafters[MTP]
        self._log("head", heads[MTP], "forward", patch)
        self._log("verify", target, "forward_capturing", patch)
        self._log("propose", head_drafter, "propose", patch)
        self._log("catch_up", head_drafter, "catch_up", patch)
        if isinstance(head_drafter, FollowsWithoutLengths):
            self._log("follow", head_drafter, "follow", patch)

    def _log(self, event: str, owner: object, name: str, patch: pytest.MonkeyPatch) -> None:
        call: Callable[..., object] = getattr(owner, name)

        def logging(*args: object, **kwargs: object) -> object:
            self.events.append(event)
            result = call(*args, **kwargs)
            self.events.append(f"{event} done")
            return result

        patch.setattr(owner, name, logging)

    def step(self) -> list[str]:
        """Runs the next step; what the scheduler does is no part of it."""
        plan = self.engine.scheduler.schedule(0.0)
        assert plan is not None
        plan = decode_plan(encode_plan(plan))
        self.events.clear()
        results: list[StepResult] = []

        def publish(result: StepResult) -> None:
            self.events.append("publish")
            results.append(result)

        with host_reads(self.events.append):
            self.engine.runner.execute(plan, publish)
        self.engine._take(self.engine.scheduler.apply(decode_result(encode_result(results[0]))))
        return list(self.events)


def reads_before(events: list[str], end: str) -> list[str]:
    """What was read before `end`."""
    return [event for event in events[: events.index(end)] if event.split()[0] not in MARKS]


@pytest.mark.parametrize("samplings", [(GREEDY, GREEDY), (SEEDED, SEEDED), (GREEDY, SEEDED)])
@pytest.mark.parametrize("kind", ["mtp", "mtp-published"])
def test_nothing_is_read_before_the_follow_up_was_launched(
    kind: str, samplings: tuple[Sampling, ...], target: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps of several requests, beside a prompt that comes in later too; log-probabilities are read behind."""
    steps = EventfulStep(target, OneTokenDrafter, kind, monkeypatch)
    for number, sampling in enumerate(samplings):
        steps.engine.submit([5 + number, 6, 7], max_tokens=30, sampling=sampling, num_logprobs=number - 1)
    steps.step()
    for number in range(12):
        if number == 5:
            steps.engine.submit(list(range(40, 60)), max_tokens=8, num_prompt_logprobs=0)
        events = steps.step()
        assert reads_before(events, "follow done") == []
        order = [event for event in events if event in MARKS]
        assert order[:6] == ["propose", "verify", "follow", "head", "publish", "catch_up"] or number == 5
        between = events[events.index("follow done") + 1 : events.index("publish")]
        assert between.count("tolist") >= 1, "tokens and lengths"


def test_tokens_and_lengths_are_read_at_once(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the head runs once a step: neither drafting nor what is left behind the publish needs a pass."""
    steps = EventfulStep(target, OneTokenDrafter, "mtp", monkeypatch)
    for number in range(3):
        steps.engine.submit([5 + number, 6, 7], max_tokens=30)
    steps.step()
    for _ in range(6):
        events = steps.step()
        assert events == [
            *("propose", "propose done", "verify", "verify done"),
            *("follow", "head", "head done", "follow done"),
            *("tolist", "publish", "catch_up", "catch_up done"),
        ]


def test_the_usual_drafter_reads_before_it_catches_up(
    target: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the others of these tests would find nothing whatever happened."""
    steps = EventfulStep(target, HiddenStateDrafter, "mtp", monkeypatch)
    steps.engine.submit([5, 6, 7], max_tokens=30)
    steps.step()
    events = steps.step()
    assert "tolist" in reads_before(events, "verify")  # the draft
    assert "tolist" in reads_before(events[events.index("verify done") :], "catch_up")  # what was accepted


def test_truncation_is_read_and_nothing_else(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The known gap: how many candidates are left is a size; still the follow-up does not wait for lengths."""
    steps = EventfulStep(target, OneTokenDrafter, "mtp", monkeypatch)
    steps.engine.submit([5, 6, 7], max_tokens=30, sampling=TRUNCATED)
    steps.step()
    events = steps.step()
    after = events[events.index("verify done") :]
    assert set(reads_before(after, "follow done")) == {"value"}


@pytest.mark.parametrize("inference", [True, False])
def test_reads_are_found(inference: bool) -> None:
    values = torch.arange(4)
    found: list[str] = []
    with torch.inference_mode(inference), host_reads(found.append):
        values.tolist()
        values.max().item()
        values[values > 1]
        values.nonzero()
        values.to("cpu")
        torch.tensor([1], device="cpu")
        assert values[0] == 0
        assert int(values[1])
        values.numpy()
        found.append("allowed from here")
        values.to("cpu", non_blocking=True)
        values.to(torch.float32)
        values[torch.tensor([1])]
        values.index_select(0, torch.tensor([1]))
    expected = ["tolist", "value", "mask as index", "nonzero", "to", "tensor", "value", "value", "numpy"]
    assert found == [*expected, "allowed from here"]


@pytest.mark.parametrize(
    ("method", "num_draft_tokens", "device", "expected"),
    [
        (MTP, 1, "cuda", OneTokenDrafter),
        (MTP, 1, "cpu", HiddenStateDrafter),
        (MTP, 2, "cuda", HiddenStateDrafter),
        (SpeculationMethod.EAGLE3, 1, "cuda", HiddenStateDrafter),
    ],
)
def test_where_it_serves(
    method: SpeculationMethod, num_draft_tokens: int, device: str, expected: type[HiddenStateDrafter]
) -> None:
    assert head_drafter_class(method, num_draft_tokens, torch.device(device)) is expected


def test_only_the_one_token_drafter_follows_without_lengths(target: CausalLM) -> None:
    for drafter, follows in ((OneTokenDrafter, True), (HiddenStateDrafter, False)):
        engine = InProcessEngine(target, heads={MTP: tiny_head("mtp", target)}, head_drafter=drafter)
        assert isinstance(engine.drafters[MTP], FollowsWithoutLengths) is follows


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_host_copy_waits_for_itself_alone() -> None:
    copy = HostCopy(torch.arange(5, device="cuda"))
    assert copy.read() == [0, 1, 2, 3, 4]
