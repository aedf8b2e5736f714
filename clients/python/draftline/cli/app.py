"""Puts the subcommands together; one module each."""

from __future__ import annotations

import typer

from draftline.cli import admin, bench, chat, generate, info


def build_app() -> typer.Typer:
    """The command with its subcommands. Exit codes: 0 done, 1 the call failed, 2 wrong usage."""
    app = typer.Typer(
        help="Talk to a Draftline service.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command("generate")(generate.generate)
    app.command("chat")(chat.chat)
    app.command("info")(info.info)
    app.command("bench")(bench.bench)
    app.add_typer(admin.build_admin(), name="admin")
    return app
