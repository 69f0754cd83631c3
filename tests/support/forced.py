"""A short run of bench/forced.py, on answers that repeat their prompts."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.models import REPOSITORY

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def forced(engine: str, folder: Path, tokenizer: Path, arms: dict, **environment: str) -> dict:
    """The figures of `arms` by name, with two requests at a time; each answer has been compared with the recorded
    one, or the benchmark fails."""
    texts = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]
    rows = [
        {"prompt": f"{text}. {text}. {i}:", "output": f" {text}. {text}. {text}. {i} {text}"}
        for i, text in enumerate(texts)
    ]
    trace, out = folder / "trace.jsonl", folder / "forced.json"
    trace.write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, "bench/forced.py", "--engine", engine, "--trace", str(trace), "--json", str(out)]
    command += ["--tokenizer", str(tokenizer), "--batches", "2", "--tokens", "20", "--arms"]
    command += [f"{name}={json.dumps(speculative)}" for name, speculative in arms.items()]
    folders = [str(REPOSITORY), os.environ.get("PYTHONPATH", ""), environment.pop("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | environment
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return {name: arm["cells"][0] for name, arm in json.loads(out.read_text())["arms"].items()}
