"""Data sets of TFDS: really prepared ones, made-up ones in place of a download, and none."""

import contextlib
import json
import os
import random
import re
import shutil
import socket

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from google.protobuf import json_format
from support.covering import first
from support.refusals import refused
from support.source_columns import columns_of

import tfdist
from tfdist import config
from tfdist.config import validation
from tfdist.data import spec as spec_lib
from tfdist.data.datasets import registry
from tfdist.data.datasets import tfds as tfds_lib
from tfdist.data.sources import Arrays, Batches, Records

SIZE = 30


class Photos(tfds.core.GeneratorBasedBuilder):
    """Images of all sizes, as ImageNet has them, with a text beside that nobody asks for."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(None, None, 3), encoding_format="png"),
            "label": tfds.features.ClassLabel(names=["dark", "light"]),
            "title": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(SIZE), "test": self._generate_examples(8)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"image": photo(i), "label": i % 2, "title": f"number {i}"}


class Deep(Photos):
    """Images of 16 bits."""

    def _info(self):
        image = tfds.features.Image(shape=(4, 4, 1), dtype=np.uint16, encoding_format="png")
        features = tfds.features.FeaturesDict({"image": image, "label": tfds.features.ClassLabel(num_classes=2)})
        return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=("image", "label"))

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"image": np.full((4, 4, 1), 60_000 + i, np.uint16), "label": i % 2}


def photo(i):
    """Of one colour, which tells its number."""
    return np.full((10 + i % 3, 12 - i % 4, 3), 120 * (i % 2) + 4 * i, np.uint8)


def experiment(tmp_path, **data):
    e = config.Experiment()
    e.data = config.Data(data_dir=str(tmp_path), **data)
    return validation.validate(e)


def colours(source):
    """First pixel and label of each example, in order."""
    x, y = columns_of(source)
    assert x.dtype == np.uint8 and x.shape[1:] == (8, 8, 3)
    assert (x == x[:, :1, :1]).all()
    return list(zip(x[:, 0, 0, 0].tolist(), y.tolist()))


EXPECTED = [(int(photo(i)[0, 0, 0]), i % 2) for i in range(SIZE)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for kind in ("tfrecord", "array_record"):
        made[kind] = tmp_path_factory.mktemp(kind)
        tfds.builder("photos", data_dir=made[kind]).download_and_prepare(file_format=kind)
    return made


@pytest.mark.parametrize("kind, source", [("array_record", Records), ("tfrecord", Batches)])
def test_images_of_all_sizes(kind, source, folders):
    e = experiment(
        folders[kind], name="photos", image_size="8", train_split="train[:90%]", eval_split="train[90%:]", shuffle=False
    )
    loaded = registry.load(e)
    assert isinstance(loaded.train, source) and isinstance(loaded.eval, source)
    assert colours(loaded.train) == EXPECTED[:27] and colours(loaded.eval) == EXPECTED[27:]
    assert loaded.spec == spec_lib.Spec((8, 8, 3), "uint8", 2, 255.0, ("dark", "light")) and loaded.examples == 27


@pytest.mark.whole
def test_a_stream_tells_other_examples_by_their_content(folders, tmp_path, monkeypatch):
    """Not by the bytes of the files, which differ where they are prepared again."""
    options = dict(name="photos", image_size="8")
    facts = lambda folder: registry.load(experiment(folder, **options)).train.facts()
    before = facts(folders["tfrecord"])
    for change in (lambda i: i % 2, lambda i: (i + 1) % 2):
        builder = tfds.builder("photos", data_dir=tmp_path / str(change(0)))
        monkeypatch.setattr(
            builder,
            "_generate_examples",
            lambda count, change=change: (
                (i, {"image": photo(i), "label": change(i), "title": f"number {i}"}) for i in range(count)
            ),
        )
        builder.download_and_prepare(file_format="tfrecord")
        assert (facts(tmp_path / str(change(0))) == before) == (change(0) == 0)


@pytest.mark.whole
def test_both_formats_train_the_same(folders, connect):
    """Not shuffled, since a stream has an order of its own."""
    trained = []
    for kind, replicas in (("array_record", 1), ("array_record", 2), ("tfrecord", 2)):
        e = experiment(folders[kind], name="photos", image_size="8", shuffle=False)
        e.train.batch_size = 12
        loaded = registry.load(e)
        keras.utils.set_random_seed(0)
        with connect(replicas).scope():
            flat = [keras.Input((8, 8, 3)), keras.layers.Rescaling(1 / 255), keras.layers.Flatten()]
            model = keras.Sequential([*flat, keras.layers.Dense(2)])
            model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        batch = {"batch_size": 12} if kind == "array_record" else {}
        fit = dict(distribution=connect(replicas), epochs=3, shuffle=False, verbose=0, **batch)
        history = tfdist.fit(model, loaded.train, **fit).history["loss"]
        assert history[-1] < history[0]
        trained.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_allclose(trained[1:], [trained[0]] * 2, atol=1e-6)


def test_images_of_16_bits_are_scaled_as_such(tmp_path):
    """By 255, inputs of a built-in model reached 257, and it stayed at chance."""
    loaded = registry.load(experiment(tmp_path, name="deep", train_split="train", eval_split="test"))
    assert loaded.spec.maximum == 65535 and loaded.train.columns[0].max() == 60_000 + SIZE - 1


def test_a_set_of_fixed_size_in_memory_or_by_number(tmp_path):
    """The format on disk is decided when it is prepared; afterwards both are read."""
    whole = {}
    for cache, source in (("stream", Records), ("memory", Arrays), ("auto", Arrays)):
        loaded = registry.load(
            experiment(tmp_path, name="digits", cache=cache, train_split="train[:100]", eval_split="test[:10]")
        )
        assert isinstance(loaded.train, source) and loaded.spec.maximum == 16
        x, y = loaded.train.columns if source is Arrays else next(iter(loaded.train.in_order(100)))
        whole[cache] = np.concatenate([np.reshape(x, [100, -1]), np.reshape(y, [100, 1])], 1)
    assert [p.name.split(".")[1].split("-")[0] for p in tmp_path.rglob("digits-t*")] == ["array_record"] * 2
    np.testing.assert_array_equal(whole["memory"], whole["stream"])
    plain = tmp_path / "plain"
    (other,) = [registry.load(experiment(plain, name="digits", train_split="train[:100]", eval_split="test[:10]"))]
    np.testing.assert_array_equal(np.sort(other.train.columns[1]), np.sort(whole["auto"][:, -1]))
    assert list(plain.rglob("*.tfrecord*"))


def test_a_model_begins_the_same_whether_its_data_was_prepared_or_is(tmp_path):
    random.seed(1)
    drawn = random.getstate()
    registry.load(experiment(tmp_path, name="digits", eval_split="test"))
    assert random.getstate() == drawn, "Keras draws the seeds of layers from it"


@pytest.mark.parametrize(
    "name, size, shape, classes",
    first(
        1, [("cifar10", "", (32, 32, 3), 10), ("imagenet2012", "16", (16, 16, 3), 1000), ("imdb_reviews", "", (), 2)]
    ),
)
def test_sets_that_need_a_download(name, size, shape, classes, tmp_path):
    """Made-up examples of the real features, which TFDS offers for tests."""
    test = "validation" if name == "imagenet2012" else "test"
    described(name, test, tmp_path)
    with tfds.testing.mock_data(num_examples=20, data_dir=str(tmp_path)):
        loaded = registry.load(experiment(tmp_path, name=name, image_size=size, eval_split=test))
    assert (loaded.spec.shape, loaded.spec.classes) == (shape, classes)
    if isinstance(loaded.train, Arrays):
        x, y = loaded.train.columns
    else:
        x, y = next(iter(loaded.train.decoded))
    assert x.shape[1:] == shape and len(x) == len(y) == 20 and np.max(y) < classes


def described(name, test, folder):
    """Leaves what TFDS would know of the data set, which the stand-in for its data asks for."""
    info = tfds.builder(name, data_dir=folder).info
    template = lambda split: tfds.core.ShardedFileTemplate(
        data_dir=info.data_dir, dataset_name=info.name, split=split, filetype_suffix="tfrecord"
    )
    splits = [
        tfds.core.SplitInfo(name=s, shard_lengths=[20], num_bytes=0, filename_template=template(s))
        for s in ("train", test)
    ]
    info.set_splits(tfds.core.splits.SplitDict(splits))
    os.makedirs(info.data_dir)
    info.write_to_directory(info.data_dir)


def no_network(*arguments):
    raise socket.gaierror("no address")


@pytest.mark.parametrize(
    "data, message",
    [
        ({"name": "cifar10"},
         (r"data set 'cifar10' is not in .*/cifar10/.* and cannot be downloaded: www.cs.toronto.edu is not "
          r"found: run `tfds build cifar10` where there is a network, copy what it makes, and set data.data_dir")),
        ({"name": "imagenette"}, "run `tfds build imagenette --file_format=array_record` where"),
        ({"name": "cifar10", "cache": "stream"}, "run `tfds build cifar10 --file_format=array_record` where"),
        ({"name": "imagenet2012"},
         (r"data set 'imagenet2012' has to be downloaded by hand, from https://image-net.org/, into "
          r".*/downloads/manual: manual_dir should contain two files: ILSVRC2012_img_train.tar and")),
        ({"name": "cvs:/a.csv"}, "data.name='cvs:/a.csv' is not accepted by TFDS: "),
        ({"name": "cifa10"}, "unknown data.name 'cifa10': did you mean 'cifar10'"),
    ],
)  # fmt: skip
def test_what_cannot_be_downloaded(data, message, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(tfds_lib.urllib.request, "getproxies", dict)
    with refused(message):
        registry.load(experiment(tmp_path, **data))


@pytest.mark.whole
def test_two_runs_prepare_a_data_set_once(tmp_path, monkeypatch):
    """While this one waits for the lock, the other one has finished."""
    held = tfds_lib.local_files.locked
    locked = []

    @contextlib.contextmanager
    def after_the_other_one(path, *rest):
        locked.append(path.name)
        with held(path, *rest):
            tfds.builder("digits", data_dir=tmp_path).download_and_prepare()
            yield

    monkeypatch.setattr(tfds_lib.local_files, "locked", after_the_other_one)
    monkeypatch.setattr(tfds_lib, "_prepare", lambda *a: pytest.fail("it is prepared a second time"))
    loaded = registry.load(experiment(tmp_path, name="digits", eval_split="test"))
    assert (loaded.train.size, loaded.eval.size, locked) == (1437, 360, [".digits.lock"])
    registry.load(experiment(tmp_path, name="digits", eval_split="test"))
    assert len(locked) == 1, "what is prepared needs no lock"


def test_a_download_that_fails(tmp_path, monkeypatch):
    def fails(self, **kwargs):
        raise RuntimeError("the line\nis cut")

    monkeypatch.setattr(tfds_lib, "_unreachable", lambda builder: "")
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", fails)
    with refused(r"'cifar10' cannot be prepared in .*: the line is cut: run `tfds build cifar10`"):
        registry.load(experiment(tmp_path, name="cifar10"))
    (tmp_path / "downloads" / "manual").mkdir(parents=True)
    (tmp_path / "downloads" / "manual" / "part.tar").write_bytes(b"")
    with refused(r"the line is cut: put into .*/manual what TFDS asks for: manual_dir should"):
        registry.load(experiment(tmp_path, name="imagenet2012", image_size="8"))


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "[]", '{"color": 1}'])
def test_a_damaged_description(content, folders, tmp_path):
    copy = shutil.copytree(next(iter(folders.values())), tmp_path / "copy")
    next(copy.rglob("dataset_info.json")).write_text(content)
    with refused(r"data set 'photos' cannot be opened: .*: correct the .json files"):
        registry.load(experiment(copy, name="photos", image_size="8"))


@pytest.mark.parametrize(
    "cache, damage, message",
    first(2, [
        (
            "memory",
            lambda path, data: path.write_bytes(data[:500] + b"?" + data[501:]),
            "record 4 of {} does not match",
        ),
        ("memory", lambda path, data: path.write_bytes(data[:-9]), "{} is cut off behind 1,436 records"),
        ("stream", lambda path, data: path.write_bytes(b""), "{} is empty"),
        ("stream", lambda path, data: path.unlink(), "{} cannot be read: No such file"),
    ]),
    ids=["a byte", "cut", "empty", "gone"],
)  # fmt: skip
def test_damaged_records_of_tfds(cache, damage, message, tmp_path):
    """TensorFlow names no file, and the command would be tried again."""
    registry.load(experiment(tmp_path, name="digits"))
    path = next(tmp_path.rglob("*train.tfrecord*"))
    damage(path, path.read_bytes())
    with refused(message.format(re.escape(str(path)))):
        registry.load(experiment(tmp_path, name="digits", cache=cache))


@pytest.mark.parametrize("data, message", [
    ({}, "the images of photos have different sizes: set data.image_size, such as 224"),
    ({"image_size": "8", "train_split": "trian"}, "unknown data.train_split 'trian': photos has t"),
    ({"image_size": "8", "eval_split": "test[:0]"}, r"data.eval_split='test\[:0\]' of photos is empty"),
])  # fmt: skip
def test_what_is_refused(data, message, folders):
    for kind in folders:
        with refused(message):
            registry.load(experiment(folders[kind], name="photos", **data))


def test_a_crop_is_cut_from_the_whole_image(folders):
    e = experiment(folders["array_record"], name="photos", image_size="8", augment="resized_crop(0.5), flip")
    found = tfds_lib.load(e, 1e9)
    assert found.spec.shape == (8, 8, 3)
    stored = tf.squeeze(found.train.read(tf.constant([4], tf.int64)))
    assert found.train.decode(stored, None)[0].shape == photo(4).shape
    assert found.eval.decode(tf.squeeze(found.eval.read(tf.constant([4], tf.int64))), None)[0].shape == (8, 8, 3)


OWN = "tensorflow_datasets.core.features"
NAMES_A_MODULE = {
    "at the top": {"pythonClassName": "foreign_feature.Feature"},
    "inside": {
        "pythonClassName": f"{OWN}.features_dict.FeaturesDict",
        "featuresDict": {"features": {"image": {"pythonClassName": "foreign_feature.Feature", "text": {}}}},
    },
    "as older versions wrote it": {"type": "foreign_feature.Feature", "content": {}},
    "in a text": {
        "pythonClassName": f"{OWN}.sequence_feature.Sequence",
        "jsonFeature": {"json": json.dumps({"feature": {"type": "foreign_feature.Feature", "content": {}}})},
    },
}


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """Writes a prepared data set of somebody else's, whose features are these."""
    (tmp_path / "foreign_feature.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)

    def write(features):
        path = tmp_path / "strange" / "1.0.0"
        path.mkdir(parents=True)
        about = {"name": "strange", "version": "1.0.0", "fileFormat": "tfrecord"}
        (path / "dataset_info.json").write_text(json.dumps(about))
        (path / "features.json").write_text(json.dumps(features))
        return experiment(tmp_path, name="strange")

    return write


@pytest.mark.parametrize("features", NAMES_A_MODULE.values(), ids=NAMES_A_MODULE)
def test_a_data_set_imports_no_module_that_its_files_name(features, foreign):
    before = vars(tfds.features.FeatureConnector)["cls_from_name"]
    with refused() as error:
        registry.load(foreign(features))
    assert "the data set 'strange' has a feature of class 'foreign_feature.Feature', and only" in str(error.value)
    assert vars(tfds.features.FeatureConnector)["cls_from_name"] is before


@pytest.mark.parametrize("features", [[], 1, {"type": 1}, {"pythonClassName": "os.path"}, {"type": "a", "content": 1}])
def test_damaged_features(features, foreign):
    with refused(r"'strange' (is not accepted by TFDS|cannot be opened): "):
        registry.load(foreign(features))


class Words(tfds.features.Text):
    """A feature of a module that is imported."""


def test_features_of_a_module_that_is_imported(foreign):
    features = tfds.features.FeaturesDict({"words": Words()})
    with refused("'strange' does not say which feature is the target"):
        registry.load(foreign(json_format.MessageToDict(features.to_proto())))
