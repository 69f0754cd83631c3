#!/usr/bin/env bash
# The measured page of a machine with one NVIDIA GPU: stock vLLM and SGLang, an 8B model, and all rivals.
#
#   bench/gpu.sh minutes   about 15: where a step's time goes; kernels; tokens and logits against plain vLLM; speed with
#                          recorded answers (TRACE), on top of a head, too. Parts have limits: none costs another
#   bench/gpu.sh hour      the same with all drafters and SGLang; plain and sssd, served, at 1, 16 and 64 requests
#   bench/gpu.sh           everything, a night: about 18 hours on an H100 by our estimate
#   REPEATS=1 LIMIT=16 CONCURRENCY='1 16 64' bench/gpu.sh      three hours; MODEL=meta-llama/Llama-3.1-8B-Instruct for one
#
# Times are estimates, without installation and download of the model.
#
# Broken off, it goes on with the pass that it was in; what is missing for it is said at the start. The page is
# $OUT/results.md. It says which cells lie within 1 % of the best fixed draft length, and which below plain.
set -euo pipefail
cd "$(dirname "$0")/.."

WHAT=${1:-night}
case $WHAT in
    minutes) ;;
    hour) REPEATS=${REPEATS:-1} LIMIT=${LIMIT:-8} CONCURRENCY=${CONCURRENCY:-1 16 64} QUESTIONS=${QUESTIONS:-long agent quotes} ;;
    night) ;;
    *) echo "error: '$WHAT' is not minutes, hour or night" >&2; exit 2 ;;
esac
MODEL=${MODEL:-Qwen/Qwen3-8B}                  # a folder, or a name that the hub or its cache knows
OUT=${OUT:-build/gpu}
QUESTIONS=${QUESTIONS:-spec-bench long agent quotes}  # also sessions:FILE, and files in Spec-Bench's format
CONCURRENCY=${CONCURRENCY:-1 2 4 8 16 32 64 128 256}
LIMIT=${LIMIT:-40}                             # questions of each group, but eight in all for each request at a time
TOKENS=${TOKENS:-256}
MAX_MODEL_LEN=${MAX_MODEL_LEN:-32768}
REPEATS=${REPEATS:-2}                          # passes of each arm: their spread is on the page
TRACE=${TRACE:-}                               # recorded answers, JSONL with "prompt" and "output", for bench/forced.py
SKIP_SET=${SKIP_SET:-}                         # for layerskip and freedraft, from `freedraft calibrate`; else a search
NO_THINKING='{"enable_thinking": false}'       # else the answers' first tokens are thoughts, whatever is asked
TEMPLATE=${TEMPLATE:-$NO_THINKING}             # arguments of the chat template; those that it does not know do nothing
DISK_GB=${DISK_GB:-60}
PYTHON=${PYTHON:-python3}
VLLM=.venv/gpu-vllm
SGLANG=.venv/gpu-sglang

missing() { echo "missing: $1" >&2; lacks=1; }
lacks=0
DRIVER=580                                     # of CUDA 13, which the engines' wheels are built for
read -r driver < <(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null) || driver=
[ "${driver%%.*}" -ge "$DRIVER" ] 2> /dev/null || missing "an NVIDIA driver >= $DRIVER that works (nvidia-smi: ${driver:-none})"
command -v c++ > /dev/null || missing 'a C++20 compiler (c++), which Triton and the arm suffix need'
command -v nvcc > /dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] \
    || missing 'nvcc (on PATH or in CUDA_HOME/bin), with which SGLang compiles what NGRAM needs'
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
[ -e "$SGLANG/ready" ] || [ "$free" -ge "$DISK_GB" ] || missing "$DISK_GB GB of disk here; $free are free (DISK_GB)"
[ -z "$TRACE" ] || [ -f "$TRACE" ] || missing "the file $TRACE (TRACE)"
[ -z "$SKIP_SET" ] || [ -f "$SKIP_SET" ] || missing "the file $SKIP_SET"
why_no_model() { # nothing is said where it is a folder, in the cache, or to be had from the hub
    [ -f "$MODEL/config.json" ] && return
    local cache=${HF_HOME:-$HOME/.cache/huggingface}/hub/models--${MODEL//\//--}
    compgen -G "$cache/snapshots/*/config.json" > /dev/null && return
    "$PYTHON" - "$MODEL" << 'END'
import os, sys, urllib.error, urllib.parse, urllib.request
hub, token = os.environ.get("HF_ENDPOINT", "https://huggingface.co"), os.environ.get("HF_TOKEN")
home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
kept = os.environ.get("HF_TOKEN_PATH", os.path.join(home, "token"))
if not token and os.path.isfile(kept):
    token = open(kept).read().strip()
headers = {"Authorization": f"Bearer {token}"} if token else {}
address = f"{hub}/{urllib.parse.quote(sys.argv[1])}/resolve/main/config.json"
try:
    request = urllib.request.Request(address, headers=headers)
    urllib.request.urlopen(request, timeout=20).close()
except urllib.error.HTTPError as error:
    gated = "not there, or gated: accept its licence and log in (hf auth login), or set HF_TOKEN"
    print(gated if error.code in (401, 403, 404) else f"the hub answers {error.code}")
except (OSError, ValueError) as error:
    print(f"no such folder, not in the cache, and the hub cannot be reached ({getattr(error, 'reason', error)})")
END
}
if "$PYTHON" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
    headers=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
    [ -f "$headers/Python.h" ] || missing "Python.h in $headers (python3-dev), with which Triton compiles"
    why=$(why_no_model)
    [ -z "$why" ] || missing "the model $MODEL: $why (MODEL)"
    # shellcheck disable=SC2086
    [ "$WHAT" = minutes ] || why=$("$PYTHON" -m bench.lib.questions $QUESTIONS --concurrency $CONCURRENCY 2>&1) \
        || missing "$why (QUESTIONS, CONCURRENCY)"
else
    missing "Python >= 3.11 with venv (PYTHON=$PYTHON)"
fi
[ "$lacks" = 0 ] || { echo 'error: nothing was begun' >&2; exit 2; }

install() { # folder, engine, version: an environment with it, what it compiles with, and freedraft as it is here
    [ "$1/ready" -nt pyproject.toml ] && [ "$1/ready" -nt bench/gpu.sh ] && return
    "$PYTHON" -m venv "$1"
    "$1/bin/pip" install -q "$2==$3" cmake ninja
    "$1/bin/pip" install -q --editable '.[bench,calibrate]' pytest pytest-timeout hypothesis
    "$1/bin/python" -c "import torch, $2; assert torch.cuda.is_available(), 'torch finds no GPU'" \
        || { echo "error: $2 $3 does not run here" >&2; exit 2; }
    touch "$1/ready"
}
install "$VLLM" vllm 0.33.0
[ "$WHAT" = minutes ] || install "$SGLANG" sglang 0.5.23
folder=$MODEL
[ -d "$MODEL" ] || folder=$("$VLLM/bin/hf" download "$MODEL" --exclude 'original/*' | tail -n 1) \
    || { echo "error: the model $MODEL cannot be had whole" >&2; exit 2; }
[ "$WHAT" = minutes ] || [ -d build/arctic/arctic_inference ] || PYTHON="$VLLM/bin/python" bench/arctic.sh build/arctic \
    || echo 'arm suffix will be named as failed: arctic-inference was not built' >&2

failed=0
mkdir -p "$OUT"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv > "$OUT/gpu.csv"
timeout 60 "$VLLM/bin/freedraft" doctor || true
timeout -k 30 480 "$VLLM/bin/python" bench/step_times.py --shape "$folder/config.json" --json "$OUT/step-times.json" || failed=1
limited() { # seconds, of the first 15 minutes only, and a part of them
    [ "$WHAT" != minutes ] || { timeout -k 30 "$@"; return; }
    shift
    "$@"
}
limited 120 "$VLLM/bin/python" bench/kernels.py --json "$OUT/kernels.json" || failed=1
limited 240 "$VLLM/bin/python" -m pytest -q tests/kernels || failed=1
timeout 120 "$VLLM/bin/freedraft" profile --out "$OUT/profile.yaml" --force || true
arms='chain-bf16 tree-bf16'
[ "$WHAT" = minutes ] || arms="$arms auto-bf16 chain auto auto-v1"
# shellcheck disable=SC2086
limited 480 "$VLLM/bin/python" bench/identity.py --model "$folder" --json "$OUT/identity.json" --arms $arms || failed=1
forced() { # engine, python, further options: random weights of the model's shape, answers of any model
    [ -n "$TRACE" ] || { echo "TRACE is not set: nothing is measured with recorded answers on $1" >&2; return; }
    local name=$1 python=$2
    shift 2
    limited 300 "$python" bench/forced.py --engine "$name" --trace "$TRACE" --tokenizer "$folder" --shape "$folder/config.json" \
        --json "$OUT/forced-$name.json" "$@" || failed=1
}
[ "$WHAT" = minutes ] && { forced vllm "$VLLM/bin/python" --rounds 2 --arms plain chain head sssd+head; exit "$failed"; }
forced vllm "$VLLM/bin/python" --batches 1 8 32 128 --rounds 2
forced sglang "$SGLANG/bin/python" --batches 1 8 32 128 --rounds 2

# One server at a time: an engine takes most of the device's memory. bf16 and CUDA graphs, as people serve. Each arm runs
# on the model runner that its users get; plain is stock plain.
run() { # name, arms...
    local name=$1
    shift
    # shellcheck disable=SC2086
    "$VLLM/bin/python" bench/serve.py --device cuda --dtype bfloat16 --compiled --in-turns --model "$MODEL" \
        --questions $QUESTIONS --concurrency $CONCURRENCY --limit "$LIMIT" --max-tokens "$TOKENS" \
        --repeats "$REPEATS" --max-model-len "$MAX_MODEL_LEN" --chat-template-kwargs "$TEMPLATE" \
        --sglang-python "$SGLANG/bin/python" --start-limit 1200 --json "$OUT/$name.json" --arms "$@" && return
    local code=$?
    [ "$code" -lt 128 ] || exit "$code" # broken off
    failed=1
}
fixed() { # engine, draft tokens: sssd that always drafts so many
    echo "{\"engine\": \"$1\", \"method\": \"sssd\", \"num_speculative_tokens\": $2, \"policy\": \"fixed\"}"
}
layers() { # method, draft tokens, window: by the skip set that was given, or by a search while serving
    local how='"selection": "swift"'
[ -z "$SKIP_SET" ] || how="\"skip_set\": \"$SKIP_SET\""
    echo "{\"method\": \"$1\", \"num_speculative_tokens\": $2, \"window\": $3, $how}"
}
if [ "$WHAT" = hour ]; then
    run serve-vllm plain sssd
    run serve-sglang sglang sglang-sssd
    "$VLLM/bin/python" docs/make_results.py "$OUT"
    exit "$failed"
fi
on_gpu='{"method": "ngram_gpu", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}'
run serve-vllm plain ngram "ngram_gpu=$on_gpu" suffix sssd "fixed1=$(fixed vllm 1)" "fixed2=$(fixed vllm 2)" "fixed4=$(fixed vllm 4)" \
    "fixed8=$(fixed vllm 8)" "layerskip=$(layers layerskip 5 2048)" "sssd+layerskip=$(layers sssd+layerskip 5 2048)"
run serve-sglang sglang sglang-ngram sglang-sssd "sglang-fixed4=$(fixed sglang 4)" "sglang-fixed8=$(fixed sglang 8)" \
    "sglang-fixed16=$(fixed sglang 16)"
"$VLLM/bin/python" docs/make_results.py "$OUT"
exit "$failed"
