"""How far a car goes on a gallon: a table with numbers, categories and gaps, and one number to tell.

    python -m tfdist.train --config=table_mlp

398 cars of 1970 to 1982 (Auto MPG), a fifth of them held out: 2.2 miles off on average, 3 s on two cores. For a table
of your own, give `--config.data.name=csv:mine.csv --config.data.options=target=price`.
"""

import importlib.resources

from tfdist.config import Data, Experiment, Model, Optimizer, Train

CARS = importlib.resources.files("tfdist.data.datasets") / "auto_mpg.csv"


def get_config() -> Experiment:
    return Experiment(
        name="table_mlp",
        data=Data(
            name=f"csv:{CARS}",
            options="target=mpg, classify=False",
            train_split="train[:80%]",
            eval_split="train[80%:]",
        ),
        model=Model(name="table_mlp"),
        optimizer=Optimizer(name="adamw", learning_rate=3e-3, schedule="cosine", warmup="5%", weight_decay=0.01),
        train=Train(epochs=60, batch_size=32),
    )
