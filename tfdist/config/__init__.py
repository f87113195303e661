"""The experiment, the runtime options, their parsing and checks, and the schedule in updates.

Nothing here touches a device, a file of a run, or TensorFlow. What users' configs import stands here by name:
`from tfdist.config import Experiment`.
"""

from tfdist.config.experiment import (  # noqa: F401  what other packages import
    APPLICATIONS,
    CHOICES,
    DATASETS,
    FILE,
    FILES,
    FORMER_NAMES,
    MODELS,
    OPTIMIZERS,
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
