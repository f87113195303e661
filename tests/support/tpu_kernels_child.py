"""Which operations have no kernel for TPUs: those that it is given as JSON on standard input, less those that have one.

An interpreter with tensorflow-tpu runs it, which starts without a TPU.
"""

import json
import os
import sys


def main():
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # else libtpu asks the Cloud about this machine, again and again
    import tensorflow as tf
    from tensorflow.python.framework import kernels

    # The kernels of XLA register themselves when something is compiled for its platform.
    compiled = tf.function(lambda x: x + 1, jit_compile=True, autograph=False)
    compiled.experimental_get_compiler_ir(tf.ones([2]))(stage="hlo", platform_name="TPU")
    missing = [
        op
        for op in json.load(sys.stdin)
        if "XLA_TPU_JIT" not in {k.device_type for k in kernels.get_registered_kernels_for_op(op).kernel}
    ]
    print(json.dumps({"tensorflow": tf.__version__, "missing": missing}))


if __name__ == "__main__":
    main()
