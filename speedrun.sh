#!/usr/bin/env bash
# From an empty machine to a model you can talk to, evaluated at every stage, and its report.
#
#     bash speedrun.sh                # for what it finds: 8 GPUs, fewer, or a CPU
#     bash speedrun.sh --chat         # and opens the chat page at the end
#     bash speedrun.sh --chat --folder=~/notes    # there the assistant looks things up in your own files
#     bash speedrun.sh --full         # the whole recipe also on a CPU that takes more than half an hour for it
#     bash speedrun.sh --rehearse     # every stage with a tiny model for two steps, on GPUs after three steps of the real one
#     bash speedrun.sh --plan=8,H100,80    # only says what it would run on 8 H100 of 80 GB, in how many hours, at what cost;
#                                          # PRICE=3 before it: dollars per GPU and hour
#
# Run it again after anything went wrong: finished stages whose files are whole are skipped, and training goes on from its
# newest checkpoint.
set -euo pipefail
chat=no rehearse=no full=no plan="" gpu="" memory="" folder=""
words=""    # tasks that the tokenizer reads, too
shard_mb=8
for argument in "$@"; do
    case $argument in
        --chat) chat=yes ;;
        -h | --help) sed -n '2,/^set /{/^#/!d; s/^# \{0,1\}//; p;}' "$0"; exit 0 ;;
        --folder=?*)
            folder=${argument#*=} folder=${folder/#\~/$HOME}
            case $folder in /*) ;; *) folder=$PWD/$folder ;; esac  # from where it was typed
            [ -e "$folder" ] || { echo "error: no folder $folder; expected one with .txt, .md, … files" >&2; exit 2; } ;;
        --rehearse) rehearse=yes ;;
        --full) full=yes ;;
        --plan*)
            # 8,H100,80; also 8xH100, 8,h100 and the like, where a GPU of that name has one size of memory only
            if [[ $argument =~ ^--plan=([1-9][0-9]?)[,x]([^,]+)(,([1-9][0-9]*))?$ ]]; then
                gpu=${BASH_REMATCH[2]} memory=${BASH_REMATCH[4]}
                case $memory$(tr a-z A-Z <<< "$gpu") in
                    H100*) memory=80 ;; H200) memory=141 ;; GH200) memory=96 ;; B200) memory=180 ;; MI300X) memory=192 ;;
                    A10 | A10G | L4 | *3090 | *4090) memory=24 ;; *5090) memory=32 ;; A40 | L40S) memory=48 ;;
                esac
                plan=${BASH_REMATCH[1]},$gpu,$memory
            fi
            [[ $plan == *,*,[1-9]* ]] || {
                echo "error: $argument: expected --plan=8,H100,80: how many GPUs, which, and of how many GB" >&2; exit 2; } ;;
        *) echo "error: $argument is unknown; expected --chat, --folder=…, --full, --rehearse, --plan=8,H100,80 or --help" >&2; exit 2 ;;
    esac
done
cd "$(dirname "$0")"
. ./setup.sh "$(! nvidia-smi >/dev/null 2>&1 || echo hub)"  # the larger tasks come from the hub
export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}"
[ $rehearse = no ] || NANOCHAT_BASE_DIR=$NANOCHAT_BASE_DIR/rehearsal
started=$SECONDS

stage() { echo; echo "=== $1 ($(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s)"; }
once() { python -m scripts.once "$@"; }

if [ -n "$plan" ]; then  # GPUs that are not here: commands are shown, not run
    IFS=, read -r gpus gpu memory <<< "$plan"
    NANOCHAT_BASE_DIR=$(mktemp -d)  # nothing was asked before
    trap 'rm -r "$NANOCHAT_BASE_DIR"' EXIT
    stage() { echo; echo "=== $1"; }
    show() { for word in "$@"; do [[ $word != *" "* ]] || word="\"$word\""; printf '%s ' "$word"; done; echo; }
    once() { while [ "$1" != -- ]; do shift; done; show "${@:2}"; }
else
    stage "doctor"
    gpus=$(python -c 'import torch; print(torch.cuda.device_count())') || true
    python -m scripts.doctor || { echo "error: nothing can be trained on this machine; the doctor says why" >&2; exit 1; }
fi
# ---- On GPUs. The recipe of 2026, explained in docs/gpus.md

planned() { python -m scripts.plan --vocab_size=$vocab --depth="$depth" --gpus=$ranks --gpu="$gpu" "$@"; }

# As many rows at a time as the memory holds, up to 16 (no GPU has confirmed that more fit), and 256 over all ranks, which
# a step of mid-training has.
fits() {
    local most=$((ranks > 16 ? 256 / ranks : 16))
    python -m scripts.doctor --batch_only --vocab_size=$vocab --depth="$depth" --ranks=$ranks --max_rows=$most ${memory:+--memory_gib=$memory} "$@"
}

# The largest depth that fits, and that is pretrained within half a day: then all is done within a day. Where hardly one
# row fits, activations are computed twice.
choose_depth_and_rows() {
    for depth in 24 20 16 12; do
        hours=$(planned --tell=hours)
        if [ "$hours" -gt 12 ] && [ $depth -ne 12 ]; then continue; fi
        rows=$(fits)
        [ "$rows" -ge 4 ] || rows="$(fits --activation_checkpointing) checkpointing"
        if [ "${rows% *}" -ne 0 ]; then break; fi
    done
    mkdir -p "${answer%/*}"
    room=$(($(df -Pk "$NANOCHAT_BASE_DIR" | awk 'END { print $4 }') / 1048576))
    if [ -z "$plan" ] && [ $rehearse = no ] && [ "$room" -lt "$(disk)" ]; then
        echo "error: depth $depth wants $(disk) GiB of disk, and $room are free in $NANOCHAT_BASE_DIR; free some there," \
            "or set NANOCHAT_BASE_DIR to a folder of a larger one" >&2
        exit 1
    fi
    echo "$depth $rows" > "$answer"
}

# GiB: text and its tokens; of each of four stages two checkpoints of 14 bytes a parameter, and one being written.
disk() { echo $((depth > 20 ? 200 : depth > 16 ? 130 : depth > 12 ? 80 : 45)); }

# What is paid for: all GPUs, also those beyond a power of two that stand idle, and the stages after pretraining.
total() {
    awk -v hours="$hours" -v ranks=$ranks -v gpus="$gpus" -v price="${PRICE:-2.5}" -v disk="$(disk)" -v shards=$shards 'BEGIN {
        low = hours + 8 / ranks; high = hours + 16 / ranks
        printf "in all about %.0f to %.0f hours and $%.0f to $%.0f for %d GPUs at $%g per GPU and hour, of which pretraining takes %s hours; ",
            low, high, low * gpus * price, high * gpus * price, gpus, price, hours
        if (ranks < gpus) printf "%d of them stand idle, so rent %d; ", gpus - ranks, ranks
        printf "disk: %d GiB; downloads: %.0f GB of text, and the tasks\n", disk, shards * 0.09 }'
}

gpu_recipe() {
    if [ -z "$plan" ] && ! python -c "import datasets" 2>/dev/null; then
        echo "error: the tasks need the datasets package: pip install datasets" >&2
        exit 1
    fi
    base=$NANOCHAT_BASE_DIR
    [ $rehearse = no ] || base=${base%/*}
    data=climbmix vocab=32768 answer=$base/once/depth-and-rows
    ranks=1
    while [ $((2 * ranks)) -le "$gpus" ]; do ranks=$((2 * ranks)); done  # a power of two, which divides every batch
    launch=(torchrun --standalone --nproc_per_node=$ranks --max-restarts=3 --shutdown-timeout=300 -m)
    [ -s "$answer" ] || choose_depth_and_rows  # kept, so that a resumed run has the same model
    read -r depth rows recompute < "$answer" || true
    if [ "$rows" -lt 1 ]; then
        rm "$answer"
        echo "error: depth $depth does not fit into this GPU's memory; set a smaller depth in speedrun.sh" >&2
        exit 1
    fi
    summary=$(planned --device_batch_size="$rows" --price="${PRICE:-2.5}" --tell=summary)
    echo "$summary"
    # Shards of about 250 million characters, 4.7 a token: a tenth more than one pass.
    shards=$((depth > 20 ? 125 : depth > 16 ? 75 : depth > 12 ? 40 : 20))
    if [[ $summary == *" MFU: "* ]]; then
        hours=${summary##* MFU: } hours=${hours%% hours*}
        echo "estimates of pretraining; mid-training and fine-tuning on half a billion tokens, downloads, compiling," \
            "evaluations and reinforcement learning take another hour or two on eight H100, longer on fewer or slower ones"
        total
    fi
    few=$((rows < 4 ? rows : 4))  # conversations at a time, and problems of reinforcement learning
    tag=speedrun-d$depth
    keep=(--keep_last=2)
    [ -z "${recompute:-}" ] || keep+=(--activation_checkpointing)
    model=(--depth="$depth" --device_batch_size="$rows" --save_every=1000 "${keep[@]}")
    lookups="lookup, tokens:$data, lookup:unknown[:2000], lookup:talk[:4000], search, search:unknown[:2000]"
    mid=(--tasks="smoltalk, mmlu*3, gsm8k*4, words:$data*3, spellingbee[:20000], tinyworld:identity, after:lookup+tinyworld:identity[:1000], after:lookup+gsm8k[:2000], $lookups"
         --embedding_lr=0.3 --unembedding_lr=0.008 --init_lr_frac=0.8 --warmdown_ratio=0.5 --device_batch_size="$rows" --total_batch_size=524288 --save_every=200 "${keep[@]}")
    sft=(--tasks="arc:ARC-Easy, arc:ARC-Challenge, gsm8k, smoltalk[:10000], words:$data[:600], tinyworld:identity" --init_lr_frac=0.02
         --device_batch_size=$few --save_every=200 "${keep[@]}")
    rl=(--task=gsm8k --device_batch_size=$few --save_every=20 "${keep[@]}")
    judged=(--tasks="arc:ARC-Easy, arc:ARC-Challenge, mmlu, gsm8k, humaneval, words:$data[:256], spellingbee[:256], tinyworld:identity, lookup, search" --max_problems=-1)
    core=-1 eval_tokens=10485760
}

# Before anything is downloaded, three steps of the same shapes on the same ranks, with validation, samples and a
# checkpoint: whether it compiles, fits, is fast, and can be saved. On Python's library, which has text enough for the
# vocabulary, in a base folder of its own; of two micro-steps, as in the second the memory also holds the first one's sum.
try_three_steps() (  # a subshell: the base folder is changed for it alone
    stage "depth $depth: three steps before the downloads"
    export NANOCHAT_BASE_DIR=$base/rehearsal
    steps=("${model[@]}" --total_batch_size=$((2 * rows * 2048 * ranks)) --num_iterations=3)
    python -m scripts.dataset --source=python
    once tokenizer-python --needs data/python/manifest.json --makes tokenizer/python -- \
        python -m scripts.tok_train --data=python --vocab_size=$vocab
    once steps-$tag --needs tokenizer/python --makes report/sections/python/$tag/base_train.json -- \
        "${launch[@]/restarts=3/restarts=0}" scripts.base_train --data=python --model_tag=$tag --overwrite "${steps[@]}"
    rm -rf "$NANOCHAT_BASE_DIR/base_checkpoints/$tag"
)

# ---- On a CPU: the embedded world, and Python's own documentation. Nothing to download, and a model small enough for
# minutes on two cores

# All stages together take about as long as 3,600 steps as the doctor times them, and three minutes more. What others compute
# while it looks, such as an installation that ends soon, decides nothing.
estimate() {
    local ms busy
    read -r ms busy <<< "$(python -m scripts.doctor --time_only --depth=$depth --max_seq_len=256 --vocab_size=$vocab)"
    minutes=$((3 + ms * 3600 / 60000)) beside=$((3 + busy * 3600 / 60000))
    about="about $minutes minutes"
    [ $beside -lt $((minutes * 5 / 4)) ] || about+=" once other processes have ended (beside them, as now, $beside)"
}

choose_cpu_depth() {
    depth=4
    estimate
    echo "on this machine this will take $about"
    if [ "$minutes" -gt 30 ]; then
        depth=2
        estimate
        echo "a smaller model instead, in $about; bash speedrun.sh --full trains the larger one"
    fi
    echo $depth > "$answer"
}

cpu_recipe() {
    data=tinyworld shards=-1 vocab=4096 words="pydoc, run" answer=$NANOCHAT_BASE_DIR/once/depth-assistant
    mkdir -p "${answer%/*}"
    [ $full = no ] || echo 4 > "$answer"
    [ -s "$answer" ] || choose_cpu_depth  # asked once: another answer must not change the model in the middle of a run
    read -r depth < "$answer"
    tag=assistant-d$depth launch=(python -m)
    # Four heads of 64 learn to copy sooner than two of 128; on text alone they were worse (docs/ablations.md).
    model=(--depth=$depth --arch=modern,head_dim=64 --max_seq_len=256 --device_batch_size=16 --total_batch_size=4096 --num_iterations=500
           --eval_every=100 --eval_tokens=32768 --save_every=100 --keep_last=2)
    # What to do is in a question, not in the ones before it: without these arithmetic after a lookup was 44% right.
    turns="after:lookup+arithmetic[:1200], after:search+spellingbee[:1200], after:lookup+tinyworld[:1000], after:lookup+tinyworld:identity[:400], after:arithmetic+lookup[:700], after:tinyworld+search[:500]"
    more_turns="after:lookup+arithmetic[5000:5400], after:search+spellingbee[8000:8300], after:lookup+tinyworld[1000:1300], after:lookup+tinyworld:identity[:200]"
    lookups="lookup[:16000], tokens:$data[:8000], lookup:unknown[:2500], lookup:talk[:6000], search[:10000], search:unknown[:3000]"
    more_lookups="lookup[20000:23000], tokens:$data[8000:9500], lookup:unknown[2500:3000], lookup:talk[6000:7500], search[15000:19000], search:unknown[3000:3800]"
    mid=(--tasks="tinyworld, tinyworld[:13000], $turns, arithmetic[:5000], spellingbee[:6000], spellingbee:hand[:6000], words:$data[:5000], run[:13000], $lookups"
         --device_batch_size=16 --total_batch_size=4096 --eval_every=500 --eval_tokens=32768 --save_every=100 --keep_last=2)
    sft=(--tasks="tinyworld[:2000], $more_turns, tinyworld:identity, arithmetic[5000:6500], spellingbee:hand[8000:10500], words:$data[8000:8500], run[13000:18000], $more_lookups"
         --device_batch_size=16 --target_examples_per_step=64 --init_lr_frac=0.3 --eval_every=100 --eval_steps=5 --eval_metrics_every=-1
         --save_every=100 --keep_last=2)
    rl=(--task="run[18000:]" --num_iterations=60 --init_lr_frac=0.3 --num_samples=8 --max_new_tokens=80 --device_batch_size=16
        --eval_every=60 --eval_examples=400 --eval_samples=1 --save_every=10 --keep_last=2)
    judged=(--tasks="tinyworld:facts, tinyworld:identity, arithmetic, spellingbee, words:$data, pydoc:known, pydoc, run, lookup, lookup:unknown, lookup:talk, search, search:unknown"
            --max_problems=400 --batch_size=64)
    core=0 eval_tokens=65536
}

# ---- A rehearsal: everything in small, on all GPUs or the CPU. Nothing is learnt. That compiling works has been seen by
# now

rehearsal_recipe() {
    data=tinyworld shards=2 shard_mb=1 vocab=1024 tag=rehearsal
    launch=(python -m)
    [ "$gpus" -le 1 ] || launch=(torchrun --standalone --nproc_per_node="$gpus" -m)
    tiny=(--num_iterations=2 --device_batch_size=1 --eval_every=-1 --save_every=1 --compile=False)
    model=(--depth=2 --max_seq_len=256 --total_batch_size=$((256 * (gpus > 1 ? gpus : 1))) --sample_every=-1 "${tiny[@]}")
    mid=(--tasks="tinyworld[:99], lookup[:99]" --total_batch_size=512 "${tiny[@]}")
    sft=(--tasks="tinyworld[:99], spellingbee[:99]" --target_examples_per_step=2 --eval_metrics_every=-1 "${tiny[@]}")
    rl=(--task=arithmetic:easy --examples_per_step=1 --num_samples=2 --max_new_tokens=4 "${tiny[@]}")
    judged=(--tasks="arithmetic[:4], lookup[:4]" --max_problems=4) core=0 eval_tokens=256
}

# ---- The run

if [ "$gpus" -ge 1 ]; then
    gpu_recipe
    [ -n "$plan" ] || try_three_steps
elif [ $rehearse = no ]; then
    cpu_recipe
fi
[ $rehearse = no ] || rehearsal_recipe

[ -z "$plan" ] || python() { show python "$@"; }
stage "data: $data"
python -m scripts.dataset --source="$data" --num_shards="$shards" --shard_mb=$shard_mb

stage "library: what the assistant looks up"
python -m scripts.library --source=python
[ -z "$folder" ] || python -m scripts.library --source="$folder" --name=folder

stage "tokenizer"
once tokenizer-$data --needs data/$data/manifest.json --makes tokenizer/$data -- \
    python -m scripts.tok_train --data="$data" --vocab_size="$vocab" --tasks="$words"

stage "base model: training"
once base-$tag --needs data/$data/manifest.json --needs tokenizer/$data --makes base_checkpoints/$tag --makes report/sections/$data/$tag/base_train.json -- \
    "${launch[@]}" scripts.base_train --data="$data" --model_tag="$tag" --resume=auto "${model[@]}"

stage "base model: evaluation"
once base_eval-$tag --needs base_checkpoints/$tag --needs eval_bundle --makes report/sections/$data/$tag/base_eval.json -- \
    "${launch[@]}" scripts.base_eval --model_tag="$tag" --core_metric_max_per_task="$core" --eval_tokens="$eval_tokens"

# From here on the model learns to converse: each stage begins with the one before it, and is measured on held-out problems.
before=base
train() {  # NAME SCRIPT SETTINGS…
    once $1-$tag --needs ${before}_checkpoints/$tag --makes $1_checkpoints/$tag --makes report/sections/$data/$tag/$2.json -- \
        "${launch[@]}" scripts.$2 --model_tag="$tag" --resume=auto "${@:3}"
    before=$1
    stage "evaluation: $1"
    once chat_eval-$1-$tag --needs $1_checkpoints/$tag --makes report/sections/$data/$tag/chat_eval_$1.json -- \
        "${launch[@]}" scripts.chat_eval --source=$1 --model_tag="$tag" "${judged[@]}"
}
stage "mid-training"
train mid mid_train "${mid[@]}"
stage "fine-tuning"
train sft chat_sft "${sft[@]}"
stage "reinforcement learning"
train rl chat_rl "${rl[@]}"

stage "report"
python -m scripts.report --model_tag="$tag"
[ -z "$plan" ] || exit 0
stage "done"
page=(python -m scripts.chat_web --source=rl --model_tag=$tag)
[ -z "$folder" ] || page+=(--library=folder)
if [ $rehearse = no ]; then
    echo "talk to it: . ./setup.sh && ${page[*]}      (or scripts.chat_cli, in the terminal)"
else
    echo "everything works; the models in $NANOCHAT_BASE_DIR have learnt nothing"
fi
[ $chat = no ] || exec "${page[@]}"
