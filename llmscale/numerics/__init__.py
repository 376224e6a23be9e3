"""Proof that an engine computes what it should, link by link (docs/numerics.md).

plain_model, plain_optimizers   the truth
probe                           what the engine uses and computes
links                           weights, reduction, norm, update
block, check                    loss and gradients of the run's own block
"""
