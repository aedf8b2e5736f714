"""An operator changes a running service: the settings show, texts do not change."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from draftline import Client, FailedPreconditionError, InvalidArgumentError
from draftline.admin import SpeculationSettings

from tests.harness.service import Service, leftovers, run_client

PROMPT = [5, 6, 7, 8, 9] * 3


@pytest.fixture(scope="module")
def served(tiny_model_dir: Path) -> Iterator[tuple[Client, Client, str]]:
    """A client of the service, one of its admin address, and that address."""
    before = leftovers()
    with tempfile.TemporaryDirectory(prefix="dl-test-") as directory:
        address = f"unix:{directory}/admin.sock"
        flags = [
            "--model",
            str(tiny_model_dir),
            "--dtype",
            "float32",
            "--page-size",
            "4",
            "--num-pages",
            "2000",
        ]
        flags += ["--speculation", "ngram,draft-model,portfolio", "--draft-model", "layers:1"]
        with (
            Service(*flags, "--admin-listen", address) as running,
            Client(running.address) as client,
            Client(address) as admin,
        ):
            yield client, admin, address
    assert leftovers() <= before


def test_settings_change_while_a_text_is_written(served: tuple[Client, Client, str]) -> None:
    client, admin, _ = served
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 300, "ignore_eos": True, "token_ids": True}
    plain = client.generate(PROMPT, speculation="off", **options).completion()
    changes = [
        {"method": "off"},
        {"method": "portfolio", "max_draft_tokens": 2},
        {"disable_at_batch_size": 1},
        {"method": "draft-model", "disable_at_batch_size": 0},
        {"method": "ngram", "max_draft_tokens": 4},
    ]
    try:
        for default in ("portfolio", "ngram"):
            admin.set_speculation(method=default)
            ids: list[int] = []
            pending = list(changes)
            with client.generate(PROMPT, speculation_steps=True, **options) as stream:
                for event in stream:
                    ids += getattr(event, "token_ids", ())
                    if pending and len(ids) > 20 * (len(changes) - len(pending) + 1):
                        change = admin.set_speculation(**pending[0])
                        assert set(pending[0].items()) <= {
                            (name, getattr(change.settings, name)) for name in pending[0]
                        }
                        pending.pop(0)
                        assert client.server_info().speculation == change.settings
            assert not pending
            assert tuple(ids) == plain.token_ids
    finally:
        admin.set_speculation(method="ngram", max_draft_tokens=4, disable_at_batch_size=0)


def test_off_by_default_drafts_nothing(served: tuple[Client, Client, str]) -> None:
    client, admin, _ = served
    try:
        admin.set_speculation(method="off")
        options = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
        assert client.generate(PROMPT, **options).completion().speculation is None
        asked = client.generate(PROMPT, speculation="ngram", **options).completion().speculation
        assert asked is not None
        assert asked.method == "ngram"
    finally:
        admin.set_speculation(method="ngram")


def test_refusals_change_nothing(served: tuple[Client, Client, str]) -> None:
    client, admin, _ = served
    before = client.server_info().speculation
    assert before == SpeculationSettings("ngram", 4, 0)
    with pytest.raises(FailedPreconditionError, match="medusa is not loaded") as refused:
        admin.set_speculation(method="medusa", disable_at_batch_size=3)
    assert (refused.value.reason, refused.value.field) == ("PRECONDITION", "method")
    with pytest.raises(InvalidArgumentError) as wrong:
        admin.set_speculation(max_draft_tokens=1000)
    assert wrong.value.field == "max_draft_tokens"
    assert client.server_info().speculation == before


def test_the_command_flushes_the_cache(served: tuple[Client, Client, str]) -> None:
    client, _, address = served
    client.generate(list(range(40, 80)), max_tokens=2).completion()
    cached = client.load().num_cached_pages
    assert cached >= 10
    done = run_client("admin", "flush-cache", "--server", address, "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"num_freed_pages": cached})
    assert client.load().num_cached_pages == 0
