"""When updates, evaluations and predictions run: fit, evaluate, predict, callbacks, checkpoints, worker agreement.

A batch passes `fit`, `fit_loop` and `update_loop`, which ask the feed for batches and `step.step_calls` for the
compiled call. Nothing here shows or records a run: that is `monitoring`.
"""
