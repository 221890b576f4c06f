#!/usr/bin/env bash
# From an empty machine to a model you can talk to, evaluated at every stage, and its report: the commands for eight
# H100s (2 to 4 hours, estimated; never run on eight). Other GPUs change eight variables; without a GPU runs/cpu.sh
# runs, 12 minutes on two slow cores.
#
#     bash speedrun.sh                # stopped or failed? Run it again: finished steps stay, training goes on
#     bash speedrun.sh --chat --folder=~/notes    # a page shows the run, then chats, and looks things up in your files
#     bash speedrun.sh --full         # on a CPU: twice the layers, three times the minutes
#     bash speedrun.sh --rehearse     # every stage in small; on GPUs, first three steps of the real model
#     bash speedrun.sh --plan=8,H100,80 --price=2.5  # only shows the commands for 8 H100 of 80 GB, hours and dollars
#     bash speedrun.sh --run=NAME     # also logs training on GPUs to wandb, after `wandb login`
set -euo pipefail
chat="" folder="" depth=2 rehearsal="" plan="" show="" price="" wandb=""
expected() { echo "error: $argument: expected $1" >&2; exit 2; }
for argument in "$@"; do
    case $argument in
        --chat) chat=yes ;; --full) depth=4 ;; --rehearse) rehearsal=rehearsal ;;
        -h | --help) sed -n '2,/^set /{/^#/!d; s/^# \{0,1\}//; p;}' "$0"; exit 0 ;;
        --folder=?*) folder=${argument#*=} folder=${folder/#\~/$HOME}
            [[ $folder == /* ]] || folder=$PWD/$folder  # a relative path begins where you are
            [ -e "$folder" ] || { echo "error: no folder $folder: expected .txt, .md, … files" >&2; exit 2; }
            # The library is called after the folder or file; "python" is Python's own.
            library=$(cd "$folder" 2>/dev/null && pwd) || { library=${folder##*/} library=${library%%.*}; }
            library=${library##*/} library=${library//[^[:alnum:]_-]/-}
            case $library in "" | [Pp]ython) library=my-$library ;; esac ;;
        --plan | --plan= | --plan=[!1-9]* | --plan=*[,x][Aa]100)  # A100s have 40 or 80 GB
            expected "--plan=8,H100,80: how many GPUs, which, and of how many GB" ;;
        --plan=*) plan=${argument#*=} show=--show ;;
        --price | --price= | --price=*[!0-9.]*) expected "--price=2.5: dollars for one GPU and hour" ;;
        --price=*) price=$argument ;; --run=?*) wandb=$argument ;;
        --folder | --folder=) expected "--folder=~/notes, in one word" ;;
        --run | --run=) expected "--run=NAME, in one word" ;;
        --chat=* | --full=* | --rehearse=*) expected "${argument%%=*} alone" ;;
        *) echo "error: $argument is unknown; bash speedrun.sh --help lists what is known" >&2; exit 2 ;;
    esac
done
cd "$(dirname "$0")"
# Extras: hub has more tasks, gpu has FlashAttention 4.
case $(nvidia-smi --query-gpu=compute_cap,driver_version --format=csv,noheader 2>/dev/null || :) in
    9.0,\ 5[89]* | 10.0,\ 5[89]*) extra=hub,gpu ;; [0-9]*) extra=hub ;; *) extra="" ;;
esac
. ./setup.sh "$extra${extra:+${wandb:+,wandb}}"
export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}"
[ -z "$plan" ] || { NANOCHAT_BASE_DIR=$(mktemp -d); trap 'rm -r "$NANOCHAT_BASE_DIR"' EXIT; }
once() { python -m scripts.once $show "$@"; }  # once for the same command, --needs and --makes; a plan shows it
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
[ -n "$plan" ] || [ "$gpus" -ge 1 ] || { . runs/${rehearsal:-cpu}.sh; exit; }

# ---- Eight H100s: RANKS=8 DEPTH=22 ROWS=32 FEW=4 RECOMPUTE=False VOCAB=49152 RATIO=9.4 SHARDS=125; docs/gpus.md
fits=(python -m scripts.plan --file="$NANOCHAT_BASE_DIR/once/gpus" $price)  # hours, cost; ends here if nothing fits
[ -z "$plan" ] || fits+=(--gpus="${plan%%[,x]*}" --gpu="${plan#*[,x]}")
"${fits[@]}"
. "$NANOCHAT_BASE_DIR/once/gpus"
tag=speedrun-d$DEPTH made=report/sections/climbmix/speedrun-d$DEPTH
run="torchrun --standalone --nproc_per_node=$RANKS --max-restarts=3 -m"
keep="--keep_last=2 --activation_checkpointing=$RECOMPUTE $wandb"
model="--depth=$DEPTH --target_param_data_ratio=$RATIO --device_batch_size=$ROWS --save_every=1000 $keep"
if [ -z "$plan" ]; then  # before anything is downloaded, three such steps on Python's library: do they fit, and save?
    NANOCHAT_BASE_DIR+=/rehearsal
    once data-python -- python -m scripts.dataset --source=python
    once tokenizer-python --needs data/python/manifest.json --makes tokenizer/python -- \
        python -m scripts.tok_train --data=python --vocab_size=$VOCAB
    once steps-$tag --needs tokenizer/python --makes report/sections/python/$tag/base_train.json -- \
        ${run/restarts=3/restarts=0} scripts.base_train --data=python --model_tag=$tag --overwrite $model \
        --total_batch_size=$((2 * ROWS * 2048 * RANKS)) --num_iterations=3  # two micro-steps: gradients are summed
    rm -rf "$NANOCHAT_BASE_DIR/base_checkpoints/$tag"
    [ -z "$rehearsal" ] || { . runs/rehearsal.sh; exit; }
    NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR%/rehearsal}
fi
page=(python -m scripts.chat_web --source=rl --model_tag=$tag ${folder:+--library=$library})
[ -z "$chat" ] || [ -n "$plan" ] || { "${page[@]}" --watch & trap "kill $! 2>/dev/null || :" EXIT; }  # the run, live
# ---- The base model: text, the assistant's library, tokenizer, training, evaluation
once data-climbmix -- python -m scripts.dataset --source=climbmix --num_shards=$SHARDS
once library -- python -m scripts.library --source=python
[ -z "$folder" ] || once folder -- python -m scripts.library --source="$folder" --name=$library
once tokenizer-climbmix --needs data/climbmix/manifest.json --makes tokenizer/climbmix -- \
    python -m scripts.tok_train --data=climbmix --vocab_size=$VOCAB
once base-$tag --needs data/climbmix/manifest.json tokenizer/climbmix --makes base_checkpoints/$tag -- \
    $run scripts.base_train --data=climbmix --model_tag=$tag --resume=auto $model
once base_eval-$tag --needs base_checkpoints/$tag eval_bundle --makes $made/base_eval.json -- \
    $run scripts.base_eval --model_tag=$tag --core_metric_max_per_task=-1
# ---- The assistant: each stage starts from the previous stage's model; held-out problems judge the result
judge=($run scripts.chat_eval --model_tag=$tag --max_problems=-1 --tasks="arc:ARC-Easy, arc:ARC-Challenge, mmlu, gsm8k,
    humaneval, words:climbmix[:256], spellingbee[:256], tinyworld:identity, lookup, search")
once mid-$tag --needs base_checkpoints/$tag --makes mid_checkpoints/$tag $made/mid_train.json -- \
    $run scripts.mid_train --model_tag=$tag --resume=auto --device_batch_size=$ROWS --total_batch_size=524288 \
    --embedding_lr=0.3 --unembedding_lr=0.008 --init_lr_frac=0.8 --warmdown_ratio=0.5 --save_every=200 $keep \
    --tasks="smoltalk, mmlu*3, gsm8k*4, words:climbmix*3, spellingbee[:20000], tinyworld:identity,
        after:lookup+tinyworld:identity[:1000], after:lookup+gsm8k[:2000], lookup, tokens:climbmix,
        lookup:unknown[:2000], lookup:talk[:4000], search, search:unknown[:2000]"
once chat_eval-mid-$tag --needs mid_checkpoints/$tag --makes $made/chat_eval_mid.json -- "${judge[@]}" --source=mid
once sft-$tag --needs mid_checkpoints/$tag --makes sft_checkpoints/$tag $made/chat_sft.json -- $run scripts.chat_sft \
    --model_tag=$tag --resume=auto --device_batch_size=$FEW --init_lr_frac=0.02 --save_every=200 $keep \
    --tasks="arc:ARC-Easy, arc:ARC-Challenge, gsm8k, smoltalk[:10000], words:climbmix[:600], tinyworld:identity"
once chat_eval-sft-$tag --needs sft_checkpoints/$tag --makes $made/chat_eval_sft.json -- "${judge[@]}" --source=sft
once rl-$tag --needs sft_checkpoints/$tag --makes rl_checkpoints/$tag $made/chat_rl.json -- $run scripts.chat_rl \
    --model_tag=$tag --resume=auto --task=gsm8k --device_batch_size=$FEW --save_every=20 $keep
once chat_eval-rl-$tag --needs rl_checkpoints/$tag --makes $made/chat_eval_rl.json -- "${judge[@]}" --source=rl
once report -- python -m scripts.report --model_tag=$tag
[ -z "$chat" ] || [ -n "$plan" ] || wait
echo "talk to it: . ./setup.sh && ${page[*]}"
