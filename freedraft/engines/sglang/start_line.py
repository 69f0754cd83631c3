"""One line at start: what decides how fast this server answers with drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freedraft.engines.hooks import installed_version
from freedraft.engines.sglang.hooks import DISTRIBUTIONS, TESTED_VERSIONS
from freedraft.engines.start_line import start_line as put_together


def start_line(runner: Any, method: str, backend: str, widths: Sequence[int], *, chains: bool) -> str:
    """Say it of a server whose CUDA graphs are captured, where it has any.

    Args:
        runner: SGLang's ModelRunner; backend: of attention, in steps that verify.
        widths: numbers of nodes per request, root included, that a step may have.
        chains: whether drafts are chains.
    """
    args, version = runner.server_args, installed_version(DISTRIBUTIONS)
    parts = [
        f"overlap scheduling {'off' if args.disable_overlap_schedule else 'on'}",
        f"CUDA graphs {'off' if runner.decode_cuda_graph_runner is None else 'on'}",
        f"attention {backend}",
    ]
    ranks = {"tensor": args.tp_size, "pipeline": args.pp_size, "data": args.dp_size}
    lengths = f"{'chains' if chains else 'trees'} of up to {widths[-1] - 1} draft tokens, {len(widths)} sizes"
    return put_together(method, "SGLang", version, TESTED_VERSIONS, parts, ranks, [lengths])
