"""Every setting of the service, as flags and as fields of the TOML file given by --config; passed on explicitly."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from scheduler_svc.errors import StartupError
from shared_mem.enums import SpeculationMethod


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one service. Counts are tokens, pages or requests; 0 where said means `choose for me`."""

    model: str = ""  # directory, GGUF file or hub id; "" is the embedded SmolLM2-135M-Instruct
    model_name: str = ""  # served name; "" derives it from the model
    dtype: str = "auto"  # auto | float32 | bfloat16 | int8
    device: str = "auto"  # auto | cpu | cuda
    listen: str = "127.0.0.1:50051"  # HOST:PORT or unix:PATH; port 0 takes any free one
    speculation: tuple[SpeculationMethod, ...] = (
        SpeculationMethod.NGRAM,
    )  # loaded methods; the first is the default
    num_draft_tokens: int = 4
    draft_model: str = (
        ""  # directory, GGUF file, hub id, or "layers:N" for the target cut to its first N layers
    )
    page_size: int = 16
    num_pages: int = 0  # 0: from the memory that is free
    max_running_requests: int = 64
    max_queued_requests: int = 1024
    max_batched_tokens: int = 512  # rows of one step, draft rows included
    max_context_tokens: int = 0  # 0: the model's own limit
    draft_in: str = "mixed"  # decode_only | mixed: whether decode rows draft in steps that also prefill
    prefix_cache: bool = True
    num_threads: int = 0  # compute threads of a worker; 0: all cores
    drain_grace_seconds: float = 30.0  # how long live streams may go on after SIGTERM
    runtime_dir: str = ""  # sockets live here; "" makes a private temporary directory
    metrics_listen: str = ""  # HOST:PORT of the Prometheus endpoint; "" is off
    log_level: str = "info"


def load_config(path: Path) -> ServerConfig:
    """Reads a TOML file whose keys are ServerConfig's fields (speculation: a list of labels).

    Raises StartupError naming the file and the field for anything unknown or of the wrong type.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"--config {path}: not valid TOML: {error}") from error
    unknown = sorted(set(raw) - set(ServerConfig.__dataclass_fields__))
    if unknown:
        raise StartupError(f"--config {path}: unknown field {unknown[0]!r}")
    if "speculation" in raw:
        raw["speculation"] = parse_speculation(raw["speculation"])
    try:
        return msgspec.convert(raw, ServerConfig)
    except msgspec.ValidationError as error:
        raise StartupError(f"--config {path}: {error}") from error


def parse_speculation(value: str | list[str]) -> tuple[SpeculationMethod, ...]:
    """`off` or a comma-separated list (or a list) of method labels. Raises StartupError for an unknown one."""
    labels = value.split(",") if isinstance(value, str) else value
    try:
        methods = tuple(SpeculationMethod.from_label(label.strip()) for label in labels)
    except ValueError as error:
        raise StartupError(f"speculation: {error}") from error
    if SpeculationMethod.DISABLED in methods:
        if len(methods) > 1:
            raise StartupError("speculation: 'off' excludes other methods")
        return ()
    if len(set(methods)) != len(methods):
        raise StartupError(f"speculation: a method is named twice in {value!r}")
    return methods


def check(config: ServerConfig) -> ServerConfig:
    """Returns the config if every value is in range. Raises StartupError naming the field, value and limit."""
    minimum = {
        "num_draft_tokens": 1,
        "page_size": 1,
        "num_pages": 0,
        "max_running_requests": 1,
        "max_queued_requests": 1,
        "max_batched_tokens": 1,
        "max_context_tokens": 0,
        "num_threads": 0,
    }
    for field, limit in minimum.items():
        value = getattr(config, field)
        if value < limit:
            raise StartupError(f"{field}: {value} is below {limit}")
    if config.num_draft_tokens > 64:
        raise StartupError(f"num_draft_tokens: {config.num_draft_tokens} is above 64")
    choices = {
        "dtype": ("auto", "float32", "bfloat16", "int8"),
        "device": ("auto", "cpu", "cuda"),
        "draft_in": ("decode_only", "mixed"),
        "log_level": ("debug", "info", "warning", "error"),
    }
    for field, allowed in choices.items():
        value = getattr(config, field)
        if value not in allowed:
            raise StartupError(f"{field}: {value!r} is not one of {', '.join(allowed)}")
    if SpeculationMethod.DRAFT_MODEL in config.speculation and not config.draft_model:
        raise StartupError("speculation draft-model: --draft-model names no model")
    if not 0 <= config.drain_grace_seconds < math.inf:
        raise StartupError(
            f"drain_grace_seconds: {config.drain_grace_seconds} is not a number of seconds from 0 on"
        )
    return config
