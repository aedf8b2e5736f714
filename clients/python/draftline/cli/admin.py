"""`draftline admin`: changes a running service, over the address of its --admin-listen."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from draftline.cli import common
from draftline.cli.summary import settings_text
from draftline.client import Client
from draftline.labels import METHODS
from draftline.retry import NO_RETRY

Server = Annotated[
    str,
    typer.Option("--server", metavar="ADDR", help="HOST:PORT or unix:PATH of the service's --admin-listen."),
]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Deadline of the call.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def set_speculation(
    server: Server,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD|off",
            callback=common.one_of(METHODS),
            help="Who drafts for requests that name nobody; must be loaded.",
        ),
    ] = None,
    max_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            "--max-draft-tokens",
            min=1,
            help="Most draft tokens per step, whatever requests ask for.",
        ),
    ] = None,
    disable_at_batch_size: Annotated[
        int | None, typer.Option(min=0, help="Sequences from which on nobody drafts; 0: never.")
    ] = None,
    timeout: Timeout = 10.0,
    as_json: AsJson = False,
) -> None:
    """Changes speculation for steps planned from now on; what is not given stays. Shows what is in force."""
    with common.one_line_failure(), Client(server, retry=NO_RETRY) as client:
        change = client.set_speculation(
            method=method,
            max_draft_tokens=max_draft_tokens,
            disable_at_batch_size=disable_at_batch_size,
            timeout=timeout,
        )
    if as_json:
        typer.echo(json.dumps({**asdict(change.settings), "effective_step": change.effective_step}))
    else:
        typer.echo(f"{settings_text(change.settings)}; from step {change.effective_step} on")


def flush_cache(server: Server, timeout: Timeout = 10.0, as_json: AsJson = False) -> None:
    """Drops the prefix-cache pages that no live request holds."""
    with common.one_line_failure(), Client(server, retry=NO_RETRY) as client:
        num_freed_pages = client.flush_cache(timeout=timeout)
    typer.echo(
        json.dumps({"num_freed_pages": num_freed_pages}) if as_json else f"{num_freed_pages} pages freed"
    )


def build_admin() -> typer.Typer:
    """The subcommand with its own subcommands."""
    app = typer.Typer(help="Change a running service.", no_args_is_help=True)
    app.command("set-speculation")(set_speculation)
    app.command("flush-cache")(flush_cache)
    return app
