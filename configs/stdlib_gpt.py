"""A small GPT over the bytes of Python's own standard library.

    python -m tfdist.train --config=stdlib_gpt

Real text on every machine, no download; every tenth module is held out.
A loss of 1.355 nats a byte and 63 % of the bytes right after 2 epochs, on 1, 2 and 4 replicas within 5e-5; 134 s with
`--virtual_devices=2` on two cores.
"""

from tfdist.config import Data, Experiment, Model, Optimizer, Train


def get_config() -> Experiment:
    return Experiment(
        name="stdlib_gpt",
        data=Data(name="stdlib_text", options="length=128, examples=16384"),
        model=Model(name="gpt", options="width=128, heads=4, depth=3"),
        optimizer=Optimizer(
            name="adamw",
            learning_rate=2e-3,
            schedule="cosine",
            warmup="5%",
            weight_decay=0.1,
            decay_exclude="bias, gamma, beta",
            clip_norm=1.0,
            schedule_options="end=0.1",
            options="beta_2=0.95",
        ),
        train=Train(epochs=2, batch_size=32, label_smoothing=0.0),
    )
