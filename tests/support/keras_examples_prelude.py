"""Runs one example of keras.io on data that are made here, with few rows and epochs and nothing drawn at random.

Dropout and augmentation change nothing, `shuffle` keeps the order, pretrained weights are drawn: what is left must be
the same on any number of devices. Every process writes history and weights after each call of `fit`.
"""

import functools
import os
import pathlib
import random
import runpy
import string
import sys
import types
import zipfile

import numpy as np

OUT = pathlib.Path(os.environ["EXAMPLE_OUT"])
BATCH, ROWS, EPOCHS = 16, 21, 2
FILES = OUT / "files" / str(os.getpid())
rng = np.random.default_rng(0)


def images(rows, *shape):
    return rng.integers(0, 256, (rows, *shape), dtype=np.uint8)


def words(count):
    vocabulary = ["".join(rng.choice(list(string.ascii_lowercase), 4)) for _ in range(40)]
    return " ".join(rng.choice(vocabulary, count))


# ---- data that the examples download ----


def image_classes(train, test, classes, *shape, column=False):
    def load_data(*_, **__):
        y = [rng.integers(0, classes, (rows, *[1] * column)).astype("uint8") for rows in (train, test)]
        return (images(train, *shape), y[0]), (images(test, *shape), y[1])

    return load_data


def imdb(num_words=20000, **_):
    def made(rows):
        x = np.empty(rows, object)
        x[:] = [list(rng.integers(1, num_words, rng.integers(5, 60))) for _ in range(rows)]
        return x, rng.integers(0, 2, rows)

    return made(200), made(100)


def boston_housing(*_, **__):
    return tuple((rng.normal(size=(rows, 13)), rng.normal(size=rows)) for rows in (200, 50))


def heart(**_):
    pandas = REAL["pandas"]
    columns = {name: rng.integers(0, 4, 120) for name in ["sex", "cp", "fbs", "restecg", "exang", "slope", "ca"]}
    columns.update({name: rng.integers(20, 300, 120) for name in ["age", "trestbps", "chol", "thalach"]})
    columns["oldpeak"] = rng.normal(size=120)
    columns["thal"] = rng.choice(["normal", "fixed", "reversible"], 120)
    return pandas.DataFrame({**columns, "target": rng.integers(0, 2, 120)})


def anomalies(**_):
    pandas = REAL["pandas"]
    index = pandas.date_range("2014-04-01", periods=600, freq="5min", name="timestamp")
    value = np.sin(np.arange(600) / 9) + rng.normal(size=600) / 9
    return pandas.DataFrame({"value": value + 50 * (np.arange(600) > 560)}, index=index)


def text_file(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def zipped(path, *members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members:
            archive.writestr(name, text)


def translations(count, mark=""):
    return "\n".join(f"{words(3)}\t{mark}{words(4)}\tCC-BY" for _ in range(count)) + "\n"


def movielens():
    seen = ((user, movie) for user in range(1, 21) for movie in range(1, 30) if (user * movie) % 3)
    rows = (f"{user},{movie},{rng.integers(1, 11) / 2},9" for user, movie in seen)
    movies = (f"{movie},Film {movie},Drama" for movie in range(1, 30))
    return "userId,movieId,rating,timestamp\n" + "\n".join(rows), "movieId,title,genres\n" + "\n".join(movies)


def jena():
    names = ["Date Time", "p (mbar)", "T (degC)", "Tpot (K)", "Tdew (degC)", "rh (%)", "VPmax (mbar)", "VPact (mbar)"]
    names += ["VPdef (mbar)", "sh (g/kg)", "H2OC (mmol/mol)", "rho (g/m**3)", "wv (m/s)", "max. wv (m/s)", "wd (deg)"]
    values = np.round(rng.normal(size=(420551, 14)).cumsum(0) / 100, 3)
    lines = [f"{i // 6 % 28 + 1:02}.01.2009 00:10:00," + ",".join(map(str, row)) for i, row in enumerate(values)]
    return ",".join(names) + "\n" + "\n".join(lines)


def pictures(folder, count, size, form="jpg"):
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.fromarray(images(1, *size, 3)[0]).save(folder / f"{number:03}.{form}")


def adult(names=None, **_):
    """A table of the census, whose numbers have these names and whose other columns are words."""
    numbers = {"age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week"}
    made = {n: rng.integers(0, 90, 100) if n in numbers else rng.choice([" a", " b", " c"], 100) for n in names}
    return REAL["pandas"].DataFrame({**made, names[-1]: rng.choice([" <=50K", " >50K"], 100)})


def tfds_load(name, split=None, with_info=False, **_):
    """Images with a label in two classes; rows of a fixed number, in order."""
    import tensorflow as tf

    def made():
        x, y = images(ROWS, 160, 160, 3), rng.integers(0, 2, ROWS)
        return tf.data.Dataset.from_tensor_slices((x, y)).apply(tf.data.experimental.assert_cardinality(ROWS))

    sets = [made() for _ in split] if isinstance(split, (list, tuple)) else made()
    label = types.SimpleNamespace(num_classes=2, int2str=str, names=["0", "1"])
    features = {"image": types.SimpleNamespace(shape=(160, 160, 3)), "label": label}
    count = types.SimpleNamespace(num_examples=ROWS)
    info = types.SimpleNamespace(features=features, splits={"train": count, "test": count})
    return (sets, info) if with_info else sets


def pets(folder):
    for part in ("Cat", "Dog"):
        pictures(folder / "PetImages" / part, ROWS, (40, 50))
    (folder / "PetImages" / "Cat" / "000.jpg").rename(folder / "PetImages" / "Cat" / "6779.jpg")  # which they look at


def get_file(fname=None, origin=None, untar=False, extract=False, **_):
    FILES.mkdir(parents=True, exist_ok=True)
    if not str(fname).strip() or fname is None or str(fname).startswith("http"):
        fname, origin = (origin or fname).split("/")[-1], origin or fname
    path = FILES / fname
    kind = origin.split("/")[-1]
    if kind == "nietzsche.txt":
        path.write_text(words(2000))
    elif kind == "fra-eng.zip":
        zipped(path, ("fra.txt", translations(120)))
        (FILES / "fra.txt").write_text(zipfile.ZipFile(path).read("fra.txt").decode())
    elif kind == "spa-eng.zip":
        text_file(FILES / "spa-eng" / "spa.txt", translations(150).splitlines())
    elif kind == "mnist_test_seq.npy":
        np.save(path, images(1, 20, 40, 64, 64)[0])
    elif kind == "ml-latest-small.zip":
        ratings, movies = movielens()
        zipped(path, ("ml-latest-small/ratings.csv", ratings), ("ml-latest-small/movies.csv", movies))
    elif kind == "jena_climate_2009_2016.csv.zip":
        zipped(path, ("jena_climate_2009_2016.csv", jena()))
        zipfile.ZipFile(path).extractall(FILES)
    elif kind == "BSR_bsds500.tgz":
        for part in ("train", "val", "test"):
            pictures(path / "BSDS500" / "data" / "images" / part, 21, (300, 300))
    elif kind == "aclImdb_v1.tar.gz":
        reviews(FILES)
    elif kind == "kagglecatsanddogs_5340.zip":
        pets(FILES)
    else:
        raise NotImplementedError(f"no data are made for {origin}")
    return str(path)


def reviews(folder):
    for part in ("train", "test"):
        for kind in ("pos", "neg"):
            for number in range(30):
                text_file(folder / "aclImdb" / part / kind / f"{number}.txt", [words(30)])


def read_csv(path, *arguments, **options):
    for key, made in {"heart.csv": heart, "art_daily": anomalies, "adult.": adult}.items():
        if key in str(path):
            return made(**options)
    return REAL["read_csv"](path, *arguments, **options)


def loadtxt(path, *arguments, **options):
    if "FordA" in str(path):
        return np.column_stack([rng.choice([-1, 1], 96), rng.normal(size=(96, 500))])
    return REAL["loadtxt"](path, *arguments, **options)


def work_folder(name):
    """What examples expect in their working directory, since a shell command above has brought it there."""
    here = pathlib.Path()
    if name in ("text_classification_from_scratch", "text_generation_with_miniature_gpt"):
        reviews(here)
    elif name in ("mirnet", "zero_dce"):
        for part in ("our485/low", "our485/high", "eval15/low", "eval15/high"):
            pictures(here / "lol_dataset" / part, 330 if "our" in part else 3, (40, 50), "png")
    elif name == "image_classification_from_scratch":
        pets(here)
    elif name == "captcha_ocr":
        pictures(here, ROWS, (50, 200), "png")
        (here / "captcha_images_v2").mkdir()
        for number, file in enumerate(sorted(here.glob("*.png"))):
            file.rename(here / "captcha_images_v2" / f"{12345 + number * 37}.png")
    elif name == "imbalanced_classification":
        rows = [",".join([*map(str, rng.normal(size=30)), f'"{int(rng.random() < 0.3)}"']) for _ in range(200)]
        text_file(here / "creditcard.csv", ["header", *rows])


# ---- what would be drawn, and what would take long ----


def constant(shape, *arguments, dtype=None, minval=0.0, maxval=1.0, mean=0.0, stddev=1.0, **_):
    import keras

    dtype = dtype or keras.config.floatx()
    return keras.ops.full(shape, minval + (maxval - minval) / 2, dtype)


def head(data, rows):
    """The first rows of arrays, the first batches of a dataset."""
    import tensorflow as tf

    if isinstance(data, tf.data.Dataset):
        return data.take(2)
    if isinstance(data, dict):
        return {name: head(part, rows) for name, part in data.items()}
    if isinstance(data, (list, tuple)) and len(data) and hasattr(data[0], "shape"):
        return type(data)(head(part, rows) for part in data)
    return data[:rows] if hasattr(data, "shape") and hasattr(data, "__getitem__") else data


def short(method):
    """A method of models that is given few examples and epochs, in order."""

    @functools.wraps(method)
    def called(self, x=None, y=None, *arguments, **options):
        names = (
            ("batch_size", "epochs", "verbose", "callbacks") if method.__name__ == "fit" else ("batch_size", "verbose")
        )
        options.update(zip(names, arguments, strict=False))
        x, y = head(x, ROWS), head(y, ROWS)
        if isinstance(options.get("sample_weight"), np.ndarray):
            options["sample_weight"] = head(options["sample_weight"], ROWS)
        if hasattr(x, "shape") or isinstance(x, (list, dict)):
            options["batch_size"] = min(options.get("batch_size") or 32, BATCH)
        if method.__name__ == "fit":
            options["epochs"] = min(options.get("epochs", 1), EPOCHS + options.get("initial_epoch", 0))
            options["verbose"] = 0
            if options.get("validation_data") is not None:
                data = options["validation_data"]
                options["validation_data"] = (
                    tuple(head(d, 13) for d in data) if isinstance(data, (tuple, list)) else head(data, 13)
                )
            for steps in ("steps_per_epoch", "validation_steps"):
                if options.get(steps):
                    options[steps] = min(options[steps], 2)
            options["shuffle"] = False
        result = method(self, x, y, **options)
        if method.__name__ == "fit":
            record(self, result)
        return result

    return called


def record(model, history):
    number = record.calls = getattr(record, "calls", 0) + 1
    values = {f"history {name}": np.array(value, "float64") for name, value in history.history.items()}
    values.update(
        {f"weight {i}": np.asarray(w, "float64") for i, w in enumerate(model.get_weights()) if w.dtype.kind == "f"}
    )
    np.savez(OUT / f"{os.getpid()}-{number:03}.npz", **values)


REAL = {}


def replace(keras):
    """Replaces what examples call: data, draws, weights to download, and the size of everything."""
    import pandas
    import tensorflow as tf
    import tensorflow_datasets

    tensorflow_datasets.load = tfds_load
    REAL.update(pandas=pandas, read_csv=pandas.read_csv, loadtxt=np.loadtxt)
    pandas.read_csv, np.loadtxt = read_csv, loadtxt
    sets = keras.datasets
    sets.mnist.load_data = sets.fashion_mnist.load_data = image_classes(60000, 10000, 10, 28, 28)
    sets.cifar10.load_data = image_classes(50000, 10000, 10, 32, 32, 3, column=True)
    sets.cifar100.load_data = image_classes(50000, 10000, 100, 32, 32, 3, column=True)
    sets.imdb.load_data, sets.boston_housing.load_data = imdb, boston_housing
    keras.utils.get_file = get_file
    keras.utils.plot_model = lambda *_, **__: None
    for name in ("Dropout", "SpatialDropout1D", "SpatialDropout2D", "GaussianNoise", "GaussianDropout", "AlphaDropout"):
        getattr(keras.layers, name).call = lambda self, inputs, *_, **__: inputs
    for name in dir(keras.layers):
        if name.startswith("Random") and name != "RandomCrop":
            getattr(keras.layers, name).call = lambda self, inputs, *_, **__: inputs
    keras.random.normal = keras.random.uniform = keras.random.truncated_normal = constant
    keras.random.dropout = lambda inputs, *_, **__: inputs
    tf.random.normal = tf.random.uniform = constant
    tf.data.Dataset.shuffle = lambda self, *_, **__: self
    batch = tf.data.Dataset.batch
    tf.data.Dataset.batch = lambda self, batch_size, *a, **k: batch(self, min(int(batch_size), BATCH), *a, **k)
    apply = keras.optimizers.Optimizer.apply  # which squares the slices of a sparse gradient before it adds them

    def dense(self, grads, *arguments):
        return apply(self, [g if g is None else tf.convert_to_tensor(g) for g in grads], *arguments)

    if "tfdist" not in sys.modules:  # which sums them itself, and refuses another `apply`
        next(c for c in keras.optimizers.Optimizer.__mro__ if "apply" in vars(c)).apply = dense
    for module in vars(keras.applications).values():
        for name, made in list(vars(module).items()) if isinstance(module, types.ModuleType) else ():
            if name[0].isupper() and callable(made):
                drawn = functools.partial(lambda made, *a, weights=None, **k: made(*a, weights=None, **k), made)
                setattr(module, name, drawn)
                if hasattr(keras.applications, name):
                    setattr(keras.applications, name, drawn)
    for name in ("fit", "evaluate"):
        setattr(keras.Model, name, short(getattr(keras.Model, name)))


def main():
    import keras

    example = pathlib.Path(sys.argv[1])
    keras.config.set_floatx(os.environ["EXAMPLE_FLOATX"])
    keras.utils.set_random_seed(1)
    replace(keras)
    work_folder(example.stem)
    keras.utils.set_random_seed(1)
    random.seed(1)
    sys.argv = [str(example)]
    real_open = open
    import builtins

    builtins.open = lambda file, *a, **k: real_open(str(file).replace("/Users/fchollet/Downloads/", ""), *a, **k)
    runpy.run_path(str(example), run_name="__main__")


main()
