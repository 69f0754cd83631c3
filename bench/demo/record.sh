#!/usr/bin/env bash
# Record docs/img/demo.svg: a terminal with `freedraft doctor`, a server, a request without drafts and with, `freedraft top`.
#
#   bench/demo/record.sh          after `make serve && make stop`, on an idle machine; needs node; 3 minutes
#
# In real time, except that no pause is longer than PAUSE seconds: it shortens the starts. The recorder (asciinema) and the
# renderer (svg-term) go to build/record, never into an engine's environment.
set -euo pipefail
cd "$(dirname "$0")/../.."
BIN=$PWD/.venv/vllm/bin OUT=${OUT:-docs/img/demo.svg} TOOLS=build/record PAUSE=2 COLUMNS=108 LINES=30
export PATH=$BIN:$PATH PYTHONPATH=${PYTHONPATH:-$PWD} COLUMNS LINES HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

QUESTION='Write a Python class `Stack` on top of a list, with the methods push, pop, peek, is_empty and size, a docstring '\
'for each method, and a short example of its use.' # the second one of `code` in bench/lib/prompts.json

say() { printf '\e[2m# %s\e[0m\n' "$1"; }

# Show a command as if typed, and run it.
run() {
    printf '\e[1;32m$\e[0m '
    for ((i = 0; i < ${#1}; i++)); do printf '%s' "${1:i:1}"; sleep 0.02; done
    sleep 0.4
    echo
    eval "$1"
    echo
}

scenes() {
    clear
    say "Real time, pauses cut to $PAUSE s. SmolLM2-135M in fp32 on $(nproc) CPU cores: $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1)"
    run 'freedraft doctor'
    sleep 2
    run 'python -m bench.demo.server start > build/record/start.txt      # what make serve runs'
    run "grep -o 'freedraft: .*' build/logs/serve.log"
    run 'python -m bench.demo.server ask "Tell me about tea." > /dev/null      # warm up'
    sleep 2
    clear
    say 'The same request, without drafts and with, each time as a client whose text the server has not seen.'
    say "QUESTION='$QUESTION'"
    run 'python -m bench.demo.server ask "$QUESTION" --plain --max-tokens 160 2>&1 | tee build/record/plain.txt'
    sleep 1
    run 'python -m bench.demo.server ask "$QUESTION" --max-tokens 160 2>&1 | tee build/record/drafted.txt'
    run 'cmp <(head -n -1 build/record/plain.txt) <(head -n -1 build/record/drafted.txt) && echo identical'
    sleep 3
    clear
    run 'for i in 1 2 3; do python -m bench.demo.server ask "$QUESTION" --max-tokens 160; done > build/record/more.txt 2>&1 &'
    sleep 6
    run 'timeout -s KILL 14 freedraft top' 2> /dev/null || true
}

if [[ ${1:-} == scenes ]]; then
    scenes
    exit
fi
[[ -x $BIN/freedraft && -f build/model/config.json ]] || { echo 'error: run make serve && make stop first' >&2; exit 2; }
mkdir -p "$TOOLS"
if [[ ! -x $TOOLS/bin/asciinema ]]; then
    "$BIN/python" -m venv "$TOOLS"
    "$TOOLS/bin/pip" install -q asciinema==2.4.0
fi
[[ -x $TOOLS/node_modules/.bin/svg-term ]] || npm install --silent --no-audit --no-fund --prefix "$TOOLS" svg-term-cli@2.1.1
trap 'python -m bench.demo.server stop' EXIT
"$TOOLS/bin/asciinema" rec --overwrite --quiet --cols "$COLUMNS" --rows "$LINES" -c "bash bench/demo/record.sh scenes" "$TOOLS/raw.cast"
awk -v most="$PAUSE" 'NR == 1 { print; next }
    { now = substr($0, 2) + 0; pause = now - last; last = now; at += pause > most ? most : pause
      sub(/^\[[0-9.]+/, sprintf("[%.6f", at)); print }' "$TOOLS/raw.cast" > "$TOOLS/demo.cast"
"$TOOLS/node_modules/.bin/svg-term" --in "$TOOLS/demo.cast" --out "$OUT" --window --no-cursor --width "$COLUMNS" --height "$LINES"
ls -l "$OUT"
