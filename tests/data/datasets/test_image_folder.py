"""A folder of images: what is found, what is refused or skipped, and what is trained on."""

import io
import json
import os
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from support.refusals import refused
from support.source_columns import columns_of

import tfdist
from tfdist import config
from tfdist.data import image_decoding, sources
from tfdist.data.augmentation import ops
from tfdist.data.datasets import examples, image_folder, registry
from tfdist.models import build as models


def picture(number, size=(12, 16), mode="RGB"):
    """Smooth colours that differ from picture to picture."""
    corners = np.random.default_rng(number).integers(0, 255, (2, 2, 3)).astype("uint8")
    return Image.fromarray(corners).resize(size[::-1], Image.BILINEAR).convert(mode)


def save(path, image, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


def folder(root, classes=("cat", "dog", "owl"), each=7, **options):
    for c, name in enumerate(classes):
        for i in range(each):
            save(root / name / f"{i}.jpg", picture(10 * c + i, **options), quality=95)
    return root


def found_in(root, train, evaluation, size=None, **fields):
    """What the adapter alone finds, with whole images."""
    return image_folder.load(str(root), config.Data(train_split=train, eval_split=evaluation, **fields), {}, size)


def experiment(root, **fields):
    found = config.Experiment(data=config.Data(name=f"image_folder:{root}", cache="stream"))
    found.data.train_split, found.data.eval_split = "train[:70%]", "train[70%:]"
    found.train.batch_size = found.eval.batch_size = 4
    for name, value in fields.items():
        setattr(found.data, name, value)
    return found


def test_classes_and_nested_folders(tmp_path):
    folder(tmp_path)
    save(tmp_path / "cat" / "black" / "old" / "x.png", picture(1))
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "cat" / ".DS_Store").write_text("x")
    (tmp_path / "notes.txt").write_text("not in a class")
    (tmp_path / "cat" / "circle").symlink_to("../cat")
    (tmp_path / "owl" / "up").symlink_to("..")
    names, splits = image_folder.listing(str(tmp_path), "it")
    assert names == ("cat", "dog", "owl") and set(splits) == {"train"}
    train = splits["train"]
    assert sorted(train.paths) == sorted(
        [f"{name}/{i}.jpg" for name in names for i in range(7)] + ["cat/black/old/x.png"]
    )
    assert all(names[label] == path.split("/")[0] for path, label in zip(train.paths, train.labels))
    assert len(set(train.labels[:8])) == 3, "slices must not be sorted by class"

    moved = tmp_path.with_name("moved")
    tmp_path.rename(moved)
    assert image_folder.listing(str(moved), "it")[1]["train"].paths == train.paths, "the order must not depend on where"


def test_folders_for_splits_and_slices(tmp_path):
    folder(tmp_path / "train", each=10)
    folder(tmp_path / "val", ("cat", "dog"), each=3)
    found = found_in(tmp_path, "train[:80%]", "val+train[80%:]")
    assert found.spec.names == ("cat", "dog", "owl") and (found.train.size, found.eval.size) == (24, 12)
    paths = [pathlib.Path(s.name(i)).relative_to(tmp_path) for s in (found.train, found.eval) for i in range(s.size)]
    assert len(set(paths)) == 36
    assert [p.parts[0] for p in paths] == ["train"] * 24 + ["val"] * 6 + ["train"] * 6
    labels = np.concatenate([columns_of(source)[1] for source in (found.train, found.eval)])
    assert [found.spec.names[label] for label in labels] == [p.parts[1] for p in paths]


def test_a_tenth_of_a_flat_folder_is_held_out(tmp_path, caplog):
    """Every image is on one side, the classes are on both, and a run that asks for all of `train` gets it."""
    folder(tmp_path, ("cat", "dog"), each=40)
    caplog.set_level("INFO", "tfdist")
    plain = dict(train_split="train", eval_split="test")
    loaded = registry.load(experiment(tmp_path, **plain))
    assert (loaded.train.size, loaded.eval.size) == (72, 8)
    assert "a tenth of its images, the same at every run, is held out" in caplog.text
    paths = lambda source: [source.name(i) for i in range(source.size)]
    assert sorted(paths(loaded.train) + paths(loaded.eval)) == sorted(map(str, tmp_path.glob("*/*.jpg")))
    assert set(loaded.eval.labels) == {0, 1}
    again = registry.load(experiment(tmp_path, train_split="train[:-8]", eval_split="train[-8:]"))
    assert (paths(again.train), paths(again.eval)) == (paths(loaded.train), paths(loaded.eval)), "as the line says"
    assert registry.load(experiment(tmp_path, train_split="train", eval_split="train")).eval.size == 80
    with refused("has no split 'test'"):  # as `predict` asks for another folder
        registry.load(experiment(tmp_path, **plain), hold_out=False)


def test_what_is_held_out():
    for size, held in [(2, 1), (4, 1), (14, 1), (16, 2), (95, 10)]:
        assert examples.held_out("train", "test", {"train": size}) == (f"train[:-{held}]", f"train[-{held}:]")
    for case in [("train", "mine"), ("train[:5]", "test"), ("train", "train[5:]")]:
        assert examples.held_out(*case, {"train": 9}) == case
    assert examples.held_out("train", "test", {"train": 1}) == ("train", "test")
    assert examples.held_out("train", "test", {"train": 5, "val": 2}) == ("train", "test")


FORMATS = {"JPEG": "RGB L CMYK", "PNG": "RGB L RGBA P LA 1 I;16", "GIF": "RGB", "BMP": "RGB L RGBA"}
if hasattr(tf.io, "decode_webp"):  # not TensorFlow 2.18
    FORMATS["WEBP"] = "RGB RGBA"
FORMATS = [(kind, mode) for kind, modes in FORMATS.items() for mode in modes.split()]


def test_formats_become_rgb_as_pil_has_it(tmp_path):
    folder(tmp_path, ("jpeg",), each=2)
    for number, (kind, mode) in enumerate(FORMATS):
        image = picture(number, mode="L" if mode == "I;16" else mode)
        image = Image.fromarray(np.asarray(image).astype("uint16") * 257) if mode == "I;16" else image
        options = {"quality": 95} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
        save(tmp_path / "all" / f"{number}.dat", image, format=kind, **options)
    found = found_in(tmp_path, "train", "train[:1]")
    assert found.spec.shape == (12, 16, 3)
    x, _ = columns_of(found.train)
    for i in range(found.train.size):
        path = pathlib.Path(found.train.name(i))
        if path.parent.name == "all":
            kind, mode = FORMATS[int(path.stem)]
            image = Image.open(path)
            expected = np.asarray(image) // 257 if mode == "I;16" else np.asarray(image.convert("RGB"))
            expected = np.repeat(expected[..., None], 3, -1) if expected.ndim == 2 else expected
            # CMYK has no one meaning in RGB; TensorFlow decodes JPEGs fast and not to the last digit.
            tolerance = 20 if mode == "CMYK" else 4 if kind == "JPEG" else 0
            assert np.abs(x[i].astype(int) - expected).mean() <= tolerance, (kind, mode)


def break_some(root):
    """Broken files of each kind among good ones, with what is said of them."""
    raw = (root / "cat" / "0.jpg").read_bytes()
    save(root / "cat" / "good.png", picture(5))
    png = (root / "cat" / "good.png").read_bytes()
    gif, bmp = io.BytesIO(), io.BytesIO()
    picture(1).save(gif, "GIF")
    picture(1, mode="P").save(bmp, "BMP")
    broken = {
        "empty.jpg": (b"", "is empty"), "zeros.jpg": (bytes(1000), "is not a JPEG, PNG, GIF, BMP or WebP image"),
        "text.jpg": (b"hello, this is no image", "is not a JPEG"),
        "page.jpg": (b"<html>404</html>" * 50, "is not a JPEG"),
        "half.jpg": (raw[: len(raw) // 2], "cannot be decoded: "), "head.jpg": (raw[:30], "is cut off"),
        "half.png": (png[: len(png) // 2], "cannot be decoded: "), "head.png": (png[:18], "is cut off"),
        "half.gif": (gif.getvalue()[:300], "cannot be decoded: "),
        "colours.bmp": (bmp.getvalue(), "is a BMP with a palette"),
    }  # fmt: skip
    for name, (content, _) in broken.items():
        (root / "cat" / name).write_bytes(content)
    (root / "cat" / "gone.jpg").symlink_to("nowhere.jpg")
    # Whole, though there is something behind its end.
    (root / "cat" / "longer.jpg").write_bytes(raw + bytes(100))
    return {name: said for name, (_, said) in broken.items()} | {"gone.jpg": "cannot be read: No such file"}


def test_broken_files_are_named_and_counted(tmp_path):
    folder(tmp_path)
    broken = break_some(tmp_path)
    with refused() as error:
        found_in(tmp_path, "train", "train")
    assert str(error.value).startswith(
        f"data.name='image_folder:{tmp_path}': {len(broken)} of 34 files are not images: cat/colours.bmp is a BMP with"
    )
    assert str(error.value).endswith(f", and {len(broken) - 3} more: remove them, or set data.on_error=skip")
    for name, said in broken.items():  # one by one: a message names three
        others = tmp_path.with_name("one")
        folder(others)
        if name == "gone.jpg":
            (others / "cat" / name).symlink_to("nowhere")
        else:
            (others / "cat" / name).write_bytes((tmp_path / "cat" / name).read_bytes())
        with refused(f"1 of 22 files is not an image: cat/{name} {said}.*remove them"):
            found_in(others, "train", "train")
        (others / "cat" / name).unlink()


def test_broken_files_are_skipped(tmp_path, said):
    folder(tmp_path)
    before = found_in(tmp_path, "train", "train[:5]")
    broken = break_some(tmp_path)
    found = found_in(tmp_path, "train", "train[:5]", (12, 16), on_error="skip")
    names = {pathlib.Path(found.train.name(i)).name for i in range(found.train.size)}
    assert found.train.size == before.train.size + 2 and not names & set(broken) and {"longer.jpg", "good.png"} <= names
    (line,) = said
    assert line.startswith(f"WARNING: {len(broken)} of 34 files are not images and skipped: cat/colours.bmp is a BMP")
    assert columns_of(found.train)[2].tolist() == [1.0] * found.train.size
    for name in names:
        (tmp_path / "dog" / name).write_bytes(b"")
    (tmp_path / "only").mkdir()
    with refused(r"all 1 files of data.eval_split are broken"):
        paths = image_folder.listing(str(tmp_path), "it")[1]["train"].paths
        at = next(i for i, path in enumerate(paths) if path == "cat/empty.jpg")
        found_in(tmp_path, "train", f"train[{at}:{at + 1}]", on_error="skip")


def trained(given, distribution, epochs=2):
    """Weights after a short training."""
    loaded = registry.load(given)
    keras.utils.set_random_seed(0)
    with distribution.scope():
        layers = [keras.Input(loaded.spec.shape), keras.layers.Rescaling(1 / 255), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(len(loaded.spec.names))])
        reduction = "mean_with_sample_weight" if given.data.on_error == "skip" else "sum_over_batch_size"
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        model.compile("adam", loss, weighted_metrics=[])
    options = dict(distribution=distribution, batch_size=4, check_agreement="off")
    tfdist.fit(model, loaded.train, epochs=epochs, verbose=0, **options)
    return np.concatenate([w.ravel() for w in model.get_weights()])


@pytest.mark.parametrize("replicas", [2, *(pytest.param(n, marks=pytest.mark.whole) for n in (1, 3))])
@pytest.mark.parametrize("cache", ["stream", pytest.param("memory", marks=pytest.mark.whole)])
def test_every_strategy_and_cache_trains_the_same(cache, replicas, tmp_path, connect):
    folder(tmp_path)
    for i, size in enumerate([(30, 50), (9, 9), (100, 20)]):
        save(tmp_path / "owl" / f"other{i}.jpg", picture(i, size))
    fields = dict(image_size="8x10", augment="flip, crop(2)")
    expected = trained(experiment(tmp_path, **fields), connect(1))
    if cache == "memory":
        plain = experiment(tmp_path, image_size="8x10")
        images, whole = (columns_of(registry.load(given).train)[0] for given in (experiment(tmp_path, **fields), plain))
        assert np.abs(images.astype(int) - whole).max() > 1, "nothing was augmented"
    got = trained(experiment(tmp_path, cache=cache, **fields), connect(replicas))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.whole
def test_what_is_held_in_memory_and_what_is_not(tmp_path):
    folder(tmp_path, size=(20, 30))

    def kind(**fields):
        loaded = registry.load(experiment(tmp_path, **fields))
        return type(loaded.train), type(loaded.eval)

    assert kind(cache="auto", image_size="8") == (sources.Arrays, sources.Arrays)
    assert kind(cache="auto", image_size="8", augment="flip") == (sources.Records, sources.Arrays)
    assert kind(cache="stream", image_size="8") == (sources.Records, sources.Records)
    assert kind(cache="auto", image_size="8", augment="resized_crop(0.3)") == (sources.Records, sources.Arrays)
    with refused(r"data.cache=memory holds images of one size, and resized_crop needs them whole"):
        kind(cache="memory", image_size="8", augment="resized_crop(0.3)")


def test_images_of_one_size_need_none_to_be_given(tmp_path):
    folder(tmp_path, size=(20, 30))
    loaded = registry.load(experiment(tmp_path))
    assert loaded.spec.shape == (20, 30, 3)
    save(tmp_path / "cat" / "other.jpg", picture(3, (21, 30)))
    with refused(r"data.image_size is needed, since the images have different sizes"):
        registry.load(experiment(tmp_path))


def test_a_random_crop_is_cut_from_the_whole_image(tmp_path):
    folder(tmp_path, size=(64, 64))
    loaded = registry.load(experiment(tmp_path, image_size="8", augment="resized_crop(0.01)"))
    found = found_in(tmp_path, "train[:70%]", "train[70%:]")
    recipe = ops.parse("resized_crop(0.01)")
    from tfdist.data.records import example_seeds

    seeds = example_seeds(0, 0, np.arange(loaded.train.size))
    whole = columns_of(found.train)[0]
    for got, image, seed in zip(columns_of(loaded.train)[0], whole, seeds):
        np.testing.assert_array_equal(got, recipe.example(tf.constant(image), tf.constant(seed), (8, 8)))


@pytest.mark.parametrize("policy", ["crop", "stretch", "pad"])
def test_large_jpegs_are_shrunk_while_they_are_decoded(policy, tmp_path):
    sizes = np.array([(12, 16), (23, 16), (24, 32), (24, 40), (64, 50), (100, 128), (1000, 700), (97, 16)])
    size = (12, 16)
    ratios = {"crop": [1, 1, 2, 2, 2, 8, 8, 1], "stretch": [1, 1, 2, 2, 2, 8, 8, 1], "pad": [1, 1, 2, 2, 4, 8, 8, 1]}
    for i, (ratio, (height, width)) in enumerate(zip(ratios[policy], sizes)):
        path = tmp_path / ("x.jpg" if i < 7 else "x.png")
        save(path, picture(7, (int(height), int(width))), **({"quality": 98} if i < 7 else {}))
        contents = tf.io.read_file(str(path))
        small, whole = (decode(contents) for decode in (image_decoding.decoder(size, policy), image_decoding.decoder()))
        assert small.shape == (-(-height // ratio), -(-width // ratio), 3)
        got, expected = (ops.resize(image, size, policy).numpy().astype(int) for image in (small, whole))
        assert got.shape == (12, 16, 3)
        # Sizes are rounded up by the decoder, so a pixel along a border of `pad` may fall to the other side.
        assert np.median(np.abs(got - expected)) <= 3, (ratio, height, width)


@pytest.mark.whole
def test_a_file_that_breaks_during_the_training(tmp_path, connect, run):
    folder(tmp_path / "x")
    given = experiment(tmp_path / "x", image_size="8")
    loaded = registry.load(given)
    victim = pathlib.Path(loaded.train.name(6))
    whole = victim.read_bytes()
    victim.write_bytes(whole[:300])
    for distribution in (connect(1), connect(2)):
        with distribution.scope():
            model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(3)])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        for use in (
            lambda d, m, **o: tfdist.fit(m, loaded.train, distribution=d, batch_size=4, verbose=0),
            lambda d, m, **o: tfdist.evaluate(m, loaded.train, distribution=d, batch_size=4),
            lambda d, m, **o: tfdist.predict(m, loaded.train, distribution=d, batch_size=4),
        ):
            with refused(f"^{victim} cannot be decoded: .*repair or remove it$"):
                use(distribution, model)
    victim.write_bytes(whole)


@pytest.mark.whole
def test_a_file_that_breaks_during_the_training_weighs_nothing(tmp_path, connect, capfd):
    """As if it were not there: the same as with a weight of 0 for it in memory."""
    folder(tmp_path)
    given = experiment(tmp_path, image_size="8", on_error="skip")
    loaded = registry.load(given)
    x, y, _ = columns_of(loaded.train)
    victim = pathlib.Path(loaded.train.name(6))
    victim.write_bytes(victim.read_bytes()[:300])
    black, same, without = columns_of(loaded.train)
    assert f"WARNING: {victim} cannot be decoded and is skipped" in capfd.readouterr().out
    np.testing.assert_array_equal(same, y)
    np.testing.assert_array_equal(np.flatnonzero(without == 0), [6])
    np.testing.assert_array_equal(np.delete(black, 6, 0), np.delete(x, 6, 0))
    assert not black[6].any()


@pytest.mark.whole
def test_the_command(tmp_path, run):
    folder(tmp_path / "pictures", each=10)
    (tmp_path / "pictures" / "cat" / "empty.jpg").write_bytes(b"")
    flags = [
        f"--config.data.name=image_folder:{tmp_path / 'pictures'}", "--config.data.train_split=train[:80%]",
        "--config.data.eval_split=train[80%:]", "--config.data.image_size=8", "--config.train.batch_size=8",
        "--config.train.epochs=2", "--config.optimizer.warmup=0%", "--config.model.name=mlp", "--workdir=out",
    ]  # fmt: skip
    first = run("tfdist.train", *flags)
    assert first.returncode == 2
    assert first.stderr.count("\n") == 1 and "1 of 31 files is not an image: cat/empty.jpg is empty" in first.stderr
    augmented = ["--config.data.on_error=skip", "--config.data.augment=flip, mixup(0.2)", "--config.data.cache=stream"]
    done = run("tfdist.train", *flags, *augmented, "--virtual_devices=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WARNING: 1 of 31 files is not an image and skipped: cat/empty.jpg is empty") == 1
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["status"] == "completed" and result["examples_seen"] in (48, 50)


@pytest.mark.parametrize(
    "make, fields, message",
    [
        (lambda p: None, dict(name="image_folder:/no/such/folder"),
         "data.name='image_folder:/no/such/folder': there is no such folder"),
        (lambda p: None, {}, "there are no images: put those of each class into a folder of its own"),
        (lambda p: (p / "cat").mkdir(), {}, "there are no images"),
        (lambda p: folder(p, ("cat",)), {}, "there is only one class, 'cat'"),
        # beside a slice of train, a tenth would be held out twice
        (folder, dict(eval_split="test"), "data.eval_split='test': .* has no split 'test': known are train, and"),
        (folder, dict(train_split="train[:0%]"), "selects none of the 21 examples"),
        (lambda p: save(folder(p) / "cat" / "caf\udce9.png", picture(1)), {},
         r"name of cat/caf\\xe9.png is not written in UTF-8: rename"),
        (lambda p: os.mkfifo(folder(p) / "cat" / "pipe"), {}, "1 of 22 files is not an image: cat/pipe cannot be read"),
        (folder, dict(options="a=1"), "unknown 'a' in data.options: known are max_pixels"),
    ],
)  # fmt: skip
def test_unusable_folders(make, fields, message, tmp_path):
    make(tmp_path)
    with refused(message):
        registry.load(experiment(tmp_path, **fields))


@pytest.mark.parametrize("fields, message", [
    (dict(name="stdlib_text", options="examples=20", cache="auto", image_size="8"),
     "data.image_size='8' is for images"),
    (dict(name="stdlib_text", options="examples=20", cache="auto", augment="flip"), "is for images"),
    (dict(name="stdlib_text", options="examples=20"), "data.cache=stream: stdlib_text can only be read into memory as"),
])  # fmt: skip
def test_image_fields_on_other_data(fields, message, tfds_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_dir))
    with refused(message):
        registry.load(experiment("x", train_split="train", eval_split="test", data_dir=str(tfds_dir), **fields))


@pytest.mark.whole
def test_mixing_is_for_the_loss_of_tfdist(tmp_path, connect):
    given = experiment(folder(tmp_path), image_size="8", augment="cutmix(1.0)")
    loaded = registry.load(given)
    keras.utils.set_random_seed(0)
    layers = [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    given.train.label_smoothing = 0.0
    mixed = models.compiled(model, keras.optimizers.SGD(), given, loaded)
    assert isinstance(model.loss, keras.losses.CategoricalCrossentropy)
    ((_, y), *_) = mixed.train.in_order(4)
    assert y.shape == (4, 3) and ((y.numpy() > 0).sum(1) == 2).any(), "targets are not mixed"
    own = keras.Sequential(layers)
    own.compile(loss="sparse_categorical_crossentropy")
    with refused(r"data.augment='cutmix\(1.0\)' mixes classes, which is for .* tfdist's own loss"):
        models.compiled(own, keras.optimizers.SGD(), given, loaded)


def test_a_stream_has_no_numbers():
    stream = sources.Batches(tf.data.Dataset.from_tensors((np.zeros((2, 8, 8, 3), "uint8"),)))
    with refused(r"data.image_size needs examples that can be read by number"):
        registry.resized(stream, (4, 4), "crop")
    with refused(r"data.augment needs examples that can be read by number"):
        registry.augmented(stream, ops.parse("flip"), (8, 8))


@pytest.mark.whole
def test_images_in_memory_are_made_one_size_at_once(connect):
    given = experiment("x", name="synthetic", options="examples=20, shape=(6, 8, 3)", image_size="4x5", cache="auto")
    given.data.train_split, given.data.eval_split = "train", "test"
    loaded = registry.load(given)
    assert loaded.spec.shape == (4, 5, 3) and isinstance(loaded.train, sources.Arrays)
    given.data.image_size = ""
    whole = registry.load(given).train.columns[0]
    np.testing.assert_array_equal(
        loaded.train.columns[0], [ops.resize(tf.constant(image), (4, 5), "crop") for image in whole]
    )


@pytest.mark.whole
def test_by_name_from_python(tmp_path, connect):
    """The data of an experiment without one: a loss of one's own, and targets that mixing has blended."""
    folder(tmp_path)
    options = dict(train_split="train[:70%]", eval_split="train[70%:]", cache="stream", image_size="8")
    loaded = tfdist.load_data(f"image_folder:{tmp_path}", augment="flip, mixup(0.4)", **options)
    assert loaded.spec.names == ("cat", "dog", "owl") and loaded.spec.shape == (8, 8, 3)
    for source, size, blended in ((loaded.train, 15, True), (loaded.eval, 6, False)):
        ((x, y),) = source.in_order(32)
        assert x.shape == (size, 8, 8, 3) and y.shape == (size, 3)
        np.testing.assert_allclose(np.sum(y, 1), 1, rtol=1e-6)
        assert (np.max(y, 1) < 0.999).any() == blended
    distribution = connect(2)
    with distribution.scope():
        model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(3)])
        model.compile("adam", keras.losses.CategoricalCrossentropy(from_logits=True))
    history = tfdist.fit(model, loaded.train, distribution=distribution, batch_size=4, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert tfdist.predict(model, loaded.eval, distribution=distribution).shape == (6, 3)

    labels = tfdist.load_data(f"image_folder:{tmp_path}", **options)
    assert next(iter(labels.train.in_order(4)))[1].dtype == tf.int32
    with refused(r"load_data\(\) has no option 'imagesize': did you mean 'image_size'"):
        tfdist.load_data("digits", imagesize="8")
    with refused(r"unknown data.resize 'zoom'"):
        tfdist.load_data("digits", resize="zoom")
    numbers = tfdist.load_data(f"image_folder:{tmp_path}", **options | {"image_size": 9})
    assert numbers.spec.shape == (9, 9, 3)
    with refused(r"data.augment must be text in quotes, got None"):
        tfdist.load_data("digits", augment=None)


# -- images that would take all memory --------------------------------------


def headers():
    """The first bytes of images of 20,000 x 30,000 pixels; nothing else of them is needed to see that."""
    png = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + (20_000).to_bytes(4, "big") + (30_000).to_bytes(4, "big")
    little = (20_000).to_bytes(2, "little") + (30_000).to_bytes(2, "little")
    bmp = b"BM" + b"\0" * 12 + (40).to_bytes(4, "little")
    bmp += (20_000).to_bytes(4, "little") + (-30_000).to_bytes(4, "little", signed=True) + b"\1\0\x18\0"
    extended = (19_999).to_bytes(3, "little") + (29_999).to_bytes(3, "little")
    jpeg = b"\xff\xd8\xff\xc0\0\x11\x08" + (30_000).to_bytes(2, "big") + (20_000).to_bytes(2, "big")
    return {
        "png": png + b"\x08\2\0\0\0", "gif": b"GIF89a" + little, "bmp": bmp,
        "webp": b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + extended, "jpg": jpeg + b"\0" * 20 + b"\xff\xd9",
    }  # fmt: skip


@pytest.mark.parametrize("kind", headers())
def test_a_huge_image_is_refused_before_it_is_decoded(kind, tmp_path, monkeypatch):
    folder(tmp_path)
    (tmp_path / "cat" / f"huge.{kind}").write_bytes(headers()[kind])
    monkeypatch.setattr(image_folder.image_decoding, "decoder", lambda used: pytest.fail("something is decoded"))
    with refused() as error:
        registry.load(experiment(tmp_path, image_size="8", train_split="train", eval_split="train"))
    assert f"/cat/huge.{kind} has 600,000,000 pixels, more than 178,956,970: make it smaller, set data.o" in str(
        error.value
    )
    assert str(error.value).endswith("or allow it with data.options=max_pixels=600000000")


@pytest.mark.parametrize("marker", [0x00, 0x01, 0xD0, 0xD7])
def test_a_marker_without_a_length_hides_no_size(marker, tmp_path):
    save(tmp_path / "x.jpg", picture(1, (13, 21)))
    true = (tmp_path / "x.jpg").read_bytes()
    content = true[:2] + bytes([0xFF, marker]) + true[2:]
    # Where the next segment would be if what follows the marker were its length.
    content = content.ljust(4 + int.from_bytes(true[2:4], "big"), b"\0") + b"\xff\xc0\0\x11\x08\0\1\0\1\3\xff\xd9"
    (tmp_path / "x.jpg").write_bytes(content)
    assert tf.io.decode_jpeg(content).shape == (13, 21, 3)
    (look,) = image_folder.look_at([str(tmp_path / "x.jpg")])
    assert look.size == (13, 21)


@pytest.mark.whole
def test_huge_images_are_skipped_or_allowed(tmp_path, said):
    folder(tmp_path)
    save(tmp_path / "cat" / "large.png", picture(1, (20, 30)))
    both = dict(image_size="8", train_split="train", eval_split="train")
    skipped = registry.load(experiment(tmp_path, options="max_pixels=599", on_error="skip", **both))
    assert skipped.train.size == 21
    assert said == [
        "WARNING: 1 of 22 files is not an image and skipped: cat/large.png has 600 pixels, more than max_pixels=599"
    ]
    with refused(r"cat/large.png has 600 pixels, more than 599: make it smaller"):
        registry.load(experiment(tmp_path, options="max_pixels=599", **both))
    assert registry.load(experiment(tmp_path, options="max_pixels=600", **both)).train.size == 22
    with refused(r"data.options: max_pixels must be an integer of at least 1, got 0"):
        registry.load(experiment(tmp_path, options="max_pixels=0", **both))
