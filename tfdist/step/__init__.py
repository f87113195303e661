"""The compiled functions of one update: slices -> sums -> one all-reduce -> one division -> clip -> update.

In reading order: `step` (which compiled functions exist), `training` and `evaluation` (what each does with a global
batch), `batch_loop` (over the batches of a call), `global_sums` (over slices and replicas; `virtual_replicas` where
the sums must be exact), `replica` (forward and backward pass), `sums` (numerators, denominators and gradients).
Losses, metrics and optimizer updates are in `keras_bridge`; the training loop is in `trainer`.
"""
