# An assistant for a laptop: the embedded world and Python's own documentation, without downloads, in 12
# minutes on two slow cores. speedrun.sh sources this file if there is no GPU. To paste its commands, begin with
#     . ./setup.sh; export NANOCHAT_BASE_DIR=~/.cache/nanochat CHAIN=$(mktemp); once() { python -m scripts.once "$@"; }
DEPTH=${depth:-2}  # 4 with --full
python -m scripts.plan --depth=$DEPTH --file="$NANOCHAT_BASE_DIR/once/estimate.json"  # how long it takes
tag=assistant-d$DEPTH
batch="--total_batch_size=4096 --device_batch_size=8 --eval_tokens=32768"
keep="--save_every=200 --keep_last=2"
page=(python -m scripts.chat_web --model_tag=$tag ${folder:+--library=$library})
[ -z "${chat:-}" ] || { "${page[@]}" --watch & trap "kill $! 2>/dev/null || :" EXIT; }  # the run, live; then the chat
# ---- The base model: text, the assistant's library, tokenizer, training, evaluation
once python -m scripts.dataset --source=tinyworld
once python -m scripts.library --source=python
[ -z "${folder:-}" ] || once python -m scripts.library --source="$folder" --name=$library
once python -m scripts.tok_train --data=tinyworld --vocab_size=4096 \
    --tasks="pydoc, run[:4000], notes[:6000], typed:messages[:8000]"
# Heads of 64 learn to copy sooner than heads of 128; on text alone they were worse (docs/tried.md). One warmdown
# for all rates: with two, which are better on text, the assistant was not. More than these 200 steps, and lower rates,
# make better text but no better assistant, since mid-training asks for each fact many times (docs/tried.md).
once python -m scripts.base_train --data=tinyworld --model_tag=$tag --resume=auto --depth=$DEPTH \
    --arch=modern,head_dim=64 --max_seq_len=512 --num_iterations=200 --eval_every=50 --sample_every=100 \
    --embedding_lr=0.4 --unembedding_lr=0.008 --matrix_lr=0.04 --warmdown_ratio=0.6 $batch $keep
# ---- The assistant, judged by held-out problems. base_train has measured the base model. Fine-tuning did not help.
judge=(python -m scripts.chat_eval --model_tag=$tag --batch_size=160 --tasks="typed:sums, typed:messages,
    tinyworld:facts, tinyworld:identity, arithmetic, spellingbee, words:tinyworld, pydoc:known, pydoc, run, lookup,
    lookup:unknown, lookup:talk, search, search:unknown, notes, notes:unknown, notes:talk")
# after:…: a question of another task comes first. Without these, arithmetic after a lookup was 44% right.
once python -m scripts.mid_train --model_tag=$tag --resume=auto --eval_every=500 --matrix_lr=0.03 --warmdown_ratio=1 \
    $batch $keep \
    --tasks="tinyworld, tinyworld[:16000], after:lookup+arithmetic[:700], after:search+spellingbee[:700],
        after:lookup+tinyworld[:600], after:lookup+tinyworld:identity[:300], after:arithmetic+lookup[:400],
        after:tinyworld+search[:300],
        arithmetic[:5000], typed:sums[:1500], typed:messages, after:lookup+typed:messages[:400],
        after:notes+typed:sums[:300], spellingbee[:3000], spellingbee:hand[:8000], words:tinyworld[:5000],
        words:tinyworld:hand, run[:15000], lookup[:5000], lookup:unknown[:2000], lookup:talk[:2500], search[:7500],
        search:unknown[:5000], notes[:8000], notes:unknown[:2000], notes:talk[:5000]"
once "${judge[@]}" --source=mid --max_problems=100
# Embeddings and head stay as they are: trained on one task's rewards, they cost other tasks up to 2 points. Compiling
# took 12 to 22 seconds, and made these short steps no faster.
once python -m scripts.chat_rl --source=mid --model_tag=$tag --resume=auto --task="run[18000:]" --num_iterations=45 \
    --init_lr_frac=0.25 --embedding_lr=0 --unembedding_lr=0 --num_samples=8 --max_new_tokens=128 --eval_every=100 \
    --device_batch_size=16 --eval_examples=200 --eval_samples=1 --save_every=20 --keep_last=2 --compile=False
once "${judge[@]}" --source=rl --max_problems=400
once python -m scripts.report --model_tag=$tag
[ -z "${chat:-}" ] || wait
echo "talk to it: . ./setup.sh && ${page[*]}"
