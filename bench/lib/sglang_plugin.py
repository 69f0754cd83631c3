"""SGLang on the CPU platform, with functions of a benchmark called in all its processes."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def engine_with(entry: str, model: Path, env: Mapping[str, str], **options: Any) -> Iterator[Any]:
    """A `sglang.Engine`.

    Args:
        entry: "module:function", called where SGLang loads its plugins.
        env: of its processes; options: of the engine.
    """
    from tests.sglang.conftest import sglang_engine

    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / "freedraft_bench-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: freedraft-bench\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nbench = {entry}\n")
        sys.path.insert(0, folder)
        path = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
        try:
            with sglang_engine(model, env={**env, "PYTHONPATH": path}, **options) as engine:
                yield engine
        finally:
            sys.path.remove(folder)
