"""Devices, strategies, and GPUs and TPUs.

`connect` leads from flags to a started `Distribution`; `strategies/` holds one builder per strategy. Nothing here knows
of models, data or checkpoints.
"""
