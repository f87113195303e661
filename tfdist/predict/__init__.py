"""The command `python -m tfdist.predict`, and the function `tfdist.predict`. Neither imports TensorFlow early."""

import sys

from tfdist import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
