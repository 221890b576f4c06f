# The shared part of miniseries.sh and scaling_laws.sh, which source it.
#     DATA      data set; on a CPU the embedded world with a small vocabulary: the head must not outweigh the blocks
#     launch    how a script is started here: one process, or one for each GPU
#     model     settings of base_train that fit this machine
#     train     one run of a series; a stopped run goes on, a finished one is skipped
set -euo pipefail
case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,/^\. /{/^#/!d; s/^# \{0,1\}//; p;}' "$0"; exit 0 ;;
    *) echo "error: $1 is unknown: settings are variables in front, such as DEPTHS=\"2 4\"; --help" >&2; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ./setup.sh
export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}"

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if [ "$gpus" -ge 1 ]; then
    DATA=${DATA:-climbmix}
    launch=(torchrun --standalone --nproc_per_node="$gpus" --max-restarts=3 -m)
    model=(--save_every=1000 --keep_last=1)
    if [ "$DATA" = climbmix ]; then python -m scripts.dataset --source=climbmix --num_shards="${SHARDS:-100}"; fi
else
    DATA=${DATA:-tinyworld512}
    launch=(python -m)
    # Small steps in a short run: compiling would take more time than it saves.
    fits=--device_batch_size=2
    model=(--max_seq_len=128 --total_batch_size=256 --eval_tokens=16384 --compile=False --save_every=500 --keep_last=1)
    if [ "$DATA" = tinyworld512 ]; then python -m scripts.dataset --source=tinyworld --name="$DATA"; fi
fi
if [ ! -e "$NANOCHAT_BASE_DIR/tokenizer/$DATA/tokenizer_nanochat.json" ]; then
    python -m scripts.tok_train --data="$DATA" --vocab_size="$([ "$DATA" = tinyworld512 ] && echo 512 || echo 49152)"
fi

# train TAG --depth=… --setting=value …: validates at the start and end. A finished run is skipped.
train() {
    local tag=$1; shift
    if [ "$gpus" -ge 1 ]; then  # up to 16 rows: a step's batch is a multiple of all ranks' rows
        fits=$(python -m scripts.plan "$1" | grep -e ^--device_batch_size=)
    fi
    python -m scripts.once "${launch[@]}" scripts.base_train --data="$DATA" --model_tag="$tag" --resume=auto $fits \
        --eval_every=1000000000 --sample_every=-1 "${model[@]}" "$@"
}
