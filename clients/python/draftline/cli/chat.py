"""`draftline chat`: a conversation in the terminal, with history."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from draftline.cli import common
from draftline.cli import sampling_flags as flags
from draftline.cli.summary import statistics_line
from draftline.cli.terminal import TextWriter
from draftline.client import Client
from draftline.errors import DraftlineError
from draftline.options import GenerateOptions, Message
from draftline.results import Delta

HELP = "/exit ends, /clear forgets the conversation, Ctrl-C ends an answer."


def chat(
    server: common.Server = common.DEFAULT_SERVER,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System turn.")] = None,
    temperature: flags.Temperature = None,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    min_p: flags.MinP = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    seed: flags.Seed = None,
    max_tokens: flags.MaxTokens = None,
    speculation: common.Speculation = None,
    num_draft_tokens: common.NumDraftTokens = None,
    acceptance_rule: common.AcceptanceRule = None,
    timeout: flags.Timeout = None,
) -> None:
    """Talks with the model turn by turn. /exit or Ctrl-D ends; Ctrl-C ends the answer, not the program."""
    options = GenerateOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
        speculation=speculation,
        num_draft_tokens=num_draft_tokens,
        acceptance_rule=acceptance_rule,
        timeout=timeout,
    )
    with common.one_line_failure(), Client(server) as client:
        Conversation(client, options, system).run(interactive=sys.stdin.isatty())


class Conversation:
    """The turns so far and the loop that adds to them."""

    def __init__(self, client: Client, options: GenerateOptions, system: str | None) -> None:
        self._client = client
        self._options = options
        self._opening = [Message("system", system)] if system is not None else []
        self.history = list(self._opening)
        self._writer = TextWriter()

    def run(self, *, interactive: bool) -> None:
        """Reads and answers turns until /exit or the end of input.

        A failed call ends the program (raises DraftlineError) only if nobody sits there to try again.
        """
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - line editing and history for input()
            typer.echo(HELP, err=True)
        while True:
            try:
                text = input("> " if interactive else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                typer.echo(f"\n{HELP}", err=True)
                continue
            if text == "/exit":
                return
            if text == "/clear":
                self.history = list(self._opening)
            elif text:
                try:
                    self.answer(text)
                except DraftlineError as error:
                    if not interactive:
                        raise
                    typer.echo(f"error: {error}", err=True)

    def answer(self, text: str) -> None:
        """Streams the answer to one user turn; both become history, the answer as far as it was told.

        A failed call leaves the history as it was.
        """
        turns = [*self.history, Message("user", text)]
        told: list[str] = []
        try:
            with self._client.chat(turns, self._options) as stream:
                for event in stream:
                    if isinstance(event, Delta):
                        told.append(event.text)
                        self._writer.write(event.text)
                self._writer.end_line()
                typer.echo(statistics_line(stream.completion().samples[0]), err=True)
        except KeyboardInterrupt:  # leaving the `with` has cancelled the request
            self._writer.end_line()
            typer.echo("(stopped)", err=True)
        except DraftlineError:
            self._writer.end_line()
            raise
        self.history = [*turns, Message("assistant", "".join(told))]
