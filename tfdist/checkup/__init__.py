"""What `python -m tfdist.doctor` looks at, one module per thing that can be wrong. None of it imports TensorFlow."""
