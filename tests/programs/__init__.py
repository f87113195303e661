"""Keras programs that the tests train: written as users write them, drawn at random, and after Keras' own examples."""
