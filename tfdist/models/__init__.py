"""What is trained: models by name or from a file, their first weights, optimizers, rates and frozen layers.

`keras_internals` holds all private names of Keras that tfdist uses. How an update is computed is in `engine`.
"""
