"""Tables of hooks: they name everything that the adapters import from their engine."""

import ast
from pathlib import Path

import pytest

import freedraft.engines.sglang.hooks
import freedraft.engines.vllm.hooks
from freedraft.engines.hooks import Hook

TABLES = {"vllm": freedraft.engines.vllm.hooks, "sglang": freedraft.engines.sglang.hooks}


def imported(engine: str) -> dict[str, Path]:
    """Names that the adapter of an engine imports from it, and a file that does."""
    found = {}
    for file in Path(TABLES[engine].__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == engine:
                found |= {f"{node.module}.{alias.name}": file for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name: file for alias in node.names if alias.name.partition(".")[0] == engine}
    return found


@pytest.mark.parametrize("engine", TABLES)
def test_every_import_from_an_engine_is_in_a_table(engine: str) -> None:
    tables = [table for table in vars(TABLES[engine]).values() if isinstance(table, tuple)]
    known = {hook.name for table in tables for hook in table if isinstance(hook, Hook)}
    missing = {
        name: file.name
        for name, file in imported(engine).items()
        if not any(hook == name or hook.startswith(f"{name}.") for hook in known)
    }
    assert len(known) > 50 and not missing, missing
