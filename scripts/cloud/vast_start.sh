#!/usr/bin/env bash
# On-start script of a Vast.ai instance: check, train, and copy the run folder to a store. Paste it into the template's
# "On-start Script", or: vastai create instance ... --image ghcr.io/OWNER/llmscale:VERSION-cuda --onstart
# scripts/cloud/vast_start.sh. The image, which .github/workflows/image.yml pushes, has everything installed; any other one
# gets the repository and its packages first.
# Vast runs it at every boot: an interrupted instance continues by itself, and a new one continues from the copy.
# Variables of the template's environment (-e NAME=VALUE):
#   LLMSCALE_REPO   git URL to clone, in another image than ours
#   LLMSCALE_REF    branch, tag or commit (default main)
#   TRAIN_ARGS      arguments of train.py, quoted as in a shell; nothing in them is expanded or executed
#   RUN             the run folder (default runs/vast; do not give --run in TRAIN_ARGS)
#   SYNC_TO         rclone path of the copy, such as s3:bucket/llmscale/run1 (RCLONE_CONFIG_* configure it); empty: no copy
#   SYNC_EVERY_S    seconds between copies (default 600)
#   WORK            folder for the clone and the log (default ~/vast)
set -euo pipefail

WORK=${WORK:-$HOME/vast}
RUN=${RUN:-runs/vast}
SYNC_TO=${SYNC_TO:-}

main() {
    local arguments=() status=0
    mkdir -p "$WORK"
    # Vast shows only the last lines of the output.
    exec > >(tee -a "$WORK/llmscale.log") 2>&1
    install_llmscale
    if [[ -n $SYNC_TO ]] && ! command -v rclone >/dev/null; then
        echo "error: SYNC_TO needs rclone, which is not installed. Add it to the image, or unset SYNC_TO." >&2
        return 2
    fi
    restore
    mapfile -d '' -t arguments < <(split_words "${TRAIN_ARGS:-}")
    step "Checks"
    llmscale doctor
    step "Training"
    run_training llmscale launch -- "${arguments[@]}" --run "$RUN" || status=$?
    sync_run || status=1
    echo "== ended with status $status. Stop the costs of the instance: vastai destroy instance ${CONTAINER_ID:-ID}"
    return "$status"
}

step() {
    printf '\n== %s  [%(%F %T)T]\n' "$1" -1
}

# Install into $WORK/llmscale, unless this is the image of scripts/cloud/Dockerfile. Changes to the repository.
install_llmscale() {
    if [[ -f /app/llmscale/train.py ]]; then
        # The shell of an instance may lack the image's variables.
        export PATH=/opt/venv/bin:$PATH
        cd /app
        return
    fi
    step "Installation"
    if ((EUID == 0)); then
        apt-get update -qq
        apt-get install -qq --no-install-recommends g++ git libaio-dev python3-dev python3-venv rclone >/dev/null
    fi
    if [[ ! -d $WORK/llmscale/.git ]]; then
        git clone --quiet "${LLMSCALE_REPO:?set LLMSCALE_REPO to the git URL}" "$WORK/llmscale"
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

# Print the words of a string as a shell would split them, without expansion, each ended by a zero byte.
split_words() {
    python3 -c 'import shlex, sys; sys.stdout.write("".join(w + "\0" for w in shlex.split(sys.argv[1])))' "$1"
}

# On a new machine, restore the run before anything is written. Exit if the copy exists but cannot be read: a run begun
# from scratch would replace it.
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
            # Under another name until it is complete: half a copy must not replace the full one.
            rclone copy "$SYNC_TO" "$RUN.restoring"
            mv "$RUN.restoring" "$RUN"
            ;;
        3) echo "No copy there: the run starts from scratch." ;; # rclone's status for a folder that does not exist
        *)
            echo "error: SYNC_TO=$SYNC_TO cannot be read (rclone status $status). Check RCLONE_CONFIG_*." >&2
            return "$status"
            ;;
    esac
}

# Copy the finished files of the run folder; the name of an unfinished checkpoint begins with a dot.
sync_run() {
    if [[ -n $SYNC_TO && -d $RUN ]]; then
        rclone sync --exclude '.*.partial/**' --exclude .lock "$RUN" "$SYNC_TO"
    fi
}

# run_training COMMAND...: run it and return its status. Copies the run folder periodically, and passes on SIGTERM and
# SIGUSR1, at which the run saves and ends.
run_training() {
    local pid status next
    "$@" &
    pid=$!
    trap 'kill -s TERM "$pid" 2>/dev/null || true' TERM
    trap 'kill -s USR1 "$pid" 2>/dev/null || true' USR1
    next=$((SECONDS + ${SYNC_EVERY_S:-600}))
    while kill -0 "$pid" 2>/dev/null; do
        # In the background, so that a signal is handled at once and not after the sleep.
        sleep 1 &
        wait $! || true
        if ((SECONDS >= next)); then
            sync_run || echo "warning: $SYNC_TO could not be written; training continues" >&2
            next=$((SECONDS + ${SYNC_EVERY_S:-600}))
        fi
    done
    status=0
    wait "$pid" || status=$?
    return "$status"
}

main "$@"
