"""The command `python -m tfdist.doctor`: one module per thing that can be wrong. None of it imports TensorFlow."""
