# Sourced by the sbatch scripts: run the training, pass Slurm's signals on, and decide about a requeue.
# shellcheck shell=bash

received=" " # signals, such as " USR1 TERM "
child=""     # the process that runs the training
interrupted=0

# Put the repository's environment first on the PATH. Slurm runs a copy of the script from a spool folder, so only the
# folder in which sbatch was called leads to the repository.
enter_environment() {
    local threads
    # bash runs a trap after the current command: until the training has started, signals are only recorded.
    trap 'pass_on USR1' USR1
    trap 'pass_on TERM' TERM
    if [[ -x .venv/bin/python ]]; then
        export VIRTUAL_ENV=$PWD/.venv PATH=$PWD/.venv/bin:$PATH
    fi
    RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
    # Since Slurm 22.05, srun does not inherit this from sbatch, and gives every task one core without it.
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
        export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
        threads=$((SLURM_CPUS_PER_TASK / RANKS_PER_NODE))
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
    fi
    export RANKS_PER_NODE
    echo "== job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}:" \
        "$SLURM_JOB_NUM_NODES x $RANKS_PER_NODE ranks on $SLURM_JOB_NODELIST"
}

# Record a signal, and send it to the training if it has begun.
pass_on() {
    received+="$1 "
    interrupted=1
    echo "== SIG$1: asking the run to save and end" >&2
    if [[ -n $child ]]; then
        kill -s "$1" "$child" 2>/dev/null || true
    fi
}

# run_training COMMAND...: run it and return its exit status, whatever signals arrive meanwhile.
run_training() {
    local status name
    # In the background: bash runs no trap during a command in the foreground.
    "$@" &
    child=$!
    # Signals that arrived before the process existed.
    for name in $received; do
        kill -s "$name" "$child" 2>/dev/null || true
    done
    while true; do
        interrupted=0
        status=0
        wait "$child" || status=$?
        # A signal ends `wait` with 128 + its number while the process continues: wait again for the true status.
        ((interrupted)) || return "$status"
    done
}

# end_job STATUS ARGUMENTS OF TRAIN.PY...: exit, after a requeue if Slurm's USR1 (time limit or pre-emption) ended an
# unfinished run. SIGTERM alone does not requeue: scancel means the end, and a pre-emption by SIGTERM makes Slurm requeue
# the job itself, because of --requeue.
end_job() {
    local status=$1
    shift
    # 138: the signal came before the launcher could catch it, so no training was lost.
    if [[ $received != *" USR1 "* ]] || ((status != 0 && status != 138)); then
        exit "$status"
    fi
    if python scripts/slurm/is_finished.py "$@"; then
        exit 0
    fi
    if ((${SLURM_RESTART_COUNT:-0} >= ${MAX_RESTARTS:-100})); then
        echo "error: the run is saved but not finished after ${SLURM_RESTART_COUNT} restarts, the limit of" \
            "MAX_RESTARTS. Submit it again, or raise the limit." >&2
        exit 1
    fi
    if ! scontrol requeue "$SLURM_JOB_ID"; then
        echo "error: the run is saved, but job $SLURM_JOB_ID could not be requeued. Submit it again." >&2
        exit 1
    fi
    echo "== saved; job $SLURM_JOB_ID is in the queue again and will continue from this checkpoint"
    exit 0
}
