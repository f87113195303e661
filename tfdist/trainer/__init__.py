"""Decides when updates, evaluations and predictions run: `fit` checks, `plan` decides, `loop` trains."""
