"""Where Adafactor can work. No torch: checked before anything is started."""

from __future__ import annotations

from llmscale.errors import ConfigError


def check_adafactor_stage(zero_stage: int) -> None:
    """Refuse Adafactor where ZeRO would give it flat one-dimensional shards without rows and columns to factor."""
    if zero_stage != 0:
        raise ConfigError(
            f"optimizer 'adafactor' cannot run at ZeRO stage {zero_stage}: ZeRO hands it flat shards, which have no "
            "rows and columns to factor. Use --optimizer adamw (ZeRO already divides its states among the ranks), "
            "or --ds ds_configs/zero0.json."
        )
