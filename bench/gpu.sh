#!/usr/bin/env bash
# The measured page of a machine with one NVIDIA GPU: stock vLLM and SGLang, an 8B model, and all rivals.
#
#   bench/gpu.sh                                   everything: some two hours on an H100, the servers' starts included
#   MODEL=meta-llama/Llama-3.1-8B-Instruct LIMIT=20 CONCURRENCY='1 4 16 64' bench/gpu.sh
#
# Needed: Linux, an NVIDIA driver, Python >= 3.11 with venv, a C++20 compiler, cmake, ninja, some 60 GB of disk, and access
# to PyPI and to the model. Broken off, it goes on where it was. The page is $OUT/report.html.
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-Qwen/Qwen3-8B}
OUT=${OUT:-build/gpu}
QUESTIONS=${QUESTIONS:-spec-bench}
CONCURRENCY=${CONCURRENCY:-1 2 4 8 16}
LIMIT=${LIMIT:-80}
TOKENS=${TOKENS:-256}
REPEATS=${REPEATS:-1}
PYTHON=${PYTHON:-python3}
VLLM=.venv/gpu-vllm
SGLANG=.venv/gpu-sglang

command -v nvidia-smi > /dev/null || { echo 'error: no NVIDIA driver here (nvidia-smi)' >&2; exit 2; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'error: Python >= 3.11 is needed' >&2; exit 2; }

install() { # folder, requirement: an environment with an engine and freedraft
    [ -e "$1/done" ] && return
    "$PYTHON" -m venv "$1"
    "$1/bin/pip" install -q "$2"
    "$1/bin/pip" install -q '.[bench]'
    touch "$1/done"
}
install "$VLLM" vllm==0.32.0
install "$SGLANG" sglang==0.5.23
[ -d build/arctic ] || "$VLLM/bin/python" bench/arctic.py build/arctic \
    || echo 'arm suffix will be named as failed: arctic-inference was not built' >&2

mkdir -p "$OUT"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv > "$OUT/gpu.csv"
"$VLLM/bin/freedraft" doctor || true
"$VLLM/bin/freedraft" profile --out "$OUT/profile.yaml" || true

# One server at a time: an engine takes most of the device's memory. bf16 and CUDA graphs, as people serve.
run() { # name, arms...
    local name=$1
    shift
    # shellcheck disable=SC2086
    "$VLLM/bin/python" bench/serve.py --device cuda --dtype bfloat16 --compiled --in-turns --model "$MODEL" \
        --questions $QUESTIONS --concurrency $CONCURRENCY --limit "$LIMIT" --max-tokens "$TOKENS" --repeats "$REPEATS" \
        --sglang-python "$SGLANG/bin/python" --start-limit 1200 --json "$OUT/$name.json" --arms "$@" || failed=1
}
failed=0
run serve-vllm plain sssd ngram suffix
run serve-sglang sglang sglang-sssd sglang-ngram
"$VLLM/bin/python" bench/report.py "$OUT"
exit "$failed"
