"""The command `python -m tfdist.horovod_build`: builds Horovod against the installed TensorFlow."""
