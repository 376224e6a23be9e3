"""Proof that an engine computes what it should, link by link (docs/numerics.md).

plain    the truth
probe    what the engine uses and computes
links    weights, reduction, norm, update
check    loss and gradients of the run's own block, other settings
"""
