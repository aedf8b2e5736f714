"""What is said in Markdown was written to its end."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_no_place_is_left_to_be_filled() -> None:
    """Such as a table that was to be put in once it had been measured."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    unfilled = {
        name: found
        for name in listed
        if (found := re.findall(r"@[A-Z]+@|\bTODO\b|\bTBD\b", (ROOT / name).read_text(encoding="utf-8")))
    }
    assert not unfilled
