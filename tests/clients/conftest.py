"""The scripted service, fresh for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.fake_service import FakeService


@pytest.fixture
def service() -> Iterator[FakeService]:
    """A running FakeService."""
    with FakeService() as running:
        yield running
