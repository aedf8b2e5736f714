"""`draftline generate`: one prompt in, the streamed text and a line of statistics out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from draftline.cli import common
from draftline.cli import sampling_flags as flags
from draftline.cli.drafts import DraftPainter
from draftline.cli.summary import completion_object, statistics_line
from draftline.cli.terminal import TextWriter
from draftline.client import Client, GenerationStream
from draftline.options import Chat, GenerateOptions, Message, Prompt
from draftline.results import Completion, Delta


def generate(
    server: common.Server = common.DEFAULT_SERVER,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File (UTF-8) to continue; - is standard input.")
    ] = None,
    chat: Annotated[str | None, typer.Option(metavar="TEXT", help="One user turn to answer.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System turn before --chat.")] = None,
    temperature: flags.Temperature = None,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    min_p: flags.MinP = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    logit_bias: flags.LogitBias = None,
    seed: flags.Seed = None,
    max_tokens: flags.MaxTokens = None,
    min_tokens: flags.MinTokens = 0,
    stop: flags.Stop = None,
    stop_token_id: flags.StopTokenId = None,
    include_stop: flags.IncludeStop = False,
    ignore_eos: flags.IgnoreEos = False,
    speculation: common.Speculation = None,
    num_draft_tokens: common.NumDraftTokens = None,
    acceptance_rule: common.AcceptanceRule = None,
    typical_epsilon: Annotated[float | None, typer.Option(help="Absolute bound of rule typical.")] = None,
    typical_delta: Annotated[float | None, typer.Option(help="Entropy-scaled bound of rule typical.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Probability bound of rule threshold.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Log-probabilities with N alternatives (--json).")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The same for the prompt (--json).")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Number of samples.")] = 1,
    priority: Annotated[int, typer.Option(help="Higher runs first.")] = 0,
    cache_salt: Annotated[str, typer.Option(help="Only equal salts share cached prefixes.")] = "",
    request_id: Annotated[str, typer.Option(help="Id of the request; the service makes one if empty.")] = "",
    special_tokens: Annotated[bool, typer.Option("--special-tokens", help="Keep special tokens.")] = False,
    timeout: flags.Timeout = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour the accepted draft tokens, by drafter.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Generates text and streams it to stdout; the line of statistics goes to stderr."""
    for name, value in (("--logprobs", logprobs), ("--prompt-logprobs", prompt_logprobs)):
        if value is not None and not as_json:
            raise typer.BadParameter("streamed text has no place for them, give --json too", param_hint=name)
    options = GenerateOptions(
        request_id=request_id,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=flags.parse_logit_bias(logit_bias),
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop or (),
        stop_token_ids=stop_token_id or (),
        include_stop=include_stop,
        ignore_eos=ignore_eos,
        speculation=speculation,
        num_draft_tokens=num_draft_tokens,
        acceptance_rule=acceptance_rule,
        typical_epsilon=typical_epsilon,
        typical_delta=typical_delta,
        threshold=threshold,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        token_ids=as_json or show_drafts,
        speculation_steps=show_drafts,
        special_tokens=special_tokens,
        n=n,
        priority=priority,
        cache_salt=cache_salt,
        timeout=timeout,
    )
    wanted = read_prompt(prompt, prompt_file, chat, system)
    with common.one_line_failure(), Client(server) as client, client.generate(wanted, options) as stream:
        if as_json:
            typer.echo(json.dumps(completion_object(stream.completion()), ensure_ascii=False))
        elif n == 1:
            painter = _painter(client, special_tokens) if show_drafts else None
            writer = TextWriter()
            _print_statistics(stream_text(stream, writer, painter), writer)
        else:
            _print_samples(client, stream, show_drafts, special_tokens)


def read_prompt(prompt: str | None, prompt_file: Path | None, chat: str | None, system: str | None) -> Prompt:
    """The one prompt that the flags name. Raises BadParameter unless it is exactly one and readable."""
    if sum(value is not None for value in (prompt, prompt_file, chat)) != 1:
        raise typer.BadParameter("give exactly one of --prompt, --prompt-file and --chat")
    if system is not None and chat is None:
        raise typer.BadParameter("--system goes with --chat only")
    if chat is not None:
        turns = [Message("system", system)] if system is not None else []
        return Chat([*turns, Message("user", chat)])
    if prompt_file is None:
        return prompt or ""
    try:
        if str(prompt_file) == "-":
            return typer.get_text_stream("stdin", encoding="utf-8").read()
        return prompt_file.read_text(encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{prompt_file}: {error.strerror}", param_hint="--prompt-file") from error
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{prompt_file}: not UTF-8: {error}", param_hint="--prompt-file") from error


def stream_text(
    stream: GenerationStream, writer: TextWriter, painter: DraftPainter | None = None
) -> Completion:
    """Writes one sample's text as it comes and ends its line; returns the whole."""
    try:
        for event in stream:
            if isinstance(event, Delta):
                pieces = painter.pieces(event) if painter else [(event.text, None)]
                for piece, drafter in pieces:
                    writer.write(piece, drafter)
    finally:
        writer.end_line()  # also before the line that says why the stream broke off
    return stream.completion()


def _print_statistics(completion: Completion, writer: TextWriter) -> None:
    for sample in completion.samples:
        head = f"[{sample.index}] " if len(completion.samples) > 1 else ""
        typer.echo(head + statistics_line(sample), err=True)
    if writer.legend():
        typer.echo(f"coloured: {writer.legend()}", err=True)


def _print_samples(client: Client, stream: GenerationStream, show_drafts: bool, special_tokens: bool) -> None:
    """Samples arrive interleaved: each is printed whole, in order, when all have ended."""
    painters: dict[int, DraftPainter] = {}
    pieces: dict[int, list[tuple[str, str | None]]] = {}
    for event in stream:
        if isinstance(event, Delta):
            if show_drafts and event.index not in painters:
                painters[event.index] = _painter(client, special_tokens)
            new = painters[event.index].pieces(event) if show_drafts else [(event.text, None)]
            pieces.setdefault(event.index, []).extend(new)
    writer = TextWriter()
    completion = stream.completion()
    for sample in completion.samples:
        writer.write(f"[{sample.index}]\n")
        for piece, drafter in pieces.get(sample.index, ()):
            writer.write(piece, drafter)
        writer.end_line()
    _print_statistics(completion, writer)


def _painter(client: Client, special_tokens: bool) -> DraftPainter:
    return DraftPainter(lambda ids: client.detokenize(ids, special_tokens=special_tokens))
