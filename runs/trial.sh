# Three steps of the model that speedrun.sh has chosen, on Python's documentation. speedrun.sh sources this file before
# anything is downloaded: do the steps compile and fit, and can they be saved? Not again for the same model and GPUs.
tried=$NANOCHAT_BASE_DIR/rehearsal/tried
[ "$(cat "$tried" 2>/dev/null)" = "$RANKS $model" ] || (
    export NANOCHAT_BASE_DIR+=/rehearsal CHAIN=$(mktemp)
    once python -m scripts.dataset --source=python
    once python -m scripts.tok_train --data=python --vocab_size=$VOCAB
    # Two micro-steps: gradients are summed.
    ${run/restarts=3/restarts=0} scripts.base_train --data=python --model_tag=$tag --overwrite $model \
        --total_batch_size=$((2 * ROWS * 2048 * RANKS)) --num_iterations=3
    rm -rf "$NANOCHAT_BASE_DIR/base_checkpoints/$tag"
    echo "$RANKS $model" > "$tried"
)
