"""The command `run`: trains an unmodified Keras script."""
