"""A classifier for your own pictures: one folder for each class.

    python -m tfdist.train --config=image_folder --config.data.name=image_folder:/path/to/pictures

The pictures may have any size and lie in folders of folders. Where there are no `train` and `test` folders, the tenth
that is held out is the same at every run. From zero, with a small network; with few pictures, begin with one that has
seen many: `--config.model.name=MobileNetV3Small --config.model.weights=weights.h5 --config.model.freeze='!head'`.
"""

from tfdist.config import Checkpoint, Data, Experiment, Model, Optimizer, Train


def get_config() -> Experiment:
    return Experiment(
        name="image_folder",
        data=Data(
            name="image_folder:pictures",
            train_split="train[:90%]",
            eval_split="train[90%:]",
            image_size="64",
            augment="resized_crop(0.35), flip, color(0.2)",
            on_error="skip",
        ),
        model=Model(name="conv_bn"),
        optimizer=Optimizer(name="adamw", learning_rate=2e-3, schedule="cosine", warmup="5%", weight_decay=0.05),
        train=Train(epochs=20, batch_size=64, label_smoothing=0.1),
        checkpoint=Checkpoint(best="val_accuracy"),
    )
