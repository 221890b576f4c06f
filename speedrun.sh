#!/usr/bin/env bash
# From an empty machine to a model you can talk to, evaluated at every stage, and its report. These are the commands for
# eight H100, in order; runs/cpu.sh has those for a machine without a GPU.
#
#     bash speedrun.sh                # for this machine: 8 GPUs, fewer, or a CPU
#     bash speedrun.sh --chat         # and open the chat page at the end
#     bash speedrun.sh --chat --folder=~/notes    # there the assistant looks things up in your own files
#     bash speedrun.sh --full         # the larger model also on a CPU that takes more than half an hour for it
#     bash speedrun.sh --rehearse     # each stage with a tiny model (runs/rehearsal.sh), on GPUs after three real steps
#     bash speedrun.sh --plan=8,H100,80    # only says what it would run on 8 H100 of 80 GB, in how many hours, at what
#                                          # cost; PRICE=3 before it: dollars per GPU and hour
#
# After anything went wrong run it again: `once` skips a command that ended well and whose files are whole, and training
# goes on from its newest checkpoint.
set -euo pipefail
. "$(dirname "$0")/runs/prepare.sh" "$@"  # reads the options above, installs what is missing, and asks the doctor
[ "$RANKS" -gt 0 ] || { . "runs/${rehearse:-cpu}.sh"; exit; }

# On eight H100 the doctor has chosen RANKS=8 DEPTH=24 ROWS=16 FEW=4 RECOMPUTE=False SHARDS=125.
run="torchrun --standalone --nproc_per_node=$RANKS --max-restarts=3 --shutdown-timeout=300 -m"
tag=speedrun-d$DEPTH
keep="--keep_last=2 --activation_checkpointing=$RECOMPUTE"
base="--depth=$DEPTH --device_batch_size=$ROWS --save_every=1000 $keep"

[ -n "$plan" ] || . runs/three_steps.sh  # of these shapes, before anything is downloaded
[ -z "$rehearse" ] || { . runs/rehearsal.sh; exit; }

stage "data"
python -m scripts.dataset --source=climbmix --num_shards=$SHARDS

stage "library: what the assistant looks up"
python -m scripts.library --source=python
[ -z "$folder" ] || python -m scripts.library --source="$folder" --name=folder

stage "tokenizer"
once tokenizer --needs data/climbmix/manifest.json --makes tokenizer/climbmix -- \
    python -m scripts.tok_train --data=climbmix --vocab_size=32768

stage "base model"
once base-$tag --needs data/climbmix/manifest.json tokenizer/climbmix --makes base_checkpoints/$tag -- \
    $run scripts.base_train --data=climbmix --model_tag=$tag --resume=auto $base
once base_eval-$tag --needs base_checkpoints/$tag eval_bundle --makes report/sections/climbmix/$tag/base_eval.json -- \
    $run scripts.base_eval --model_tag=$tag --core_metric_max_per_task=-1

# From here on it learns to converse. Each stage begins with the model of the one before.
judge() {  # STAGE: its model on problems that are held out
    stage "evaluation: $1"
    once chat_eval-$1-$tag --needs $1_checkpoints/$tag --makes report/sections/climbmix/$tag/chat_eval_$1.json -- \
        $run scripts.chat_eval --source=$1 --model_tag=$tag --tasks="arc:ARC-Easy, arc:ARC-Challenge, mmlu, gsm8k, \
humaneval, words:climbmix[:256], spellingbee[:256], tinyworld:identity, lookup, search"
}
stage "mid-training: conversations, tools, multiple choice"
once mid-$tag --needs base_checkpoints/$tag --makes mid_checkpoints/$tag -- \
    $run scripts.mid_train --model_tag=$tag --resume=auto --device_batch_size=$ROWS --total_batch_size=524288 $keep \
    --save_every=200 --embedding_lr=0.3 --unembedding_lr=0.008 --init_lr_frac=0.8 --warmdown_ratio=0.5 \
    --tasks="smoltalk, mmlu*3, gsm8k*4, words:climbmix*3, spellingbee[:20000], tinyworld:identity, \
after:lookup+tinyworld:identity[:1000], after:lookup+gsm8k[:2000], lookup, tokens:climbmix, \
lookup:unknown[:2000], lookup:talk[:4000], search, search:unknown[:2000]"
judge mid
stage "fine-tuning: answers alone"
once sft-$tag --needs mid_checkpoints/$tag --makes sft_checkpoints/$tag -- \
    $run scripts.chat_sft --model_tag=$tag --resume=auto --device_batch_size=$FEW --init_lr_frac=0.02 $keep \
    --save_every=200 --tasks="arc:ARC-Easy, arc:ARC-Challenge, gsm8k, smoltalk[:10000], words:climbmix[:600], \
tinyworld:identity"
judge sft
stage "reinforcement learning: sums in words"
once rl-$tag --needs sft_checkpoints/$tag --makes rl_checkpoints/$tag -- \
    $run scripts.chat_rl --model_tag=$tag --resume=auto --device_batch_size=$FEW --task=gsm8k $keep --save_every=20
judge rl
finish  # the report; with --chat the page
