#!/usr/bin/env bash
# From an empty machine to a model you can talk to, evaluated at every stage, and its report: on eight H100s in 2 to 3
# hours (estimated; never run on eight), on one in any --hours. Without a GPU runs/cpu.sh runs: 12 minutes on two cores.
#
#     bash speedrun.sh                # stopped or failed? Run it again: finished steps stay, training goes on
#     bash speedrun.sh --chat --folder=~/notes    # a page shows the run, then chats, and looks things up in your files
#     bash speedrun.sh --full         # on a CPU: twice the layers, three times the minutes
#     bash speedrun.sh --rehearse     # every stage in small; on GPUs, first three steps of the real model
#     bash speedrun.sh --hours=2      # on GPUs the largest model whose stages all end in that time; or --depth=16
#     bash speedrun.sh --plan=8,H100,80 --price=2.5  # only shows the commands for 8 H100 of 80 GB, hours and dollars
#     bash speedrun.sh --run=NAME     # also logs training on GPUs to wandb, after `wandb login`
set -euo pipefail
chat="" folder="" library="" depth=2 stages=cpu plan="" choose="" wandb=""
for argument in "$@"; do
    case $argument in
        --chat) chat=yes ;; --full) depth=4 ;; --rehearse) stages=rehearsal ;; --run=?*) wandb=$argument ;;
        --plan=[1-9]*[,x]?*) plan=${argument#*=} ;;
        --plan*) echo "error: $argument: expected a number of GPUs, a comma and a name: --plan=1,RTX4090" >&2; exit 2 ;;
        --price=?* | --hours=*[1-9]* | --depth=?*) choose+=" $argument" ;;
        --folder=?*) folder=${argument#*=} folder=${folder/#\~/$HOME}
            [[ $folder == /* ]] || folder=$PWD/$folder  # a relative path begins where you are
            # The library is called after the folder or file; "python" is Python's own.
            library=$(cd "$folder" 2>/dev/null && pwd) || { library=${folder##*/} library=${library%%.*}; }
            library=${library##*/} library=${library//[^[:alnum:]_-]/-} library=${library/#[Pp]ython/my-python}
            [ -e "$folder" ] || { echo "error: no folder $folder: expected .txt, .md, … files" >&2; exit 2; } ;;
        -h | --help) sed -n '2,/^set /{/^#/!d; s/^# \{0,1\}//; p;}' "$0"; exit 0 ;;
        *) echo "error: $argument: expected one of those that bash speedrun.sh --help shows, such as --hours=2 or" \
            "--plan=8,H100" >&2; exit 2 ;;
    esac
done
cd "$(dirname "$0")"
# Extras: hub has more tasks, gpu has FlashAttention 4.
case $(nvidia-smi --query-gpu=compute_cap,driver_version --format=csv,noheader 2>/dev/null || :) in
    9.0,\ 5[89]* | 10.0,\ 5[89]*) extra=hub,gpu ;; [0-9]*) extra=hub ;; *) extra="" ;;
esac
. ./setup.sh "$extra${extra:+${wandb:+,wandb}}"
export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}"
[ -z "$plan" ] || {  # shown by one cat at the end: its reader, such as head, may leave early
    NANOCHAT_BASE_DIR=$(mktemp -d); exec 3>&1 >"$NANOCHAT_BASE_DIR/plan"
    trap 'cat "$NANOCHAT_BASE_DIR/plan" >&3 || :; rm -r "$NANOCHAT_BASE_DIR"' EXIT; }
once() { python -m scripts.once ${plan:+--show} "$@"; }  # not again what is done; a plan only shows it
export CHAIN=$(mktemp)  # the sum of the commands so far: from the first changed line on all run again
gpus=$plan; [ -n "$plan" ] || gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
[ "$gpus" != 0 ] || [ -z "$choose$wandb" ] || {
    echo "error:$choose${wandb:+ $wandb}: there is no GPU here; --plan=1,H100 shows what one would do" >&2; exit 2; }
[ "$gpus" != 0 ] || { . runs/$stages.sh; exit; }

# ---- What fits here, or on the planned GPUs, and ends in the hours. Eight H100s: RANKS=8 DEPTH=22 ROWS=32 FEW=4
# RECOMPUTE=False VOCAB=49152 RATIO=9.4 SHARDS=125 TALK=500000 RL=467 SAMPLES=256; docs/gpus.md
python -m scripts.plan --file="$NANOCHAT_BASE_DIR/once/gpus" $choose \
    ${plan:+"--gpus=${plan%%[,x]*}" "--gpu=${plan#*[,x]}"}
. "$NANOCHAT_BASE_DIR/once/gpus"
tag=speedrun-d$DEPTH run="torchrun --standalone --nproc_per_node=$RANKS --max-restarts=3 -m"
keep="--keep_last=2 --activation_checkpointing=$RECOMPUTE $wandb" go="--model_tag=$tag --resume=auto $keep"
validated=--eval_tokens=2097152
model="--depth=$DEPTH --target_param_data_ratio=$RATIO --device_batch_size=$ROWS --save_every=1000 $validated $keep"
[ -n "$plan" ] || { . runs/trial.sh; [ $stages = cpu ] || { . runs/$stages.sh; exit; }; }  # three such steps, first
page=(python -m scripts.chat_web --model_tag=$tag ${folder:+--library=$library})
[ -z "$chat" ] || [ -n "$plan" ] || { "${page[@]}" --watch & trap "kill $! 2>/dev/null || :" EXIT; }  # the run, live

# ---- The base model: it learns to continue text
once python -m scripts.dataset --source=climbmix --num_shards=$SHARDS
once python -m scripts.library --source=python  # where the assistant will look things up
[ -z "$folder" ] || once python -m scripts.library --source="$folder" --name=$library
once python -m scripts.tok_train --data=climbmix --vocab_size=$VOCAB
once $run scripts.base_train --data=climbmix --model_tag=$tag --resume=auto $model
# Bits per byte, and CORE: 500 items of each of its 22 tasks, or all, which takes 2% of pretraining at depth 22.
once $run scripts.base_eval --model_tag=$tag --core_metric_max_per_task=$((DEPTH < 22 ? 500 : -1))
# ---- The assistant: each stage starts from the previous stage's model; held-out problems judge the result, after the
# last stage all of them
judge=($run scripts.chat_eval --model_tag=$tag --tasks="arc:ARC-Easy, arc:ARC-Challenge, mmlu, gsm8k,
    humaneval, words:climbmix[:256], spellingbee[:256], tinyworld:identity, lookup, search")
# Mid-training: turns of a conversation, tools, and multiple choice. Conversations and choices are as many as suit the
# model: this stage and the next have at most a fifth of pretraining's tokens.
once $run scripts.mid_train $go --device_batch_size=$ROWS --total_batch_size=524288 $validated \
    --embedding_lr=0.3 --unembedding_lr=0.008 --init_lr_frac=0.8 --warmdown_ratio=0.5 --save_every=200 \
    --tasks="smoltalk[:$TALK], mmlu[:$((TALK / 5))]*3, gsm8k*4, words:climbmix*3, spellingbee[:20000],
        tinyworld:identity, after:lookup+tinyworld:identity[:1000], after:lookup+gsm8k[:2000], lookup,
        lookup:unknown[:2000], lookup:talk[:4000], search, search:unknown[:2000]"
once "${judge[@]}" --source=mid --max_problems=128
# Supervised fine-tuning: few, good conversations, each in a row of its own as in a chat.
once $run scripts.chat_sft $go --device_batch_size=$FEW --init_lr_frac=0.02 --save_every=200 \
    --tasks="arc:ARC-Easy, arc:ARC-Challenge, gsm8k, smoltalk[:10000], words:climbmix[:600], tinyworld:identity"
once "${judge[@]}" --source=sft --max_problems=$((RL ? 128 : -1))
# Reinforcement learning: it tries each problem several times, and learns from the answers that are right. A model that
# solves none of 200 problems in four samples stays as it is.
[ $RL = 0 ] || once $run scripts.chat_rl $go --task=gsm8k --num_iterations=$RL --device_batch_size=$ROWS \
    --save_every=20 --sampling_batch_size=$SAMPLES --max_new_tokens=256 --eval_examples=200 --eval_samples=4
[ $RL = 0 ] || once "${judge[@]}" --source=rl
once python -m scripts.report --model_tag=$tag
[ -z "$chat" ] || [ -n "$plan" ] || wait
echo "talk to it: . ./setup.sh && ${page[*]}"
