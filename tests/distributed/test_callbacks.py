"""Callbacks and data sets on several workers: who writes, what a backup restores, and in which order examples come."""

import re

import keras
import numpy as np
import pytest
from support import callback_scenes, training_cases, worlds
from support.covering import first

WORLDS = {"ring": ("multi_worker", {"communication": "ring"}), "shared memory": ("multi_worker", {})}
WORLDS["horovod"] = "horovod", {}
"""How two workers sum; those of `test_workers.py` do it through shared memory and by Horovod in `make test`."""
UNSEEDED = {"shuffled evaluate": "batch 1", "shuffled fit": "update 1", "shuffled predict": "batch 1"}
SEEDED = ["shuffled seeded", "shuffled of unknown length", "shuffled with a batch without rows", "shuffled augmented"]
OTHER_INPUTS = {
    "shuffled another row": 3, "shuffled other inputs": 1, "shuffled other inputs of a PyDataset": 1,
}  # fmt: skip
ENDED = {
    "ended fit": "after update 3", "ended predict": "earlier", "ended several updates a call": "after update 3",
    "ended evaluate": "earlier",
}  # fmt: skip

LONG = ("forked", "measured", "on_batch", "stopped", "changed")
"""Scenes of one test each, which is `whole`; so are those of a data set, but for one that is shuffled."""


@pytest.fixture(scope="module", params=first(1, WORLDS))
def world(request, tmp_path_factory):
    """The folder of two workers, and what each has found, by scene: the first ones, and others if asked for."""
    folder, names = tmp_path_factory.mktemp("world"), [*LONG, *UNSEEDED, *SEEDED, *OTHER_INPUTS, *ENDED]
    strategy, options = WORLDS[request.param]
    scenes = callback_scenes.SCENES.keys() - LONG | {*worlds.asked(request, names, world=request.param)}
    return folder, worlds.outcomes(folder, strategy, 2, "scene", sorted(scenes), **options)


def scene(world, name):
    return [worker[name] for worker in world[1]]


def test_callbacks_that_write_are_called_on_the_chief_alone(world):
    chief, other = scene(world, "writers")
    expected = {"log.csv", *(f"{n}.keras" for n in range(1, 5)), "update 2.keras", "update 4.keras"}
    assert expected <= set(chief["files"]) and any("events" in name for name in chief["files"])
    assert other["files"] == []
    assert [epoch for epoch, _ in chief["writer"]] == [0, 1, 2, 3] and other["writer"] == []
    assert "Epoch 1/9" in chief["said"] and "Epoch 4: early stopping" in chief["said"] and other["said"] == ""
    assert chief["left"] == [], "a callback of the user is not as it was"
    saved = keras.saving.load_model(world[0] / "rank 0" / "4.keras")
    training_cases.all_same(saved.get_weights(), chief["weights"])


def test_callbacks_that_change_the_training_are_called_everywhere(world):
    chief, other = scene(world, "writers")
    assert chief["epochs"] == other["epochs"] == [0, 1, 2, 3], "EarlyStopping with a patience of 3"
    assert chief["rates"] == other["rates"] == pytest.approx([0.1, 0.1, 0.05, 0.025])
    training_cases.all_same(chief["weights"], other["weights"])


def test_a_file_within_an_epoch_has_the_mean_of_all_statistics(world):
    chief, other = scene(world, "writers")
    training_cases.all_same(chief["statistics"], other["statistics"])
    saved = keras.saving.load_model(world[0] / "rank 0" / "update 4.keras")
    np.testing.assert_array_equal(saved.layers[2].moving_mean.numpy(), chief["statistics"][-1])


def test_what_the_chief_cannot_do_alone_is_refused(world, request):
    chief, _ = scene(world, "writers")
    texts = [
        "Writer.on_epoch_end runs on the chief, and calls what needs all workers: leave that out, or set "
        "chief_only=False",
        "Writer.on_epoch_end runs on the chief, and reads what is summed over the workers, such as a metric: take it "
        "from the logs, or set chief_only=False",
    ]
    if "horovod" in request.node.name:  # a read is no collective there
        texts = texts[:1]
    assert chief["refused"] == texts * 4


def test_a_backup_of_the_chief_is_restored_on_all_workers(world, tmp_path):
    chief, other = scene(world, "backup")
    assert chief["epochs"] == other["epochs"] == [2, 3]
    assert chief["weights"].tobytes() == other["weights"].tobytes()
    assert not (world[0] / "backup 1").exists()
    # The judge is Keras on one device.
    x, y = training_cases.images(42)
    for seed, epochs in ((3, 2), (9, 4)):
        keras.utils.set_random_seed(seed)
        model = training_cases.compiled(training_cases.dense(), keras.optimizers.SGD(0.1, momentum=0.9))
        keep = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        model.fit(x, y, epochs=epochs, callbacks=[keep], **callback_scenes.BACKUP)
    assert chief["iterations"] == other["iterations"] == int(model.optimizer.iterations)
    assert training_cases.distance(chief["weights"], training_cases.weights(model)) < 1e-6


@pytest.mark.parametrize("name", first(0, UNSEEDED))
def test_a_shuffle_without_a_seed_is_refused(world, name):
    chief, other = scene(world, name)
    assert chief == other
    assert "worker 1" in chief and f"has read other batches than worker 0 up to {UNSEEDED[name]}" in chief
    assert chief.endswith("if any, alike on all workers")


@pytest.mark.parametrize("name", first(1, SEEDED))
def test_a_shuffle_with_a_seed_is_that_of_one_device(world, name, connect):
    chief, other = scene(world, name)
    assert chief.tobytes() == other.tobytes()
    if name != "shuffled augmented":  # other random changes of the inputs are nobody's error
        assert training_cases.distance(chief, callback_scenes.found(name, connect(1), None)) < 1e-6


@pytest.mark.parametrize("name", first(1, OTHER_INPUTS))
def test_other_inputs_of_one_worker_are_refused(world, name):
    """They trained other weights without a word where the targets were the same."""
    chief, other = scene(world, name)
    assert chief == other
    words = rf"worker 1 .* has read other inputs than worker 0 up to update {OTHER_INPUTS[name]}: give all"
    assert re.match(words, chief), chief


@pytest.mark.whole
@pytest.mark.parametrize("name", ["stopped"])
def test_a_callback_of_one_worker_ends_on_all_what_it_ends_there(world, name, connect):
    """Also where that worker alone has a callback, and so wants every batch."""
    chief, other = scene(world, name)
    assert (chief["batches"], other["batches"]) == ([3], [3, 3])
    x, y = (part[:36] for part in training_cases.images(120))
    model = callback_scenes.plain(connect(1))
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    rows = model.predict(x, verbose=0)
    model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    for worker in (chief, other):
        assert worker["logs"] == [pytest.approx(expected, rel=1e-6)] * 2
        np.testing.assert_allclose(worker["rows"], rows, rtol=1e-5, atol=1e-6)
        assert training_cases.distance(worker["weights"], training_cases.weights(model)) < 1e-6
    assert (world[0] / "2.keras").exists()


@pytest.mark.whole
@pytest.mark.parametrize("name", ["measured"])
def test_a_callback_measures_as_with_keras(world, name, connect):
    """Keras' own `evaluate` and `predict` end with an error where workers share their variables."""
    x, y = training_cases.images(42)
    callback, model = callback_scenes.Measures(), callback_scenes.plain(connect(1))
    model.fit(x, y, 12, 2, 0, [callback], shuffle=False)
    for rank, worker in enumerate(scene(world, name)):
        assert ("tfdist: checked: " in worker["said"]) == (rank == 0) and worker["left"] == set()
        for (rows, values, names), expected in zip(worker["found"], callback.found, strict=True):
            np.testing.assert_allclose(rows, expected[0], rtol=1e-5, atol=1e-6)
            assert values == pytest.approx(expected[1], rel=1e-6) and names == expected[2]


@pytest.mark.whole
@pytest.mark.parametrize("name", ["on_batch"])
def test_calls_with_one_batch_return_what_keras_returns(world, name, connect):
    expected = callback_scenes.calls(keras.Model, callback_scenes.plain(connect(1)))
    for seen, text, said in scene(world, name):
        assert text.startswith("the model returns text, which cannot be gathered from several workers: ")
        training_cases.all_same(keras.tree.flatten(seen), keras.tree.flatten(expected), rtol=1e-4, atol=1e-5)
        message = r"worker 1 .* has other batches than worker 0 .*: give all workers the same, .* and seed random numb"
        assert re.match(message, said), said


@pytest.mark.whole
@pytest.mark.parametrize("name", ["forked"])
def test_a_child_that_ends_by_sys_exit_ends_no_worker(world, name, request):
    """It has inherited their exit handlers and connections."""
    if "horovod" in request.node.name:
        pytest.skip("Gloo's threads abort once a child has run the exit handlers of C++")
    assert scene(world, name) == [{"codes": 3, "epochs": [0, 1]}] * 2


@pytest.mark.whole
@pytest.mark.parametrize("name", ["changed"])
def test_what_one_worker_changes_alone_is_noticed_on_all(world, name):
    chief, other = scene(world, name)
    assert chief == other
    assert re.search(r"after update 0: .*learning_rate differs on worker 1 \(\S*\) from worker 0", chief["optimizer"])
    assert re.search(r"before an evaluation: .*bias differs on worker 1 \(\S*\) from worker 0", chief["weights"])


@pytest.mark.parametrize("name", first(0, ENDED))
def test_data_that_ends_earlier_on_one_worker_is_named_on_all(world, name):
    chief, other = scene(world, name)
    assert chief == other
    assert re.fullmatch(
        rf"UserError: the data of worker 1 \(\S+\) ended {ENDED[name]}, that of worker 0 \(\S+\) goes on: give all "
        "workers the same batches",
        chief,
    )
