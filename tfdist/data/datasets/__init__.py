"""Data sets by name: `registry` is the way in, and a module reads each format by its `load`.

These take `splits`, those for training and evaluation by the field that asks for each; `options`, `data.options`;
`free` where images are made one size later, and otherwise all must have the size of the first.
"""
