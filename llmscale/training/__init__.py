"""A training run, from its flags to its last checkpoint. A start meets these modules in this order.

Before torch:
    stop_request    signals: the run saves and ends; peers that are lost
    watchdog        heartbeats for a launcher, and the end of a rank that hangs
    inputs          each small file of a run, read once: configuration, ds_config, data, checkpoint, tasks
    sample_stream   the samples of the run, a function of seed, data and checkpoint
    start           inputs resolved for a number of ranks; changes since the checkpoint; memory, disk space
    identity        what may not change between a checkpoint and a run that resumes it
    run_folder      files of a run folder and their lock; --notify

All ranks together:
    open_session    everything up to the first step
    rank_agreement  ranks that were started alike, and which of them share a disk
    resume          the checkpoint that all ranks see; its history; loading it
    publish_run     copies to a run's store

Each step:
    session         train.py's loop: fetch, decide, train, act, save, go back
    live_run        what a step changes, actions after steps, and what is printed before the first
    log_steps       the logged step: losses, experts, sensors; ranks that are slow
    step_metrics    every metric, declared once; the clock
    metrics         metrics.jsonl and trackers
    live_view       the terminal
    loss_spikes     spikes and steps without finite numbers
    reports         start-up, memory, validation, tasks, sampled text, --overfit-batch, --profile
"""
