"""Proof that an engine computes what it should, link by link (docs/numerics.md).

plain    the truth
probe    what the engine uses and computes
links    weights, reduction, norm
check    loss and gradients of the run's own block, other settings

run_update  the step of a run's optimizer
own_engine  an engine around any module
own_update  the step of any optimizer beside that of its copy
"""
