"""The command `python -m tfdist.evaluate`, and the function `tfdist.evaluate`. Neither imports TensorFlow early."""

import sys

from tfdist import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
