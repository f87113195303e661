"""Learning rates by layer: factors given by name, and factors that fall from the output to the input."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras

from tfdist.errors import UserError
from tfdist.keras_bridge import keras_internals

_BLOCK = re.compile(r"^.*(?:block|layer)_?\d+[a-z]?(?=_)")
_SHOWN = 12  # names in a message
_SMALLEST = 1e-6  # share of the learning rate below which a layer does not move in float32


class _Owned(NamedTuple):
    """A trainable variable and where it is."""

    variable: keras.Variable
    chain: tuple[str, ...]  # names of the layers that it is in, from the outermost on; none for one of the model itself

    @property
    def nearest(self) -> str:
        """The name to show a person."""
        return self.chain[-1] if self.chain else self.variable.name


def factors(model: keras.Model, rates: Mapping[str, float], decay: float = 1.0) -> tuple[float, ...]:
    """Computes the factor on learning rate and decoupled weight decay of each trainable variable; none if all are 1.

    Args:
      model: built.
      rates: factor by a pattern (`head*`) for names or paths of layers or variables; the last match counts.
      decay: factor between a layer and the one below it (Clark et al., *ELECTRA*, 2020; Bao et al., *BEiT*, 2021):
        1 for the layer next to the output. Layers that are named as parts of a block (`block3_conv`) count as one, so
        does a layer made of layers; embeddings and weights of the model itself are the lowest together.
    """
    for name, value in {**rates, "layer_decay": decay}.items():
        if not 0 < value < float("inf"):
            raise UserError(f"the learning rate of {name!r} is multiplied by {value:g}", "give a positive number")
    variables = model.trainable_variables
    by_depth = _by_depth(model, variables, decay)
    depths = set(by_depth)
    if min(depths, default=1.0) < _SMALLEST:
        raise UserError(
            f"a decay of {decay:g} over {len(depths)} layers and blocks leaves the lowest {min(depths):.1g} of the "
            "learning rate, and so nothing",
            f"choose it nearer to 1, such as {1e-3 ** (1 / len(depths)):.3g}",
        )
    by_name = [1.0] * len(variables)
    for pattern, factor in rates.items():
        for i in matching(model, pattern, "learning rates"):
            by_name[i] = factor
    both = [depth * factor for depth, factor in zip(by_depth, by_name)]
    return () if all(f == 1 for f in both) else tuple(both)


def matching(model: keras.Model, pattern: str, what: str) -> list[int]:
    """Returns the indices of the trainable variables that match a pattern; `what` names its purpose in messages."""
    matched, owned = [], _owned(model)
    for i, (variable, chain) in enumerate(owned):
        paths = ["/".join(chain[: end + 1]) for end in range(len(chain))]
        names = {*chain, *paths, "/".join((*chain, variable.name)), variable.name, variable.path}
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            matched.append(i)
    if not matched:
        layers = list(dict.fromkeys(one.nearest for one in owned))
        more = f" and {len(layers) - _SHOWN} more" if len(layers) > _SHOWN else ""
        raise UserError(
            f"{what}: {pattern!r} matches nothing that is trained: there are {', '.join(layers[:_SHOWN])}{more}"
        )
    return matched


def describe(model: keras.Model, factors: Sequence[float]) -> str:
    """Returns the extremes of `factors`: `x0.1 (conv2d) to x10 (dense)`."""
    layers = [owned.nearest for owned in _owned(model)]
    low, high = min(factors), max(factors)
    return f"x{low:.3g} ({layers[factors.index(low)]}) to x{high:.3g} ({layers[factors.index(high)]})"


def _owned(model: keras.Model) -> list[_Owned]:
    """The trainable variables, in their order."""
    chains: dict[int, tuple[str, ...]] = {}

    def walk(layer: keras.Layer, chain: tuple[str, ...]) -> None:
        model_of_layers = isinstance(layer, keras.Model)
        for inner in layer.layers if model_of_layers else keras_internals.flat_layers(layer, False, False):
            for variable in inner.variables:
                chains[id(variable)] = (*chain, inner.name)
            walk(inner, (*chain, inner.name))

    walk(model, ())
    return [_Owned(variable, chains.get(id(variable), ())) for variable in model.trainable_variables]


def _by_depth(model: keras.Model, variables: list[keras.Variable], decay: float) -> list[float]:
    """The factor of each variable by its distance from the output."""
    if decay == 1:
        return [1.0] * len(variables)
    units: dict[str, set[int]] = {"": set()}
    """Variables by layer or block, from the input to the output; the first is the lowest."""

    def walk(part: keras.Model, path: str) -> None:
        for layer in part.layers:
            block = _BLOCK.match(layer.name)
            unit = f"{path}/{block[0] if block else layer.name}"
            if isinstance(layer, keras.Model):
                walk(layer, unit)
            elif layer.weights:
                lowest = "embed" in type(layer).__name__.lower()
                units.setdefault("" if lowest else unit, set()).update(id(v) for v in layer.weights)

    walk(model, "")
    placed = set().union(*units.values())
    units[""].update(id(v) for v in variables if id(v) not in placed)
    order = [ids for ids in units.values() if ids]
    depth = {i: len(order) - 1 - place for place, ids in enumerate(order) for i in ids}
    return [decay ** depth[id(v)] for v in variables]
