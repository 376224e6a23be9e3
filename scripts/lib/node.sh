#!/usr/bin/env bash
# node.sh torchrun|deepspeed ARGUMENTS OF TRAIN.PY...: run once on every node by srun (train_plain.sbatch), SkyPilot
# (sky.yaml) or a JobSet (jobset.yaml). Starts the launcher and passes SIGUSR1 and SIGTERM to the ranks, which save and
# end. Without it torchrun dies of SIGUSR1, and both launchers kill their ranks at SIGTERM.
# The exit status is the launcher's. In the cloud a node that was told to end, and saved, ends with 143: status 0 would
# mean that the run is finished, and nothing would start it again.
set -euo pipefail

main() {
    local launcher=$1 command pid status=0
    shift
    stop=0
    trap 'stop=1' USR1 TERM
    find_place
    case $launcher in
        torchrun)
            command=(torchrun --nnodes "$num_nodes" --nproc-per-node "$RANKS_PER_NODE"
                --node-rank "$node_rank" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
                --) # otherwise torchrun reads --run of train.py as an abbreviation of its --run-path
            ;;
        deepspeed)
            hostfile=$(mktemp)
            trap 'rm -f "$hostfile"' EXIT
            awk -v slots="$RANKS_PER_NODE" '{ print $1 " slots=" slots }' <<<"$JOB_HOSTS" >"$hostfile"
            command=(deepspeed --hostfile "$hostfile" --no_ssh --node_rank "$node_rank"
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
    if ((stop && is_cloud && status == 0)); then
        status=143
    fi
    return "$status"
}

# Set this node's place in the job: node_rank, num_nodes, RANKS_PER_NODE, JOB_HOSTS, MASTER_ADDR and MASTER_PORT.
find_place() {
    is_cloud=1
    if [[ -n ${SKYPILOT_NODE_RANK:-} ]]; then
        node_rank=$SKYPILOT_NODE_RANK
        num_nodes=$SKYPILOT_NUM_NODES
        RANKS_PER_NODE=${RANKS_PER_NODE:-${SKYPILOT_NUM_GPUS_PER_NODE:-1}}
        JOB_HOSTS=$SKYPILOT_NODE_IPS
        MASTER_ADDR=${JOB_HOSTS%%$'\n'*}
    elif [[ -n ${JOB_COMPLETION_INDEX:-} ]]; then
        node_rank=$JOB_COMPLETION_INDEX
        num_nodes=${NUM_NODES:?the JobSet must set it to its completions}
        JOB_HOSTS=$(seq -f 'node-%.0f' 0 "$((num_nodes - 1))") # deepspeed only counts them
        # Kubernetes gives the first pod's name an address when that pod is scheduled.
        until getent hosts "${MASTER_ADDR:?the JobSet must set it to the name of its first pod}" >/dev/null; do
            if ((SECONDS > 600)); then
                echo "error: MASTER_ADDR=$MASTER_ADDR has no address after 600 s. Is enableDNSHostnames set?" >&2
                return 1
            fi
            sleep 1
        done
    else
        is_cloud=0
        node_rank=${SLURM_NODEID:?node.sh is for srun, SkyPilot and JobSets}
        num_nodes=$SLURM_JOB_NUM_NODES
    fi
    RANKS_PER_NODE=${RANKS_PER_NODE:-1}
    # SkyPilot counts 0 GPUs on a machine without any.
    ((RANKS_PER_NODE > 0)) || RANKS_PER_NODE=1
    MASTER_PORT=${MASTER_PORT:-29500}
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
