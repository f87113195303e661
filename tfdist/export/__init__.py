"""The command `python -m tfdist.export`: a trained model in formats of other runtimes, checked against it."""
