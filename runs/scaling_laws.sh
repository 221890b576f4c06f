#!/usr/bin/env bash
# How large a model should a given amount of computation train? Every depth gets the same FLOPs (one curve for each
# budget), and the lowest point of the curve is the answer. Hoffmann et al. 2022, arXiv:2203.15556, approach 2.
#
#     bash runs/scaling_laws.sh                                     # tiny models without a GPU, minutes
#     BUDGETS="1e18 4e18" DEPTHS="8 10 12 14" bash runs/scaling_laws.sh
#
# After any failure run it again: finished runs are skipped, an unfinished one goes on.
. "$(dirname "$0")/machine.sh"
SERIES=${SERIES:-isoflop}
if [ "$gpus" -ge 1 ]; then
    BUDGETS=${BUDGETS:-"1e18 3e18 1e19"} DEPTHS=${DEPTHS:-"8 10 12 14 16 18"}
else
    BUDGETS=${BUDGETS:-"4e10 1.6e11 6.4e11"} DEPTHS=${DEPTHS:-"1 2 3 4"}
fi

for budget in $BUDGETS; do
    for depth in $DEPTHS; do
        train "$SERIES-$budget-d$depth" --depth="$depth" --target_flops="$budget"
    done
done
python -m bench.scaling --series="$SERIES"
