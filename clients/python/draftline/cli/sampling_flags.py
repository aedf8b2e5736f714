"""The sampling and stopping flags that `generate`, `chat` and `bench` share."""

from __future__ import annotations

from typing import Annotated

import typer

Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(min=0, help="Keep the k most likely tokens; 0 is off.")]
TopP = Annotated[float | None, typer.Option(help="Keep the smallest set of this mass.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the most likely one.")]
PresencePenalty = Annotated[float | None, typer.Option(help="Subtracted once from a generated token.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="Subtracted per earlier occurrence.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Divides the logit of seen tokens; 1 is off.")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=BIAS", help="Added to the logit of a token id. Repeatable."),
]
Seed = Annotated[int | None, typer.Option(min=0, help="Same seed, same tokens.")]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Most generated tokens; unset: up to the context limit.")
]
MinTokens = Annotated[int, typer.Option(min=0, help="No end before this many tokens.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Text that ends the output. Repeatable.")
]
StopTokenId = Annotated[
    list[int] | None, typer.Option(min=0, metavar="ID", help="Token id that ends the output. Repeatable.")
]
IncludeStop = Annotated[bool, typer.Option("--include-stop", help="Keep the matched stop in the output.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Run on through the end token.")]
Timeout = Annotated[float | None, typer.Option(metavar="SECONDS", help="Deadline of the whole call.")]


def parse_logit_bias(entries: list[str] | None) -> dict[int, float]:
    """ID=BIAS flags as a mapping. Raises BadParameter naming the entry."""
    bias: dict[int, float] = {}
    for entry in entries or ():
        token_id, separator, value = entry.partition("=")
        try:
            if not separator:
                raise ValueError
            bias[int(token_id)] = float(value)
        except ValueError:
            raise typer.BadParameter(f"{entry!r} is not ID=BIAS", param_hint="--logit-bias") from None
    return bias
