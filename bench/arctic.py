"""Build ArcticInference's suffix decoding, which vLLM's method `suffix` drafts with, from its source on PyPI.

    python bench/arctic.py build/arctic

There are no wheels, and its own build needs CUDA; this part is plain C++. Needed: a C++20 compiler, cmake and ninja,
those beside this Python or others. The folder goes onto PYTHONPATH (bench/serve.py does that by itself), so that
nothing is installed into the environment and the package's own vLLM plugin, which patches the engine, stays away.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from bench.lib.servers import programs_first

VERSION = "0.1.1"  # the one that vLLM 0.32 asks for
NANOBIND = "nanobind==2.9.2"
PART = "suffix_decoding"


def build(target: Path) -> None:
    """Make `target/arctic_inference`. Raises subprocess.CalledProcessError: a step failed; its output was shown."""
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        # pip asks a source archive for its metadata, for which this one imports torch: from here, not a fresh one.
        download = [*pip, "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        subprocess.run([*download, "--dest", name, f"arctic-inference=={VERSION}"], check=True)
        subprocess.run([*pip, "install", "--target", str(work / "tools"), NANOBIND], check=True)
        with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
        source = next(path for path in work.glob("arctic_inference-*") if path.is_dir())
        package = work / "built" / "arctic_inference"
        shutil.copytree(source / "arctic_inference" / PART, package / PART)
        (package / "__init__.py").write_text("")
        environment = programs_first(os.environ) | {"PYTHONPATH": str(work / "tools")}
        configure = ["cmake", "-G", "Ninja", "-S", str(source / "csrc" / PART), "-B", str(work / "build")]
        configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"]
        configure += [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={(package / PART).resolve()}"]
        subprocess.run(configure, check=True, env=environment)
        subprocess.run(["cmake", "--build", str(work / "build")], check=True, env=environment)
        shutil.rmtree(target / package.name, ignore_errors=True)  # only now, so that what is there is whole
        shutil.copytree(package, target / package.name)
    check = f"from arctic_inference.{PART} import SuffixDecodingCache; SuffixDecodingCache(8).start_request(0, [1, 2])"
    subprocess.run([sys.executable, "-c", check], check=True, env=os.environ | {"PYTHONPATH": str(target.resolve())})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path, nargs="?", default=Path("build/arctic"))
    target = parser.parse_args().target
    try:
        build(target)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:  # cmake and ninja are needed
        print(f"error: arctic-inference {VERSION} cannot be built: {error}", file=sys.stderr)
        return 2
    print(f"{target / 'arctic_inference'}: suffix decoding of arctic-inference {VERSION}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
