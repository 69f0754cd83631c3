#!/usr/bin/env bash
# Builds ArcticInference's suffix decoding, which vLLM's method `suffix` drafts with, from its source on PyPI:
#
#   bench/arctic.sh build/arctic                 (PYTHON=... for another than the first `python` on PATH)
#
# There are no wheels, and its own build needs CUDA; this part is plain C++. Needed: a C++20 compiler, cmake and ninja,
# those beside this Python or others. The folder goes onto PYTHONPATH (bench/serve.py does that by itself), so that
# nothing is installed into the environment and the package's own vLLM plugin, which patches the engine, stays away.
set -euo pipefail

VERSION=0.1.1 # the one that vLLM 0.33 asks for
target=$(realpath -m "${1:-build/arctic}")
python=$(command -v "${PYTHON:-python}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'echo "error: arctic-inference $VERSION cannot be built" >&2' ERR
export PATH="$(dirname "$python"):$PATH" PYTHONPATH="$work/tools"
pip() { "$python" -m pip -q --disable-pip-version-check "$@"; }

# pip asks a source archive for its metadata, for which this one imports torch: from here, not a fresh one.
PYTHONPATH='' pip download --no-deps --no-binary :all: --no-build-isolation --dest "$work" "arctic-inference==$VERSION"
PYTHONPATH='' pip install --target "$work/tools" nanobind==2.9.2
tar -xzf "$work"/*.tar.gz -C "$work"
source=$(echo "$work"/arctic_inference-*/)
package=$work/built/arctic_inference
mkdir -p "$package" "$target"
cp -r "$source/arctic_inference/suffix_decoding" "$package/"
touch "$package/__init__.py"
cmake -G Ninja -S "$source/csrc/suffix_decoding" -B "$work/build" -DPython_EXECUTABLE="$python" \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$package/suffix_decoding"
cmake --build "$work/build"
PYTHONPATH="$work/built" "$python" -c '
from arctic_inference.suffix_decoding import SuffixDecodingCache
SuffixDecodingCache(8).start_request(0, [1, 2])'
rm -rf "$target/arctic_inference"
cp -r "$package" "$target/" # only now, so that what is there is whole
echo "$target/arctic_inference: suffix decoding of arctic-inference $VERSION"
