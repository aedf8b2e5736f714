"""Measures this service side by side with other engines: same prompts, same weights, greedy; one Markdown table.

Each engine lives in a virtual environment of its own (made by --install) and runs there as a child process, alone
on the machine, once per round. The parts are in the folder `peers`, which is what `import peers` finds.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer
from draftline.bench.workload import PromptRow, WorkloadError, read_prompts
from peers.catalogue import PEERS, InstallError, Peer, install, interpreter, versions
from peers.child import Child, started
from peers.machine import machine_facts, multiplies_bfloat16
from peers.report import Outcome, markdown, report_object
from peers.rounds import Setup, run_rounds
from peers.workload import plan

HERE = Path(__file__).resolve().parent
RUNNERS = HERE / "peers"
QUICK = {
    "limit": 2,
    "rounds": 1,
    "batch": "1,2",
    "max_tokens": 16,
    "batch_tokens": 16,
    "batch_prompts": 2,
    "long_tokens": 300,
    "num_long": 1,
}


class PreparationError(Exception):
    """There is nothing to compare, or prompts or weights could not be made ready."""


def measure(
    prompts: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help="Rows {id, category, turns} or {prompt}.")
    ],
    peers: Annotated[str, typer.Option(metavar="NAME,...")] = ",".join(PEERS),
    batch: Annotated[str, typer.Option(metavar="N,...")] = "1,4,16,64",
    rounds: Annotated[int, typer.Option(min=1, help="Figures are medians over rounds.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=2, help="At batch 1, EOS ends an answer sooner.")] = 256,
    batch_tokens: Annotated[int, typer.Option(min=2, help="At larger batches, EOS or not.")] = 128,
    limit: Annotated[int, typer.Option(min=1, help="Prompts at batch 1.")] = 20,
    batch_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts of a larger batch, one group at least.")
    ] = 16,
    long_tokens: Annotated[int, typer.Option(min=1, help="Length of the long prompts.")] = 1500,
    num_long: Annotated[int, typer.Option(min=0, help="Long prompts.")] = 3,
    model: Annotated[str, typer.Option(help="A GGUF file; empty is the embedded one.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="Per engine; 0: all cores.")] = 0,
    server_flags: Annotated[str, typer.Option(help='For draftline-server, e.g. "--dtype int8".')] = "",
    install_missing: Annotated[
        bool, typer.Option("--install", help="Make the environments that are missing.")
    ] = False,
    envs: Annotated[Path, typer.Option(metavar="DIR", help="Environments, checkpoints, logs.")] = Path(
        "~/.cache/draftline/peers"
    ),
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write every measurement here.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A smoke run: 2 prompts, 1 round, few tokens.")] = False,
) -> None:
    """Prints one Markdown table of greedy decoding speed, first tokens and memory."""
    options: dict[str, Any] = {
        "limit": limit, "rounds": rounds, "batch": batch, "max_tokens": max_tokens, "batch_tokens": batch_tokens,
        "batch_prompts": batch_prompts, "long_tokens": long_tokens, "num_long": num_long,
    }  # fmt: skip
    if quick:
        options |= QUICK
    envs = envs.expanduser()
    chosen = _chosen(peers)
    machine = machine_facts()
    rows = read_prompts(prompts)
    pythons, skipped = _interpreters(chosen, envs, install_missing)
    able = [peer for peer in chosen if peer.name in pythons]
    if not able:
        raise PreparationError(f"none of {peers} is installed under {envs}; --install does it")
    setup, repeats = _setup(
        rows, able, options, machine, envs, model=model, threads=threads, flags=server_flags
    )

    def start(peer: Peer) -> AbstractContextManager[Child]:
        command = [str(pythons[peer.name]), str(RUNNERS / peer.script)]
        return started(command, envs / "logs" / f"{peer.name}.log", _child_environment(peer))

    measurements, failures = run_rounds(able, options["rounds"], setup, start, _tell)
    outcome = Outcome(
        peers=[peer.name for peer in chosen],
        skipped=skipped,
        failures=failures,
        measurements=measurements,
        setup=setup,
        machine=machine,
        arguments={"prompts": str(prompts), "model": model, **options},
        environments={peer.environment.name: versions(peer.environment, envs) for peer in able},
        notes=_notes(repeats),
    )
    print(markdown(outcome), flush=True)
    if json_out is not None:
        json_out.write_text(json.dumps(report_object(outcome), indent=1) + "\n", encoding="utf-8")
    if failures:
        raise typer.Exit(1)


def _chosen(names: str) -> list[Peer]:
    unknown = [name for name in names.split(",") if name not in PEERS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(PEERS)}", param_hint="--peers")
    return [PEERS[name] for name in dict.fromkeys(names.split(","))]


def _interpreters(
    peers: Sequence[Peer], envs: Path, install_missing: bool
) -> tuple[dict[str, Path], dict[str, str]]:
    """Each engine's python, and engine -> why it is left out."""
    failed: dict[str, str] = {}  # by environment
    for environment in dict.fromkeys(peer.environment for peer in peers):
        if install_missing and interpreter(environment, envs) is None:
            _tell(f"installing {' '.join(environment.packages)} into {envs / environment.name}")
            try:
                install(environment, envs)
            except InstallError as error:
                _tell(str(error))
                failed[environment.name] = "could not be installed"
    pythons, skipped = {}, {}
    for peer in peers:
        if (python := interpreter(peer.environment, envs)) is not None:
            pythons[peer.name] = python
        else:
            skipped[peer.name] = failed.get(peer.environment.name, "not installed")
            _tell(f"{peer.name}: {skipped[peer.name]}, skipped")
    return pythons, skipped


def _setup(
    rows: Sequence[PromptRow],
    peers: Sequence[Peer],
    options: dict[str, Any],
    machine: dict[str, Any],
    envs: Path,
    *,
    model: str,
    threads: int,
    flags: str,
) -> tuple[Setup, bool]:
    request = {
        "model": model,
        "cache": str(envs),
        "write_checkpoint": any(not peer.reads_gguf for peer in peers),
        "prompts": [
            {"id": row.id, "text": row.text, "chat": not isinstance(row.prompt, str)} for row in rows
        ],
        "num_long": options["num_long"],
        "long_tokens": options["long_tokens"],
    }
    run = subprocess.run(
        [sys.executable, str(RUNNERS / "prepare.py")],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if run.returncode:
        raise PreparationError(f"{RUNNERS / 'prepare.py'} ended with code {run.returncode}")
    prepared = json.loads(run.stdout)
    workload, repeats = plan(
        prepared["prompts"],
        prepared["long"],
        batches=[int(size) for size in options["batch"].split(",")],
        num_single=options["limit"],
        num_batched=options["batch_prompts"],
        single_tokens=options["max_tokens"],
        batch_tokens=options["batch_tokens"],
    )
    setup = Setup(
        workload=workload,
        gguf=prepared["gguf"],
        checkpoint=prepared["checkpoint"],
        eos_token_ids=tuple(prepared["eos_token_ids"]),
        kv_bytes_per_token=prepared["kv_bytes_per_token"],
        threads=threads or machine["cores"],
        dtype="bfloat16" if multiplies_bfloat16(machine) else "float32",
        server_flags=tuple(shlex.split(flags)) + (("--num-threads", str(threads)) if threads else ()),
    )
    return setup, repeats


def _child_environment(peer: Peer) -> dict[str, str]:
    """Our own runner uses speed_table.py beside this script; the others see nothing of ours."""
    return {"PYTHONPATH": str(HERE)} if not peer.environment.packages else {"PYTHONPATH": ""}


def _notes(repeats: bool) -> list[str]:
    return ["Too few prompts: loads repeat those of others, which prefix caches may hold."] if repeats else []


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        typer.run(measure)
    except (PreparationError, WorkloadError) as error:
        sys.exit(f"error: {error}")
