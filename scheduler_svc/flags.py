"""The command line of `draftline-server`: each field of ServerConfig as a flag, over a TOML file's values."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from scheduler_svc.config import ServerConfig, check, load_config, parse_heads, parse_speculation
from scheduler_svc.errors import StartupError


class Role(enum.StrEnum):
    """Which parts a launcher starts."""

    ALL = "all"
    SCHEDULER = "scheduler"
    FRONTEND = "frontend"


@dataclass(frozen=True)
class Launch:
    """A parsed command line."""

    config: ServerConfig
    role: Role


def parse(arguments: Sequence[str] | None = None) -> Launch | None:
    """The command line (sys.argv's by default); None when it only asked for help, which was printed.

    Raises StartupError with one line that names the flag or field.
    """
    app = typer.Typer(add_completion=False)
    app.command()(_command)
    command = typer.main.get_command(app)
    try:
        result = command.main(
            args=None if arguments is None else list(arguments),
            prog_name="draftline-server",
            standalone_mode=False,
        )
    except typer.Abort as error:
        raise StartupError("aborted") from error
    except Exception as error:
        # typer brings its own copy of click; its usage errors share nothing importable but this method.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        raise StartupError(" ".join(str(message()).split())) from error
    return result if isinstance(result, Launch) else None


def _command(
    model: Annotated[
        str | None, typer.Option(help="Directory, GGUF file or hub id; unset serves the embedded model.")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Served name; unset derives it from the model.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or int8.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT (port 0: any free one) or unix:PATH.")] = None,
    admin_listen: Annotated[
        str | None, typer.Option(help="HOST:PORT or unix:PATH of AdminService; unset is off.")
    ] = None,
    speculation: Annotated[
        str | None,
        typer.Option(
            help="off, or a list of ngram, draft-model, eagle, eagle3, mtp, medusa, portfolio (all others of the "
            "list together); the first is the default."
        ),
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Draft tokens per step, at most.")] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Directory, GGUF file, hub id, or layers:N of the target. Unset: the one that ships for the embedded "
            "model."
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD=PATH",
            help="Weights of a drafting head (eagle, eagle3, mtp, medusa); repeatable. Unset: the head that ships "
            "for the embedded model.",
        ),
    ] = None,
    eagle3_layer_ids: Annotated[
        str | None,
        typer.Option(
            help="What the layer ids in a published EAGLE-3 head's config.json name: inputs of layers (as the original "
            "code has it) or outputs (as some trainers write it). Accepts too little: try the other."
        ),
    ] = None,
    draft_shape: Annotated[
        str | None,
        typer.Option(
            help="chain, tree (grown by the draft's probabilities) or fixed-tree: what models and heads draft."
        ),
    ] = None,
    max_draft_depth: Annotated[
        int | None,
        typer.Option(
            help="Levels of a tree and of Medusa's drafts, at most; other chains are as long as they may."
        ),
    ] = None,
    min_draft_probability: Annotated[
        float | None,
        typer.Option(
            help="A draft token is verified only if the chance that it and all before it are right is at least this."
        ),
    ] = None,
    disable_at_batch_size: Annotated[
        int | None, typer.Option(help="Running requests from which on nobody drafts; 0: never.")
    ] = None,
    suffix_store: Annotated[
        bool | None,
        typer.Option(
            "--suffix-store/--no-suffix-store",
            help="n-gram lookup also searches recent outputs of other requests of the same cache salt.",
        ),
    ] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens per KV page.")] = None,
    num_pages: Annotated[int | None, typer.Option(help="KV pages; 0 takes the memory that is free.")] = None,
    max_running_requests: Annotated[int | None, typer.Option(help="Sequences in one batch, at most.")] = None,
    max_queued_requests: Annotated[
        int | None, typer.Option(help="Samples of requests that may wait.")
    ] = None,
    max_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one step, draft tokens included.")
    ] = None,
    max_context_tokens: Annotated[
        int | None, typer.Option(help="Prompt plus completion; 0 is the model's own limit.")
    ] = None,
    draft_in: Annotated[
        str | None, typer.Option(help="decode_only or mixed: whether steps that prefill also draft.")
    ] = None,
    prefix_cache: Annotated[
        bool | None, typer.Option("--prefix-cache/--no-prefix-cache", help="Share pages of equal prefixes.")
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option(help="Compute threads of a worker; 0: all cores.")
    ] = None,
    stream_interval_ms: Annotated[
        float | None, typer.Option(help="Tokens of so many milliseconds travel together; 0: each step alone.")
    ] = None,
    drain_grace_seconds: Annotated[
        float | None, typer.Option(help="How long live streams may go on after SIGTERM.")
    ] = None,
    step_timeout_seconds: Annotated[
        float | None, typer.Option(help="A worker whose step has no result after so long is lost.")
    ] = None,
    runtime_dir: Annotated[
        str | None, typer.Option(help="Where sockets live; unset makes a private directory.")
    ] = None,
    metrics_listen: Annotated[str | None, typer.Option(help="HOST:PORT of the Prometheus endpoint.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of these settings; flags win.")] = None,
    role: Annotated[
        Role, typer.Option(help="Which parts to start; a worker of its own is draftline-worker.")
    ] = Role.ALL,
) -> Launch:
    """Serves a language model over gRPC, with speculative decoding."""
    given: dict[str, Any] = {name: value for name, value in locals().items() if value is not None}
    given.pop("config", None)
    given.pop("role")
    if given.pop("head", None):
        given["heads"] = parse_heads(head or ())
    if speculation is not None:
        given["speculation"] = parse_speculation(speculation)
    return Launch(check(load_config(config, given)), role)
