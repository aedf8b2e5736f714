"""Logs: one JSON line per event, libraries' included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging, structlog
from scheduler_svc import logs
logs.configure("part", "warning")
log = structlog.get_logger()
log.info("left out")
log.warning("kept", text="한\\nline", path=__import__("pathlib").Path("/x"))
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
logging.getLogger("grpc._cython").error("from %s", "a library")
logging.getLogger("noisy").info("left out")
"""

CLOSED = """
import os, structlog
from scheduler_svc import logs
logs.configure("part")
os.close(2)
structlog.get_logger().info("nobody reads this")
print("and yet it goes on")
"""


def test_every_event_is_one_json_line() -> None:
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout == ""
    kept, failed, library = map(json.loads, result.stderr.splitlines())
    assert (kept["event"], kept["level"], kept["process"]) == ("kept", "warning", "part")
    assert (kept["text"], kept["path"]) == ("한\nline", "/x")
    assert "ZeroDivisionError" in failed["exception"]
    assert (library["event"], library["logger"]) == ("from a library", "grpc._cython")


def test_a_closed_stderr_stops_nothing() -> None:
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", CLOSED], cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout == "and yet it goes on\n"
