#!/usr/bin/env bash
# From an empty machine to a model you can talk to, evaluated at every stage, and its report.
#
#     bash speedrun.sh
#
# It adapts to what it finds: 8 GPUs, one GPU, or a CPU. Run it again after anything went wrong: data and tokenizer are
# kept, and training goes on from its newest checkpoint.
set -euo pipefail
cd "$(dirname "$0")"
. ./setup.sh $(nvidia-smi >/dev/null 2>&1 && echo hub)  # the larger tasks come from the hub
export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}"
started=$SECONDS

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if [ "$gpus" -ge 1 ]; then
    # The public corpus, about 250 million characters a shard; tokens to train on = 20 per parameter.
    data=fineweb-edu shards=240 vocab=65536 depth=20 rows=8 chat=()
    model=(--max_seq_len=2048 --total_batch_size=524288 --save_every=1000 --keep_last=2)
    memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | sort -n | head -1)  # MiB
    if [ "$gpus" -ge 8 ]; then
        launch=(torchrun --standalone --nproc_per_node=8 --max-restarts=3 --shutdown-timeout=300 -m) model+=(--device_batch_size=32)
    else
        # One GPU: a smaller model, and as many rows at a time as its memory holds.
        launch=(python -m) shards=70 depth=12
        if   [ "$memory" -ge 70000 ]; then model+=(--device_batch_size=32)
        elif [ "$memory" -ge 22000 ]; then model+=(--device_batch_size=8)
        else                               model+=(--device_batch_size=4 --activation_checkpointing) rows=4 chat=(--activation_checkpointing)
        fi
    fi
    model+=(--depth=$depth) tag=speedrun-d$depth
    chat+=(--save_every=200 --keep_last=2)
    mid=(--tasks="smoltalk, mmlu, gsm8k, spellingbee[:80000], tinyworld:identity*2" --device_batch_size=$rows --total_batch_size=524288 "${chat[@]}")
    sft=(--tasks="arc:ARC-Easy, arc:ARC-Challenge, gsm8k, smoltalk[:10000], spellingbee[:600], tinyworld:identity" --device_batch_size=4 "${chat[@]}")
    rl=(--task=gsm8k --device_batch_size=4 "${chat[@]}")
    tasks="arc:ARC-Easy, arc:ARC-Challenge, mmlu, gsm8k, humaneval, spellingbee[:256]" problems=-1 core=500
else
    # The embedded world: nothing to download, and a model small enough for minutes on two cores.
    data=tinyworld shards=-1 vocab=8192 tag=speedrun-d4
    launch=(python -m)
    model=(--depth=4 --max_seq_len=256 --device_batch_size=16 --total_batch_size=4096 --num_iterations=700
           --warmdown_ratio=0.6 --eval_every=100 --eval_tokens=65536 --save_every=100 --keep_last=2)
    mid=(--tasks="tinyworld*3, arithmetic[:6000], spellingbee[:9000]" --device_batch_size=16 --total_batch_size=4096
         --eval_every=200 --eval_tokens=65536 --save_every=100 --keep_last=2)
    sft=(--tasks="tinyworld[:4000], arithmetic[6000:9000], arithmetic:quick[:3000], spellingbee[9000:17000]" --device_batch_size=16
         --target_examples_per_step=64 --init_lr_frac=0.3 --eval_every=150 --eval_steps=20 --eval_metrics_every=-1 --save_every=100 --keep_last=2)
    rl=(--task=arithmetic:quick --num_iterations=30 --num_samples=8 --max_new_tokens=60 --device_batch_size=32
        --eval_every=30 --eval_examples=1000 --eval_samples=1 --save_every=10 --keep_last=2)
    tasks="tinyworld:facts, tinyworld:identity, arithmetic, arithmetic:quick, spellingbee" problems=600 core=0
fi

stage() { echo; echo "=== $1 ($(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s)"; }

stage "data: $data"
python -m nanochat.dataset --source="$data" --num_shards="$shards"

stage "tokenizer"
if [ -e "$NANOCHAT_BASE_DIR/tokenizer/$data/tokenizer_nanochat.json" ]; then echo "there already"; else
    python -m scripts.tok_train --data="$data" --vocab_size="$vocab"
fi

stage "base model: training"
"${launch[@]}" scripts.base_train --data="$data" --model_tag="$tag" --resume=auto "${model[@]}"

stage "base model: evaluation"
"${launch[@]}" scripts.base_eval --model_tag="$tag" --core_metric_max_per_task="$core"

# From here on the model learns to converse: each stage begins with the one before it, and is measured on held-out problems.
for name in mid sft rl; do
    case $name in
        mid) stage "mid-training" && "${launch[@]}" scripts.mid_train --model_tag="$tag" --resume=auto "${mid[@]}" ;;
        sft) stage "fine-tuning" && "${launch[@]}" scripts.chat_sft --model_tag="$tag" --resume=auto "${sft[@]}" ;;
        rl)  stage "reinforcement learning" && "${launch[@]}" scripts.chat_rl --model_tag="$tag" --resume=auto "${rl[@]}" ;;
    esac
    stage "evaluation: $name"
    "${launch[@]}" scripts.chat_eval --source=$name --model_tag="$tag" --tasks="$tasks" --max_problems="$problems"
done

stage "report"
python -m nanochat.report
stage "done"
echo "talk to it: . ./setup.sh && python -m scripts.chat_cli --source=rl --model_tag=$tag"
