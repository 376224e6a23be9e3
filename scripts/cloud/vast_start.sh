#!/usr/bin/env bash
# On-start script of a Vast.ai instance: install, check, train, and keep a copy of the run folder outside. Paste it into
# the template's "On-start Script", or: vastai create instance ... --onstart scripts/cloud/vast_start.sh
# Vast runs it at every boot, so an instance that was interrupted goes on by itself, and a new one goes on from the copy.
# What it reads comes from the template's environment (-e NAME=VALUE):
#   LLMSCALE_REPO   git URL to clone; not needed in an image of scripts/cloud/Dockerfile, which has /app
#   LLMSCALE_REF    branch, tag or commit of it (default main)
#   TRAIN_ARGS      arguments of train.py, in a shell's quoting; nothing in them is expanded or executed
#   RUN             the run folder (default runs/vast; do not give --run in TRAIN_ARGS)
#   SYNC_TO         rclone path for the copy, as s3:bucket/llmscale/run1 (RCLONE_CONFIG_* configure it); none: no copy
#   SYNC_EVERY_S    seconds between copies (default 600)
#   WORK            folder for the clone and the log (default ~/vast)
set -euo pipefail

WORK=${WORK:-$HOME/vast}
RUN=${RUN:-runs/vast}
SYNC_TO=${SYNC_TO:-}

main() {
    local arguments=() status=0
    mkdir -p "$WORK"
    # Vast shows only the last lines of an instance's output.
    exec > >(tee -a "$WORK/llmscale.log") 2>&1
    install_llmscale
    if [[ -n $SYNC_TO ]] && ! command -v rclone >/dev/null; then
        echo "error: SYNC_TO needs rclone, which is not installed. Add it to the image, or leave SYNC_TO out." >&2
        return 2
    fi
    restore
    mapfile -d '' -t arguments < <(split_words "${TRAIN_ARGS:-}")
    step "Checks"
    llmscale doctor
    step "Training"
    run_training llmscale launch -- "${arguments[@]}" --run "$RUN" || status=$?
    sync_run || status=1
    echo "== ended with status $status. The instance costs money until: vastai destroy instance ${CONTAINER_ID:-ID}"
    return "$status"
}

step() {
    printf '\n== %s  [%(%F %T)T]\n' "$1" -1
}

# Into $WORK/llmscale, unless this is the image of scripts/cloud/Dockerfile. Leaves the shell in the repository.
install_llmscale() {
    if [[ -f /app/llmscale/train.py ]]; then
        cd /app
        return
    fi
    step "Installation"
    if ((EUID == 0)); then
        apt-get update -qq
        apt-get install -qq --no-install-recommends g++ git libaio-dev python3-dev python3-venv rclone >/dev/null
    fi
    if [[ ! -d $WORK/llmscale/.git ]]; then
        git clone --quiet "${LLMSCALE_REPO:?give the git URL in LLMSCALE_REPO}" "$WORK/llmscale"
    fi
    cd "$WORK/llmscale"
    git fetch --quiet origin "${LLMSCALE_REF:-main}"
    git checkout --quiet --detach FETCH_HEAD
    if [[ ! -x .venv/bin/python ]]; then
        python3 -m venv .venv
    fi
    export VIRTUAL_ENV=$PWD/.venv PATH=$PWD/.venv/bin:$PATH
    pip install --quiet --editable '.[train,data,eval]' --constraint constraints.txt
}

# The words of a string as a shell would split them, each ended by a zero byte; no expansion.
split_words() {
    python3 -c 'import shlex, sys; sys.stdout.write("".join(w + "\0" for w in shlex.split(sys.argv[1])))' "$1"
}

# On a new machine: bring the run back before anything is written. When the copy is there but cannot be read, end here:
# a run begun anew would replace it.
restore() {
    local status=0
    if [[ -z $SYNC_TO || -d $RUN ]]; then
        return
    fi
    mkdir -p "$(dirname "$RUN")"
    step "Looking for an earlier part of the run in $SYNC_TO"
    rclone lsf --max-depth 1 "$SYNC_TO" >/dev/null || status=$?
    case $status in
        0)
            # Under another name until all of it is there: half a copy must not replace the whole one.
            rclone copy "$SYNC_TO" "$RUN.restoring"
            mv "$RUN.restoring" "$RUN"
            ;;
        3) echo "Nothing there: the run begins." ;; # rclone's status for a folder that does not exist
        *)
            echo "error: SYNC_TO=$SYNC_TO cannot be read (rclone status $status). Check RCLONE_CONFIG_*." >&2
            return "$status"
            ;;
    esac
}

# Finished files of the run folder; a checkpoint that is being written has a name that begins with a dot.
sync_run() {
    if [[ -n $SYNC_TO && -d $RUN ]]; then
        rclone sync --exclude '.*.partial/**' --exclude .lock "$RUN" "$SYNC_TO"
    fi
}

# run_training COMMAND...: its status. Copies the run folder now and then, and passes SIGTERM and SIGUSR1 on, at which
# the run saves and ends.
run_training() {
    local pid status next
    "$@" &
    pid=$!
    trap 'kill -s TERM "$pid" 2>/dev/null || true' TERM
    trap 'kill -s USR1 "$pid" 2>/dev/null || true' USR1
    next=$((SECONDS + ${SYNC_EVERY_S:-600}))
    while kill -0 "$pid" 2>/dev/null; do
        # In the background, so that a signal is handled at once and not when the sleep is over.
        sleep 1 &
        wait $! || true
        if ((SECONDS >= next)); then
            sync_run || echo "warning: $SYNC_TO could not be written; training goes on" >&2
            next=$((SECONDS + ${SYNC_EVERY_S:-600}))
        fi
    done
    status=0
    wait "$pid" || status=$?
    return "$status"
}

main "$@"
