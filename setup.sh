# Make .venv with everything the repo needs, unless it is there; sourced by speedrun.sh and tests/run.sh:
#     . ./setup.sh [extra]
# NANOCHAT_NO_VENV=1: nothing is made, the Python on the PATH is used as it is (a container that has everything).
# A torch that already works in .venv is never replaced. Without a GPU, torch's CPU wheels are asked for first: the
# default ones bring gigabytes of CUDA. With one, its driver says which of CUDA's; CUDA_VISIBLE_DEVICES= hides GPUs.
# How many rounds a waiting OpenMP thread spins. 1,000 cost a seventh of the speed on an idle machine. Beside another busy
# process 10,000 cost a quarter of the speed at 1,000, the default of 300,000 up to nine tenths (docs/LOG.md, 25 November).
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"
# torch 2.13 takes kernels from its cache that it compiled for another instruction set, and computes wrong numbers or crashes.
[ -z "${ATEN_CPU_CAPABILITY:-}" ] || export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/torchinductor-$(id -un)-$ATEN_CPU_CAPABILITY}"
# Under nohup a lost connection stops nothing; torchrun would act on the signal all the same.
[ -z "$(trap -p HUP 2>/dev/null)" ] || export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT
[ -z "${NANOCHAT_NO_VENV:-}" ] || return 0
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1) || {
    ! command -v nvidia-smi >/dev/null || echo "nvidia-smi finds no GPU: ${driver%%$'\n'*}" >&2
    driver=""
}
# The first number of the driver, and the index of the newest wheels that it runs: CUDA 13 (the default ones) from 580 on.
driver=${driver%%.*} wheels=""
case ${CUDA_VISIBLE_DEVICES-all}:$driver in :* | -1:* | NoDevFiles:* | *:*[!0-9]*) driver="" ;; esac
if [ -z "$driver" ]; then wheels=cpu
elif [ "$driver" -lt 525 ]; then echo "error: NVIDIA driver $driver is too old for torch 2.11 to 2.13; install 525 or newer, best 580" >&2; return 1
elif [ "$driver" -lt 570 ]; then wheels=cu126
elif [ "$driver" -lt 580 ]; then wheels=cu128
fi
# The stamp holds what was installed: a second run costs nothing, a changed pyproject.toml installs again.
stamp="$(cksum pyproject.toml) ${1:-}"
case "$(.venv/bin/python -c pass 2>/dev/null && cat .venv/installed 2>/dev/null)" in "$stamp" | "$(cksum pyproject.toml) dev") ;; *)  # dev has everything
    # One whose making failed or was interrupted has no pip. Where that cannot be added (its Python is gone, or out of reach),
    # another is made, and what is there is kept under another name.
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1 && ! .venv/bin/python -m ensurepip >/dev/null 2>&1; then
        [ ! -e .venv ] && [ ! -L .venv ] || { echo "the Python of .venv does not start: it is moved to .venv.old-$$" && mv .venv ".venv.old-$$"; } || return 1
        for python in "${PYTHON:-python3}" python3.13 python3.12 python3.11 ""; do
            "${python:-false}" -c "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1 && break
        done
        if [ -n "$python" ]; then "$python" -m venv .venv || return 1
        elif command -v uv >/dev/null; then uv venv --quiet --seed --python 3.12 .venv || return 1
        else
            echo "error: no Python from 3.11 to 3.13 with venv was found, only $(python3 --version 2>&1);" \
                "install uv (https://docs.astral.sh/uv), or python3.12 with python3.12-venv and python3.12-dev" >&2
            return 1
        fi
    fi
    if ! .venv/bin/python -c "import torch; torch.ones(1) + 1" 2>/dev/null; then
        from_torch() {
            .venv/bin/python -m pip install --quiet --retries 1 --timeout 20 \
                --index-url "https://download.pytorch.org/whl/$1" "torch>=2.11,<=2.13.0"
        }
        case $(uname)$wheels in
            Linuxcpu) from_torch cpu 2>/dev/null || true ;;
            Linuxcu*) from_torch $wheels || {
                echo "error: there is no torch for NVIDIA driver $driver without this download; try again, or update the driver to 580" >&2
                return 1
            } ;;
        esac
    fi
    echo "installing into .venv ..."
    .venv/bin/python -m pip install --quiet --editable ".${1:+[$1]}" || return 1
    echo "$stamp" > .venv/installed
esac
if [ -n "$driver" ] && ! why=$(.venv/bin/python -c "import torch; torch.cuda.init()" 2>&1); then
    echo "error: torch cannot use the GPUs here (NVIDIA driver $driver): ${why##*$'\n'}" >&2
    echo "    rm -r .venv, then again, installs one for this driver; export CUDA_VISIBLE_DEVICES= to train on the CPU" >&2
    return 1
fi
PATH="$PWD/.venv/bin:$PATH"
