"""The demo's datastore: sources and documentation of Python's standard library, which every machine has."""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

# Tests and data tables: half of the library, and unlike the code of chats.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"}


def documents() -> Iterator[str]:
    """Yield each module's source, then the topics of the language reference that `help()` shows."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(library).parts) and path.parent.name != "pydoc_data":
            try:
                yield path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
    yield from topics.values()


def ensure_store(store: Path, model: Path) -> None:
    """Build the datastore with the `freedraft` command, unless a complete one for this model exists."""
    command = [str(Path(sys.executable).with_name("freedraft")), "datastore"]
    verify = [*command, "verify", str(store), "--tokenizer", str(model)]
    verified = subprocess.run(verify, capture_output=True, text=True, check=False)
    if verified.returncode == 0:
        print(f"datastore: {verified.stdout.strip()}")
        return
    print("datastore: from the sources and documentation of Python's standard library", flush=True)
    text = store.with_name(store.name + ".jsonl")
    text.parent.mkdir(parents=True, exist_ok=True)
    with text.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": document}) + "\n" for document in documents())
    build = [*command, "build", str(store), str(text), "--tokenizer", str(model), "--force", "--quiet"]
    built = subprocess.run(build, check=True, stdout=subprocess.PIPE, text=True)
    print(built.stdout.strip())
