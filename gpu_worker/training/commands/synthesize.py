"""draftline-train synthesize: conversations that the target writes itself, or answers to prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpu_worker.config import WorkerConfig
from gpu_worker.engine import build_engine
from gpu_worker.training.batch_generator import BatchGenerator
from gpu_worker.training.chat import ChatTemplate
from gpu_worker.training.commands.options import DATA, Conversations, Meter, Target, Threads
from gpu_worker.training.documents import DocumentPrompts
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.passages import MAX_PASSAGE_CHARS, read_passages
from gpu_worker.training.prompts import read_prompts
from gpu_worker.training.synthesis_settings import SynthesisSettings
from gpu_worker.training.synthesize import Synthesizer

_PAGE_SIZE = 16
_BATCHED_TOKENS = 512


def synthesize(
    model: Target = "",
    conversations: Conversations = DATA / "conversations",
    count: Annotated[
        int,
        typer.Option(min=1, help="Conversations to begin (--quoting adds to them); with prompts: at most."),
    ] = 4096,
    shard_size: Annotated[int, typer.Option(min=1, help="Conversations of one file.")] = 512,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines: messages, ShareGPT, turns or plain text.")
    ] = None,
    documents: Annotated[
        Path | None,
        typer.Option(help="Directory of text, Markdown, HTML and source files that prompts are about."),
    ] = None,
    document_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the conversations that are about documents.")
    ] = 0.5,
    answered_share: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of those whose answer is taken from the document: costs nothing."
        ),
    ] = 0,
    learn_passages: Annotated[
        bool,
        typer.Option(help="Their prompts count as answers too: more to learn from for the same extraction."),
    ] = False,
    max_passage_chars: Annotated[
        int, typer.Option(min=200, help="Length of a document's longest passages: what prompts cost.")
    ] = MAX_PASSAGE_CHARS,
    dtype: Annotated[
        str, typer.Option(help="Precision of the target: what it will be served with.")
    ] = "auto",
    greedy_share: Annotated[
        float, typer.Option(min=0, max=1, help="Of the answers; the others are sampled.")
    ] = 0.6,
    second_turns: Annotated[
        float, typer.Option(min=0, max=1, help="Share that goes on for a second prompt.")
    ] = 0.25,
    openings: Annotated[
        float, typer.Option(min=0, max=1, help="Share of prompts that are led into some kind of task.")
    ] = 0.75,
    quoting: Annotated[
        float, typer.Option(min=0, max=1, help="Share of conversations that a further one quotes from.")
    ] = 0.15,
    max_answer_tokens: Annotated[int, typer.Option(min=1)] = 448,
    batch: Annotated[int, typer.Option(min=1, help="Texts that are written at the same time.")] = 64,
    seed: int = 1,
    threads: Threads = 0,
) -> None:
    """Writes the shards that are missing or too short; others are left alone, so an interrupted run just goes on."""
    if prompts and documents:
        raise TrainingError("--documents: of no use beside --prompts, which gives every prompt already")
    if answered_share and not documents:
        raise TrainingError(
            f"--answered-share: {answered_share}, of no use without --documents to answer from"
        )
    if learn_passages and not answered_share:
        raise TrainingError("--learn-passages: of no use without --answered-share, whose prompts it is about")
    given = read_prompts(prompts.expanduser()) if prompts else None
    about = DocumentPrompts(read_passages(documents.expanduser(), max_passage_chars)) if documents else None
    settings = SynthesisSettings(
        count if given is None else min(count, len(given)),
        shard_size=shard_size,
        seed=seed,
        max_answer_tokens=max_answer_tokens,
        greedy_share=greedy_share,
        second_turn_share=second_turns,
        opening_share=openings,
        quoting_share=quoting,
        document_share=document_share,
        answered_share=answered_share,
        learn_passages=learn_passages,
    )
    context = settings.max_context_tokens
    num_pages = batch * -(-(context + 1) // _PAGE_SIZE)
    engine = build_engine(
        WorkerConfig(
            model=model,
            dtype=dtype,
            speculation=(),
            page_size=_PAGE_SIZE,
            num_pages=num_pages,
            max_running_requests=batch,
            max_context_tokens=context,
            max_batched_tokens=_BATCHED_TOKENS,
            num_threads=threads,
        )
    )
    generator = BatchGenerator(
        engine.runner,
        num_slots=batch,
        page_size=_PAGE_SIZE,
        num_pages=num_pages,
        max_context_tokens=context,
        max_batched_tokens=_BATCHED_TOKENS,
    )
    facts = engine.facts
    synthesizer = Synthesizer(
        generator,
        ChatTemplate(Path(facts.tokenizer_path)),
        frozenset(facts.eos_token_ids),
        settings,
        given,
        about,
        {"model": model, "revision": facts.revision, "dtype": facts.dtype},
    )
    with Meter("synthesize") as meter:

        def report(done: int, tokens: int, seconds: float) -> None:
            note = f"conversations, {tokens} answer tokens, {tokens / seconds:.0f}/s"
            meter.show(done, settings.num_conversations, note)

        tokens = synthesizer.write(conversations.expanduser(), report)
    print(f"{tokens} answer tokens written into {conversations}")
