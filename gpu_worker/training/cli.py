"""draftline-train: synthesize -> extract -> fit -> evaluate."""

from __future__ import annotations

import sys

import typer

from gpu_worker.errors import WorkerError
from gpu_worker.training.commands.evaluate import evaluate
from gpu_worker.training.commands.extract import extract
from gpu_worker.training.commands.fit import fit
from gpu_worker.training.commands.synthesize import synthesize

app = typer.Typer(
    name="draftline-train",
    help="Trains draft heads for a target model, from nothing to a served head.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(synthesize)
app.command()(extract)
app.command()(fit)
app.command()(evaluate)


def main() -> None:
    """Console entry; an expected failure ends with one line on stderr."""
    try:
        app()
    except WorkerError as error:
        sys.exit(f"error: {error}")
    except OSError as error:  # a directory that cannot be made or written
        sys.exit(f"error: {error.filename}: {error.strerror}")


if __name__ == "__main__":
    main()
