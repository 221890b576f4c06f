#!/usr/bin/env bash
# A family of models that differ only in depth, each trained on the same number of tokens per parameter of its
# matrices and head: it shows what quality costs before you pay for the largest.
#
#     bash runs/miniseries.sh                                # tiny models without a GPU, a few minutes
#     RATIO=8 DEPTHS="10 12 14" bash runs/miniseries.sh     # tokens per parameter, depths
#
# After any failure run it again: finished runs are skipped, an unfinished one goes on.
. "$(dirname "$0")/machine.sh"
if [ "$gpus" -ge 1 ]; then
    RATIO=${RATIO:-9.4} DEPTHS=${DEPTHS:-"10 12 14 16 18 20"}
else
    RATIO=${RATIO:-1} DEPTHS=${DEPTHS:-"1 2 3"}
fi
SERIES=${SERIES:-miniseries-r$RATIO}

for depth in $DEPTHS; do
    train "$SERIES-d$depth" --depth="$depth" --target_param_data_ratio="$RATIO"
done
python -m bench.scaling --series="$SERIES"
