"""When updates, evaluations and predictions run: fit, evaluate, predict, callbacks, checkpoints, worker agreement.

`fit` checks its arguments, `plan` decides and `loop` trains. Nothing here shows a run: that is `monitoring`.
"""
