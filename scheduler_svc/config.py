"""Every setting of the service, as flags and as fields of the TOML file given by --config; passed on explicitly."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from scheduler_svc.errors import StartupError
from shared_mem.drafting_defaults import with_drafting_defaults
from shared_mem.enums import SpeculationMethod

HEAD_METHODS = (
    SpeculationMethod.EAGLE,
    SpeculationMethod.MTP,
    SpeculationMethod.MEDUSA,
    SpeculationMethod.EAGLE3,
)
MAX_DRAFT_TOKENS = 64


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one service. Counts are tokens, pages or requests; 0 where said means `choose for me`."""

    model: str = ""  # directory, GGUF file or hub id; "" is the embedded SmolLM2-135M-Instruct
    model_name: str = ""  # served name; "" derives it from the model
    dtype: str = "auto"  # auto | float32 | bfloat16 | int8
    device: str = "auto"  # auto | cpu | cuda
    listen: str = "127.0.0.1:50051"  # HOST:PORT or unix:PATH; port 0 takes any free one
    admin_listen: str = ""  # the same for AdminService; "" is off
    speculation: tuple[SpeculationMethod, ...] = (
        SpeculationMethod.NGRAM,
    )  # loaded methods; the first is the default
    num_draft_tokens: int = 4
    draft_model: str = (
        # directory, GGUF file, hub id, or "layers:N" for the target cut to its first N layers; "": the one that ships
        # for the embedded model
        ""
    )
    # Weights of drafting heads. A loaded method without an entry takes the head that ships for the embedded model.
    heads: tuple[tuple[SpeculationMethod, str], ...] = ()
    eagle3_layer_ids: str = "inputs"  # inputs | outputs: what the layer ids of a published EAGLE-3 head name
    draft_shape: str = "chain"  # chain | tree | fixed-tree: shape of what models and heads draft
    suffix_store: bool = (
        False  # n-gram lookup also searches recent outputs of other requests of the same salt
    )
    max_draft_depth: int = 4  # levels of a tree of drafts and of Medusa's drafts, at most
    min_draft_probability: float = (
        0.2  # of a draft token and all before it being right: else it is not verified
    )
    disable_at_batch_size: int = (
        0  # running sequences from which on nobody drafts, until an operator says else; 0: never
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
    stream_interval_ms: float = 20.0  # tokens of so many milliseconds travel together; 0: each step by itself
    drain_grace_seconds: float = 30.0  # how long live streams may go on after SIGTERM
    step_timeout_seconds: float = 300.0  # a step without a result for so long: its worker hangs and is lost
    runtime_dir: str = ""  # sockets live here; "" makes a private temporary directory
    metrics_listen: str = ""  # HOST:PORT of the Prometheus endpoint; "" is off
    log_level: str = "info"


def load_config(path: Path | None, given: Mapping[str, Any] | None = None) -> ServerConfig:
    """Reads a TOML file whose keys are ServerConfig's fields (speculation: a list of labels; heads: a table).

    given: fields that win over the file's, as ServerConfig has them. Raises StartupError naming the file and the field
    for anything unknown or of the wrong type.
    """
    raw = {} if path is None else _read(path)
    settings = with_drafting_defaults({**raw, **(given or {})})
    try:
        if not isinstance(settings["speculation"], tuple):
            settings["speculation"] = parse_speculation(settings["speculation"])
        if not isinstance(settings.get("heads", ()), tuple):
            settings["heads"] = parse_heads(settings["heads"])
        return msgspec.convert(settings, ServerConfig)
    except msgspec.ValidationError as error:
        raise StartupError(f"--config {path}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"--config {path}: not valid TOML: {error}") from error
    unknown = sorted(set(raw) - set(ServerConfig.__dataclass_fields__))
    if unknown:
        raise StartupError(f"--config {path}: unknown field {unknown[0]!r}")
    return raw


def parse_speculation(value: str | list[str]) -> tuple[SpeculationMethod, ...]:
    """`off` or a comma-separated list (or a list) of method labels. Raises StartupError for an unknown one."""
    labels = value.split(",") if isinstance(value, str) else value
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise StartupError(f"speculation: {value!r} is no list of methods")
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


def parse_heads(
    value: Sequence[str] | Mapping[str, object],
) -> tuple[tuple[SpeculationMethod, str], ...]:
    """`METHOD=PATH` entries, or a table METHOD -> PATH. Raises StartupError for a method that has no head."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = [(label, path) for label, _, path in (entry.partition("=") for entry in value)]
    else:
        raise StartupError(f"heads: {value!r} is no table of METHOD = PATH")
    heads: dict[SpeculationMethod, str] = {}
    for label, path in pairs:
        choices = {method.label: method for method in HEAD_METHODS}
        method = choices.get(label)
        if method is None:
            raise StartupError(f"heads: {label!r} is not one of {', '.join(choices)}")
        if not isinstance(path, str) or not path:
            raise StartupError(f"heads: {label} names no path (METHOD=PATH)")
        if method in heads:
            raise StartupError(f"heads: {label} is named twice")
        heads[method] = path
    return tuple(heads.items())


def check(config: ServerConfig) -> ServerConfig:
    """Returns the config if every value is in range. Raises StartupError naming the field, value and limit."""
    minimum = {
        "num_draft_tokens": 1,
        "max_draft_depth": 1,
        "disable_at_batch_size": 0,
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
    for field in ("num_draft_tokens", "max_draft_depth"):
        if getattr(config, field) > MAX_DRAFT_TOKENS:
            raise StartupError(f"{field}: {getattr(config, field)} is above {MAX_DRAFT_TOKENS}")
    if not 0 <= config.min_draft_probability < 1:
        raise StartupError(
            f"min_draft_probability: {config.min_draft_probability} is not within 0..1, without 1"
        )
    choices = {
        "dtype": ("auto", "float32", "bfloat16", "int8"),
        "device": ("auto", "cpu", "cuda"),
        "draft_in": ("decode_only", "mixed"),
        "draft_shape": ("chain", "tree", "fixed-tree"),
        "eagle3_layer_ids": ("inputs", "outputs"),
        "log_level": ("debug", "info", "warning", "error"),
    }
    for field, allowed in choices.items():
        value = getattr(config, field)
        if value not in allowed:
            raise StartupError(f"{field}: {value!r} is not one of {', '.join(allowed)}")
    if SpeculationMethod.DRAFT_MODEL in config.speculation and not config.draft_model and config.model:
        raise StartupError("speculation draft-model: --draft-model names no model")
    for method, _ in config.heads:
        if method not in config.speculation:
            raise StartupError(f"heads: {method.label} is not among the methods of --speculation")
    if config.speculation == (SpeculationMethod.PORTFOLIO,):
        raise StartupError("speculation portfolio: names no other method that it could combine")
    if not 0 <= config.stream_interval_ms <= 1000:
        raise StartupError(f"stream_interval_ms: {config.stream_interval_ms} is not within 0..1000")
    if not 0 <= config.drain_grace_seconds < math.inf:
        raise StartupError(
            f"drain_grace_seconds: {config.drain_grace_seconds} is not a number of seconds from 0 on"
        )
    if not 1 <= config.step_timeout_seconds < math.inf:
        raise StartupError(
            f"step_timeout_seconds: {config.step_timeout_seconds} is not a number of seconds from 1 on"
        )
    return config
