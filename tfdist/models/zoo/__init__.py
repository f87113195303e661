"""The architectures that ship with tfdist."""
