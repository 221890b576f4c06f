# The assistant of a laptop: the embedded world and Python's own documentation, without downloads, in six to ten minutes
# on two cores. speedrun.sh sources this file where there is no GPU. To paste its commands, begin with
#     . ./setup.sh; export NANOCHAT_BASE_DIR=~/.cache/nanochat; once() { python -m scripts.once "$@"; }
DEPTH=${depth:-2}  # 4 with --full
python -m scripts.choose_size --depth=$DEPTH  # says how long it takes
tag=assistant-d$DEPTH made=report/sections/tinyworld/assistant-d$DEPTH
batch="--total_batch_size=4096 --device_batch_size=8 --eval_tokens=32768 --save_every=100 --keep_last=2"
# ---- The base model: text, what the assistant will look up, tokens, training, evaluation
once data-tinyworld -- python -m scripts.dataset --source=tinyworld
once library -- python -m scripts.library --source=python
[ -z "${folder:-}" ] || once folder -- python -m scripts.library --source="$folder" --name=folder
once tokenizer-tinyworld --needs data/tinyworld/manifest.json --makes tokenizer/tinyworld -- \
    python -m scripts.tok_train --data=tinyworld --vocab_size=4096 --tasks="pydoc, run"
# Four heads of 64 learn to copy sooner than two of 128; on text alone they were worse (docs/ablations.md).
once base-$tag --needs data/tinyworld/manifest.json tokenizer/tinyworld --makes base_checkpoints/$tag -- \
    python -m scripts.base_train --data=tinyworld --model_tag=$tag --resume=auto --depth=$DEPTH \
    --arch=modern,head_dim=64 --max_seq_len=512 --num_iterations=500 --eval_every=100 $batch
once base_eval-$tag --needs base_checkpoints/$tag --makes $made/base_eval.json -- \
    python -m scripts.base_eval --model_tag=$tag --core_metric_max_per_task=0 --eval_tokens=65536
# ---- The assistant: each stage begins with the model of the stage before, and is judged by held-out problems
judge=(python -m scripts.chat_eval --model_tag=$tag --max_problems=400 --batch_size=64 --tasks="tinyworld:facts,
    tinyworld:identity, arithmetic, spellingbee, words:tinyworld, pydoc:known, pydoc, run, lookup, lookup:unknown,
    lookup:talk, search, search:unknown")
# A question says what to do, whatever was asked before it: without after:… arithmetic after a lookup was 44% right.
once mid-$tag --needs base_checkpoints/$tag --makes mid_checkpoints/$tag $made/mid_train.json -- \
    python -m scripts.mid_train --model_tag=$tag --resume=auto --eval_every=500 $batch --tasks="tinyworld,
        tinyworld[:13000], after:lookup+arithmetic[:1200], after:search+spellingbee[:1200],
        after:lookup+tinyworld[:1000], after:lookup+tinyworld:identity[:400], after:arithmetic+lookup[:700],
        after:tinyworld+search[:500], arithmetic[:5000], spellingbee[:6000], spellingbee:hand[:6000],
        words:tinyworld[:5000], run[:13000], lookup[:16000], tokens:tinyworld[:8000], lookup:unknown[:2500],
        lookup:talk[:6000], search[:10000], search:unknown[:3000]"
once chat_eval-mid-$tag --needs mid_checkpoints/$tag --makes $made/chat_eval_mid.json -- "${judge[@]}" --source=mid
once sft-$tag --needs mid_checkpoints/$tag --makes sft_checkpoints/$tag $made/chat_sft.json -- \
    python -m scripts.chat_sft --model_tag=$tag --resume=auto --device_batch_size=16 --target_examples_per_step=64 \
    --init_lr_frac=0.3 --eval_every=100 --eval_steps=5 --eval_metrics_every=-1 --save_every=100 --keep_last=2 \
    --tasks="tinyworld[:2000], after:lookup+arithmetic[5000:5400], after:search+spellingbee[8000:8300],
        after:lookup+tinyworld[1000:1300], after:lookup+tinyworld:identity[:200], tinyworld:identity,
        arithmetic[5000:6500], spellingbee:hand[8000:10500], words:tinyworld[8000:8500], run[13000:18000],
        lookup[20000:23000], tokens:tinyworld[8000:9500], lookup:unknown[2500:3000], lookup:talk[6000:7500],
        search[15000:19000], search:unknown[3000:3800]"
once chat_eval-sft-$tag --needs sft_checkpoints/$tag --makes $made/chat_eval_sft.json -- "${judge[@]}" --source=sft
once rl-$tag --needs sft_checkpoints/$tag --makes rl_checkpoints/$tag $made/chat_rl.json -- \
    python -m scripts.chat_rl --model_tag=$tag --resume=auto --task="run[18000:]" --num_iterations=60 \
    --init_lr_frac=0.3 --num_samples=8 --max_new_tokens=80 --device_batch_size=16 --eval_every=60 \
    --eval_examples=400 --eval_samples=1 --save_every=10 --keep_last=2
once chat_eval-rl-$tag --needs rl_checkpoints/$tag --makes $made/chat_eval_rl.json -- "${judge[@]}" --source=rl
once report -- python -m scripts.report --model_tag=$tag
page=(python -m scripts.chat_web --source=rl --model_tag=$tag ${folder:+--library=folder})
[ -n "${chat:-}" ] && once page -- "${page[@]}" || echo "talk to it: . ./setup.sh && ${page[*]}"
