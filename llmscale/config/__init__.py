"""Configuration of a run: from flags and files to one resolved object. No torch. Read them in this order.

run_config            every key with its unit, default and behaviour; a run's configuration from plain values
run_keys              groups of keys, places of their resolved values, conditions, what leaves the machine
run_flags             keys as flags, for help without pydantic
run_arguments         a configuration from flags and a run file
command_line          flags of all commands, and their errors
user_paths            paths, URLs and prompts that a user names
bundled_files         files that come with llmscale
presets, hf_model     shapes of models by name, and of published ones
batch_plan            a global batch over ranks, micro-steps and ramps; which ranks share what
schedule              learning rate of a step
optimizers            groups and states of AdamW, Muon and Adafactor
muon_plan             matrices of Muon over ranks
loss_settings         settings of the loss and of routers
deepspeed             keys, rules and defaults of a ds_config
resolve               all of these for one dataset and number of ranks
describe_defaults     sentences about what followed from what
hardware              GPUs and networks, with peaks
"""
