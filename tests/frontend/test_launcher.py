"""`draftline-server`'s command line: flags over file, one line and exit code 2 for what cannot work."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler_svc.config import ServerConfig
from scheduler_svc.errors import StartupError
from scheduler_svc.flags import Role, parse
from scheduler_svc.launcher import _parts, main
from scheduler_svc.listen import ListenAddress
from scheduler_svc.runtime_dir import runtime_dir as make_runtime_dir
from shared_mem.enums import SpeculationMethod


@pytest.fixture(autouse=True)
def _keep_this_process_logs_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.logs.configure", lambda *_: None)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_without_arguments() -> None:
    launch = parse([])
    assert launch is not None
    assert launch.role == Role.ALL
    drafting = {
        "speculation": (SpeculationMethod.PORTFOLIO, SpeculationMethod.EAGLE3, SpeculationMethod.NGRAM),
        "draft_shape": "tree", "num_draft_tokens": 6, "max_draft_depth": 6, "disable_at_batch_size": 4,
    }  # fmt: skip
    assert launch.config == ServerConfig(**drafting), "the embedded model has a head of its own"


@pytest.mark.parametrize("arguments", [["--model", "m"], ["--speculation", "ngram"]])
def test_lookup_alone_drafts_for_other_models(arguments: list[str]) -> None:
    launch = parse(arguments)
    assert launch is not None
    assert replace(launch.config, model="") == ServerConfig()


def test_every_field_is_a_flag() -> None:
    flags = {
        "model": "m", "model_name": "n", "dtype": "int8", "device": "cpu", "listen": "0.0.0.0:1",
        "speculation": "draft-model,ngram,mtp,eagle3", "num_draft_tokens": 3, "draft_model": "layers:2", "page_size": 8,
        "num_pages": 9, "max_running_requests": 10, "max_queued_requests": 11, "max_batched_tokens": 12,
        "max_context_tokens": 13, "draft_in": "decode_only", "num_threads": 1, "drain_grace_seconds": 2.5,
        "runtime_dir": "/run/x", "metrics_listen": "127.0.0.1:2", "log_level": "debug",
        "admin_listen": "unix:/run/x/admin", "draft_shape": "tree", "max_draft_depth": 6,
        "stream_interval_ms": 5.0, "disable_at_batch_size": 12, "min_draft_probability": 0.25,
        "eagle3_layer_ids": "outputs",
        "step_timeout_seconds": 60.0,
    }  # fmt: skip
    assert {*flags, "prefix_cache", "suffix_store", "heads"} == set(ServerConfig.__dataclass_fields__)
    arguments = ["--no-prefix-cache", "--suffix-store", "--head", "mtp=/heads/mtp", "--head", "eagle3=a=b"]
    for name, value in flags.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    launch = parse(arguments)
    assert launch is not None
    eagle3, mtp = SpeculationMethod.EAGLE3, SpeculationMethod.MTP
    methods = (SpeculationMethod.DRAFT_MODEL, SpeculationMethod.NGRAM, mtp, eagle3)
    heads = ((mtp, "/heads/mtp"), (eagle3, "a=b"))
    changes = {"speculation": methods, "prefix_cache": False, "suffix_store": True, "heads": heads}
    assert launch.config == ServerConfig(**{**flags, **changes})


def test_heads_are_a_table_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", 'speculation = ["eagle3", "ngram"]\n[heads]\neagle3 = "/heads/e3"\n')
    launch = parse(["--config", path])
    assert launch is not None
    assert launch.config.heads == ((SpeculationMethod.EAGLE3, "/heads/e3"),)
    launch = parse(["--config", path, "--head", "eagle3=other"])
    assert launch is not None
    assert launch.config.heads == ((SpeculationMethod.EAGLE3, "other"),)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.toml",
        'speculation = ["draft-model"]\ndraft_model = "d"\npage_size = 4\nprefix_cache = false\n',
    )
    launch = parse(["--config", path, "--page-size", "8", "--role", "scheduler"])
    assert launch is not None
    expected = ServerConfig(
        speculation=(SpeculationMethod.DRAFT_MODEL,), draft_model="d", page_size=8, prefix_cache=False
    )
    assert (launch.config, launch.role) == (expected, Role.SCHEDULER)


def test_speculation_off() -> None:
    launch = parse(["--speculation", "off"])
    assert launch is not None
    assert launch.config.speculation == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float16"], "dtype: 'float16' is not one of auto, float32, bfloat16, int8"),
        (["--draft-shape", "bush"], "draft_shape: 'bush' is not one of chain, tree, fixed-tree"),
        (["--max-draft-depth", "0"], "max_draft_depth: 0 is below 1"),
        (["--min-draft-probability", "1"], "min_draft_probability: 1.0 is not within 0..1, without 1"),
        (["--step-timeout-seconds", "0"], "step_timeout_seconds: 0.0 is not a number of seconds from 1 on"),
        (["--max-draft-depth", "65"], "max_draft_depth: 65 is above 64"),
        (["--eagle3-layer-ids", "both"], "eagle3_layer_ids: 'both' is not one of inputs, outputs"),
        (["--head", "mtp=x"], "heads: mtp is not among the methods of --speculation"),
        (["--head", "ngram=x"], "heads: 'ngram' is not one of eagle, mtp, medusa, eagle3"),
        (["--head", "mtp"], "heads: mtp names no path"),
        (["--head", "mtp=a", "--head", "mtp=b"], "heads: mtp is named twice"),
        (["--speculation", "portfolio"], "speculation portfolio: names no other method"),
        (
            ["--listen", "127.0.0.1:0", "--admin-listen", "x"],
            "admin_listen: 'x' is neither HOST:PORT nor unix:",
        ),
        (["--device", "tpu"], "device: 'tpu' is not one of auto, cpu, cuda"),
        (["--page-size", "0"], "page_size: 0 is below 1"),
        (["--page-size", "many"], "Invalid value for '--page-size': "),
        (["--role", "worker"], "Invalid value for '--role': "),
        (["--no-such-flag"], "No such option: --no-such-flag"),
        (["--model"], "Option '--model' requires an argument."),
        (["--speculation", "magic"], "speculation: unknown speculation method 'magic'; one of: "),
        (["--speculation", "ngram,ngram"], "speculation: a method is named twice"),
        (
            ["--model", "m", "--speculation", "draft-model"],
            "speculation draft-model: --draft-model names no model",
        ),
        (["--config", "/no/such.toml"], "--config /no/such.toml: No such file or directory"),
        (["--listen", "localhost"], "listen: 'localhost' is neither HOST:PORT nor unix:PATH"),
        (["--listen", "127.0.0.1:70000"], "listen: 127.0.0.1:70000: port 70000 is above 65535"),
        (["--listen", "::1:80"], "listen: '::1:80' is neither HOST:PORT nor unix:PATH"),
        (["--listen", "unix:"], "listen: 'unix:' names no socket path"),
        (["--listen", "unix:/no/such/dir/x"], "listen: unix:/no/such/dir/x: cannot create a socket in"),
        (["--metrics-listen", "unix:/x"], "metrics_listen: 'unix:/x' is not HOST:PORT"),
        (["--role", "frontend"], "runtime_dir: --role frontend needs --runtime-dir"),
        (["--runtime-dir", "/dev/null/x", "--listen", "127.0.0.1:0"], "runtime_dir: /dev/null/x: Not a dir"),
        (["--runtime-dir", "/tmp/" + "x" * 100, "--listen", "127.0.0.1:0"], "runtime_dir: /tmp/xxx"),
    ],
)
def test_one_line_and_exit_code_2(
    capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.count("\n") == 1
    assert errors.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("pages = 3\n", "unknown field 'pages'"),
        ('page_size = "big"\n', "Expected `int`, got `str` - at `$.page_size`"),
        ("page_size = \n", "not valid TOML"),
        ("page_size = -1\n", "page_size: -1 is below 1"),
        ("heads = 3\n", "heads: 3 is no table of METHOD = PATH"),
        ("[heads]\neagle = 3\n", "heads: eagle names no path"),
        ('[heads]\ndraft-model = "x"\n', "heads: 'draft-model' is not one of"),
    ],
)
def test_bad_files_name_the_field(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
) -> None:
    assert main(["--config", write(tmp_path / "c.toml", content)]) == 2
    errors = capfd.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "--num-draft" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--listen", "--metrics-listen", "--admin-listen"])
def test_a_port_in_use(capfd: pytest.CaptureFixture[str], flag: str) -> None:
    before = set(Path(tempfile.gettempdir()).glob("draftline-*"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert main(["--listen", "127.0.0.1:0", flag, address]) == 2
    field = flag.strip("-").replace("-", "_")
    assert capfd.readouterr().err == f"error: {field}: {address}: address already in use\n"
    assert set(Path(tempfile.gettempdir()).glob("draftline-*")) == before


def test_an_unknown_host(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--listen", "no host:0"]) == 2
    assert capfd.readouterr().err == "error: listen: no host:0: unknown host 'no host'\n"


def test_addresses(runtime_dir: Path) -> None:
    assert ListenAddress.parse("[::1]:50051").host == "::1"
    assert ListenAddress.parse("[::1]:0").with_port(7) == "[::1]:7"
    path = runtime_dir / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(StartupError, match="address already in use"):
            ListenAddress.parse(f"unix:{path}").check_free()
    ListenAddress.parse(f"unix:{path}").check_free()  # left behind by a dead server


def test_parts_of_a_role(runtime_dir: Path) -> None:
    config = ServerConfig(drain_grace_seconds=3)
    parts = _parts(config, Role.ALL, runtime_dir / "c.json", runtime_dir)
    assert [part.module for part in parts] == [
        "scheduler_svc.frontend.process",
        "scheduler_svc.scheduler.process",
        "gpu_worker.worker",
    ]
    assert {part.arguments for part in parts} == {
        ("--config-json", str(runtime_dir / "c.json"), "--runtime-dir", str(runtime_dir))
    }
    for role in (Role.SCHEDULER, Role.FRONTEND):
        (part,) = _parts(config, role, runtime_dir / "c.json", runtime_dir)
        assert part.name == role.value


def test_a_private_directory_is_gone_afterwards() -> None:
    with make_runtime_dir("", "all") as path:
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "file").touch()
    assert not path.exists()


def test_a_given_directory_keeps_what_is_not_ours(runtime_dir: Path) -> None:
    (runtime_dir / "old").touch()
    with make_runtime_dir(str(runtime_dir), "all") as path:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path / "scheduler.sock"))
        with (
            pytest.raises(StartupError, match="is in use by a running service"),
            make_runtime_dir(str(runtime_dir), "all"),
        ):
            pass
        with make_runtime_dir(str(runtime_dir), "frontend"):
            pass
    assert [file.name for file in runtime_dir.iterdir()] == ["old"]


@pytest.mark.parametrize("role", ["all", "scheduler"])
def test_the_end_of_a_scheduler_leaves_a_frontends_sockets_alone(runtime_dir: Path, role: str) -> None:
    theirs, ours = ("api.sock", "admin.sock"), ("scheduler.sock", "control.sock")
    with contextlib.ExitStack() as sockets:
        with make_runtime_dir(str(runtime_dir), role) as path:
            for name in (*theirs, *ours):
                server = sockets.enter_context(socket.socket(socket.AF_UNIX))
                server.bind(str(path / name))
        assert {file.name for file in runtime_dir.iterdir()} == set(theirs)


def test_directories_of_killed_services_are_swept(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(runtime_dir))
    stale, young, foreign = (runtime_dir / f"draftline-{name}" for name in ("stale", "young", "foreign"))
    for path in (stale, young, foreign):
        path.mkdir()
    for path in (stale, young):
        (path / "all.lock").touch()
    hour_ago = time.time() - 3600
    os.utime(stale / "all.lock", (hour_ago, hour_ago))
    with make_runtime_dir("", "all") as living:
        os.utime(living / "all.lock", (hour_ago, hour_ago))
        with make_runtime_dir("", "all"):
            assert living.exists()
    assert not stale.exists()
    assert young.exists()
    assert foreign.exists()


def test_config_survives_json() -> None:
    import msgspec

    config = ServerConfig(
        speculation=(SpeculationMethod.DRAFT_MODEL,), draft_model="d", drain_grace_seconds=2
    )
    data = msgspec.json.encode(config)
    assert msgspec.json.decode(data, type=ServerConfig) == config
    assert json.loads(data)["speculation"] == [2]
