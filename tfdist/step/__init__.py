"""The compiled functions of one update: slices -> sums -> one all-reduce -> one division -> clip -> update.

In reading order: `step` (which compiled functions exist), `batch_loop` (over the batches of a call), `functions` (what
each does with a global batch: sums over slices and replicas, by `virtual_replicas` where they must be exact), `replica`
(forward and backward pass; numerators, denominators and gradients).
Losses, metrics and optimizer updates are in `keras_bridge`; the training loop is in `trainer`.
"""
