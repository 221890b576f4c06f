#!/usr/bin/env bash
# The first minutes on a GPU, in the order of what is most worth knowing; ten at most. Writes one Markdown file for an issue.
#     bash bench/gpu_first_hour.sh                 # gpu_first_hour.md in the base folder; takes one GPU
#     bash bench/gpu_first_hour.sh --rehearse      # the same commands in small, on a CPU: does everything run?
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ./setup.sh dev || exit 1  # named: without it, it would read this script's arguments
page="${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}/gpu_first_hour.md"
mkdir -p "$(dirname "$page")"
machine=(nvidia-smi) slow=1 small=() tiny=() prompts=() tests=(tests/test_gpt.py tests/test_optimizers.py)
case "${1:-}" in
    "") export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" ;;
    --rehearse)
        small=(--device_type=cpu --max_seq_len=128 --device_batch_size=2 --vocab_size=512 --steps=3)
        tiny=(--device_type=cpu --max_seq_len=64 --vocab_size=512) prompts=(--vocab_size=512 --new_tokens=8 --repeats=1 --batch_size=2)
        machine=(uname -a) slow=3 tests=(tests/test_muon.py) ;;
    *) echo "error: $1: expected nothing or --rehearse" >&2; exit 1 ;;
esac
depth() { if [ ${#small[@]} -gt 0 ]; then echo --depth=2; else echo "--depth=$1"; fi; }
failed=0

# part TITLE LIMIT command …: its output, at most LIMIT seconds of it (a CPU has three times as many), as a section of the page.
part() {
    local title=$1 limit=$2 began=$SECONDS status=0; shift 2
    echo "=== $title"
    output=$(timeout $((limit * slow)) "$@" 2>&1) || status=$?
    [ $status -eq 0 ] || failed=$((failed + 1))
    { echo; echo "## $title"; echo; echo "\`$*\`: $((SECONDS - began)) s$([ $status -eq 0 ] || echo ", FAILED with exit code $status")"
      echo; echo '```'; echo "$output" | tail -n 60; echo '```'; } | tee -a "$page"
}

{ echo "# The first minutes on a GPU"; echo; date -u; git log -1 --format='%h %s' 2>/dev/null; } > "$page"
hour=(python -m bench.gpu_first_hour)
part "Machine" 10 "${machine[@]}"
part "Doctor: kernels beside their references, memory" 120 python -m scripts.doctor "$(depth 20)" "${tiny[@]}"
part "Compiled steps, depth 20" 90 "${hour[@]}" "$(depth 20)" "${small[@]}"
part "Compiled steps, depth 12" 60 "${hour[@]}" "$(depth 12)" "${small[@]}"
part "Where a step's time goes, depth 20" 60 "${hour[@]}" --part=profile "$(depth 20)" "${small[@]}"
part "Prompts of 20 new lengths" 50 "${hour[@]}" --part=prefill "$(depth 20)" "${small[@]}"
part "Decoding" 60 python -m bench.engine "$(depth 12)" "${prompts[@]}"
part "fp8, depth 20" 70 "${hour[@]}" --fp8=True "$(depth 20)" "${small[@]}"
part "Model and optimizers beside their references" 70 python -m pytest -q "${tests[@]}"
echo; echo "$page is written in $((SECONDS / 60)) min $((SECONDS % 60)) s; $failed part(s) failed"
