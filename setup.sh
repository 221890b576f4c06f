# Make .venv with everything the repo needs, unless it is there; sourced by speedrun.sh and tests/run.sh:
#     . ./setup.sh [extra]
# NANOCHAT_NO_VENV=1 takes the Python on the PATH as it is (a container). A torch that works is never replaced.
# With pip: uv does not read pip's configuration, and fetched CUDA's gigabytes where a CPU's wheel lay on the disk.

# Rounds that a waiting OpenMP thread spins: fewer are slower on an idle machine, more on a busy one (docs/LOG.md).
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"
# torch 2.13 takes cached kernels of another instruction set, and computes wrong numbers or crashes.
[ -z "${ATEN_CPU_CAPABILITY:-}" ] ||
    export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-/tmp/torchinductor-$(id -un)-$ATEN_CPU_CAPABILITY}"
# Under nohup a lost connection stops nothing; torchrun would act on the signal all the same.
[ -z "$(trap -p HUP 2>/dev/null)" ] || export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT
[ -z "${NANOCHAT_NO_VENV:-}" ] || return 0
complain() { echo "error: $1" >&2; return 1; }

# The driver says which wheels run: the default ones from 580 on; the others, and the CPU's, are in torch's own index.
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || driver=""
driver=${driver%%.*} wheels=cpu
case ${CUDA_VISIBLE_DEVICES-all}:$driver in :* | -1:* | NoDevFiles:* | *:*[!0-9]*) driver="" ;; esac
case $driver in "") ;; 52[5-9] | 5[3-6]?) wheels=cu126 ;; 57?) wheels=cu128 ;; 5[89]? | [6-9]??) wheels="" ;;
    *) complain "NVIDIA driver $driver is too old for torch 2.11; install 525 or newer, best 580" || return 1 ;; esac

python=.venv/bin/python stamp="$(cksum pyproject.toml) ${1:-}"  # of what is installed: a second run costs nothing
case "$($python -c pass 2>/dev/null && cat .venv/installed 2>/dev/null)" in "$stamp" | "${stamp% *} dev") ;; *)
    if ! $python -m pip --version >/dev/null 2>&1 && ! $python -m ensurepip >/dev/null 2>&1; then
        [ ! -e .venv ] && [ ! -L .venv ] || { echo "the Python of .venv does not start: it is moved to .venv.old-$$" &&
            mv .venv ".venv.old-$$"; } || return 1
        for new in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
            "$new" -c "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || continue
            "$new" -m venv .venv && break
        done
        [ -x $python ] || uv venv --quiet --seed --python 3.12 .venv 2>/dev/null ||
            complain "no Python of 3.11 to 3.13 with venv; install uv, or python3.12, python3.12-venv, -dev" || return 1
    fi
    if [ "$(uname)" = Linux ] && [ -n "$wheels" ] && ! $python -c "import torch; torch.ones(1) + 1" 2>/dev/null; then
        $python -m pip install --quiet --retries 1 --timeout 20 --index-url "https://download.pytorch.org/whl/$wheels" \
            "torch>=2.11,<=2.13.0" 2>/dev/null || [ $wheels = cpu ] ||
            complain "cannot download torch for NVIDIA driver $driver; try again, or update it to 580" || return 1
    fi
    echo "installing into .venv ..."
    $python -m pip install --quiet --editable ".${1:+[$1]}" || return 1
    echo "$stamp" > .venv/installed ;;
esac
[ -z "$driver" ] || why=$($python -c "import torch; torch.cuda.init()" 2>&1) ||
    complain "torch cannot use the GPUs here (NVIDIA driver $driver): ${why##*$'\n'}
    rm -r .venv, then again, installs one for this driver; export CUDA_VISIBLE_DEVICES= to train on the CPU" || return 1
PATH="$PWD/.venv/bin:$PATH"
