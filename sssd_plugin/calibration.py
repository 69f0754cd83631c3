"""`freedraft calibrate scorer`: train the learned scorer from a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MIN_PROMPT, MIN_OUTPUT, MAX_OUTPUT = 4, 9, 512


def scorer(
    trace: Annotated[Path, typer.Argument(help='JSONL with "prompt" and "output": real answers of any model.')],
    tokenizer: Annotated[Path, typer.Option(help="Model folder, or its tokenizer.json.")],
    out: Annotated[Path, typer.Option(help="Where to write the weights (JSON).")],
    recorded: Annotated[
        Path | None, typer.Option(help="Answers with logits (bench/record.py), for the weights of recycled logits.")
    ] = None,
) -> None:
    """Train the weights of SSSD's learned scorer. They are for the option "weights".

    Without recorded logits, the weights of recycled logits are the shipped ones.
    """
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from sssd_plugin.scoring.training import train, train_recycled
    from sssd_plugin.scoring.weights import Weights
    from sssd_plugin.trace import Trace, load_recordings

    recordings = load_recordings(recorded) if recorded is not None else []
    loaded = Trace.load(trace, tokenizer)
    rows = [(p, o[:MAX_OUTPUT]) for p, o in loaded.rows if len(p) >= MIN_PROMPT and len(o) >= MIN_OUTPUT]
    if not out.parent.is_dir():
        raise ValueError(f"out: folder {out.parent} does not exist")
    columns = (TextColumn("training"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=1.0)
        values = train(rows, loaded.vocab_size, progress=lambda done: bar.update(task, completed=done))
        recycled = Weights.load().recycled
        if recordings:
            task = bar.add_task("with logits", total=1.0)
            vocab_size = loaded.vocab_size
            recycled = train_recycled(values, recordings, vocab_size, progress=lambda d: bar.update(task, completed=d))
    Weights(values, trace.stem, loaded.sha256, recycled).save(out)
    typer.echo(f"wrote {out}: trained on {len(rows)} answers of {trace}")
