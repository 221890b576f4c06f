# Every stage with a tiny model for two steps, on all GPUs or the CPU, in minutes. Nothing is learned, and only
# FlashAttention 4 is compiled: 28 seconds in each process. speedrun.sh --rehearse sources this file.
NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR%/rehearsal}/rehearsal
tag=rehearsal run="python -m"
[ "$gpus" -le 1 ] || run="torchrun --standalone --nproc_per_node=$gpus -m"
tiny="--num_iterations=2 --device_batch_size=1 --eval_every=-1 --save_every=1 --compile=False"
judge=($run scripts.chat_eval --model_tag=$tag --max_problems=4 --tasks="arithmetic[:4], lookup[:4]")

once python -m scripts.dataset --source=tinyworld --num_shards=2 --shard_mb=1
once python -m scripts.library --source=python
[ -z "$folder" ] || once python -m scripts.library --source="$folder" --name=$library
once python -m scripts.tok_train --data=tinyworld --vocab_size=1024
once $run scripts.base_train --data=tinyworld --model_tag=$tag --resume=auto --depth=2 --max_seq_len=256 \
    --total_batch_size=$((256 * (gpus > 1 ? gpus : 1))) --sample_every=-1 $tiny
once $run scripts.base_eval --model_tag=$tag --core_metric_max_per_task=0 --eval_tokens=256
once $run scripts.mid_train --model_tag=$tag --resume=auto --tasks="tinyworld[:99], lookup[:99]" \
    --total_batch_size=512 $tiny
once "${judge[@]}" --source=mid
once $run scripts.chat_sft --model_tag=$tag --resume=auto --tasks="tinyworld[:99], spellingbee[:99]" \
    --target_examples_per_step=2 $tiny
once "${judge[@]}" --source=sft
once $run scripts.chat_rl --model_tag=$tag --resume=auto --task=arithmetic:easy --examples_per_step=1 --num_samples=2 \
    --max_new_tokens=4 $tiny
once "${judge[@]}" --source=rl
once python -m scripts.report --model_tag=$tag
echo "everything works; the models in $NANOCHAT_BASE_DIR have learned nothing"
[ -z "$chat" ] || python -m scripts.chat_web --source=rl --model_tag=$tag ${folder:+--library=$library}
