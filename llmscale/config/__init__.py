"""Configuration of a run: from flags and files to one resolved object. No torch. Read them in this order.

run_config            every key with its unit, default and behaviour; parsing
run_flags             keys as flags, for help without pydantic
command_line          flags of all commands, and their errors
user_paths            paths, URLs and prompts that a user names
bundled_files         files that come with llmscale
presets, hf_model     shapes of models by name, and of published ones
batch_plan            a global batch over ranks, micro-steps and ramps; which ranks share what
schedule              learning rate of a step
optimizers            groups and states of AdamW, Muon and Adafactor
loss_settings         settings of the loss and of routers
deepspeed             keys, rules and defaults of a ds_config
resolve               all of these for one dataset and number of ranks
published             parts of a run's texts that leave the machine
describe_defaults     sentences about what followed from what
hardware              GPUs and networks, with peaks
launcher_variables    ranks as launchers announce them
"""
