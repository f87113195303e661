"""The compiled functions of a model, made once, and one call of them."""

import contextlib
import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.cluster.peers import Peers
from tfdist.data.protocol import Feed, FeedCall
from tfdist.data.records import REPAIR, UNREADABLE
from tfdist.data.sources import Source
from tfdist.distributed import shared_memory_sum
from tfdist.distributed.distribution import Distribution, not_forked
from tfdist.errors import TrainingError, UserError, one_line
from tfdist.keras_bridge import keras_internals, loss, preconditions
from tfdist.step.batch_loop import uneven_end
from tfdist.step.functions import NO_BATCH
from tfdist.step.step import Step


class _Kept(NamedTuple):
    """The last step of a model."""

    key: tuple[int | str, ...]  # what it was made for, as ids
    owners: tuple  # what these ids belong to; held, or another object could take an id and be mistaken for its owner
    step: Step  # it does not keep its model alive (see `Step.model`)
    trained: tuple[keras.Variable, ...] | None = None  # updated by trainings since compile()


_MOST_CHECKED = 64  # rows on which code of the user's own is checked; no more than a batch, for which memory suffices
_STEPS: dict[int, _Kept] = {}
"""By the id of the model, until it is gone; by the model itself those without a hash could have none."""


def step_of(
    model: keras.Model,
    distribution: Distribution,
    source: Source,
    outputs_only: bool = False,
    batch: int = loss.SAMPLE_ROWS,
) -> Step:
    """Returns the compiled functions of this model; kept with it until it is compiled anew or its weights change.

    Args:
      source: some of its examples tell the shapes, and on them losses and metrics are tried.
      outputs_only: the model need not be compiled, nor the source have targets.
      batch: examples of a global batch.
    """
    if distribution.replicas > 1:
        not_forked(distribution.process)
    key = _key(model, distribution)
    kept = _STEPS.get(id(model))
    if kept is not None and kept.key == key:
        kept.step.replica.bare = source.bare
        return kept.step
    preconditions.same_model(model, distribution, not outputs_only)
    step = Step(model, distribution)
    step.more_rows = max(loss.SAMPLE_ROWS, min(_MOST_CHECKED, batch))
    try:
        rows = source.spread_rows(loss.SAMPLE_ROWS)
    except UNREADABLE as error:
        raise explained(error, None, None, distribution.peers) from error
    step.build(rows, source.bare, outputs_only, lambda: source.spread_rows(batch))
    optimizer = [] if outputs_only else [v for o in preconditions.optimizers(model) for v in keras_internals.state(o)]
    preconditions.same_weights(model, distribution)
    distribution.broadcast([*model.variables, *optimizer])
    if not outputs_only:
        if kept is None:
            weakref.finalize(model, _STEPS.pop, id(model), None).atexit = False
        owners = _owners(model, distribution)  # anew: building may have created the weights
        compiled = len(owners) - len(model.trainable_variables)
        same = kept is not None and [*map(id, kept.owners[:compiled])] == [*map(id, owners[:compiled])]
        _STEPS[id(model)] = _Kept(_key(model, distribution), owners, step, kept.trained if kept and same else None)
    return step


def trains(model: keras.Model) -> None:
    """Notes that a training of this model, for which there is a step, begins.

    Raises:
      UserError: one before it, since the model was compiled, has updated other weights. Keras would go on with those.
    """
    kept, now = _STEPS[id(model)], tuple(model.trainable_variables)
    before = {id(v): v.path for v in kept.trained or now}
    here = {id(v): v.path for v in now}
    odd = [path for key, path in {**before, **here}.items() if key not in before or key not in here]
    if odd:
        raise UserError(
            f"the training before has updated other weights than this would, such as {odd[0]}: after a change of what "
            "is trainable, compile() the model again"
        )
    _STEPS[id(model)] = kept._replace(trained=now)


def _owners(model: keras.Model, distribution: Distribution) -> tuple:
    """Returns the objects that a step is made for; none of them refers to the model."""
    return (*compiled_parts(model, distribution), *model.trainable_variables)


def compiled_parts(model: keras.Model, distribution: Distribution) -> tuple:
    """Returns the objects that are others once the model is compiled anew."""
    compiled = keras_internals.compiled_loss(model), keras_internals.compiled_metrics(model)
    return (distribution.strategy, *compiled, getattr(model, "optimizer", None))


def functions_of_keras(model: keras.Model) -> list[int]:
    """Returns the numbers of Keras' functions of a model, which nothing here calls, made where they are missing.

    A script that sets one to None, or calls `make_train_function(force=True)`, wants the model to be traced anew. They
    hold the model, so that none is held here, and ids of those that are gone are given away.
    """
    for kind in ("train", "test", "predict"):
        if getattr(model, f"{kind}_function") is None:
            getattr(model, f"make_{kind}_function")()  # which traces nothing
    made = model.train_function, model.test_function, model.predict_function
    return [_NUMBERS.setdefault(function, next(_COUNT)) for function in made]


_NUMBERS: weakref.WeakKeyDictionary[Callable, int] = weakref.WeakKeyDictionary()
_COUNT = itertools.count()


def _key(model: keras.Model, distribution: Distribution) -> tuple[int | str, ...]:
    # A layer's `synchronized` is read while the step is traced: one that is set between two fits would do nothing.
    synchronized = "".join(str(int(layer.synchronized)) for layer in keras_internals.batch_norms(model))
    ids = map(id, _owners(model, distribution))
    return (distribution.jit, distribution.static_shapes, synchronized, *functions_of_keras(model), *ids)


@contextlib.contextmanager
def eagerly(wanted: bool) -> Iterator[None]:
    """Lets the compiled functions run as Python, op by op, if `wanted`, such as for prints and debuggers."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(before or wanted)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def read(step: Step, feed: Feed, update: int, limit: int) -> FeedCall:
    """Returns the next batches of a feed, see `ArrayFeed.next`; a pipeline that Python reads may fail in this."""
    try:
        return feed.next(update, limit)
    except UNREADABLE as error:
        raise explained(error, feed, update, step.distribution.peers) from error


def run(
    step: Step, call: Callable[..., tuple], arguments: tuple, feed: Feed | None, update: int | None = None
) -> tuple:
    """Calls a compiled function, and turns its errors into those that a person can act on, see `explained`.

    Args:
      update: updates made so far, for those who watch this worker; None where the call makes none.

    Returns:
      What the function returns: the fields of a `CallResult`, or (outputs, examples) of one that predicts.
    """
    peers = step.distribution.peers
    peers.doing("call" if id(call) in step.warm else "compiling", update)
    try:
        with eagerly(step.model.run_eagerly):
            result = call(*arguments)
        first, *_ = result
        keras.tree.map_structure(lambda t: t.numpy(), first)  # waits for the end, where TensorFlow has not
    except UNREADABLE as error:
        raise explained(error, feed, update, peers) from error
    except ValueError as error:
        if misfit := preconditions.input_misfit(error) or complaint(error):
            raise misfit from error
        raise
    finally:
        peers.doing("python", update)
    step.warm.add(id(call))
    return result


class EndOfData(Exception):  # noqa: N818  an event and no error
    """There is no further batch."""


class OutOfMemory(TrainingError):  # noqa: N818
    """A device has not had the memory for an update; the weights may be between two updates."""


class NotFinite(TrainingError):  # noqa: N818
    """The loss is NaN or infinite since an update.

    Args:
      loss: of the epoch so far.
      update, epoch: where it came about, counted from 0 as in `Position`; people count from 1.
    """

    def __init__(self, loss: float, update: int, epoch: int):
        super().__init__(
            f"the loss is {loss} since update {update + 1} (epoch {epoch + 1}): "
            "try a lower learning rate, warm-up, or gradient clipping, and look for NaN in the data"
        )
        self.update = update


def explained(
    error: tf.errors.OpError | UnicodeDecodeError, feed: Feed | None, update: int | None, peers: Peers
) -> Exception:
    """Returns the error to raise instead of TensorFlow's; `update` is None where a call makes no updates.

    Returns:
      EndOfData: a data set of unknown length has no more batches.
      UserError: the data does not fit.
      PeerError: another worker is lost.
      OutOfMemory: there is not enough memory for an update.
      TrainingError: anything else that TensorFlow reports.
    """
    if NO_BATCH in str(error):
        return EndOfData()
    if ended := uneven_end(str(error), update, peers):
        return UserError(ended)
    if known := complaint(error):
        return known
    in_pipeline = isinstance(error, UnicodeDecodeError) or re.search("IteratorGetNext|OptionalGetValue", str(error))
    if feed and in_pipeline and (unreadable := feed.first_unreadable()):
        return UserError(unreadable, REPAIR)
    if isinstance(error, tf.errors.ResourceExhaustedError) and re.search("OOM|[Mm]emory|alloc", str(error)):
        text = one_line(error)
        tensor = re.search(r"allocating tensor with shape\[[\d,]*\]", text)
        text = f"out of memory ({tensor[0] if tensor else text[:200]})"
        if update is None:
            return TrainingError(f"{text}: measure with a smaller batch (eval.batch_size)")
        return OutOfMemory(text)
    return cause(error, peers)


def complaint(error: Exception) -> UserError | None:
    """Returns what a user can act on, if TensorFlow's words are known."""
    of_tensorflow = isinstance(error, ValueError) or type(error).__module__.startswith("tensorflow.")
    found = ((re.search(pattern, str(error)), advice) for pattern, advice in _COMPLAINTS if of_tensorflow)
    return next((UserError(f"{words[0]}{advice}") for words, advice in found if words), None)


def cause(error: Exception, peers: Peers) -> Exception:
    """Returns what an error of TensorFlow means: a lost worker, if the others know of one and it may be that."""
    if known := complaint(error):
        return known
    text = one_line(error)
    mine = isinstance(error, _OWN_FAULTS) and not re.search("[Cc]ollective|Horovod", text)
    return peers.error() if not mine and peers.verdict() else TrainingError(text[:400])


_FAULTS = "FailedPrecondition InvalidArgument NotFound OutOfRange ResourceExhausted Unimplemented"
_OWN_FAULTS = tuple(getattr(tf.errors, f"{name}Error") for name in _FAULTS.split())
"""Without a word of a collective in them, these have nothing to do with the other workers."""
_COMPLAINTS = (
    (r"Cast string to \w+ is not supported", ": the data has text where the model takes numbers"),
    (
        shared_memory_sum.OUT_OF_STEP.format(r"\d+", r"\d+"),
        ": what layers, losses and steps sum with all_reduce must not depend on the worker",
    ),
    (
        r"Detected unsupported operations when trying to compile graph \S+ on XLA_\w+: \w+"
        r"|\w+ \w+ gradient ops do not yet have a deterministic XLA implementation",
        ": use --jit=off, with which TensorFlow's own kernels compute it",
    ),
    (r"a batch of the data set is larger than the first one \(.*?\)", ": make the first batch the largest"),
    (
        r"Cannot batch tensors with different shapes.*? and element \d+ had shape \[.*?\]",
        ": make them alike in the data",
    ),
    (r"stateful layers carry on .*? is made for", ""),
    (r"(corrupted|truncated) record at \d+", ": a TFRecord file of the data is damaged, copy or prepare it again"),
    (
        r"tf\.function only supports singleton tf\.Variables created on the first call"
        r"|seed_generator_state(?=/replica_\d+/Initializer)",
        ": give keras.random a seed=keras.random.SeedGenerator() that is made in the __init__ of the layer or model, "
        "and make variables in its build",
    ),
    (r"Received a label value of .*? outside the valid range of \[.*?\)", ": correct labels or the model's last layer"),
)
