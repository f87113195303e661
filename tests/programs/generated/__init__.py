"""Whole Keras programs that are made up at random, as text, and run by Keras and by tfdist.

`pieces` lists what a program is made of, `writer` puts a program together, and `running` runs it and compares.
"""
