"""Random changes of training images, each a function of the image and a seed alone."""
