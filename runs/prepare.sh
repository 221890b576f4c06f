# What speedrun.sh begins with: its options, the environment, the doctor's choice. Sourced, with the options.
#
#     once NAME --needs … --makes … -- COMMAND    run a command unless it ended well before (scripts/once.py)
#     stage NAME                                  a heading, with the time since the beginning
#     finish                                      the report of the model $tag, and how to talk to it
#     $folder, $chat, $rehearse, $plan            what was asked for; empty: not
#     $RANKS, $DEPTH, …                           what the doctor has chosen for this machine; RANKS=0: it has no GPU
plan="" folder="" chat="" rehearse="" full=False
usage() { echo "error: $1" >&2; exit 2; }
for argument in "$@"; do
    case $argument in
        --chat) chat=yes ;;
        --full) full=True ;;
        --rehearse) rehearse=rehearsal ;;
        --plan=[1-9]*[,x]?*) plan=${argument#*=} ;;
        --plan*) usage "$argument: expected --plan=8,H100,80: how many GPUs, which, and of how many GB" ;;
        --folder=?*)
            folder=${argument#*=} folder=${folder/#\~/$HOME}
            [ -e "$folder" ] || usage "no folder $folder; expected one with .txt, .md, … files"
            folder=$(realpath "$folder") ;;
        -h | --help) sed -n '2,/^set /{/^#/!d; s/^# \{0,1\}//; p;}' "$0"; exit 0 ;;
        *) usage "$argument is unknown; expected --chat, --folder=…, --full, --rehearse, --plan=8,H100,80, --help" ;;
    esac
done
cd "$(dirname "$0")"
. ./setup.sh "$(! nvidia-smi >/dev/null 2>&1 || echo hub)"  # the larger tasks come from the hub

stage() { echo; echo "=== $1 ($((SECONDS / 60)) min $((SECONDS % 60)) s)"; }
once() { python -m scripts.once "$@"; }
finish() {  # the report of the model $tag, and how to talk to it
    stage "report"
    python -m scripts.report --model_tag=$tag
    [ -z "$plan" ] || exit 0
    page="python -m scripts.chat_web --source=rl --model_tag=$tag${folder:+ --library=folder}"
    stage "done"
    echo "talk to it: . ./setup.sh && $page      (or scripts.chat_cli, in the terminal)"
    [ -z "$chat" ] || exec $page
}
export NANOCHAT_BASE_DIR="${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}"
choice=$NANOCHAT_BASE_DIR/once/choice  # kept: a run that goes on has the same model
choose=(python -m scripts.doctor --full=$full --price="${PRICE:-2.5}")
if [ -n "$plan" ]; then  # nothing is run: each command is shown
    choice=$(mktemp) && trap 'rm "$choice"' EXIT
    "${choose[@]}" --plan="$plan" --choose="$choice"
    stage() { echo; echo "=== $1"; }
    show() {
        words=""
        for word in "$@"; do [[ $word != *[\ []* ]] || word="\"$word\""; words+=" $word"; done
        echo "${words# }"
    }
    once() { while [ "$1" != -- ]; do shift; done; show "${@:2}"; }
    python() { show python "$@"; }
else
    stage "doctor"
    python -m scripts.doctor || { echo "error: nothing can be trained here; the doctor says why" >&2; exit 1; }
    gpus=$(python -c "import torch; print(torch.cuda.device_count())")
    if [ -n "$rehearse" ] && [ "$gpus" -eq 0 ]; then
        choice=/dev/null RANKS=0  # tiny models need no choice
    elif [ ! -s "$choice" ] || [ $full = True ]; then
        "${choose[@]}" --choose="$choice"
    fi
fi
. "$choice"
