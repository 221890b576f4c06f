#!/usr/bin/env bash
# Ours beside nanochat: each pretrains depth 12 to its end on all GPUs here, on the same shards, 8 tokens a parameter of
# matrices and head, 32,768 tokens in the vocabulary, bfloat16; then one table. About ten minutes of eight H100s, after
# the text and the tokenizers are made.
#
#     git clone https://github.com/karpathy/nanochat ../nanochat
#     (cd ../nanochat && git checkout a825e63 && uv sync --extra gpu)    # its record of March 2026
#     bash runs/beside.sh ../nanochat
#
# Not run on GPUs so far. nanochat's commands, folders and lines are those of its source from March to July 2026; its
# rewrite of September 2026 has others. Each has a tokenizer of its own, which bits per byte do not depend on. Both are
# measured on the same last shard, whose long documents nanochat crops.
set -euo pipefail
case ${1:---help} in -h | --help) sed -n '2,/^set /{/^#/!d; s/^# \{0,1\}//; p;}' "$0"; exit 0 ;; esac
peer=$(cd "$1" && pwd)
[ -x "$peer/.venv/bin/python" ] || { echo "error: $peer/.venv has no Python: (cd $1 && uv sync --extra gpu)" >&2; exit 2; }
cd "$(dirname "$0")/.."
set --  # or setup.sh would take the folder for an extra
. ./setup.sh
export OMP_NUM_THREADS=1 NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}/beside"
ranks=(--standalone --nproc_per_node="$(nvidia-smi -L | grep -c '^GPU')" -m)
theirs() { (cd "$peer" && env -u PYTHONPATH NANOCHAT_BASE_DIR="$base" .venv/bin/python -m "$@"); }

python -m scripts.dataset --source=climbmix --num_shards=30
python -m scripts.tok_train --data=climbmix --vocab_size=32768
base=$NANOCHAT_BASE_DIR/nanochat
mkdir -p "$base"
ln -sfn "$NANOCHAT_BASE_DIR/data/climbmix" "$base/base_data_climbmix"
theirs scripts.tok_train

torchrun "${ranks[@]}" scripts.base_train --data=climbmix --model_tag=beside --overwrite --depth=12 \
    --target_param_data_ratio=8 --device_batch_size=32 --eval_every=1000000 --eval_tokens=41943040 --sample_every=-1 |
    tee "$NANOCHAT_BASE_DIR/ours.log"
theirs torch.distributed.run "${ranks[@]}" scripts.base_train -- --model-tag=beside --depth=12 \
    --target-param-data-ratio=8 --device-batch-size=32 --eval-every=1000000 --eval-tokens=41943040 --sample-every=-1 \
    --core-metric-every=-1 --save-every=-1 | tee "$base/theirs.log"

# last LOG PATTERN: what \(…\) matches in the last such line
last() { sed -n "s/.*$2.*/\1/p" "$1" | tail -n 1; }
number='\([0-9.,]*\)'
ours=$NANOCHAT_BASE_DIR/ours.log peers=$base/theirs.log
printf '\n| | tokens | bits per byte at the end | tokens/s of the last step |\n| --- | ---: | ---: | ---: |\n'
printf '| %s | %s | %s | %s |\n' \
    ours "$(last "$ours" "steps, $number tokens")" "$(last "$ours" "validation $number bits per byte")" \
    "$(last "$ours" "| $number tok\/s")" \
    nanochat "$(last "$peers" "training tokens: $number")" "$(last "$peers" "Validation bpb: $number")" \
    "$(last "$peers" "tok\/sec: $number")"
