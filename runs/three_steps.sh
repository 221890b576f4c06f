# Three steps of the model that speedrun.sh will train, on the same ranks, with validation, samples and a checkpoint:
# whether it compiles, fits, is fast and can be saved. On Python's library, in a base folder of its own; of two
# micro-steps, as in the second the memory also holds the first one's sum. Sourced by speedrun.sh.
stage "three steps of depth $DEPTH before the downloads"
(
    export NANOCHAT_BASE_DIR=$NANOCHAT_BASE_DIR/rehearsal
    python -m scripts.dataset --source=python
    once tokenizer-python --needs data/python/manifest.json --makes tokenizer/python -- \
        python -m scripts.tok_train --data=python --vocab_size=32768
    once steps-$tag --needs tokenizer/python --makes report/sections/python/$tag/base_train.json -- \
        ${run/restarts=3/restarts=0} scripts.base_train --data=python --model_tag=$tag --overwrite $base \
        --total_batch_size=$((2 * ROWS * 2048 * RANKS)) --num_iterations=3
    rm -rf "$NANOCHAT_BASE_DIR/base_checkpoints/$tag"
)
