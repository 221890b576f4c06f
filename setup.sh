# Make .venv with everything the repo needs, unless it is there; sourced by speedrun.sh and tests/run.sh:
#     . ./setup.sh [extra]
# NANOCHAT_NO_VENV=1: nothing is made, the Python on the PATH is used as it is (a container that has everything).
# A torch that already works in .venv is never replaced. Without a GPU, torch's CPU wheels are asked for first: the
# default ones bring gigabytes of CUDA.
# OpenMP threads that wait should not spin for long: beside any other busy process that costs a third of the speed.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"
# torch 2.13 takes kernels from its cache that it compiled for another instruction set, and computes wrong numbers or crashes.
[ -z "${ATEN_CPU_CAPABILITY:-}" ] || export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/torchinductor-$(id -un)-$ATEN_CPU_CAPABILITY}"
# Under nohup a lost connection stops nothing; torchrun would act on the signal all the same.
[ -z "$(trap -p HUP 2>/dev/null)" ] || export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT
[ -z "${NANOCHAT_NO_VENV:-}" ] || return 0
# The stamp holds what was installed: a second run costs nothing, a changed pyproject.toml installs again.
stamp="$(cksum pyproject.toml) ${1:-}"
case "$(.venv/bin/python -c pass 2>/dev/null && cat .venv/installed 2>/dev/null)" in "$stamp" | "$(cksum pyproject.toml) dev") ;; *)  # dev has everything
    # One whose making failed or was interrupted has no pip. Where that cannot be added (its Python is gone, or out of reach),
    # another is made, and what is there is kept under another name.
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1 && ! .venv/bin/python -m ensurepip >/dev/null 2>&1; then
        [ ! -e .venv ] && [ ! -L .venv ] || { echo "the Python of .venv does not start: it is moved to .venv.old-$$" && mv .venv ".venv.old-$$"; } || return 1
        "${PYTHON:-python3}" -m venv .venv || return 1
    fi
    if ! .venv/bin/python -c "import torch; torch.ones(1) + 1" 2>/dev/null; then
        if [ "$(uname)" = Linux ] && ! nvidia-smi >/dev/null 2>&1; then
            .venv/bin/python -m pip install --quiet --retries 1 --timeout 20 \
                --index-url https://download.pytorch.org/whl/cpu "torch>=2.11,<=2.13.0" 2>/dev/null || true
        fi
    fi
    echo "installing into .venv ..."
    .venv/bin/python -m pip install --quiet --editable ".${1:+[$1]}" || return 1
    echo "$stamp" > .venv/installed
esac
PATH="$PWD/.venv/bin:$PATH"
