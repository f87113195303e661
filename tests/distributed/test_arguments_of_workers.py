"""Workers that call fit with other arguments are told so before the first update."""

import json

import pytest

SCRIPT = """
import json, os, sys
import keras
import numpy as np
import tfdist

CASES = {
    "nothing": {},
    "seed": {"seed": (0, 1)},
    "shuffle": {"shuffle": (True, False)},
    "epochs": {"epochs": (1, 2)},
    "beta_1": {},
    "activation": {},
    "loss": {},
}
rank, distribution, said = int(os.environ["RANK"]), tfdist.connect("multi_worker"), {}
x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
for name, options in CASES.items():
    with distribution.scope():
        activation = "relu" if rank and name == "activation" else None
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation)])
        loss = keras.losses.Huber(reduction="sum" if rank and name == "loss" else "sum_over_batch_size")
        model.compile(keras.optimizers.Adam(beta_1=0.9 - 0.1 * rank * (name == "beta_1")), loss)
    own = {option: values[rank] for option, values in options.items()}
    try:
        tfdist.fit(model, x, y, batch_size=4, verbose=0, distribution=distribution, **own)
        said[name] = ""
    except tfdist.UserError as error:
        said[name] = str(error)
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(said, file)
"""


@pytest.mark.whole
def test_other_arguments_of_a_worker_are_named(tmp_path, run):
    """Another order on each worker would count some rows twice and leave out others."""
    (tmp_path / "refusals.py").write_text(SCRIPT)
    done = run("tfdist.launch", "--nproc_per_node=2", "--", str(tmp_path / "refusals.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first.pop("nothing") == ""
    other = "has other layers or arguments of compile() than worker 0"
    assert f"{other} (layer 2 (Dense) activation: relu and not linear): build and compile" in first.pop("activation")
    assert f"{other} (loss reduction: sum and not sum_over_batch_size): build and compile" in first.pop("loss")
    for name, message in first.items():
        assert f"has other arguments of fit or of the optimizer than worker 0 ({name}: " in message
        assert "give all workers the same" in message
