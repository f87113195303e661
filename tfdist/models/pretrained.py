"""Weights that a model starts with, from a file: by layer and variable, as far as they fit."""

import io
import re
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable

import h5py
import keras
import numpy as np

from tfdist.errors import UserError, one_line

SHOWN = 4  # how many layers a message names
_SPLIT = re.compile(r"(?<=.)(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])")
_CLASSES = {_SPLIT.sub("_", name).lower() for name in (*dir(keras.layers), "Functional", "Sequential")}
NUMBERED = _CLASSES | {f"{way}_{name}" for way in ("forward", "backward") for name in _CLASSES}
"""What Keras calls a layer without a name, before the number that it counts up in each process."""
OF_TRAINING = {"optimizer", "metrics", "seed_generator"}  # parts of a file that are not weights

Key = tuple[str, ...]  # names of the layers around a variable, from outside in, and its number among that layer's


def take(model: keras.Model, path: str) -> str:
    """Gives a built model the weights in a file, where layer, variable and shape are the same.

    Returns a line about them. A layer goes by its name, or if Keras has numbered it by its place among those of its
    class. One that has more or fewer variables than in the file takes none: those of BatchNorm without `scale`, say,
    have the same shapes and other meanings. Call it within the scope of the strategy, on all workers. The file is a
    `.keras`, `.weights.h5` or (as Keras 2 and keras.applications have them) `.h5` file.
    """
    try:
        given = read(path)
    except (OSError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        why = one_line(error, 150)
        raise UserError(f"model.weights={path!r} cannot be read ({why})", "give a file that Keras has saved") from error
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        # Keras writes and reads the model's own variables, so that both sides go by the same names.
        own = f"{folder}/own.weights.h5"
        model.save_weights(own)
        with h5py.File(own, "r+") as file:
            here = _places(file)
            alike = Counter(key[:-1] for key in given), Counter(key[:-1] for key in here)
            fits = [
                key
                for key, place in here.items()
                if key in given and given[key].shape == file[place].shape and alike[0][key[:-1]] == alike[1][key[:-1]]
            ]
            for key in fits:
                file[here[key]][...] = given[key]
        if not fits:
            raise UserError(
                f"model.weights={path!r} has nothing that fits: it has {_layers(given)}, the model has {_layers(here)}"
            )
        model.load_weights(own)
    line = f"weights: {len(fits)} of {len(here)} tensors are those of {path}"
    order = {layer.name: place for place, layer in enumerate(model.layers)}
    left = sorted((key for key in here if key not in set(fits)), key=lambda key: order.get(key[0], -1))
    return f"{line}; not those of {_layers(left)}" if left else line


def read(path: str) -> dict[Key, np.ndarray]:
    """Returns the weights in a file; raises the errors of zipfile and h5py if it is none that Keras has saved."""
    stored: str | io.BytesIO = path
    if path.endswith(".keras"):
        with zipfile.ZipFile(path) as archive:
            stored = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(stored) as file:
        root = file.get("model_weights", file)
        places = _older_places(root) if "layer_names" in root.attrs else _places(root)
        return {key: root[place][()] for key, place in places.items()}


def _places(file: h5py.Group) -> dict[Key, str]:
    """Where the tensors of a file of Keras 3 are: `<layer>/vars/<number>`, with the layer's name as an attribute."""
    layer_of: dict[str, str] = {}  # place of a tensor -> place of its layer
    labels: dict[str, str] = {}  # place of a layer -> its name

    def visit(place: str, item: h5py.Group | h5py.Dataset) -> None:
        layer, _, last = place.rpartition("/")
        if last == "vars" or place == "vars":
            name, segment = item.attrs.get("name", ""), layer.rpartition("/")[2]
            # The attribute that holds the layer says more than a number of Keras' own.
            labels[layer] = segment if _base(name) in NUMBERED and _base(segment) != _base(name) else name
        elif isinstance(item, h5py.Dataset) and not OF_TRAINING & {_base(part) for part in place.split("/")}:
            layer_of[place] = layer.rpartition("/")[0]

    file.visititems(visit)
    chains = []
    pieces = lambda part: [(int(p), "") if p.isdigit() else (0, p) for p in re.split(r"(\d+)", part)]
    for place in sorted(layer_of, key=lambda place: [*map(pieces, place.split("/"))]):  # `dense_10` behind `dense_9`
        parts = layer_of[place].split("/") if layer_of[place] else []
        around = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        chains.append((tuple(labels[a] for a in around if labels.get(a)), place.rpartition("/")[2], place))
    return _keys(chains)


def _older_places(root: h5py.Group) -> dict[Key, str]:
    """The same for the format of Keras 2, which lists layers and weights in attributes."""
    chains = []
    for layer in map(_text, root.attrs["layer_names"]):
        counted: dict[tuple, int] = {}
        for weight in map(_text, root[layer].attrs["weight_names"]):
            parts = weight.partition(":")[0].split("/")
            inner = parts[parts.index(layer) + 1 : -1] if layer in parts else []
            chain = (layer, *inner)
            counted[chain] = counted.get(chain, -1) + 1
            chains.append((chain, str(counted[chain]), f"{layer}/{weight}"))
    return _keys(chains)


def _keys(chains: Iterable[tuple[tuple[str, ...], str, str]]) -> dict[Key, str]:
    """Places by key, of (names of the layers, number of the variable, its place).

    Layers that Keras has numbered are counted anew, in the order in which they come.
    """
    counted: dict[tuple, list[str]] = {}
    places = {}
    for names, number, place in chains:
        key: tuple[str, ...] = ()
        for name in names:
            base = _base(name)
            if base in NUMBERED:
                alike = counted.setdefault((*key, base), [])
                if name not in alike:
                    alike.append(name)
                name = f"{base} {alike.index(name) + 1}"
            key = (*key, name)
        key = (*key, number)
        places[key] = place
    return places


def _base(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _layers(keys: Iterable[Key]) -> str:
    """The first layers of these, in words."""
    names = list(dict.fromkeys("/".join(key[:-1]) or "the model itself" for key in keys))
    more = f" and {len(names) - SHOWN} more layers" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) or "no layers") + more


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
