"""Targets, and the losses and metrics that fit them, as text. {o} stands for options that each class takes."""

import dataclasses


def lines(text: str) -> list[str]:
    return text.strip().split("\n")


@dataclasses.dataclass(frozen=True)
class Target:
    """What a model may be trained to give."""

    head: str
    """The last layer."""
    data: str
    losses: list[str]
    metrics: list[str]


ANY_METRIC = """
metrics.Mean{o}
metrics.Sum{o}
"""

OF_NUMBERS = """
losses.MeanSquaredError({o})
losses.MeanAbsoluteError({o})
losses.Huber(0.7, {o})
losses.LogCosh({o})
losses.CosineSimilarity({o})
losses.MeanAbsolutePercentageError({o})
"mse"
"mae"
"log_cosh"
keras.losses.huber
by_example
to_one_number
sum_to_one_number
root_of_the_mean
by_element
OwnLoss({o})
"""

NUMBER_METRICS = """
"mae"
"mse"
metrics.MeanSquaredError()
metrics.MeanAbsoluteError(name="distance")
metrics.MeanAbsolutePercentageError()
metrics.RootMeanSquaredError()
metrics.R2Score()
metrics.R2Score(class_aggregation="variance_weighted_average")
metrics.PearsonCorrelation()
metrics.ConcordanceCorrelation()
metrics.CosineSimilarity(axis=-1)
metrics.LogCoshError()
metrics.MeanMetricWrapper(by_example, name="wrapped")
by_example
to_one_number
Largest()
LateMean()
TwoNumbers()
keras.metrics.mean_squared_error
"""

TARGETS = {
    "numbers": Target("L.Dense(4)", "normal(n, 4)", lines(OF_NUMBERS), lines(NUMBER_METRICS)),
    "one number": Target(
        "L.Dense(1)",
        "normal(n)",
        lines(OF_NUMBERS.replace("losses.CosineSimilarity({o})\n", "")),
        ['"mae"', "metrics.RootMeanSquaredError()", "metrics.MeanSquaredError()", "Largest()", '"mse"'],
    ),
    "positive": Target(
        'L.Dense(4, "softplus")',
        "np.abs(normal(n, 4)) + 0.1",
        lines("""
losses.MeanSquaredLogarithmicError({o})
losses.Poisson({o})
losses.MeanAbsolutePercentageError({o})
"msle"
"poisson"
losses.Tversky({o})
"""),
        ["metrics.MeanSquaredLogarithmicError()", "metrics.Poisson()", '"mape"', '"msle"'],
    ),
    "classes": Target(
        "L.Dense(5)",
        "classes(n)",
        lines("""
losses.SparseCategoricalCrossentropy(from_logits=True, {o})
losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2, {o})
"""),
        lines("""
"accuracy"
"acc"
metrics.SparseCategoricalAccuracy()
metrics.SparseTopKCategoricalAccuracy(2)
metrics.SparseCategoricalCrossentropy(from_logits=True)
metrics.IoU(5, [0, 2], sparse_y_pred=False)
metrics.MeanIoU(5, sparse_y_pred=False)
"sparse_top_k_categorical_accuracy"
"""),
    ),
    "class probabilities": Target(
        'L.Dense(5, "softmax")',
        "classes(n)[:, None]",
        ['"sparse_categorical_crossentropy"', "losses.SparseCategoricalCrossentropy({o})"],
        ['"accuracy"', '"sparse_categorical_crossentropy"', "metrics.SparseCategoricalAccuracy()"],
    ),
    "numbered class": Target(
        'L.Dense(5, "softmax")',
        "classes(n)",
        ["losses.CategoricalGeneralizedCrossEntropy({o})", "losses.SparseCategoricalCrossentropy({o})"],
        ['"accuracy"', "metrics.SparseCategoricalAccuracy()"],
    ),
    "one-hot": Target(
        'L.Dense(5, "softmax")',
        "np.eye(5)[classes(n)]",
        lines("""
losses.CategoricalCrossentropy({o})
losses.CategoricalCrossentropy(label_smoothing=0.1, {o})
losses.CategoricalFocalCrossentropy(alpha=0.3, gamma=1.5, {o})
losses.CategoricalHinge({o})
losses.KLDivergence({o})
losses.Dice({o})
losses.Dice(axis=-1, {o})
losses.Tversky(0.3, 0.7, axis=-1, {o})
"categorical_crossentropy"
"kl_divergence"
"categorical_hinge"
"""),
        lines("""
"accuracy"
"crossentropy"
metrics.CategoricalAccuracy()
metrics.TopKCategoricalAccuracy(2)
metrics.CategoricalCrossentropy(label_smoothing=0.1)
metrics.CategoricalHinge()
metrics.KLDivergence()
metrics.F1Score("macro", name="f1")
metrics.FBetaScore(average="weighted", beta=2.0)
metrics.OneHotIoU(5, [0, 1])
metrics.OneHotMeanIoU(5)
metrics.AUC(num_thresholds=20, multi_label=True)
metrics.Precision(top_k=2)
metrics.Recall(class_id=1)
"""),
    ),
    "yes or no": Target(
        'L.Dense(1, "sigmoid")',
        "yes_or_no(n, 1)",
        lines("""
losses.BinaryCrossentropy({o})
losses.BinaryCrossentropy(label_smoothing=0.2, {o})
losses.BinaryFocalCrossentropy(apply_class_balancing=True, {o})
losses.BinaryFocalCrossentropy(gamma=1.0, {o})
"binary_crossentropy"
"""),
        lines("""
"accuracy"
metrics.Accuracy()
metrics.AUC(num_thresholds=20)
metrics.AUC(num_thresholds=20, curve="PR", summation_method="majoring")
metrics.BinaryAccuracy(threshold=0.4)
metrics.BinaryCrossentropy()
metrics.BinaryIoU([0, 1], threshold=0.5)
metrics.FalseNegatives()
metrics.FalsePositives(thresholds=[0.3, 0.6])
metrics.TrueNegatives()
metrics.TruePositives()
metrics.Precision()
metrics.PrecisionAtRecall(0.5, 20)
metrics.Recall(thresholds=[0.3, 0.6])
metrics.RecallAtPrecision(0.5, 20)
metrics.SensitivityAtSpecificity(0.5, 20)
metrics.SpecificityAtSensitivity(0.5, 20)
"""),
    ),
    "several-hot": Target(
        'L.Dense(4, "sigmoid")',
        "yes_or_no(n, 4)",
        lines("""
losses.BinaryCrossentropy({o})
losses.BinaryFocalCrossentropy({o})
losses.Tversky({o})
losses.Dice({o})
"binary_focal_crossentropy"
"""),
        ['"binary_accuracy"', "metrics.AUC(num_thresholds=20, multi_label=True)", 'metrics.F1Score("micro", 0.5)'],
    ),
    "signs": Target(
        'L.Dense(4, "tanh")',
        "2.0 * yes_or_no(n, 4) - 1.0",
        ["losses.Hinge({o})", "losses.SquaredHinge({o})", '"hinge"', '"squared_hinge"'],
        ["metrics.Hinge()", "metrics.SquaredHinge()", '"hinge"'],
    ),
    "embeddings": Target(
        "keras.Sequential([L.Dense(4), L.UnitNormalization()])",
        "classes(n)",
        ["losses.Circle({o})", "losses.Circle(gamma=10.0, margin=0.3, {o})"],
        ["Largest()", "embedded_norm"],
    ),
}
"""Of one thing per example."""

STEP_TARGETS = {
    "class per step": Target(
        "L.Dense(5)",
        "classes(n * t).reshape(n, t)",
        TARGETS["classes"].losses,
        ['"accuracy"', "metrics.SparseCategoricalAccuracy()", "metrics.MeanIoU(5, sparse_y_pred=False)"],
    ),
    "numbers per step": Target(
        "L.Dense(3)",
        "normal(n, t, 3)",
        [line for line in lines(OF_NUMBERS) if "one_number" not in line],
        ['"mae"', "metrics.RootMeanSquaredError()", "metrics.MeanSquaredError()", "by_example", "Largest()"],
    ),
    "yes or no per step": Target(
        'L.TimeDistributed(L.Dense(1, "sigmoid"))',
        "yes_or_no(n, t, 1)",
        TARGETS["yes or no"].losses,
        ['"accuracy"', "metrics.AUC(num_thresholds=20)", "metrics.Precision()"],
    ),
    "label sequence": Target("L.Dense(6)", "1 + classes(2 * n).reshape(n, 2)", ["losses.CTC({o})"], []),
}
"""Of one thing per step of a sequence of {t} steps."""
