"""Random changes of images, a function of the image and a seed (int32 [2]) alone: the same on any number of workers.

Images are [h, w, c], uint8 or float, with values from 0 to `maximum`; they keep type and range, uint8 ones rounded.
"""

import dataclasses
import math

import numpy as np
import tensorflow as tf

from tfdist.config import field_syntax
from tfdist.data.augmentation.mixup import mixer
from tfdist.errors import UserError

GRAY = np.array([0.299, 0.587, 0.114], np.float32)  # weights of luma (ITU-R BT.601), as in PIL

_YIQ = np.array([[0.299, 0.587, 0.114], [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]]).T


def uniform(seed: tf.Tensor, count: int, low: float = 0.0, high: float = 1.0) -> tf.Tensor:
    """Returns `count` numbers in [low, high), float32, that `seed` (int32 [2]) alone decides, on any device."""
    return tf.random.stateless_uniform([count], seed, low, high, alg="philox")


def seed_of(seed: tf.Tensor, place: int) -> tf.Tensor:
    """Returns a seed for the operation at `place`, so that two operations do not draw the same numbers."""
    # Spread over all bits (golden ratio), since the seeds of two examples may be neighbors.
    spread = np.array([0, (place + 1) * 0x9E3779B9 & 0xFFFFFFFF], np.uint32).view(np.int32)
    return tf.bitwise.bitwise_xor(seed, spread)


def stored(values: tf.Tensor, image: tf.Tensor, maximum: float) -> tf.Tensor:
    """Returns `values`, cut to [0, maximum], in the type of `image`: rounded where that is integers."""
    values = tf.clip_by_value(values, 0.0, maximum)
    return tf.cast(values if image.dtype.is_floating else tf.round(values), image.dtype)


def jitter(image: tf.Tensor, factors: tf.Tensor, turn: tf.Tensor | float, maximum: float) -> tf.Tensor:
    """Changes brightness, contrast (around the image's mean) and saturation by `factors` [3]; turns the hue by radians.

    One product per pixel: all four are linear, and hue is a rotation of the plane of I and Q in YIQ, which keeps luma.
    Nothing is cut in between. A gray image has neither saturation nor hue.
    """
    brightness, contrast, saturation = tf.unstack(factors)
    factor = brightness * contrast
    values = tf.cast(image, tf.float32)
    means = tf.reduce_mean(values, [0, 1])
    gray = means[0] if image.shape[-1] == 1 else tf.tensordot(means, GRAY, 1)
    offset = (1.0 - contrast) * brightness * gray
    if image.shape[-1] == 1:
        return stored(values * factor + offset, image, maximum)
    parts = tf.stack([factor, factor * saturation * tf.cos(turn), factor * saturation * tf.sin(turn)])
    pixels = tf.reshape(values, [-1, 3]) @ tf.reshape(parts[None] @ _HUE, [3, 3])
    return tf.reshape(stored(pixels + offset, image, maximum), tf.shape(image))


def _hue() -> np.ndarray:
    """Returns [3, 9]: the parts of a change of hue that stay, that go with its cosine and that go with its sine."""
    back = np.linalg.inv(_YIQ)
    stay, cosine, sine = np.zeros((3, 3, 3))
    stay[0, 0] = cosine[1, 1] = cosine[2, 2] = sine[1, 2] = 1
    sine[2, 1] = -1
    return np.stack([(_YIQ @ part @ back).reshape(9) for part in (stay, cosine, sine)]).astype(np.float32)


_HUE = _hue()
OPERATIONS = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "contrast", "saturation",
    "autocontrast", "equalize", "solarize", "posterize", "sharpness",
)  # fmt: skip


def randaugment(image: tf.Tensor, seed: tf.Tensor, layers: int, magnitude: float, maximum: float = 255.0) -> tf.Tensor:
    """Applies `layers` of the paper's 14 operations, each drawn anew and as likely as any other.

    `magnitude`: 0 to 10. 10 is a rotation by 30 degrees, a shear of 0.3, a shift by 0.45 of the side, a factor of 0.1
    or 1.9 for brightness, contrast, saturation and sharpness, 4 bits left, or all values inverted. Signs are random.
    (torchvision counts the same strength up to 30.)
    """
    level = magnitude / 10
    for layer in range(layers):
        which, sign = tf.unstack(uniform(seed_of(seed, layer), 2))
        number = tf.minimum(tf.cast(which * len(OPERATIONS), tf.int32), len(OPERATIONS) - 1)
        image = apply(image, number, tf.where(sign < 0.5, -level, level), level, maximum)
    return image


def apply(image: tf.Tensor, number: tf.Tensor, signed: tf.Tensor, level: float, maximum: float) -> tf.Tensor:
    """Applies operation `number` of `OPERATIONS` with strength `level` in [0, 1], `signed` being plus or minus that."""
    factors = tf.where(tf.range(6, 9) == number, 1.0 + 0.9 * signed, 1.0)
    # Operations that share their code share a branch: a branch costs time to build and optimize, taken or not.
    branches = [
        lambda: image,
        lambda: _moved(image, number, signed),
        lambda: jitter(image, factors, 0.0, maximum),
        lambda: autocontrast(image, maximum),
        lambda: equalize(image, maximum),
        lambda: solarize(image, maximum * (1 - level), maximum),
        lambda: posterize(image, 8 - round(4 * level), maximum),
        lambda: sharpen(image, 1.0 + 0.9 * signed, maximum),
    ]
    branch = tf.gather([0, 1, 1, 1, 1, 1, 2, 2, 2, 3, 4, 5, 6, 7], number)
    return tf.ensure_shape(tf.switch_case(branch, branches), image.shape)


def _moved(image: tf.Tensor, number: tf.Tensor, signed: tf.Tensor) -> tf.Tensor:
    """Shears, shifts or rotates around the middle; what comes from outside is 0."""
    amounts = tf.where(tf.range(1, 6) == number, signed, 0.0) * [0.3, 0.3, 0.45, 0.45, math.pi / 6]
    shear_x, shear_y, shift_x, shift_y, angle = tf.unstack(amounts)
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.float32))
    cosine, sine = tf.cos(angle), tf.sin(angle)
    # Where the pixel (x, y) of the result is taken from, relative to the middle (only one amount is not 0).
    a, b, c, d = cosine, shear_x - sine, shear_y + sine, cosine
    middle_x, middle_y = (width - 1) / 2, (height - 1) / 2
    from_x = middle_x - a * middle_x - b * middle_y + shift_x * width
    from_y = middle_y - c * middle_x - d * middle_y + shift_y * height
    transform = tf.stack([a, b, from_x, c, d, from_y, 0.0, 0.0])
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None],
        transforms=transform[None],
        output_shape=tf.shape(image)[:2],
        fill_value=0.0,
        interpolation="NEAREST",
    )[0]


def autocontrast(image: tf.Tensor, maximum: float) -> tf.Tensor:
    """Stretches each channel to the whole range, as `PIL.ImageOps.autocontrast` does, but rounded."""
    values = tf.cast(image, tf.float32)
    low, high = tf.reduce_min(values, [0, 1]), tf.reduce_max(values, [0, 1])
    scale = tf.where(high > low, maximum / tf.maximum(high - low, 1e-6), 1.0)
    return stored(values * scale - tf.where(high > low, low * scale, 0.0), image, maximum)


def equalize(image: tf.Tensor, maximum: float) -> tf.Tensor:
    """Gives each channel a flat histogram of 256 levels, as `PIL.ImageOps.equalize` does."""
    channels = image.shape[-1]
    levels = tf.cast(tf.cast(image, tf.float32) * (255 / maximum), tf.int32)
    columns = tf.transpose(tf.reshape(levels, [-1, channels]))
    counts = tf.math.bincount(columns, minlength=256, maxlength=256, axis=-1)
    # As in PIL, the highest level that occurs has no part in the step.
    last = tf.gather(counts, tf.reduce_max(columns, 1), axis=1, batch_dims=1)
    step = (tf.shape(columns)[1] - last)[:, None] // 255
    below = tf.cumsum(counts, axis=1, exclusive=True)
    table = tf.minimum((step // 2 + below) // tf.maximum(step, 1), 255)
    table = tf.where(step == 0, tf.range(256), table)
    equalized = tf.reshape(tf.gather(table, columns, axis=1, batch_dims=1), [channels, -1])
    equalized = tf.reshape(tf.transpose(equalized), tf.shape(image))
    return stored(tf.cast(equalized, tf.float32) * (maximum / 255), image, maximum)


def solarize(image: tf.Tensor, threshold: float, maximum: float) -> tf.Tensor:
    """Inverts the values from `threshold` on."""
    values = tf.cast(image, tf.float32)
    return stored(tf.where(values < threshold, values, maximum - values), image, maximum)


def posterize(image: tf.Tensor, bits: int, maximum: float) -> tf.Tensor:
    """Keeps the upper `bits` of 8."""
    size = maximum / 255 * 2 ** (8 - bits)
    return stored(tf.floor(tf.cast(image, tf.float32) / size) * size, image, maximum)


def sharpen(image: tf.Tensor, factor: tf.Tensor | float, maximum: float) -> tf.Tensor:
    """Sharpens all but the border by a factor: 0 gives PIL's smoothed image, 1 the image, more the opposite."""
    if any(side is not None and side < 3 for side in image.shape[:2]):
        return image  # all of it is border
    values = tf.cast(image, tf.float32)
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32)[..., None, None] / 13
    smooth = tf.nn.depthwise_conv2d(values[None], np.tile(kernel, [1, 1, image.shape[-1], 1]), [1] * 4, "VALID")[0]
    inner = values[1:-1, 1:-1]
    change = tf.pad((factor - 1) * (inner - smooth), [[1, 1], [1, 1], [0, 0]])
    return stored(values + change, image, maximum)


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """The changes that `data.augment` requests."""

    steps: tuple[field_syntax.AugmentStep, ...]  # operations on one image, in order
    mixing: tuple[field_syntax.AugmentStep, ...]  # MixUp, CutMix or both, on a batch
    maximum: float = 255.0  # largest value of an image

    @property
    def smallest(self) -> float | None:
        """Returns what `resized_crop` was given, or None; then training images are needed whole."""
        return self.steps[0].arguments[0] if self.steps and self.steps[0].name == "resized_crop" else None

    mix = property(lambda self: mixer({s.name: s.arguments[0] for s in self.mixing}) if self.mixing else None)
    """Mixes a batch with its partners (see `mixup.mixer`), or None when nothing is mixed."""

    def check(self, shape: tuple[int, ...], dtype: str, classes: int | None, lowest: float = 0.0) -> None:
        """Raises UserError when inputs of this shape, type and lowest value, or their targets, cannot be changed so."""
        named = ", ".join(str(step) for step in (*self.steps, *self.mixing))
        if not named:
            return
        if len(shape) != 3 or shape[-1] not in (1, 3) or dtype not in ("uint8", "float16", "float32", "float64"):
            raise UserError(
                f"data.augment={named!r} is for images [height, width, 1 or 3] of uint8 or floats, "
                f"and this data has {dtype} {list(shape)}",
                "leave it empty",
            )
        tinted = [str(step) for step in self.steps if step.name in ("color", "randaugment", "erase")]
        if lowest < 0 and tinted:
            raise UserError(
                f"{tinted[0]} in data.augment is for images with values from 0 to {self.maximum:g}, "
                f"and these have {lowest:g}",
                "leave it out, or give images that are not normalized",
            )
        if self.mixing and classes is None:
            what = f"data.augment={named!r} mixes the targets of a classifier, and these are not classes"
            raise UserError(what, f"leave out {' and '.join(s.name for s in self.mixing)}")

    @tf.autograph.experimental.do_not_convert
    def example(self, image: tf.Tensor, seed: tf.Tensor, size: tuple[int, int] | None = None) -> tf.Tensor:
        """Returns one augmented image, of `size` where that is given and `resized_crop` makes it, else of its own."""
        for place, step in enumerate(self.steps):
            own = seed_of(seed, place)
            match step.name:
                case "resized_crop":
                    image = resized_crop(image, own, size or tuple(image.shape[:2]), *step.arguments)
                case "flip" | "vertical_flip":
                    image = flip(image, own, axis=1 if step.name == "flip" else 0)
                case "crop":
                    image = crop(image, own, int(step.arguments[0]))
                case "color":
                    image = color(image, own, step.arguments[0], self.maximum)
                case "randaugment":
                    layers, magnitude = step.arguments
                    image = randaugment(image, own, int(layers), magnitude, self.maximum)
                case "erase":
                    image = erase(image, own, step.arguments[0], self.maximum)
        return image


def parse(text: str, maximum: float = 255.0) -> Recipe:
    """Returns the recipe that `text` describes, such as `flip, crop(4), mixup(0.2)`; empty for none."""
    steps = field_syntax.augment_steps(text)
    return Recipe(
        tuple(s for s in steps if s.name not in field_syntax.MIXING),
        tuple(s for s in steps if s.name in field_syntax.MIXING),
        maximum,
    )


def resize(image: tf.Tensor, size: tuple[int, int], policy: str = "crop") -> tf.Tensor:
    """Makes an image [size[0], size[1], c], bilinear, smoothed where it shrinks to half or less; nothing is random.

    `policy`: `crop` keeps the middle in the new proportions, `stretch` all of it in others, `pad` adds zeros.
    """
    if tuple(image.shape[:2]) == tuple(size):
        return image
    height, width = size
    channels = image.shape[-1]
    shape = tf.cast(tf.shape(image)[:2], tf.float32)
    if policy == "crop":
        scale = tf.reduce_min(shape / np.array(size, np.float32))
        kept = tf.maximum(tf.cast(tf.round(scale * np.array(size, np.float32)), tf.int32), 1)
        kept = tf.minimum(kept, tf.shape(image)[:2])
        begin = (tf.shape(image)[:2] - kept) // 2
        image = tf.slice(image, tf.concat([begin, [0]], 0), tf.concat([kept, [-1]], 0))
    elif policy == "pad":
        scale = tf.reduce_min(np.array(size, np.float32) / shape)
        inner = tf.clip_by_value(tf.cast(tf.round(scale * shape), tf.int32), 1, size)
        before = (size - inner) // 2
        after = size - inner - before
        image = tf.pad(_resized(image, inner), [[before[0], after[0]], [before[1], after[1]], [0, 0]])
        return tf.ensure_shape(image, [height, width, channels])
    return tf.ensure_shape(_resized(image, size), [height, width, channels])


def _resized(image: tf.Tensor, size: tuple[int, int] | tf.Tensor) -> tf.Tensor:
    # Below one half, plain bilinear would leave pixels out; above it, smoothing takes twice as long as decoding.
    plain, smoothed = (lambda a=antialias: tf.image.resize(image, size, antialias=a) for antialias in (False, True))
    if isinstance(size, tuple) and image.shape[:2].is_fully_defined():  # a branch in the graph takes a tenth of it all
        values = smoothed() if any(a >= 2 * b for a, b in zip(image.shape[:2], size)) else plain()
    else:
        values = tf.cond(tf.reduce_any(tf.shape(image)[:2] >= 2 * tf.convert_to_tensor(size)), smoothed, plain)
    # tf.round is ten times as slow; a cast to unsigned integers rounds values of at least 0 down by itself.
    rounded = values + 0.5 if image.dtype.is_unsigned else tf.floor(values + 0.5)
    return tf.cast(values if image.dtype.is_floating else rounded, image.dtype)


def flip(image: tf.Tensor, seed: tf.Tensor, axis: int = 1) -> tf.Tensor:
    """Exchanges left and right, or top and bottom with `axis` 0, for half of the seeds."""
    return tf.cond(uniform(seed, 1)[0] < 0.5, lambda: tf.reverse(image, [axis]), lambda: image)


def crop(image: tf.Tensor, seed: tf.Tensor, padding: int) -> tf.Tensor:
    """Cuts out a part as large as the image, at a random place of it with `padding` pixels of 0 around."""
    padded = tf.pad(image, [[padding, padding], [padding, padding], [0, 0]])
    places = tf.cast(uniform(seed, 2, 0.0, 2.0 * padding + 1), tf.int32)
    # The product may round up to the bound itself.
    begin = tf.concat([tf.minimum(places, 2 * padding), [0]], 0)
    return tf.ensure_shape(tf.slice(padded, begin, tf.shape(image)), image.shape)


def resized_crop(image: tf.Tensor, seed: tf.Tensor, size: tuple[int, int], smallest: float) -> tf.Tensor:
    """Makes a random part, of `smallest` to 1 of the area and 3:4 to 4:3, [size[0], size[1], c].

    The crop of Inception (Szegedy et al., "Going Deeper with Convolutions", 2015).
    """
    begin, kept, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.shape(image),
        tf.zeros([1, 0, 4]),
        seed,
        min_object_covered=0.0,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(smallest, 1.0),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    return tf.ensure_shape(_resized(tf.slice(image, begin, kept), size), [*size, image.shape[-1]])


def color(image: tf.Tensor, seed: tf.Tensor, strength: float, maximum: float = 255.0) -> tf.Tensor:
    """Changes the colors of an image at random, see `jitter`, in the proportions of SimCLR (Chen et al., 2020).

    Brightness, contrast and saturation get factors of 1 - strength to 1 + strength, the hue up to strength / 4 turns.
    """
    drawn = uniform(seed, 4, -strength, strength)
    return jitter(image, drawn[:3] + 1.0, drawn[3] * (math.pi / 2), maximum)


def erase(image: tf.Tensor, seed: tf.Tensor, probability: float, maximum: float = 255.0) -> tf.Tensor:
    """Puts random values into a random rectangle, of 2 % to a third of the area, for this share of the seeds.

    "Random Erasing Data Augmentation", Zhong et al., 2017. A rectangle longer than the image is cut to it.
    """
    happens, area, ratio, top, left = tf.unstack(uniform(seed, 5))
    shape = tf.shape(image)
    sides = tf.cast(shape[:2], tf.float32)
    share = 0.02 + area * (1 / 3 - 0.02)
    # As likely wide as high: proportions of 0.3 to 1 / 0.3, evenly in their logarithm.
    stretch = tf.exp((2 * ratio - 1) * math.log(1 / 0.3) / 2)
    length = tf.sqrt(share * tf.reduce_prod(sides))
    rectangle = tf.round(length * tf.stack([stretch, 1 / stretch]))
    extent = tf.clip_by_value(rectangle, 1.0, sides)
    begin = tf.floor(tf.stack([top, left]) * (sides - extent + 1))

    def erased():
        rows, columns = tf.range(sides[0]), tf.range(sides[1])
        inside = ((rows >= begin[0]) & (rows < begin[0] + extent[0]))[:, None] & (
            (columns >= begin[1]) & (columns < begin[1] + extent[1])
        )
        noise = tf.random.stateless_uniform(shape, seed_of(seed, 0), 0.0, maximum, alg="philox")
        return tf.where(inside[..., None], stored(noise, image, maximum), image)

    return tf.ensure_shape(tf.cond(happens < probability, erased, lambda: image), image.shape)
