"""The command `python -m tfdist.train`: the story of a run, from flags to `result.json`."""
