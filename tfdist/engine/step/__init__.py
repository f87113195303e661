"""The mathematics of one update: losses as sums and counts, the sum over replicas, the optimizer, the metrics.

In a reader's order: `step` (which compiled functions there are, and the one that evaluates), `training_call`,
`prediction_call`, `batch_loop` (from batch to batch), `replica` (forward and backward pass), `loss`, `partial_sums`
(what replicas add up), `optimizer_update`. When an update happens is in `tfdist.engine.fit`.
"""
