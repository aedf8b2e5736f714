"""What the subcommands share: the --server flag, the failure line, the check of labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from draftline.errors import DraftlineError
from draftline.labels import ACCEPTANCE_RULES, METHODS

Server = Annotated[
    str, typer.Option("--server", metavar="ADDR", help="HOST:PORT or unix:PATH of the service.")
]
DEFAULT_SERVER = "127.0.0.1:50051"


@contextmanager
def one_line_failure() -> Iterator[None]:
    """Turns a failed call into one line on stderr and exit code 1."""
    try:
        yield
    except DraftlineError as error:
        fail(error)


def fail(error: DraftlineError) -> None:
    """Prints code, reason, field and message of a failed call on one line; ends with exit code 1."""
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1)


def one_of(labels: dict[str, int]) -> Callable[[str | None], str | None]:
    """A typer callback that lets only these labels pass."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in labels:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(labels)}")
        return value

    return check


Speculation = Annotated[
    str | None,
    typer.Option(
        "--speculation",
        metavar="METHOD|off",
        callback=one_of(METHODS),
        help=f"Who drafts: {', '.join(METHODS)}. Unset: the service's default.",
    ),
]
NumDraftTokens = Annotated[
    int | None, typer.Option("--num-draft-tokens", min=0, help="Most draft tokens per step.")
]
AcceptanceRule = Annotated[
    str | None,
    typer.Option(
        "--acceptance-rule",
        metavar="RULE",
        callback=one_of(ACCEPTANCE_RULES),
        help=f"One of {', '.join(ACCEPTANCE_RULES)}. Unset: coupled.",
    ),
]
