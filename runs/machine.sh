# What miniseries.sh and scaling_laws.sh have in common; sourced by them. The environment that is active is used, else .venv.
#     DATA      data set; on a CPU the embedded world with a small vocabulary, so that the head does not outweigh the blocks
#     launch    how a script is started here: one process, or one for each GPU
#     model     settings of base_train that fit this machine
#     train     one run of a series, which goes on where it was stopped and is not done again
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || . ./setup.sh
export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}"

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if [ "$gpus" -ge 1 ]; then
    DATA=${DATA:-fineweb-edu}
    launch=(torchrun --standalone --nproc_per_node="$gpus" --max-restarts=3 --shutdown-timeout=300 -m)
    model=(--max_seq_len=2048 --device_batch_size=${ROWS:-16} --total_batch_size=-1 --save_every=1000 --keep_last=1)
    if [ "$DATA" = fineweb-edu ]; then python -m nanochat.dataset --source=fineweb-edu --num_shards="${SHARDS:-100}"; fi
else
    DATA=${DATA:-tinyworld512}
    launch=(python -m)
    # Small steps: what they lose to Python a compiler would not win back in so short a run.
    model=(--max_seq_len=128 --device_batch_size=2 --total_batch_size=256 --eval_tokens=16384 --compile=False --save_every=500 --keep_last=1)
    if [ "$DATA" = tinyworld512 ]; then python -m nanochat.dataset --source=tinyworld --name="$DATA"; fi
fi
if [ ! -e "$NANOCHAT_BASE_DIR/tokenizer/$DATA/tokenizer_nanochat.json" ]; then
    python -m scripts.tok_train --data="$DATA" --vocab_size="$([ "$DATA" = tinyworld512 ] && echo 512 || echo 65536)"
fi

# train TAG --setting=value …: validated at its beginning and end. What is finished and whole is skipped.
train() {
    local tag=$1; shift
    echo; echo "=== $tag"
    python -m nanochat.once "$tag" --needs "tokenizer/$DATA" --makes "base_checkpoints/$tag" -- \
        "${launch[@]}" scripts.base_train --data="$DATA" --model_tag="$tag" --resume=auto --eval_every=1000000000 --sample_every=-1 "${model[@]}" "$@"
}
