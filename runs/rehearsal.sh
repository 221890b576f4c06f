# Every stage with a tiny model for two steps, on all GPUs or the CPU, in a base folder of its own. Nothing is learnt.
# Sourced by speedrun.sh.
export NANOCHAT_BASE_DIR=$NANOCHAT_BASE_DIR/rehearsal
tag=rehearsal
run="python -m"
[ "$gpus" -le 1 ] || run="torchrun --standalone --nproc_per_node=$gpus -m"
tiny="--model_tag=$tag --resume=auto --num_iterations=2 --device_batch_size=1 --eval_every=-1 --save_every=1"
tiny+=" --compile=False"  # that compiling works has been seen by now

stage "data"
python -m scripts.dataset --source=tinyworld --num_shards=2 --shard_mb=1
stage "library"
python -m scripts.library --source=python
[ -z "$folder" ] || python -m scripts.library --source="$folder" --name=folder
stage "tokenizer"
once tokenizer-tinyworld --needs data/tinyworld/manifest.json --makes tokenizer/tinyworld -- \
    python -m scripts.tok_train --data=tinyworld --vocab_size=1024

judge() {  # STAGE
    stage "evaluation: $1"
    once chat_eval-$1 --needs $1_checkpoints/$tag --makes report/sections/tinyworld/$tag/chat_eval_$1.json -- \
        $run scripts.chat_eval --source=$1 --model_tag=$tag --tasks="arithmetic[:4], lookup[:4]"
}
stage "base model"
once base --needs data/tinyworld/manifest.json tokenizer/tinyworld --makes base_checkpoints/$tag -- \
    $run scripts.base_train --data=tinyworld $tiny --depth=2 --max_seq_len=256 --sample_every=-1 \
    --total_batch_size=$((256 * (gpus > 1 ? gpus : 1)))
once base_eval --needs base_checkpoints/$tag --makes report/sections/tinyworld/$tag/base_eval.json -- \
    $run scripts.base_eval --model_tag=$tag --core_metric_max_per_task=0 --eval_tokens=256
stage "mid-training"
once mid --needs base_checkpoints/$tag --makes mid_checkpoints/$tag -- \
    $run scripts.mid_train $tiny --total_batch_size=512 --tasks="tinyworld[:99], lookup[:99]"
judge mid
stage "fine-tuning"
once sft --needs mid_checkpoints/$tag --makes sft_checkpoints/$tag -- \
    $run scripts.chat_sft $tiny --target_examples_per_step=2 --eval_metrics_every=-1 \
    --tasks="tinyworld[:99], spellingbee[:99]"
judge sft
stage "reinforcement learning"
once rl --needs sft_checkpoints/$tag --makes rl_checkpoints/$tag -- \
    $run scripts.chat_rl $tiny --task=arithmetic:easy --examples_per_step=1 --num_samples=2 --max_new_tokens=4
judge rl

stage "report"
python -m scripts.report --model_tag=$tag
echo "everything works; the models in $NANOCHAT_BASE_DIR have learnt nothing"
