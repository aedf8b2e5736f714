"""The example configuration is one the service takes, and says the truth about defaults."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from scheduler_svc.config import ServerConfig, check, load_config

EXAMPLE = Path(__file__).parents[2] / "deploy" / "draftline.toml"


def test_the_example_loads():
    config = check(load_config(EXAMPLE))
    assert config == load_config(None), "the example documents the defaults"


def test_every_setting_is_in_the_example(tmp_path: Path):
    """Commented-out ones too: with their marks removed the file still loads and holds every field but one."""
    text = re.sub(r"^# (?=[a-z0-9_]+ = )", "", EXAMPLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (tmp_path / "all.toml").write_text(text, encoding="utf-8")
    config = check(load_config(tmp_path / "all.toml"))
    named = set(re.findall(r"^([a-z0-9_]+) = ", text, flags=re.MULTILINE))
    fields = {field.name for field in dataclasses.fields(ServerConfig)}
    assert named == fields - {"runtime_dir"}, "units and containers set runtime_dir by flag"
    assert dataclasses.replace(config, metrics_listen="", admin_listen="") == ServerConfig()
