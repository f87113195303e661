"""When an update, an evaluation and a prediction happen, and in `step/` what they compute.

The way of a batch: `batching` lays the data out; `fit_loop` or `evaluation` asks the feed for global batches and
`step_calls` for a call; `step/` computes it; `step/results` says what it gives and adds it up; after `agreement` of all
workers the next one follows. What users import stands in `fit`, `evaluation` and `callback`. Nothing here shows or
records a run: that is `monitoring`.
"""
