"""Layers of Keras as text, by what they take and give."""

FEATURES = """
L.Dense(5, activation="tanh")
L.Dense(4, kernel_regularizer="l2", bias_regularizer=keras.regularizers.L2(0.01))
L.Dense(5, kernel_constraint=keras.constraints.MaxNorm(0.8), bias_constraint="non_neg", activation="softplus")
L.Dense(5, kernel_constraint="unit_norm", kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.01))
L.Dense(5, activity_regularizer=keras.regularizers.L1L2(0.01, 0.02), kernel_initializer="he_normal")
L.Dense(5, kernel_initializer=keras.initializers.Orthogonal(seed=3), use_bias=False)
L.Dense(6, activation="gelu", trainable=False)
L.EinsumDense("ab,bc->ac", output_shape=4, bias_axes="c")
L.Activation("swish")
L.ELU()
L.LeakyReLU(0.2)
L.PReLU()
L.ReLU(max_value=2.0)
L.Softmax()
L.Identity()
L.Lambda(lambda t: 2.0 * t)
L.BatchNormalization(momentum=0.7, synchronized=True)
L.BatchNormalization(momentum=0.7, synchronized=True, renorm=True)
L.BatchNormalization(momentum=0.7)
L.BatchNormalization(trainable=False)
L.LayerNormalization()
L.RMSNormalization()
L.UnitNormalization()
L.SpectralNormalization(L.Dense(5))
L.ActivityRegularization(l1=0.01, l2=0.01)
L.Dropout(0.0)
L.Dropout(0.4, seed=5)
L.AlphaDropout(0.3, seed=5)
L.GaussianDropout(0.3, seed=5)
L.GaussianNoise(0.2, seed=5)
L.Normalization(mean=0.3, variance=2.0)
L.Rescaling(0.5, offset=0.1)
keras.Sequential([L.Discretization(bin_boundaries=[-1.0, 0.0, 1.0]), L.Rescaling(0.5)])
keras.Sequential([L.Dense(5, activation="relu"), L.Dense(3)])
ScalesAndCounts()
AddsPenalty()
KeepsMean()
RunningMaximum()
OwnMetric()
"""

SEQUENCES = """
L.Conv1D(4, 2, padding="causal", activation="tanh")
L.Convolution1D(4, 3, padding="same", dilation_rate=2)
L.Conv1DTranspose(3, 2, padding="same")
L.DepthwiseConv1D(2, padding="same")
L.SeparableConv1D(4, 2, padding="same")
L.LSTM(4, return_sequences=True)
L.GRU(4, return_sequences=True, reset_after=False, unroll=True)
L.SimpleRNN(4, return_sequences=True, go_backwards=True)
L.RNN(L.StackedRNNCells([L.LSTMCell(3), L.GRUCell(4)]), return_sequences=True)
L.RNN(L.SimpleRNNCell(4, recurrent_regularizer="l2"), return_sequences=True)
L.Bidirectional(L.LSTM(2, return_sequences=True), merge_mode="sum")
L.TimeDistributed(L.Dense(4, activation="tanh"))
L.Masking(0.0)
L.LayerNormalization(axis=-1)
L.GroupNormalization(1)
L.SpatialDropout1D(0.3, seed=5)
L.BatchNormalization(momentum=0.7, synchronized=True)
L.UpSampling1D(2)
L.ZeroPadding1D(1)
L.Cropping1D((0, 1))
L.EinsumDense("abc,cd->abd", output_shape=(None, 4), activation="tanh")
L.Dense(4, activation="tanh")
L.Reshape((-1, 3))
L.MaxPooling1D(2, padding="same")
L.AveragePooling1D(2, padding="same")
L.AdaptiveAveragePooling1D(3)
L.AdaptiveMaxPooling1D(2)
"""

IMAGES = """
L.Conv2D(3, 3, padding="same", activation="tanh")
L.Convolution2D(4, 2, strides=2, groups=1, kernel_regularizer="l2")
L.Conv2DTranspose(3, 2, strides=2)
L.DepthwiseConv2D(2, depth_multiplier=2)
L.SeparableConv2D(4, 2, activation="relu")
L.SpectralNormalization(L.Conv2D(3, 2))
L.BatchNormalization(momentum=0.8, synchronized=True)
L.BatchNormalization(momentum=0.8)
L.GroupNormalization(1)
L.LayerNormalization([1, 2, 3])
L.SpatialDropout2D(0.3, seed=5)
L.MaxPooling2D(2, padding="same")
L.AveragePooling2D(2, padding="same")
L.AdaptiveAveragePooling2D(3)
L.AdaptiveMaxPooling2D((2, 3))
L.UpSampling2D(2)
L.ZeroPadding2D(1)
L.Cropping2D(1)
L.Resizing(6, 5)
L.CenterCrop(5, 5)
L.Rescaling(0.1)
L.Permute((2, 1, 3))
L.AutoContrast(value_range=(-3, 3))
L.Solarization(value_range=(-3, 3), seed=5)
"""

AUGMENTED = """
L.RandomFlip(seed=5)
L.RandomCrop(5, 5, seed=5)
L.RandomContrast(0.3, seed=5)
L.RandomTranslation(0.2, 0.2, seed=5)
L.RandomRotation(0.2, seed=5)
L.RandomZoom(0.2, seed=5)
L.RandomErasing(seed=5)
L.RandomBrightness(0.2, value_range=(-3, 3), seed=5)
L.RandomShear(0.2, 0.2, seed=5)
L.RandomPerspective(seed=5)
L.RandomElasticTransform(seed=5)
L.RandomGaussianBlur(kernel_size=3, value_range=(-3, 3), seed=5)
L.RandomInvert(value_range=(-3, 3), seed=5)
L.RandomPosterization(4, value_range=(-3, 3), seed=5)
L.RandomSharpness(0.5, value_range=(-3, 3), seed=5)
L.Equalization(value_range=(-3, 3))
L.ContrastLimitedAdaptiveHistogramEqualization(value_range=(-3, 3))
L.RandomGrayscale(seed=5)
L.RandomHue(0.2, value_range=(-3, 3), seed=5)
L.RandomSaturation(0.5, value_range=(-3, 3), seed=5)
L.RandomColorDegeneration(0.5, value_range=(-3, 3), seed=5)
L.RandomColorJitter(value_range=(-3, 3), brightness_factor=0.2, seed=5)
L.RandAugment(value_range=(-3, 3), seed=5)
L.AugMix(value_range=(-3, 3), seed=5)
L.Pipeline([L.Rescaling(0.5), L.RandomFlip(seed=5)])
L.Conv2D(3, 2)
"""

VOLUMES = """
L.Conv3D(3, 2, padding="same", activation="tanh")
L.Conv3DTranspose(2, 2)
L.MaxPooling3D(2, padding="same")
L.AveragePooling3D(2, padding="same")
L.AdaptiveAveragePooling3D(2)
L.AdaptiveMaxPooling3D(2)
L.UpSampling3D(2)
L.ZeroPadding3D(1)
L.Cropping3D(1)
L.SpatialDropout3D(0.3, seed=5)
L.BatchNormalization(synchronized=True)
"""

FRAMES = """
L.ConvLSTM2D(2, 2)
L.ConvLSTM2D(3, 3, padding="same", recurrent_dropout=0.0)
"""

FLAT = {
    "features": ["L.Identity()"],
    "sequence": """
L.Flatten()
L.GlobalAveragePooling1D()
L.GlobalMaxPooling1D()
L.LSTM(4)
L.GRU(4, recurrent_dropout=0.0)
L.SimpleRNN(4)
L.Bidirectional(L.GRU(3))
""".strip().split("\n"),
    "image": ["L.Flatten()", "L.GlobalAveragePooling2D()", "L.GlobalMaxPooling2D()"],
    "volume": ["L.GlobalAveragePooling3D()", "L.GlobalMaxPooling3D()", "L.Flatten()"],
    "frames": ["L.Flatten()"],
}
"""What makes features of other kinds."""

MERGES = {
    "features": """
L.Add()([h, L.Dense(h.shape[-1])(h)])
L.Average()([h, L.Dense(h.shape[-1])(h)])
L.Concatenate()([h, L.Dense(2, activation="relu")(h)])
L.Dot(axes=1)([h, L.Dense(h.shape[-1])(h)])
L.Maximum()([h, L.Dense(h.shape[-1])(h)])
L.Minimum()([h, L.Dense(h.shape[-1])(h)])
L.Multiply()([h, L.Dense(h.shape[-1], activation="sigmoid")(h)])
L.Subtract()([h, L.Dense(h.shape[-1])(h)])
L.Flatten()(L.RepeatVector(3)(h))
keras.ops.sin(h) * (2.0 + h[:, :1] * keras.ops.mean(h, axis=-1, keepdims=True))
""".strip().split("\n"),
    "sequence": """
L.Attention(use_scale=True, score_mode="concat")([h, h])
L.AdditiveAttention()([h, h])
L.MultiHeadAttention(2, 3, use_bias=False)(h, h)
L.MultiHeadAttention(2, 3, use_bias=False, dropout=0.3, seed=5)(h, h, use_causal_mask=True)
L.GroupQueryAttention(2, 4, 2, use_bias=False)(h, h)
L.Add()([h, L.Dense(h.shape[-1])(h)])
L.Concatenate()([h, L.Bidirectional(L.SimpleRNN(2, return_sequences=True))(h)])
""".strip().split("\n"),
    "image": ["L.Add()([h, L.Conv2D(h.shape[-1], 3, padding='same')(h)])"],
    "volume": ["L.Multiply()([h, h])"],
    "frames": ["L.Add()([h, h])"],
}
"""Statements of the functional interface that use `h` more than once."""


def lines(text: str) -> list[str]:
    return text.strip().split("\n")


SAME = {
    "features": lines(FEATURES), "sequence": lines(SEQUENCES), "image": lines(IMAGES), "volume": lines(VOLUMES),
    "frames": ["L.TimeDistributed(L.Conv2D(2, 2, padding='same'))"],
}  # fmt: skip
"""What keeps the kind of what it takes."""

INPUTS = {
    "features": ("features", "(6,)", "normal(n, 6)", []),
    "sequence": ("sequence", "(6, 3)", "normal(n, 6, 3)", []),
    "padded": ("sequence", "(6, 3)", "padded(n)", ["L.Masking(0.0)"]),
    "image": ("image", "(8, 7, 2)", "normal(n, 8, 7, 2)", []),
    "augmented": ("image", "(8, 8, 3)", "normal(n, 8, 8, 3)", lines(AUGMENTED)),
    "volume": ("volume", "(4, 4, 4, 2)", "normal(n, 4, 4, 4, 2)", []),
    "frames": ("image", "(3, 5, 5, 1)", "normal(n, 3, 5, 5, 1)", lines(FRAMES)),
    "lines": ("features", "(3, 5, 2)", "normal(n, 3, 5, 2)", ["keras.Sequential([L.ConvLSTM1D(2, 2), L.Flatten()])"]),
    "boxes": (
        "features",
        "(2, 3, 3, 3, 1)",
        "normal(n, 2, 3, 3, 3, 1)",
        ["keras.Sequential([L.ConvLSTM3D(2, 2), L.Flatten()])"],
    ),
    "tokens": (
        "sequence",
        "(6,), dtype='int32'",
        "tokens(n)",
        [
            "L.Embedding(12, 4, mask_zero=True)",
            "L.Embedding(12, 4)",
            "L.Embedding(12, 3, embeddings_regularizer='l2', embeddings_constraint=keras.constraints.MaxNorm(0.1))",
            "L.ReversibleEmbedding(12, 4)",
        ],
    ),
    "numbers": (
        "features",
        "(3,), dtype='int32'",
        "tokens(n)[:, :3]",
        [
            "keras.Sequential([L.CategoryEncoding(12, output_mode='multi_hot'), L.Rescaling(1.0)])",
            "keras.Sequential([L.CategoryEncoding(12, output_mode='count'), L.Rescaling(1.0)])",
            "keras.Sequential([L.IntegerLookup(vocabulary=[2, 3, 5, 7], output_mode='multi_hot'), L.Rescaling(1.0)])",
            "keras.Sequential([L.Hashing(5, output_mode='count'), L.Rescaling(1.0)])",
        ],
    ),
    "words": (
        "features",
        "(2,), dtype='string'",
        "words(n)",
        [
            "keras.Sequential([L.StringLookup(vocabulary=list('rgb'), output_mode='multi_hot'), L.Rescaling(1.0)])",
            "keras.Sequential([L.StringLookup(vocabulary=list('rg'), num_oov_indices=2), L.Rescaling(0.5)])",
            "keras.Sequential([L.Hashing(4, output_mode='multi_hot'), L.Rescaling(1.0)])",
        ],
    ),
    "text": (
        "sequence",
        "(), dtype='string'",
        "sentences(n)",
        [
            "keras.Sequential([L.TextVectorization(vocabulary=list('rg'), output_sequence_length=4), "
            "L.Embedding(5, 4, mask_zero=True)])"
        ],
    ),
    "signal": (
        "sequence",
        "(64,)",
        "normal(n, 64)",
        [
            "L.STFTSpectrogram(frame_length=16, frame_step=8, fft_length=16)",
            "keras.Sequential([L.MelSpectrogram(fft_length=32, num_mel_bins=4, sequence_stride=8), L.Permute((2, 1))])",
        ],
    ),
}
"""By name: the kind of what comes after the first layer, the arguments of Input, the data, and the first layer."""
