"""The command `python -m tfdist.launch`, and `tfdist.launch(function)`: starts, watches and restarts workers.

None of it imports TensorFlow but what the workers themselves run.
"""

import sys

from tfdist import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
