"""`draftline info`: what is served, by whom, and how busy it is."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from draftline.cli import common
from draftline.cli.summary import settings_text, speculation_text, stats_object
from draftline.client import Client
from draftline.errors import UnavailableError
from draftline.info import Load, ModelInfo, ServerInfo
from draftline.retry import NO_RETRY


def info(
    server: common.Server = common.DEFAULT_SERVER,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Deadline of each call.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 unless new requests are taken; for health checks.")
    ] = False,
) -> None:
    """Shows model, limits, drafters, workers and load; exit code 1 unless the service answers."""
    with common.one_line_failure(), Client(server, retry=NO_RETRY) as client:
        health = client.health(timeout=timeout)
        if check and health != "SERVING":
            raise UnavailableError(f"health is {health}")
        model = client.model_info(timeout=timeout)
        service = client.server_info(timeout=timeout)
        load = client.load(timeout=timeout)
    if as_json:
        typer.echo(json.dumps(info_object(health, model, service, load), ensure_ascii=False))
        return
    for name, value in _lines(health, model, service, load):
        typer.echo(f"{name:<14}{value}")


def info_object(health: str, model: ModelInfo, service: ServerInfo, load: Load) -> dict[str, Any]:
    """What `info --json` prints."""
    return {
        "health": health,
        "model": asdict(model),
        "server": {**asdict(service), "start_time": service.start_time.isoformat()},
        "load": {
            **asdict(load),
            "time": load.time.isoformat(),
            "speculation": [stats_object(stats) for stats in load.speculation],
        },
    }


def _heartbeat_text(age: float | None) -> str:
    return "no heartbeat yet" if age is None else f"heartbeat {age:.1f} s ago"


def _lines(health: str, model: ModelInfo, service: ServerInfo, load: Load) -> list[tuple[str, str]]:
    defaults = ", ".join(f"{name} {value:g}" for name, value in model.default_sampling.items())
    lines = [
        ("health", f"{health} ({service.state})"),
        ("version", service.version),
        ("started", service.start_time.isoformat(timespec="seconds")),
        ("model", f"{model.model} ({model.architecture}, {model.dtype}, KV cache {model.kv_cache_dtype})"),
        ("weights", f"{model.model_path} {model.revision}".strip()),
        ("context", f"{model.max_context_tokens} tokens, prompt up to {model.max_prompt_tokens}"),
        ("vocabulary", f"{model.vocab_size} tokens, end: {', '.join(map(str, model.eos_token_ids))}"),
        ("chat template", "yes" if model.has_chat_template else "no"),
        ("sampling", defaults or "greedy unless asked otherwise"),
    ]
    for drafter in model.drafters:
        source = f" {drafter.model_path}" if drafter.model_path else ""
        lines.append(("drafter", f"{drafter.method}{source}, up to {drafter.max_draft_tokens} draft tokens"))
    if not model.drafters:
        lines.append(("drafter", "none"))
    if service.speculation is not None:
        lines.append(("drafting", settings_text(service.speculation)))
    lines += [
        ("worker", f"rank {w.rank}, pid {w.pid}, {w.device}, {_heartbeat_text(w.heartbeat_age)}")
        for w in service.workers
    ]
    lines += [
        ("limits", f"{service.max_running_requests} sequences, {service.max_batched_tokens} tokens per step"),
        (
            "pages",
            f"{service.num_pages} of {service.page_size} tokens: {load.num_used_pages} used, "
            f"{load.num_cached_pages} cached",
        ),
        (
            "requests",
            f"{load.num_running_requests} running, {load.num_waiting_requests} waiting "
            f"({load.num_waiting_tokens} tokens)",
        ),
        (
            "since start",
            f"{load.num_generated_tokens} tokens in {load.num_steps} steps, "
            f"{load.num_preemptions} preemptions, "
            f"{load.num_cached_tokens} of {load.num_prompt_tokens} prompt tokens from the cache",
        ),
    ]
    lines += [("speculation", speculation_text(stats)) for stats in load.speculation]
    return lines
