"""`patch_keras`: `Model.fit` and its relatives, as any script calls them, are carried out by tfdist from then on."""

import contextlib
import functools
import importlib
import inspect
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoints import files
from tfdist.config.messages import logger
from tfdist.distributed import connect
from tfdist.distributed.distribution import Distribution
from tfdist.errors import UserError
from tfdist.keras_bridge import batch_norm, keras_internals, preconditions
from tfdist.trainer import evaluation, fit, on_batch

_ON_BATCH = (on_batch.train_on_batch, on_batch.test_on_batch, on_batch.predict_on_batch)
_METHODS = {method.__name__: method for method in (fit.fit, evaluation.evaluate, evaluation.predict, *_ON_BATCH)}
_TRAINING = ("fit", "train_on_batch")
_WRITERS = (
    *((keras.Model, name) for name in ("save", "save_weights", "export")),
    *((module, "save_model") for module in (keras.saving, keras.models)),
    (keras.saving, "save_weights"),
)
_STRATEGIES = ("Mirrored", "MultiWorkerMirrored", "OneDevice", "CentralStorage", "TPU")
_DEVICE_SETTERS = (
    (tf.config, ("set_visible_devices", "set_logical_device_configuration", "experimental_connect_to_cluster")),
    (tf.config.experimental, ("set_memory_growth", "set_visible_devices", "set_virtual_device_configuration")),
    (tf.tpu.experimental, ("initialize_tpu_system",)),
    (tf.config.threading, ("set_inter_op_parallelism_threads", "set_intra_op_parallelism_threads")),
)
"""What scripts set up before they use a device, as tfdist has done by then: TensorFlow would raise an error."""


class KerasPatch:
    """Keras' methods of a model, answered by tfdist under one distribution, whose scope everything is created in.

    Args:
      distribution: where models train.
      sync_batch_norm: synchronize the BatchNormalization layers of a model when it first trains on several replicas.
      virtual_replicas, check_agreement: as for `fit`, for all calls.
      call_fit: called as `call_fit(fit, model, arguments)` for each `model.fit`, with its arguments by name; `fit` also
        takes `left_out`, the number of calls that the script has left out before this one.
    """

    def __init__(
        self,
        distribution: Distribution,
        sync_batch_norm: bool = True,
        virtual_replicas: int = 0,
        check_agreement: str = "auto",
        call_fit: Callable[[Callable[..., Any], keras.Model, dict[str, Any]], Any] | None = None,
    ):
        self.distribution = distribution
        self.calls = 0  # how often a model was trained, evaluated or asked for predictions
        self.options = sync_batch_norm, virtual_replicas, check_agreement, call_fit
        self._sync_batch_norm, self._virtual_replicas, self._check_agreement, self._call_fit = self.options
        self._fits = self.depth = 0
        self._warned: set[str] = set()
        self._undo = contextlib.ExitStack()
        self._scope = contextlib.ExitStack()

    def install(self) -> None:
        """Replaces Keras' methods and enters the scope."""
        if "fit" in vars(keras.Model):
            # MLflow gives its function the names of Keras' own, and not its globals.
            whose = getattr(keras.Model.fit, "__globals__", {}).get("__name__", "another library").partition(".")[0]
            what = f"keras.Model.fit has been replaced by {whose}, which would no longer be called"
            raise UserError(what, "call tfdist.patch_keras() before it, such as before mlflow.autolog()")
        if not self.distribution.is_chief:
            # The job has one run there, and all workers make the same calls of a model for it.
            folder = self._undo.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            elsewhere = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "_MLFLOW_SERVER_ARTIFACT_ROOT": folder}
            for name, value in (elsewhere | {"WANDB_MODE": "disabled"}).items():
                self._undo.callback(os.environ.update, {name: os.environ[name]} if name in os.environ else {})
                self._undo.callback(os.environ.pop, name, None)
                os.environ[name] = value
        trainer = next(c for c in keras.Model.__mro__ if "fit" in vars(c))
        for name, ours in _METHODS.items():
            self._replace(trainer, name, self._method(getattr(trainer, name), ours))
        self._undo.enter_context(keras_internals.variables_as_numbers())
        self._undo.enter_context(keras_internals.unscaled_losses(in_replicas=False))  # of calls in the script itself
        if self.distribution.workers > 1:
            # A library that asks, as KerasTuner does, must not write into a folder that it removes at once.
            self._replace(type(self.distribution.strategy.extended), "should_checkpoint", True)
            for owner, name in _WRITERS:
                self._replace(owner, name, self._written_once(getattr(owner, name)))
            # It makes a variable on its way, which in the scope would wait for all workers.
            for owner in keras.Model, keras.saving:
                self._replace(owner, "load_weights", self._outside_scope(owner.load_weights))
            self._replace(tf.io.gfile, "rmtree", removing_together(tf.io.gfile.rmtree))  # as KerasTuner's `overwrite`
        for module in tf.distribute, tf.distribute.experimental:
            for name in filter(functools.partial(hasattr, module), (f"{kind}Strategy" for kind in _STRATEGIES)):
                self._replace(module, name, self._running(getattr(module, name)))
        for owner, names in _DEVICE_SETTERS:
            for name in names:
                self._replace(owner, name, self._set_before(getattr(owner, name)))
        # What a SavedModel holds in several copies cannot be read outside of replicas. When Keras exports a model, it
        # imports the module by this name, and makes another one of `tf.saved_model`.
        saved_model, compat = importlib.import_module("tensorflow.saved_model"), tf.compat
        for owner, name in (saved_model, "load"), (compat.v2.saved_model, "load"), (compat.v1.saved_model, "load_v2"):
            self._replace(owner, name, keras_internals.outside_scope()(getattr(owner, name)))
        # `clear_session` calls it, and a new graph has lost the scope. TensorBoard makes another module of that name.
        for owner in tf.compat.v1, importlib.import_module("tensorflow.compat.v1"):
            self._replace(owner, "reset_default_graph", self._in_scope(owner.reset_default_graph))
        self._scope.enter_context(self.distribution.scope())

    def remove(self) -> None:
        """Gives Keras its own methods back, and leaves the scope."""
        self._undo.close()
        self._leave_scope()

    def _replace(self, owner: Any, name: str, new: object) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, new)

    def _outside_scope(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that is called outside of the scope, in which a variable of the chief's own would wait."""
        return keras_internals.outside_scope()(function) if self.distribution.workers > 1 else function

    @contextlib.contextmanager
    def _one_thread(self, name: str) -> Iterator[None]:
        alone = self.distribution.one_thread(name == "fit" and self._call_fit is not None)
        with alone, keras_internals.replaced("depth", [(self, self.depth + 1)]):
            yield

    def _leave_scope(self) -> None:
        # Within a scope that the script itself has entered again, TensorFlow refuses to leave the outer one.
        with contextlib.suppress(RuntimeError, IndexError):
            self._scope.close()

    def _in_scope(self, reset: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(reset)
        def reset_default_graph() -> None:
            self._leave_scope()
            reset()
            self._scope.enter_context(self.distribution.scope())

        return reset_default_graph

    def _running(self, original: type) -> type:
        """Returns a class that is called as `original`, and gives the running strategy."""
        strategy, log_once = self.distribution.strategy, self._log_once

        class Meta(type(original)):  # type: ignore[misc]
            def __instancecheck__(cls, instance: object) -> bool:
                return isinstance(instance, original)

        def new(cls: type, *args: object, **options: object) -> tf.distribute.Strategy:
            if args or options:
                log_once(f"{original.__name__}() of the script is the running strategy, whose devices are set above")
            return strategy

        return Meta(original.__name__, (original,), {"__new__": new, "__doc__": original.__doc__})

    def _set_before(self, original: Callable[..., None]) -> Callable[..., None]:
        told = f"{original.__name__}() of the script changes nothing: the devices have been set up above"
        return functools.wraps(original)(lambda *args, **options: self._log_once(told))

    def _written_once(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that writes a model to a file on the chief, while the others wait until it is there.

        A worker writes by itself where its path is another, in a temporary folder of its own say, and the first one of
        another host where the chief's file is not on its disk.
        """
        peers = self.distribution.peers

        @functools.wraps(theirs)
        @self._outside_scope
        def write(model: keras.Model, filepath: str | os.PathLike, *args: Any, **options: Any) -> Any:
            path, name = pathlib.Path(filepath).absolute(), theirs.__name__
            if peers.doing_apart or len(set(peers.gather(f"{name}()", str(path)))) > 1:
                return theirs(model, filepath, *args, **options)
            hosts, result, content = peers.hosts, None, None
            if self.distribution.is_chief:
                with peers.during("saving"):
                    result = theirs(model, filepath, *args, **options)
                    content = _content(path) if len(set(hosts)) > 1 else None
            content = peers.gather(f"the file of {name}()", content)[0]
            if content is not None:
                first = hosts.index(hosts[peers.rank]) == peers.rank
                if first and not self.distribution.is_chief and _content(path) != content:
                    with peers.during("saving"):
                        result = theirs(model, filepath, *args, **options)
                peers.gather(f"the files of {name}()")
            return result

        return write

    def _method(self, theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        signature, name = inspect.signature(theirs), theirs.__name__

        @functools.wraps(theirs)
        @self._outside_scope
        @self._one_thread(name)
        @self.distribution.peers.raising_together(f"{name}()")
        def method(*args: Any, **options: Any) -> Any:
            if self.distribution.workers > 1 and (self.depth > 1 or name not in _TRAINING):
                outside = tf.distribute.get_strategy()  # of the scope, as callbacks are called, which may load a model
                if args[0].distribute_strategy is outside is not self.distribution.strategy:
                    return theirs(*args, **options)  # each worker has all of it
            own = {option: options.pop(option) for option in [*options] if option not in signature.parameters}
            arguments = signature.bind(*args, **options).arguments | own  # tfdist's, or misspelled
            model = arguments.pop("self")
            if name == "evaluate":
                arguments.setdefault("return_dict", False)
            arguments.setdefault("distribution", self.distribution)
            if name in _TRAINING:
                self._normalize(model, arguments)
            arguments.setdefault("virtual_replicas", self._virtual_replicas)
            arguments.setdefault("check_agreement", self._check_agreement)
            self.calls += 1
            if name == "train_on_batch" and self._call_fit:
                self._log_once("WARNING: --workdir keeps calls of fit: loops of train_on_batch start anew after a kill")
            if name != "fit":
                result = ours(model, **arguments)
                by_name = isinstance(result, dict) and arguments.get("return_dict")
                # Keras' are sorted, and a script may take the values alone; a step of its own has its own order.
                sort = by_name and not preconditions.replaced(model, (*preconditions.TRAINING, "test_step"))
                return dict(sorted(result.items())) if sort else result
            # Each worker calls `model.save`, so that all find the file, though each may have a path of its own.
            given = arguments.get("callbacks") or []
            given = given.callbacks if isinstance(given, keras.callbacks.CallbackList) else given
            for callback in keras.tree.flatten(given) if self.distribution.workers > 1 else []:
                if type(callback) is keras.callbacks.ModelCheckpoint:
                    callback.chief_only = False
            number = self._fits

            def fit(model: keras.Model, left_out: int = 0, **given: Any) -> keras.callbacks.History:
                nonlocal number
                number += left_out
                self._fits = number + 1
                # Else each of several calls would see the examples in the same order.
                given.setdefault("seed", (keras_internals.global_seed() + 7919 * number) % 2**31)
                return ours(model, **given)

            result = self._call_fit(fit, model, arguments) if self._call_fit else fit(model, **arguments)
            self._fits = number + 1  # those within callbacks are not called again where this one is restored
            return result

        return method

    def _normalize(self, model: keras.Model, arguments: dict[str, Any]) -> None:
        """Synchronizes BatchNormalization over the replicas, or accepts that each normalizes by itself."""
        several = self.distribution.replicas > 1 and not self._virtual_replicas
        if not several or not (alone := batch_norm.normalizing_alone(model)):
            return
        if self._sync_batch_norm:
            batch_norm.synchronize_batch_norm(model)
            told = f"BatchNormalization of {model.name} is synchronized over the replicas (layers: {len(alone)})"
        else:
            arguments.setdefault("check_agreement", "off")
            told = (
                f"WARNING: sync_batch_norm is off: BatchNormalization of {model.name} normalizes the "
                "rows of each replica alone, so results depend on the number of replicas"
            )
        self._log_once(told)

    def _log_once(self, told: str) -> None:
        if told not in self._warned:
            self._warned.add(told)
            logger.info(told)


def removing_together(rmtree: Callable[[str], None]) -> Callable[[str], None]:
    """Returns a function that removes a folder which others may be removing at the same time."""

    @functools.wraps(rmtree)
    def remove(path: str) -> None:
        try:
            rmtree(path)
        except tf.errors.NotFoundError:  # of a file that another one has removed first
            if tf.io.gfile.exists(path):
                remove(path)

    return remove


def _content(path: pathlib.Path) -> list[list[str]]:
    """Returns the files of a path, a folder or a single one, with their SHA-256."""
    names = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [[name.name, files.checksum(name)["sha256"]] for name in names if name.is_file()]


_INSTALLED: list[KerasPatch] = []  # one at most


def patch_keras(distribution: Distribution | None = None, *, sync_batch_norm: bool = True) -> None:
    """Makes `model.fit` and its relatives train on all connected devices, with the result of one.

    From then on tfdist carries out `fit`, `evaluate`, `predict`, `train_on_batch`, `test_on_batch` and
    `predict_on_batch` of every Keras model, which take and return what they do in Keras. Models, optimizers and metrics
    are created in the scope of the distribution without a `with`, `tf.distribute.MirroredStrategy()` returns the
    running strategy, and on several workers the chief writes what `model.save` does. Called again, it changes nothing.

    ```python
    tfdist.connect("mirrored", virtual_devices=2)
    tfdist.patch_keras()
    model = keras.Sequential([...])
    model.compile("adam", "mse")
    model.fit(x, y, epochs=3)
    ```

    Args:
      distribution: of `tfdist.connect`; if not given, the latest one, or `tfdist.connect("auto")` without any.
      sync_batch_norm: on several replicas, normalize with the statistics of the global batch in all
        `BatchNormalization` layers of a model that trains. False leaves each replica its own, with a warning.
    """
    install(KerasPatch(distribution or connect.latest() or connect.connect(), sync_batch_norm))


def install(patch: KerasPatch) -> None:
    """Installs a patch instead of the one before, if any; one that is the same in effect stays."""
    if _INSTALLED:
        before = _INSTALLED[0]
        if before.distribution is patch.distribution and before.options == patch.options:
            return
        unpatch_keras()
    try:
        patch.install()
    except BaseException:  # such as a name that another version of Keras lacks
        patch.remove()
        raise
    _INSTALLED.append(patch)


def unpatch_keras() -> None:
    """Undoes `patch_keras`: Keras' own methods are back, and objects are created outside of any scope."""
    while _INSTALLED:
        _INSTALLED.pop().remove()
