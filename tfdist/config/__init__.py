"""The experiment, the runtime options, their parsing and checks, and the schedule in updates.

Nothing here touches a device, a file of a run, or TensorFlow. What users' configs import stands here by name:
`from tfdist.config import Experiment`.
"""

from tfdist.config.experiment import (  # noqa: F401  what other packages import
    APPLICATIONS,
    CACHES,
    DATASETS,
    FILE,
    FILES,
    FORMER_NAMES,
    LR_SCALINGS,
    MODELS,
    ON_ERROR,
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
    current_name,
    flat,
    renamed,
)
