"""Devices, strategies, and who the workers are and that they are all there.

`connect` leads from flags to a started `Distribution`; `strategies/` holds one builder per strategy, and `peers/` keeps
the workers in touch. Nothing here knows of models, data or checkpoints.
"""
