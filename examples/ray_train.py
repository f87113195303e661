"""Trains on the workers of a Ray cluster: `python examples/ray_train.py`, with `pip install 'ray[train]==2.60.*'`."""

import os
import secrets
import tempfile

import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.tensorflow import TensorflowTrainer

import tfdist


def train(config):
    os.environ["TFDIST_SECRET"] = broadcast_from_rank_zero(secrets.token_hex(16))  # a new one for each start
    distribution = tfdist.connect()
    import keras

    class Report(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with tempfile.TemporaryDirectory() as folder:
                if distribution.is_chief:
                    self.model.save(f"{folder}/model.keras")
                checkpoint = Checkpoint.from_directory(folder) if distribution.is_chief else None
                ray.train.report(logs, checkpoint=checkpoint)  # on all workers, which wait here for each other

    keras.utils.set_random_seed(1)
    data = tfdist.load_data("digits")
    with distribution.scope():
        layers = [keras.layers.Flatten(), keras.layers.Dense(32, "gelu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input(data.spec.shape), *layers])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    options = dict(batch_size=64, epochs=2, validation_data=data.eval, verbose=0, distribution=distribution)
    checkpoints = tfdist.Checkpoints(config["checkpoints"], every=config["every"])
    tfdist.fit(model, data.train, callbacks=[Report()], checkpoints=checkpoints, **options)


def trainer(workers=2, name="ray", every="60 seconds", function=train):
    storage = os.path.abspath("runs")  # on several machines a folder that all of them see, or such as s3://bucket/runs
    return TensorflowTrainer(
        function,
        train_loop_config={"checkpoints": f"{storage}/{name}/checkpoints", "every": every},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=name, storage_path=storage, failure_config=FailureConfig(max_failures=3)),
    )


if __name__ == "__main__":
    print(trainer().fit().metrics)
