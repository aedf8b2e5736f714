"""The `draftline` command; entry point of the console script. One module per subcommand."""

from __future__ import annotations

import sys

import typer

from draftline.cli import bench, chat, generate, info


def build_app() -> typer.Typer:
    """The command with its subcommands."""
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
    return app


def main() -> None:
    """Runs the command. Exit codes: 0 done, 1 the call failed, 2 wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal of another encoding must not end a stream half-way
    build_app()()
