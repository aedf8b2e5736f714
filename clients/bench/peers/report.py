"""The Markdown table with what belongs under it, and the JSON that holds every measurement."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.catalogue import OURS, OURS_NGRAM
from peers.figures import comparisons, differing, round_figures, summary
from peers.rounds import Measurement, Setup

FORMAT_VERSION = 1
_MIB = 2**20
_DISTURBED = 0.05  # share of the cores that others may use before the report says so


@dataclass
class Outcome:
    """Everything that a report is made from."""

    peers: list[str]  # asked for, in the table's order
    skipped: dict[str, str]  # engine -> why it was not run
    failures: dict[str, str]
    measurements: list[Measurement]
    setup: Setup
    machine: dict[str, Any]
    arguments: dict[str, Any]
    environments: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def batches(self) -> list[int]:
        """Sizes of the loads, in the order they ran."""
        return [load.batch for load in self.setup.workload.loads]


def markdown(outcome: Outcome) -> str:
    """The table, one row per engine asked for, then notes and the machine."""
    columns = _columns(outcome.batches)
    head = ["engine", *(title for _, title, _, _ in columns)]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---', *['---:'] * len(columns)])} |"]
    figures = summary(outcome.measurements)
    for peer in outcome.peers:
        if peer in figures:
            cells = [_cell(figures[peer].get(name), factor, digits) for name, _, factor, digits in columns]
        else:
            reason = outcome.skipped.get(peer) or "failed"
            cells = [reason, *[""] * (len(columns) - 1)]
        lines.append(f"| {' | '.join([peer, *cells])} |")
    return "\n".join([*lines, "", *_notes(outcome)])


def _columns(batches: Sequence[int]) -> list[tuple[str, str, float, int]]:
    """(figure, heading, factor, digits)."""
    columns: list[tuple[str, str, float, int]] = []
    if 1 in batches:
        columns += [("decode", "batch 1, tokens/s", 1, 1), ("ttft", "TTFT ms", 1000, 0)]
    columns += [(f"batch_{n}", f"batch {n}, tokens/s", 1, 1) for n in batches if n > 1]
    return [
        *columns,
        ("long_cold", "long prompt TTFT ms", 1000, 0),
        ("long_warm", "warm prefix TTFT ms", 1000, 0),
        ("memory", "memory MiB", 1 / _MIB, 0),
    ]


def _cell(entry: dict[str, float] | None, factor: float, digits: int) -> str:
    if entry is None:
        return "-"
    value = f"{entry['median'] * factor:.{digits}f}"
    return f"{value} ({entry['ratio']:.2f}×)" if "ratio" in entry else value


def _notes(outcome: Outcome) -> list[str]:
    setup, machine = outcome.setup, outcome.machine
    rounds = 1 + max((m.round for m in outcome.measurements), default=-1)
    notes = [
        f"Greedy; medians of {rounds} interleaved rounds; in brackets the ratio to `{OURS}` within a round."
    ]
    for load in setup.workload.loads:
        end = f"exactly {load.max_tokens}" if load.ignore_eos else f"until EOS or {load.max_tokens}"
        notes.append(f"Batch {load.batch}: {len(load.prompts)} prompts, {end} tokens.")
    if setup.workload.long:
        lengths = [len(row["token_ids"]) for row in setup.workload.long]
        notes.append(
            f"Long prompts: {len(lengths)}, of {min(lengths)} to {max(lengths)} tokens; warm: the same text before"
            " another question."
        )
    notes += [
        f"`{entry['ours']}` against the best peer, {entry['what']}: {entry['times']:.2f} times `{entry['best']}`."
        for entry in comparisons(outcome.measurements, outcome.batches)
    ]
    for batch in outcome.batches:
        if (found := differing(outcome.measurements, OURS_NGRAM, batch)) is not None:
            notes.append(
                f"`{OURS_NGRAM}` at batch {batch}: {found[0]} of {found[1]} texts differ from `{OURS}`."
            )
    otherwise = {m.peer: m.num_tokenized_otherwise for m in outcome.measurements if m.num_tokenized_otherwise}
    for peer, count in otherwise.items():
        notes.append(f"`{peer}`'s own tokenizer gives other ids for {count} prompts; it was given ours.")
    if not otherwise:
        notes.append("Every engine's own tokenizer gives the same ids for every prompt.")
    disturbed = [m for m in outcome.measurements if m.other_load > _DISTURBED * machine["cores"]]
    if disturbed:
        worst = max(m.other_load for m in disturbed)
        notes.append(
            f"DISTURBED: during {len(disturbed)} of {len(outcome.measurements)} measurements other processes kept"
            f" up to {worst:.1f} of {machine['cores']} cores busy."
        )
    gaps = {(m.peer, b): why for m in outcome.measurements for b, why in m.unsupported.items()}
    notes += [f"`{peer}` at batch {batch}: {why}." for (peer, batch), why in gaps.items()]
    notes += [f"`{peer}` failed: {why.splitlines()[0]}" for peer, why in outcome.failures.items()]
    versions = {m.peer: m.version for m in outcome.measurements}
    notes.append("Versions: " + ", ".join(f"{peer} {version}" for peer, version in versions.items()) + ".")
    notes += outcome.notes
    notes.append(
        f"Machine: {machine['cpu']}, {machine['cores']} cores ({', '.join(machine['isa'])}),"
        f" {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}; {setup.threads} threads per engine."
    )
    return [f"- {note}" for note in notes]


def report_object(outcome: Outcome) -> dict[str, Any]:
    """What --json writes; token ids as their number and a digest."""
    setup = outcome.setup
    return {
        "format_version": FORMAT_VERSION,
        "arguments": outcome.arguments,
        "machine": outcome.machine,
        "environments": outcome.environments,
        "skipped": outcome.skipped,
        "failures": outcome.failures,
        "notes": outcome.notes,
        "setup": {
            "gguf": setup.gguf,
            "checkpoint": setup.checkpoint,
            "dtype_of_checkpoint_engines": setup.dtype,
            "threads": setup.threads,
            "server_flags": list(setup.server_flags),
            "max_context": setup.workload.max_context,
            "loads": [
                {
                    "batch": load.batch,
                    "max_tokens": load.max_tokens,
                    "ignore_eos": load.ignore_eos,
                    "prompts": [[row["id"], len(row["token_ids"])] for row in load.prompts],
                }
                for load in setup.workload.loads
            ],
            "long_prompts": [[row["id"], len(row["token_ids"])] for row in setup.workload.long],
        },
        "summary": summary(outcome.measurements),
        "comparisons": comparisons(outcome.measurements, outcome.batches),
        "differing_from_ours": {
            peer: {
                str(batch): found
                for batch in outcome.batches
                if (found := differing(outcome.measurements, peer, batch)) is not None
            }
            for peer in dict.fromkeys(m.peer for m in outcome.measurements)
        },
        "measurements": [_measurement_object(measurement) for measurement in outcome.measurements],
    }


def _measurement_object(measurement: Measurement) -> dict[str, Any]:
    return {
        "peer": measurement.peer,
        "round": measurement.round,
        "version": measurement.version,
        "figures": round_figures(measurement),
        "loads": {
            str(batch): {
                "seconds": load.seconds,
                "answers": [
                    {
                        "tokens": len(answer["token_ids"]),
                        "digest": hashlib.sha256(repr(answer["token_ids"]).encode()).hexdigest()[:12],
                        "time_to_first_token": answer["time_to_first_token"],
                        "seconds": answer["seconds"],
                    }
                    for answer in load.answers
                ],
            }
            for batch, load in measurement.loads.items()
        },
        "unsupported": {str(batch): why for batch, why in measurement.unsupported.items()},
        "long_cold": measurement.long_cold,
        "long_warm": measurement.long_warm,
        "memory": measurement.memory,
        "memory_kind": measurement.memory_kind,
        "num_tokenized_otherwise": measurement.num_tokenized_otherwise,
        "other_load": measurement.other_load,
    }
