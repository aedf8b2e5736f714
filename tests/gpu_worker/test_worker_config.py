"""The worker's part of the service's settings, from the launcher's JSON and from an operator's TOML."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpu_worker.config import WorkerConfig
from gpu_worker.errors import WorkerError
from gpu_worker.worker import load_worker_config
from scheduler_svc.config import ServerConfig, load_config
from scheduler_svc.errors import StartupError
from shared_mem.enums import SpeculationMethod

EAGLE3, MTP, NGRAM = SpeculationMethod.EAGLE3, SpeculationMethod.MTP, SpeculationMethod.NGRAM


def test_both_forms_say_the_same(tmp_path: Path) -> None:
    config = ServerConfig(
        speculation=(EAGLE3, MTP, NGRAM),
        heads=((EAGLE3, "/heads/e3"),),
        draft_shape="tree",
        max_draft_depth=6,
        eagle3_layer_ids="outputs",
    )
    (tmp_path / "c.json").write_bytes(msgspec.json.encode(config))
    (tmp_path / "c.toml").write_text(
        'speculation = ["eagle3", "mtp", "ngram"]\ndraft_shape = "tree"\nmax_draft_depth = 6\n'
        'eagle3_layer_ids = "outputs"\n'
        '[heads]\neagle3 = "/heads/e3"\n'
    )
    expected = WorkerConfig(
        speculation=config.speculation,
        heads=config.heads,
        draft_shape="tree",
        max_draft_depth=6,
        eagle3_layer_ids="outputs",
        control_address=f"ipc://{tmp_path}/control.sock",
        rank=1,
    )
    for name in ("c.json", "c.toml"):
        assert load_worker_config(tmp_path / name, tmp_path, 1) == expected


@pytest.mark.parametrize(
    ("text", "methods", "heads"),
    [
        ('speculation = "off"', (), ()),
        ('speculation = ["off"]', (), ()),
        ('speculation = "ngram"', (NGRAM,), ()),
        ('speculation = "mtp, ngram"', (MTP, NGRAM), ()),
        ('speculation = [" mtp", "ngram "]', (MTP, NGRAM), ()),
        ('speculation = "mtp"\nheads = ["mtp=/a=b"]', (MTP,), ((MTP, "/a=b"),)),
        ('speculation = "mtp"\n[heads]\nmtp = "/h"', (MTP,), ((MTP, "/h"),)),
        ("", (SpeculationMethod.PORTFOLIO, EAGLE3, NGRAM), ()),
    ],
)
def test_service_and_worker_read_the_same_in_one_file(
    tmp_path: Path,
    text: str,
    methods: tuple[SpeculationMethod, ...],
    heads: tuple[tuple[SpeculationMethod, str], ...],
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    for config in (load_config(path), load_worker_config(path, tmp_path, 0)):
        assert (config.speculation, config.heads) == (methods, heads)


@pytest.mark.parametrize("text", ["speculation = 3", 'speculation = "magic"', "speculation = [['ngram']]"])
def test_bad_methods_are_refused_by_both(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(StartupError, match="speculation: "):
        load_config(tmp_path / "c.toml")
    with pytest.raises(WorkerError, match=f"config {tmp_path}/c.toml: "):
        load_worker_config(tmp_path / "c.toml", tmp_path, 0)


@pytest.mark.parametrize("text", ['heads = "x"', "heads = 3", "[heads]\nmagic = 'x'", "[heads]\nmtp = 3"])
def test_bad_heads_name_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(WorkerError, match=f"config {tmp_path}/c.toml: "):
        load_worker_config(tmp_path / "c.toml", tmp_path, 0)
