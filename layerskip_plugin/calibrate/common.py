"""`Common`: the options that all searches of `freedraft calibrate` have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option(help="The file to write (JSON).")]
Seed = Annotated[int, typer.Option(help="Random seed.")]


@dataclass(frozen=True, kw_only=True)
class Common:
    data: Annotated[
        list[Path], typer.Argument(help='JSONL files with "prompt", "question", "turns" or "text" in each line.')
    ]
    model: Annotated[Path, typer.Option(help="Hugging Face folder of the model that will be served.")]
    out: Out
    tokens: Annotated[int, typer.Option(help="Calibration tokens, at least 24.")] = 64
    prompts: Annotated[int, typer.Option(help="Prompts of each file; the model answers them.")] = 8
    device: Annotated[str, typer.Option(help="cpu or cuda; auto: the GPUs, if there are any.")] = "auto"
    seed: Seed = 0
