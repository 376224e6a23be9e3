#!/usr/bin/env bash
# node.sh torchrun|deepspeed ARGUMENTS OF TRAIN.PY...: run by train_plain.sbatch once on every node. Starts the launcher
# and passes SIGUSR1 and SIGTERM to the ranks, which save and end. Without it torchrun dies of SIGUSR1, and both launchers
# kill their ranks at SIGTERM.
set -euo pipefail

main() {
    local launcher=$1 command pid status=0
    shift
    stop=0
    trap 'stop=1' USR1 TERM
    case $launcher in
        torchrun)
            command=(torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$RANKS_PER_NODE"
                --node-rank "$SLURM_NODEID" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
                --) # otherwise torchrun reads --run of train.py as an abbreviation of its --run-path
            ;;
        deepspeed)
            hostfile=$(mktemp)
            trap 'rm -f "$hostfile"' EXIT
            awk -v slots="$RANKS_PER_NODE" '{ print $1 " slots=" slots }' <<<"$JOB_HOSTS" >"$hostfile"
            command=(deepspeed --hostfile "$hostfile" --no_ssh --node_rank "$SLURM_NODEID"
                --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT")
            ;;
        *)
            echo "error: LAUNCHER is '$launcher'. Legal: torchrun, deepspeed." >&2
            return 2
            ;;
    esac
    # In a separate session, because Slurm signals the process group of a task. SIGUSR1 is ignored by every process that
    # does not install a handler; the ranks install one as soon as they can.
    (
        trap '' USR1
        exec setsid "${command[@]}" llmscale/train.py "$@"
    ) &
    pid=$!
    while ((!stop)) && kill -0 "$pid" 2>/dev/null; do
        wait "$pid" || true
    done
    # Repeatedly: the ranks may not have begun when the first signal arrives.
    while kill -0 "$pid" 2>/dev/null; do
        signal_ranks "$pid" "$launcher"
        sleep 1 || true
    done
    wait "$pid" || status=$?
    return "$status"
}

# signal_ranks PID LAUNCHER: send SIGUSR1 to the ranks, which are children of torchrun and grandchildren of deepspeed.
# Their own children, data workers and Python's helpers, must not get it.
signal_ranks() {
    local parents=$1 ranks
    if [[ $2 == deepspeed ]]; then
        parents=$(children_of "$1")
    fi
    ranks=$(children_of "$parents")
    # shellcheck disable=SC2086  # a list of process ids
    [[ -z $ranks ]] || kill -s USR1 $ranks 2>/dev/null || true
}

# children_of PIDS: print the children of all processes in the list.
children_of() {
    local pid
    for pid in $1; do
        cat "/proc/$pid/task/"*/children 2>/dev/null || true
    done
}

main "$@"
