"""The command `python -m tfdist.launch`: starts, watches and restarts workers.

None of it imports TensorFlow but what the workers themselves run.
"""
