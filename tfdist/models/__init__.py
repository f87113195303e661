"""What is trained: models by name, their losses, optimizers and weights.

Private names of Keras are in `keras_bridge`; how an update is computed is in `step`.
"""
