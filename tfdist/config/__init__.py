"""What is asked for: the experiment, the runtime options, their parsing and checks, and the plan in updates.

Nothing here touches a device, a file of a run, or TensorFlow. What users' configs import stands here by name:
`from tfdist.config import Experiment`.
"""

from tfdist.config.experiment import (
    APPLICATIONS,
    CACHES,
    DATASETS,
    FILE,
    FILES,
    LR_SCALINGS,
    MODELS,
    ON_BROKEN,
    ON_NONFINITE,
    OPTIMIZERS,
    PRECISIONS,
    REDUCE_DTYPES,
    RESIZES,
    SCHEDULES,
    Checkpoint,
    Data,
    Eval,
    Experiment,
    Model,
    Optimizer,
    Train,
    flat,
)

__all__ = [
    "APPLICATIONS",
    "CACHES",
    "DATASETS",
    "FILE",
    "FILES",
    "LR_SCALINGS",
    "MODELS",
    "ON_BROKEN",
    "ON_NONFINITE",
    "OPTIMIZERS",
    "PRECISIONS",
    "REDUCE_DTYPES",
    "RESIZES",
    "SCHEDULES",
    "Checkpoint",
    "Data",
    "Eval",
    "Experiment",
    "Model",
    "Optimizer",
    "Train",
    "flat",
]
