"""The compiled functions of one update: losses as sums and counts, one all-reduce, the update, the metrics.

In reading order: `step` (which compiled functions exist, and the one that evaluates), `training_call`,
`prediction_call`, `batch_loop` (over the batches of a call), `replica` (forward and backward pass), `partial_sums`
(what replicas add up). Losses, metrics and optimizer updates are in `keras_bridge`; the training loop is in `trainer`.
"""
