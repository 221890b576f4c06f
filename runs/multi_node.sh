#!/usr/bin/env bash
# One run on several machines: the same command on each of them, with its own NODE_RANK.
#
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash runs/multi_node.sh scripts.base_train --depth=20 --resume=auto
#     NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash runs/multi_node.sh scripts.base_train --depth=20 --resume=auto
#
#     NNODES              number of machines. A range such as 1:4 lets the run go on with any number in it, as machines
#                         leave and return; it needs --resume=auto, and no NODE_RANK. MASTER_ADDR's machine must stay.
#     MASTER_ADDR         where the others reach the first node; MASTER_PORT (29500) must be free there
#     NPROC               ranks on this node; default: one for each GPU, or one
#     NANOCHAT_BASE_DIR   on a file system that all nodes share: all ranks write pieces of a checkpoint
#     MAX_RESTARTS        (3) how often all ranks restart from the newest checkpoint when one has died
#     JOB_ID              the scheduler's, if there is one: machines with a different JOB_ID do not join
#
# With several network interfaces, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME says which one the ranks use.
set -euo pipefail
case ${1:---help} in -h | --help) sed -n '2,/^set /{/^#/!d; s/^# \{0,1\}//; p;}' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
[ -n "${NANOCHAT_NO_VENV:-}" ] || [ ! -d .venv ] || PATH="$PWD/.venv/bin:$PATH"
: "${NNODES:?set it to the number of machines}" "${MASTER_ADDR:?set it to the address of the first machine}"
if [[ $NNODES == *:* ]]; then
    # torch 2.13 would keep one store for all rounds, with addresses of earlier ranks, on a machine that may be gone.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    meeting=(--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${JOB_ID:-nanochat}")
else
    : "${NODE_RANK:?set it to 0 on the first machine, 1 on the second, …}"
    meeting=(--node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
    [ -z "${JOB_ID:-}" ] || meeting+=(--rdzv-id="$JOB_ID")
fi
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
[ "$gpus" -ge 1 ] || gpus=1
# Under nohup a lost connection should stop nothing, but torchrun would act on the signal.
[ -z "$(trap -p HUP 2>/dev/null)" ] || export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT
# Seconds for a save before torchrun kills its ranks; torch 2.11 has neither this variable nor the option, and waits 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
# exec: a signal to this script reaches torchrun, which passes it on; then every rank finishes its step and saves.
exec torchrun --nnodes="$NNODES" --nproc-per-node="${NPROC:-$gpus}" "${meeting[@]}" \
    --max-restarts="${MAX_RESTARTS:-3}" -m "$@"
