"""Stores that somebody has tampered with: each must be refused in one line, or draft harmlessly; none may crash.

    python bench/fuzz_datastore.py [--stores 1000] [--seed 0] [--json OUT]

Bytes, sizes, numbers and manifests are changed at random, mostly with checksums that are right again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib.fuzz import fuzz
from bench.lib.results import write_json


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stores", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    counts, wrong = fuzz(arguments.stores, arguments.seed)
    result = {"stores": arguments.stores, "seed": arguments.seed, "ended": counts, "wrong": wrong}
    print(json.dumps(result, indent=1))
    write_json(arguments.json, result)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
