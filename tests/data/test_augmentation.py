"""Augmentation: against PIL and NumPy, and the same example wherever it is made."""

import keras
import numpy as np
import PIL.Image
import PIL.ImageEnhance
import PIL.ImageFilter
import PIL.ImageOps
import pytest
import tensorflow as tf
from support.covering import first
from support.refusals import refused

from tfdist.data.augmentation import mixup, ops

SEEDS = [tf.constant([3, i]) for i in range(40)]


def picture(height=24, width=20, channels=3, seed=0):
    """Smooth, so that neighbouring pixels are alike, and not symmetric."""
    rng = np.random.default_rng(seed)
    small = PIL.Image.fromarray(rng.integers(0, 256, (6, 5, 3), dtype=np.uint8))
    return np.asarray(small.resize((width, height), PIL.Image.BICUBIC))[..., :channels]


@pytest.mark.parametrize("text, message", [
    ("flop", r"unknown operation 'flop' in data.augment: did you mean 'flip'\? Known are flip, vertical_flip"),
    ("crop", r"data.augment: crop has 0 arguments: write crop\(padding\)"),
    ("flip(1)", "data.augment: flip has 1 arguments: write flip"),
    ("randaugment(2)", r"randaugment has 1 arguments: write randaugment\(layers, magnitude\)"),
    ("crop(2.5)", r"padding of crop\(padding\) must be an integer, got 2.5"),
    ("crop(1e400)", r"padding of crop\(padding\) must be an integer, got inf"),
    ("crop(0)", r"padding of crop\(padding\) must be from 1 to 512, got 0"),
    ("mixup('a')", r"alpha of mixup\(alpha\) must be a number, got 'a'"),
    ("color(0)", r"strength of color\(strength\) must be above 0 and at most 1, got 0"),
    ("randaugment(2, 15)", r"magnitude of randaugment\(layers, magnitude\) must be from 0 to 10, got 15"),
    ("mixup(0.2), mixup(0.3)", "gives mixup 2 times: give it once"),
    ("flip, resized_crop(0.1)", "resized_crop decides the size, so write it first"),
    ("normalize(0, 1)", "unknown operation 'normalize' in data.augment: known are flip"),
    ("flip crop", "data.augment='flip crop' is not understood: write it like flip, crop"),
    ("padding=3", "is not understood"), ("crop(x=3)", "is not understood"), ("flip)(", "is not understood"),
    ("*flip", "is not understood"), ("crop(a)", "is not understood"),
])  # fmt: skip
def test_what_is_not_understood(text, message):
    with refused(message):
        ops.parse(text)


def test_what_is_understood():
    recipe = ops.parse("flip, crop(4), color(0.4), randaugment(2, 9), erase(0.25), mixup(0.2), cutmix(1)")
    assert [str(s) for s in recipe.steps] == ["flip", "crop(4)", "color(0.4)", "randaugment(2, 9)", "erase(0.25)"]
    assert [str(s) for s in recipe.mixing] == ["mixup(0.2)", "cutmix(1)"]
    assert ops.parse("").steps == () and ops.parse("").mix is None
    assert ops.parse("resized_crop(0.08), flip").smallest == 0.08 and recipe.smallest is None


@pytest.mark.parametrize(
    "text, shape, dtype, classes, message",
    [
        ("flip", (64,), "uint8", 2, r"'flip' is for images \[height, width, 1 or 3\].* this data has uint8 \[64\]"),
        ("flip", (8, 8, 3), "int32", 2, r"this data has int32 \[8, 8, 3\]: leave it empty"),
        ("color(0.1)", (8, 8, 4), "uint8", 2, r"has uint8 \[8, 8, 4\]"),
        ("flip, mixup(0.2)", (8, 8, 3), "uint8", None, "mixes the targets of a classifier.*leave out mixup"),
    ],
)
def test_data_that_cannot_be_augmented(text, shape, dtype, classes, message):
    with refused(message):
        ops.parse(text).check(shape, dtype, classes)
    ops.parse("").check(shape, dtype, classes)


def test_normalised_images_have_no_colours():
    with refused(r"color\(0.4\) in data.augment is for images with values from 0 to 1, and these have -2.5"):
        ops.parse("flip, color(0.4)", 1.0).check((8, 8, 3), "float32", 2, -2.5)
    ops.parse("flip, crop(2), mixup(0.2), cutmix(1)", 1.0).check((8, 8, 3), "float32", 2, -2.5)


EVERYTHING = "resized_crop(0.3), flip, vertical_flip, crop(2), color(0.4), randaugment(2, 9), erase(0.9)"


@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype, maximum", first(2, [("uint8", 16), ("float32", 1), ("uint8", 255), ("float32", 255)]))
@pytest.mark.parametrize("channels", [1, 3])
def test_type_range_and_shape_stay_and_the_seed_alone_decides(dtype, maximum, channels):
    image = (picture(channels=channels) / 255 * maximum).round(0 if dtype == "uint8" else 6).astype(dtype)
    recipe = ops.parse(EVERYTHING, maximum=float(maximum))
    recipe.check(image.shape, dtype, None)
    made = tf.data.Dataset.from_tensor_slices(tf.stack(SEEDS)).map(
        lambda seed: recipe.example(tf.constant(image), seed), num_parallel_calls=4
    )
    results = np.stack(list(made.as_numpy_iterator()))
    assert results.dtype == dtype and results.shape == (len(SEEDS), *image.shape)
    assert results.min() >= 0 and results.max() <= maximum and results.max() > maximum / 2
    assert len({r.tobytes() for r in results}) == len(SEEDS)
    again = np.stack([recipe.example(tf.constant(image), seed) for seed in SEEDS[:3]])
    np.testing.assert_allclose(again, results[:3], atol=0 if dtype == "uint8" else 1e-4 * maximum)


def test_flips_and_crops_are_parts_of_the_image():
    image = picture()
    flips = [ops.flip(tf.constant(image), s).numpy() for s in SEEDS]
    mirrored = [(f == image[:, ::-1]).all() for f in flips]
    assert all(m or (f == image).all() for m, f in zip(mirrored, flips)) and 8 < sum(mirrored) < 32
    upside = [(ops.flip(tf.constant(image), s, axis=0).numpy() == image[::-1]).all() for s in SEEDS]
    assert upside == mirrored

    padded = np.pad(image, [(2, 2), (2, 2), (0, 0)])
    windows = {padded[i : i + 24, j : j + 20].tobytes(): (i, j) for i in range(5) for j in range(5)}
    crop = tf.function(lambda seed: ops.crop(tf.constant(image), seed, 2))
    places = {windows[crop(tf.constant([0, i])).numpy().tobytes()] for i in range(250)}
    assert places == set(windows.values())


def test_whole_numbers_are_rounded_and_cut():
    image = tf.zeros([1, 4, 1], tf.uint8)
    values = tf.constant([0.6, 1.4, -3, 300])
    np.testing.assert_array_equal(ops.stored(values, image, 255.0), [1, 1, 0, 255])
    np.testing.assert_array_equal(ops.stored(values, tf.zeros([1]), 255.0), np.float32([0.6, 1.4, 0, 255]))
    x, partner = tf.constant([[8], [8]], tf.uint8), tf.zeros([2, 1], tf.uint8)
    np.testing.assert_array_equal(mixup.blended(x, partner, tf.constant([0.2, 0.3])), [[2], [2]])


def test_operations_do_not_draw_the_same_numbers():
    image = picture()
    recipe = ops.parse("flip, vertical_flip")
    made = [recipe.example(tf.constant(image), seed).numpy().tobytes() for seed in SEEDS]
    counts = [made.count(image[::a, ::b].tobytes()) for a in (1, -1) for b in (1, -1)]
    assert sum(counts) == len(SEEDS) and min(counts) >= 3


@pytest.mark.parametrize("policy, box", [("stretch", (0, 0, 40, 32)), ("crop", (4, 0, 36, 32))])
def test_resize_is_pils(policy, box):
    image = picture(32, 40)
    size = (8, 8)
    expected = np.asarray(PIL.Image.fromarray(image).crop(box).resize(size[::-1], PIL.Image.BILINEAR))
    got = ops.resize(tf.constant(image), size, policy).numpy()
    assert got.dtype == np.uint8 and np.abs(got.astype(int) - expected).max() <= 1
    of_any_size = tf.TensorSpec([None, None, 3], tf.uint8)
    unknown = tf.data.Dataset.from_generator(lambda: [image], output_signature=of_any_size)
    unknown = unknown.map(lambda x: ops.resize(x, size, policy))
    assert unknown.element_spec.shape == tf.TensorShape([8, 8, 3])
    np.testing.assert_array_equal(next(iter(unknown)), got)


def test_resize_pads_and_keeps():
    image = picture(32, 40)
    got = ops.resize(tf.constant(image), (10, 10), "pad").numpy()
    expected = np.asarray(PIL.Image.fromarray(image).resize((10, 8), PIL.Image.BILINEAR))
    assert np.abs(got[1:9].astype(int) - expected).max() <= 1 and not got[0].any() and not got[9].any()
    assert ops.resize(image, (32, 40), "crop") is image
    thin = ops.resize(tf.constant(picture(200, 1)), (4, 4), "crop")
    assert thin.shape == (4, 4, 3)
    below = tf.fill((9, 11, 3), tf.constant(-3, tf.int16))  # a cast to integers rounds them up
    assert (ops.resize(below, (6, 6), "stretch").numpy() == -3).all()


def test_a_random_crop_has_its_area_and_proportions(monkeypatch):
    image, parts = tf.constant(picture(100, 120)), []
    with monkeypatch.context() as patched:
        patched.setattr(ops, "_resized", lambda part, size: parts.append(part) or part[:1, :1])
        for i in range(300):
            ops.resized_crop(image, tf.constant([1, i]), (1, 1), 0.08)
    height, width = np.array([part.shape[:2] for part in parts]).T
    area, ratio = height * width / 12000, width / height
    assert area.min() >= 0.078 and area.max() > 0.8 and 0.3 < area.mean() < 0.6
    assert ratio.min() >= 0.7 and ratio.max() <= 1.4
    expected = ops.resize(parts[5], (16, 16), "stretch")
    got = ops.resized_crop(image, tf.constant([1, 5]), (16, 16), 0.08)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name, place", [("Brightness", 0), ("Contrast", 1), ("Color", 2)])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.7])
def test_color_is_pils(name, place, factor):
    image = picture()
    factors = [1.0, 1.0, 1.0]
    factors[place] = factor
    got = ops.jitter(tf.constant(image), tf.constant(factors), 0.0, 255.0).numpy()
    expected = np.asarray(getattr(PIL.ImageEnhance, name)(PIL.Image.fromarray(image)).enhance(factor))
    assert np.abs(got.astype(int) - expected).max() <= 2


def test_hue_keeps_grey_and_turns_back():
    image = tf.constant(picture() / 255 * 100 + 70, tf.float32)
    turned = ops.jitter(image, tf.ones(3), 0.5, 255.0)
    assert np.abs(turned - image).max() > 5
    np.testing.assert_allclose(turned @ ops.GRAY[:, None], image @ ops.GRAY[:, None], atol=1e-2)
    np.testing.assert_allclose(ops.jitter(turned, tf.ones(3), -0.5, 255.0), image, atol=1e-2)
    third = ops.jitter(tf.constant([[[200.0, 100, 100]]]), tf.ones(3), 2 * np.pi / 3, 255.0).numpy()[0, 0]
    assert sorted(third)[-1] > 1.2 * sorted(third)[0] and third.argmax() != 0


def test_erase_leaves_the_rest():
    image = np.full((30, 40, 3), 77, np.uint8)
    shares, ratios = [], []
    erase = tf.function(lambda seed: ops.erase(tf.constant(image), seed, 0.5))
    for i in range(200):
        gone = (erase(tf.constant([5, i])).numpy() != 77).any(-1)
        if gone.any():
            rows, columns = np.flatnonzero(gone.any(1)), np.flatnonzero(gone.any(0))
            box = (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
            assert gone.sum() >= 0.97 * box - 2, "a rectangle"
            shares.append(box / 1200)
            ratios.append((rows[-1] - rows[0] + 1) / (columns[-1] - columns[0] + 1))
    assert 70 < len(shares) < 130
    assert min(shares) > 0.01 and max(shares) < 0.36 and np.mean(shares) == pytest.approx(0.17, abs=0.03)
    assert min(ratios) < 0.5 and max(ratios) > 2


OPERATIONS = {
    "identity": lambda image: image,
    "autocontrast": PIL.ImageOps.autocontrast,
    "equalize": PIL.ImageOps.equalize,
    "solarize": lambda image: PIL.ImageOps.solarize(image, 128),
    "posterize": lambda image: PIL.ImageOps.posterize(image, 6),
    "brightness": lambda image: PIL.ImageEnhance.Brightness(image).enhance(1.45),
    "contrast": lambda image: PIL.ImageEnhance.Contrast(image).enhance(1.45),
    "saturation": lambda image: PIL.ImageEnhance.Color(image).enhance(1.45),
    "sharpness": lambda image: PIL.ImageEnhance.Sharpness(image).enhance(1.45),
    "shear_x": lambda image: _affine(image, 1, 0.15, 0, 0, 1, 0),
    "shear_y": lambda image: _affine(image, 1, 0, 0, 0.15, 1, 0),
    "translate_x": lambda image: _affine(image, 1, 0, 0.225 * 20, 0, 1, 0),
    "translate_y": lambda image: _affine(image, 1, 0, 0, 0, 1, 0.225 * 24),
    "rotate": lambda image: image.rotate(15),
}


def _affine(image, a, b, c, d, e, f):
    """Around the middle of the image; PIL's own origin is its corner."""
    x, y = image.width / 2, image.height / 2
    data = (a, b, c + x - a * x - b * y, d, e, f + y - d * x - e * y)
    return image.transform(image.size, PIL.Image.Transform.AFFINE, data)


@pytest.mark.parametrize("name", ops.OPERATIONS)
def test_randaugments_operations_are_pils(name):
    image = picture(seed=4) // 2 + 40
    number = tf.constant(ops.OPERATIONS.index(name))
    got = ops.apply(tf.constant(image), number, tf.constant(0.5), 0.5, 255.0).numpy().astype(int)
    expected = np.asarray(OPERATIONS[name](PIL.Image.fromarray(image))).astype(int)
    wrong = np.abs(got - expected).max(-1) > 2
    # A pixel on the border between two may come from either.
    assert wrong.mean() < (0.06 if name[:5] in ("shear", "trans", "rotat") else 1e-9)
    assert name == "identity" or (expected != image).any()


def test_the_smallest_images_can_be_changed():
    image = tf.constant(picture()[:2, :1])
    for number in range(len(ops.OPERATIONS)):
        assert ops.apply(image, tf.constant(number), tf.constant(0.5), 0.5, 255.0).shape == image.shape


@pytest.mark.whole
def test_randaugment_draws_every_operation():
    image = tf.constant(picture(seed=4) // 2 + 40)
    seeds = tf.data.Dataset.range(400).map(lambda i: tf.stack([1, tf.cast(i, tf.int32)]))
    made = [r.tobytes() for r in seeds.map(lambda s: ops.randaugment(image, s, 1, 5.0)).as_numpy_iterator()]
    # Ten operations have two signs; posterize, solarize, equalize, autocontrast and identity have one result.
    assert len(set(made)) == 9 * 2 + 5
    assert made.count(image.numpy().tobytes()) / 400 == pytest.approx(1 / 14, abs=0.04)


def batch(n=64, weights=False):
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, (n, 12, 10, 3), dtype=np.uint8)
    y = np.eye(5, dtype=np.float32)[rng.integers(0, 5, n)]
    w = rng.random(n).astype(np.float32)
    w[3] = w[4] = 0
    columns = (x, y, w) if weights else (x, y)
    partners = tuple(np.roll(c, -1, 0) for c in columns)
    seeds = np.stack([np.full(n, 9), np.arange(n)], 1).astype(np.int32)
    return tuple(map(tf.constant, columns)), tuple(map(tf.constant, partners)), tf.constant(seeds)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("text", ["mixup(0.4)", "cutmix(1)", "mixup(0.4), cutmix(1)"])
def test_a_mixed_batch_has_the_loss_of_the_formula(text, weights):
    """The share is found again in the pixels, and the loss of the mixed example compared with both losses."""
    columns, partners, seeds = batch(weights=weights)
    mixed = ops.parse(text).mix(columns, partners, seeds)
    assert mixed[0].dtype == tf.uint8 and mixed[1].dtype == tf.float32 and len(mixed) == len(columns)
    x, other, got = (c[0].numpy().astype(float) for c in (columns, partners, mixed))
    difference = (x - other).reshape(len(x), -1)
    share = ((got - other).reshape(len(x), -1) * difference).sum(1) / (difference**2).sum(1)
    pasted = ((got == x) | (got == other)).all((1, 2, 3))
    stayed = (got == x).all(-1).mean((1, 2))
    share = np.where(pasted, stayed, share)

    logits = np.random.default_rng(2).normal(size=(len(x), 5)).astype(np.float32)
    loss = lambda y: keras.losses.categorical_crossentropy(y, logits, from_logits=True).numpy()
    w = [c[2].numpy() if weights else 1.0 for c in (columns, partners, mixed)]
    expected = share * w[0] * loss(columns[1]) + (1 - share) * w[1] * loss(partners[1])
    np.testing.assert_allclose(w[2] * loss(mixed[1]), expected, atol=0.02)
    exact = pasted & (share > 0.02) & (share < 0.98)  # a share of MixUp next to 0 or 1 is lost in the rounding
    assert (exact.any() and not exact.all()) if "," in text else exact.any() == ("cutmix" in text)
    np.testing.assert_allclose((w[2] * loss(mixed[1]))[exact], expected[exact], atol=1e-5)
    if not weights:
        np.testing.assert_allclose(mixed[1].numpy().sum(1), 1, atol=1e-6)
    elif "mixup" not in text:
        np.testing.assert_allclose(mixed[2], share * w[0] + (1 - share) * w[1], atol=1e-6)


def test_a_row_does_not_depend_on_the_batch_it_is_in():
    columns, partners, seeds = batch()
    function = ops.parse("mixup(0.2), cutmix(1)").mix
    whole = function(columns, partners, seeds)
    part = function(*[tuple(c[20:23] for c in cs) for cs in (columns, partners)], seeds[20:23])
    for a, b in zip(whole, part):
        np.testing.assert_array_equal(a[20:23], b)
    inside = tf.data.Dataset.from_tensors((columns, partners, seeds)).map(function)
    for a, b in zip(whole, next(iter(inside))):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_shares_follow_the_beta_distribution(alpha):
    seeds = tf.stack([tf.zeros(20_000, tf.int32), tf.range(20_000)], 1)
    drawn = mixup.draws(seeds, 3).numpy()
    assert np.abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 0.03
    assert np.abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]) < 0.03
    shares = np.sort(mixup._interpolated(mixup._quantiles(alpha), tf.constant(drawn[:, 0])))
    expected = np.sort(np.random.default_rng(0).beta(alpha, alpha, 20_000))
    assert np.abs(shares - expected).max() < 0.03
    assert shares.min() >= 0 and shares.max() <= 1
