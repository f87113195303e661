"""Trains one script with Keras alone and with tfdist on several devices, and prints what its weights come to.

    .venv/bin/python benchmarks/same_result.py

The script has what users have: a last batch of 41 examples after fifteen of 64, and a clipped gradient.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

SCRIPT = """
import keras
import numpy as np

keras.utils.set_random_seed(7)
random = np.random.default_rng(7)
x, y = random.normal(size=(1001, 20)).astype("float32"), random.integers(0, 5, 1001)
model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(64, "gelu"), keras.layers.Dense(5)])
model.compile(
    keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(x, y, batch_size=64, epochs=3, shuffle=False, verbose=0)
print(f"norm {sum(float((w.astype('float64') ** 2).sum()) for w in model.get_weights()):.6f}")
"""

UNDER_A_STRATEGY = """
import tensorflow as tf

one = tf.config.LogicalDeviceConfiguration()
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [one] * {replicas})
with tf.distribute.MirroredStrategy([f"CPU:{{i}}" for i in range({replicas})]).scope():
    exec(open("train.py").read())
"""

PYTHON = (sys.executable,)
RUN = (*PYTHON, "-m", "tfdist", "run")
HOROVOD = (str(pathlib.Path(sys.executable).with_name("horovodrun")), "-np", "2")
WAYS = {
    "Keras, 1 device": (*PYTHON, "train.py"),
    "Keras, `MirroredStrategy` on 2": (*PYTHON, "on_2.py"),
    "Keras, `MirroredStrategy` on 4": (*PYTHON, "on_4.py"),
    "`tfdist run train.py`": (*RUN, "train.py"),
    "`tfdist run --virtual_devices=2 train.py`": (*RUN, "--virtual_devices=2", "train.py"),
    "`tfdist run --virtual_devices=4 train.py`": (*RUN, "--virtual_devices=4", "train.py"),
    "`tfdist run --nproc_per_node=2 train.py`": (*RUN, "--nproc_per_node=2", "train.py"),
    "`horovodrun -np 2 tfdist run train.py`": (*HOROVOD, *RUN, "train.py"),
}


def main():
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "train.py").write_text(SCRIPT)
        for replicas in (2, 4):
            pathlib.Path(folder, f"on_{replicas}.py").write_text(UNDER_A_STRATEGY.format(replicas=replicas))
        print("| the same script | sum of the squares of its weights |\n|---|--:|")
        for way, command in WAYS.items():
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
            norm = re.search(r"norm ([\d.]+)", done.stdout)
            print(f"| {way} | {norm[1] if norm else done.stderr.strip().splitlines()[-1]} |", flush=True)


if __name__ == "__main__":
    main()
