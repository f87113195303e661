"""The programs that the official guides of Keras and TensorFlow start people with, small, in words of our own.

Each is what its reader has after changing only `connect`, `scope` and `fit`.
"""

from programs.examples import generative, sequences, vision

EXAMPLES = [p for module in (generative, sequences, vision) for p in module.EXAMPLES]
