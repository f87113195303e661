"""The command `python -m tfdist.compare`: one experiment under several strategies, weights and speed compared."""
