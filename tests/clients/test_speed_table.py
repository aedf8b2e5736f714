"""The script behind the README's table of speed, without a model: its table, and its handling of a server."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.clients.fake_service import FakeService

SCRIPT = Path(__file__).parents[2] / "clients" / "bench" / "speed_table.py"


@pytest.fixture
def speed_table():
    spec = importlib.util.spec_from_file_location("speed_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_row_per_dtype_load_and_setting(speed_table, service: FakeService, tmp_path: Path, monkeypatch):
    started = []

    @contextlib.contextmanager
    def instead_of_a_server(*arguments):
        started.append(arguments)
        yield service.address

    monkeypatch.setattr(speed_table, "local_server", instead_of_a_server)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    app = typer.Typer()
    app.command()(speed_table.measure)
    flags = ["--prompts", str(tmp_path / "prompts.jsonl"), "--dtypes", "float32,int8", "--rounds", "1"]
    result = CliRunner().invoke(app, [*flags, "--max-tokens", "9", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    lines = [line.strip("|").split("|") for line in result.stdout.splitlines()]
    assert {len(line) for line in lines} == {len(speed_table.COLUMNS)}
    rows = [[cell.strip() for cell in line] for line in lines[2:]]
    methods = ("off", "ngram", "draft-model")
    expected = [[dtype, n, m] for dtype in ("float32", "int8") for n in ("1", "16") for m in methods]
    assert [row[:3] for row in rows] == expected
    assert rows[0][4:7] == ["1.00", "-", "1.00"]
    assert rows[1][5:7] == ["4.00", "3.00"]
    assert [arguments[1] for arguments in started] == ["float32", "int8"]
    assert "ngram,draft-model" in started[0]
    assert set(json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))) == {"float32", "int8"}


def test_a_server_that_does_not_start_is_an_error(speed_table):
    with (
        pytest.raises(speed_table.ServerFailedError, match="ended with code 2"),
        speed_table.local_server("--dtype", "float7"),
    ):
        pass
