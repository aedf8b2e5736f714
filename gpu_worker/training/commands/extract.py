"""draftline-train extract: the target's hidden states and next-token laws of all conversations, to disk."""

from __future__ import annotations

from typing import Annotated

import typer

from gpu_worker.models.heads.config import HeadKind, decoder_head_config
from gpu_worker.training.commands.options import (
    DATA,
    Conversations,
    Features,
    Meter,
    Target,
    Threads,
    serving_target,
)
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.extract import Extractor, ExtractProgress
from gpu_worker.training.features import FeatureMeta
from gpu_worker.weights.resolve import resolve_model


def extract(
    model: Target = "",
    conversations: Conversations = DATA / "conversations",
    features: Features = DATA / "features",
    dtype: Annotated[
        str, typer.Option(help="Precision of the target: what it will be served with.")
    ] = "auto",
    layers: Annotated[
        str,
        typer.Option(
            help="Layers whose outputs are kept, 0-based, comma-separated; empty: EAGLE-3's usual three."
        ),
    ] = "",
    top_k: Annotated[int, typer.Option(min=1, max=64, help="Ids kept of each next-token law.")] = 64,
    rows: Annotated[int, typer.Option(min=1, help="Tokens of one forward pass.")] = 2048,
    threads: Threads = 0,
) -> None:
    """Runs the serving target over the conversations; features of the same conversations are left alone."""
    source = resolve_model(model)
    target, attention = serving_target(source, dtype, threads)
    wanted = _layers(layers)
    config = decoder_head_config(HeadKind.EAGLE3, target.config, feature_layers=wanted or None)
    config.check_fits(target.config, "layers")
    meta = FeatureMeta(
        target=model,
        revision=source.revision,
        precision=target.precision,
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        feature_layers=config.feature_layers,
        top_k=min(top_k, target.config.vocab_size),
    )
    extractor = Extractor(target, attention, meta, rows_per_pass=rows)
    with Meter("extract") as meter:

        def report(done: ExtractProgress) -> None:
            speed = done.tokens / max(done.seconds, 1e-9)
            note = f"shard {done.shard + 1}/{done.num_shards}, {speed:.0f} tokens/s"
            meter.show(done.tokens, done.total_tokens, note)

        def begin(tokens: int, size: int) -> None:
            kept = f"layers {','.join(map(str, meta.feature_layers))}, {meta.bytes_per_token} bytes a token"
            print(f"{kept} and {meta.bytes_per_law} more in answers: {tokens} tokens, {size / 1e9:.2f} GB")

        tokens = extractor.write(conversations.expanduser(), features.expanduser(), report, begin)
    print(f"{tokens} tokens extracted into {features}")


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(layer) for layer in text.split(",") if layer.strip())
    except ValueError as error:
        raise TrainingError(f"--layers: {text!r} is no list of layer numbers") from error
