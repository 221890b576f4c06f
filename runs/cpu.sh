# The CPU's run: the embedded world and Python's own documentation. Nothing to download, and a model small enough for
# minutes on two cores. Sourced by speedrun.sh; the doctor has chosen DEPTH, 2 or 4, by the time of a step.
tag=assistant-d$DEPTH data=report/sections/tinyworld/$tag
often="--device_batch_size=16 --save_every=100 --keep_last=2"

stage "data"
python -m scripts.dataset --source=tinyworld --shard_mb=8

stage "library: what the assistant looks up"
python -m scripts.library --source=python
[ -z "$folder" ] || python -m scripts.library --source="$folder" --name=folder

stage "tokenizer"
once tokenizer-tinyworld --needs data/tinyworld/manifest.json --makes tokenizer/tinyworld -- \
    python -m scripts.tok_train --data=tinyworld --vocab_size=4096 --tasks="pydoc, run"

# Four heads of 64 learn to copy sooner than two of 128; on text alone they were worse (docs/ablations.md).
stage "base model: the embedded world as text"
once base-$tag --needs data/tinyworld/manifest.json tokenizer/tinyworld --makes base_checkpoints/$tag -- \
    python -m scripts.base_train --data=tinyworld --model_tag=$tag --resume=auto $often --depth=$DEPTH \
    --arch=modern,head_dim=64 --max_seq_len=256 --total_batch_size=4096 --num_iterations=500 --eval_every=100 \
    --eval_tokens=32768
once base_eval-$tag --needs base_checkpoints/$tag --makes $data/base_eval.json -- \
    python -m scripts.base_eval --model_tag=$tag --core_metric_max_per_task=0 --eval_tokens=65536

judge() {  # STAGE: its model on held-out problems
    stage "evaluation: $1"
    once chat_eval-$1-$tag --needs $1_checkpoints/$tag --makes $data/chat_eval_$1.json -- \
        python -m scripts.chat_eval --source=$1 --model_tag=$tag --max_problems=400 --batch_size=64 \
        --tasks="tinyworld:facts, tinyworld:identity, arithmetic, spellingbee, words:tinyworld, pydoc:known, pydoc, \
run, lookup, lookup:unknown, lookup:talk, search, search:unknown"
}
# after:… are second questions: without them arithmetic after a lookup was 44% right.
stage "mid-training: all tasks"
once mid-$tag --needs base_checkpoints/$tag --makes mid_checkpoints/$tag -- \
    python -m scripts.mid_train --model_tag=$tag --resume=auto $often --total_batch_size=4096 --eval_every=500 \
    --eval_tokens=32768 --tasks="tinyworld, tinyworld[:13000], after:lookup+arithmetic[:1200], \
after:search+spellingbee[:1200], after:lookup+tinyworld[:1000], after:lookup+tinyworld:identity[:400], \
after:arithmetic+lookup[:700], after:tinyworld+search[:500], arithmetic[:5000], spellingbee[:6000], \
spellingbee:hand[:6000], words:tinyworld[:5000], run[:13000], lookup[:16000], tokens:tinyworld[:8000], \
lookup:unknown[:2500], lookup:talk[:6000], search[:10000], search:unknown[:3000]"
judge mid
stage "fine-tuning: answers alone"
once sft-$tag --needs mid_checkpoints/$tag --makes sft_checkpoints/$tag -- \
    python -m scripts.chat_sft --model_tag=$tag --resume=auto $often --target_examples_per_step=64 --init_lr_frac=0.3 \
    --eval_every=100 --eval_steps=5 --eval_metrics_every=-1 --tasks="tinyworld[:2000], \
after:lookup+arithmetic[5000:5400], after:search+spellingbee[8000:8300], after:lookup+tinyworld[1000:1300], \
after:lookup+tinyworld:identity[:200], tinyworld:identity, arithmetic[5000:6500], spellingbee:hand[8000:10500], \
words:tinyworld[8000:8500], run[13000:18000], lookup[20000:23000], tokens:tinyworld[8000:9500], \
lookup:unknown[2500:3000], lookup:talk[6000:7500], search[15000:19000], search:unknown[3000:3800]"
judge sft
stage "reinforcement learning: what programs print"
once rl-$tag --needs sft_checkpoints/$tag --makes rl_checkpoints/$tag -- \
    python -m scripts.chat_rl --model_tag=$tag --resume=auto $often --save_every=10 --task="run[18000:]" \
    --num_iterations=60 --init_lr_frac=0.3 --num_samples=8 --max_new_tokens=80 --eval_every=60 --eval_examples=400 \
    --eval_samples=1
judge rl
finish
