# Make .venv with everything the repo needs, unless it is there: `. ./setup.sh [extra]`, as speedrun.sh and tests do.
(return 0 2>/dev/null) || { echo "error: it changes this shell's PATH, so write: . ./setup.sh" >&2; exit 2; }
[[ ${1:-dev}, =~ ^((dev|gpu|hub|wandb),)+$ ]] || {
    echo "error: $1 is no extra: expected . ./setup.sh, or with some of dev,gpu,hub,wandb" >&2; return 2; }
# NANOCHAT_NO_VENV=1: the Python on the PATH is used as it is. CUDA_VISIBLE_DEVICES= hides the GPUs.
# Under nohup a lost connection should stop nothing, but torchrun would act on the signal.
[ -z "$(trap -p HUP 2>/dev/null)" ] || export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT
# Seconds for a save before torchrun kills its ranks; torch 2.11 has neither this variable nor the option, and waits 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
[ -z "${NANOCHAT_NO_VENV:-}" ] || return 0
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1) || {
    ! command -v nvidia-smi >/dev/null || echo "nvidia-smi finds no GPU: ${driver%%$'\n'*}" >&2; driver=""; }
driver=${driver%%.*} wheels=""
case ${CUDA_VISIBLE_DEVICES-all}:$driver in  # which torch wheels run here; the default is for CUDA 13
    :* | -1:* | NoDevFiles:* | *: | *:*[!0-9]*) driver="" wheels=cpu ;;
    *:52[5-9] | *:5[3-6]?) wheels=cu126 ;; *:57?) wheels=cu128 ;; *:5[89]? | *:[6-9]??) ;;
    *) echo "error: NVIDIA driver $driver is too old for torch 2.11: install 525 or newer, best 580" >&2; return 1 ;;
esac
stamp="$(cksum pyproject.toml) ${1:-}"  # what was installed; dev has all extras
case $(.venv/bin/python -c pass 2>/dev/null && cat .venv/installed 2>/dev/null) in "$stamp"* | "${stamp% *} dev") ;; *)
    PATH="$PATH:$PWD/.uv/bin"
    command -v uv >/dev/null || why=$(python3 -m pip install --quiet --target .uv uv 2>&1) || {
        echo "$why" >&2
        echo "error: uv is missing, and pip cannot fetch it: https://docs.astral.sh/uv tells how to" >&2; return 1; }
    # uv does not read pip's settings, which may name a mirror or a folder of wheels.
    pip_setting() { python3 -m pip config list 2>/dev/null | sed -n "s/.*\.$1='\(.*\)'/\1/p" | head -n 1; }
    export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$(pip_setting index-url)}"
    export UV_FIND_LINKS="${UV_FIND_LINKS:-$(pip_setting find-links)}" UV_SYSTEM_CERTS=1 UV_NATIVE_TLS=1
    echo "installing into .venv ..."
    .venv/bin/python -c pass 2>/dev/null ||  # .venv or its Python is missing
        uv venv --quiet --seed --allow-existing --python "${PYTHON:->=3.11,<3.14}" .venv || return 1
    install="uv pip install --quiet --python .venv/bin/python"  # keeps an installed torch
    torch="torch>=2.11,<=2.14.1"
    [ "$(uname)" != Linux ] || [ -z "$wheels" ] || why=$($install --torch-backend=$wheels "$torch" 2>&1) || {
        [ $wheels = cpu ] || { echo "error: no torch for NVIDIA driver $driver: ${why##*$'\n'}" >&2; return 1; }
        # Torch's index cannot be reached: a build in pip's folder of wheels, else the index's, gigabytes for CUDA.
        $install --no-index --no-deps "$torch" 2>/dev/null || :; }
    $install --editable ".${1:+[$1]}" && echo "$stamp" > .venv/installed || return 1
esac
[ -z "$driver" ] || why=$(.venv/bin/python -c "import torch; torch.cuda.init()" 2>&1) || {
    echo "error: torch cannot use the GPUs here (NVIDIA driver $driver): ${why##*$'\n'}" >&2
    echo "    rm -r .venv, then again, installs another; CUDA_VISIBLE_DEVICES= trains on the CPU" >&2; return 1; }
PATH="$PWD/.venv/bin:$PATH"
