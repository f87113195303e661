"""Bad input: exit code 2 and one line. Where TensorFlow is not needed to know it, it is not imported."""

import importlib.util
import json
import math
import os
import pathlib
import re
import shlex
import signal

import numpy as np
import pytest
from support import many_commands
from support.covering import first

import tfdist
from tfdist import config
from tfdist.__main__ import COMMANDS
from tfdist.config import field_syntax, runtime_options, schedule, validation
from tfdist.data.loaded import Loaded
from tfdist.data.sources import Arrays
from tfdist.data.spec import Spec
from tfdist.errors import UserError
from tfdist.inference import trained_model
from tfdist.launch import plan as launch
from tfdist.models import objective


def cases(text):
    """The arguments and the message of each line `ARGUMENTS => MESSAGE`; lines that are indented go on with it."""
    lines = re.sub(r"\n +", " ", text).strip().splitlines()
    return [(shlex.split(arguments), message) for arguments, _, message in (line.partition(" => ") for line in lines)]


BAD_INPUT = cases("""
--strategy=mirored => flag --strategy=mirored: value should be one of <auto|default|mirrored|multi_worker|tpu|horovod>
--stratgy=mirrored => unknown flag --stratgy: did you mean --strategy=mirrored?
--epocs=3 => unknown flag --epocs: did you mean --config.train.epochs=3?
--batch_size 32 => unknown flag --batch_size: did you mean --config.train.batch_size=32?
--replicas=2 => unknown flag --replicas: did you mean --virtual_devices=2?
--gpus=0,1 => unknown flag --gpus: --help lists those that there are
--flagfile=typo.flags => unknown flag --epocs: did you mean --config.train.epochs=3?
train.py => flags are written --name=value, and tfdist run train.py trains a script
--lr=0.1 => unknown flag --lr: did you mean --config.optimizer.learning_rate=0.1?
--topology=v5e-8 => --topology=v5e-8 compiles ahead of time and requires --dry_run
--dry_run --topology=v5e-9 => unknown --topology=v5e-9: did you mean 'v5e-8'? Known are v5e-1, v5e-4
--dry_run --topology=v5e-8 --devices=0 =>
    --topology=v5e-8 says on which devices: leave out --strategy, --devices and --virtual_devices
--dry_run --topology=l4x1 =>
    --topology=l4x1 needs the compilers for cuda, which are not installed: run python -m tfdist.topology
mirrored => unexpected argument 'mirrored': flags are written --name=value
--config.train.epoch=3 => unknown config field --config.train.epoch: did you mean 'epochs'?
--config.trian.epochs=3 => unknown config field --config.trian.epochs: did you mean 'train'?
--config.train.epochs=many => flag --config.train.epochs=many: invalid literal for int() with base 10: 'many'
--config.train=3 => flag --config.train=3: is a group of fields: set one of them
--config=missing.py => --config=missing.py does not exist: give the path of a Python file
--config missing.py => --config=missing.py does not exist
--config=syntax.py => --config=syntax.py cannot be used: SyntaxError:
--config=raises.py => --config=raises.py cannot be used: ZeroDivisionError: division by zero
--config=empty.py => --config=empty.py cannot be used: AttributeError:
--config=typed.py => data.image_size must be text in quotes, got 224
--config=number.py => get_config() of --config must return a tfdist.config.Experiment, got int
--config.model.name=cn => unknown model.name 'cn': did you mean 'cnn'? Known are cnn, mlp,
--config.model.name=resnet50 => unknown model.name 'resnet50': did you mean 'ResNet50'? Known are cnn, mlp,
--config.model.name=EficientNetB0 => unknown model.name 'EficientNetB0': did you mean 'EfficientNetB0'?
--config.model.name=zzz => unknown model.name 'zzz': known are cnn, mlp,
--config.model.name=no.keras => model.name='no.keras' does not exist: give the path of a file on this machine
--config.model.name=text.keras --config.model.options=units=3 =>
    model.options='units=3' does not go with a model from a file (text.keras): leave it out
--config.model.name=text.keras --config.model.weights=a.h5 =>
    model.weights='a.h5' does not go with a model from a file (text.keras): leave it out
--config.model.weights=no.h5 => model.weights='no.h5' does not exist
--config.model.weights=model.ckpt =>
    model.weights='model.ckpt' is not a Keras file: give a .keras, .weights.h5 or .h5 file
--config.model.freeze=conv*,,head => model.freeze='conv*,,head' is not understood: write patterns of layer names
--config.model.freeze=! => model.freeze='!' is not understood
--config.optimizer.name=adm => unknown optimizer.name 'adm': did you mean 'adam'?
--config.optimizer.options=learning_rate=1 =>
    optimizer.options: learning_rate is set by optimizer.learning_rate: give it there
--config.optimizer.options=use_ema=True => optimizer.options: use_ema is set by optimizer.ema_momentum: give it there
--config.optimizer.schedule=steps => unknown optimizer.schedule 'steps': did you mean 'step'?
--config.optimizer.schedule=step => optimizer.schedule=step needs optimizer.schedule_options, such as
--config.optimizer.schedule_options=end => optimizer.schedule_options='end' is not understood: write name=value
--config.optimizer.schedule_options=end=0.1,end=0.2 => is not understood: write name=value, name=value, each name once
--config.optimizer.schedule_options=end=low => end in optimizer.schedule_options must be a number, got 'low'
--config.optimizer.schedule_options=end=1 =>
    end in optimizer.schedule_options must be a share of the rate below 1, got 1
--config.optimizer.schedule_options=factor=0.1 =>
    unknown 'factor' in optimizer.schedule_options='factor=0.1': cosine knows end
--config.optimizer.schedule=exponential --config.optimizer.schedule_options=factor=0.9 =>
    optimizer.schedule_options='factor=0.9' is half of it: write factor=0.94, every=2 epochs
--config.optimizer.schedule=exponential '--config.optimizer.schedule_options=end=0.1, factor=0.9, every=9' =>
    says it twice: give end, or factor and every
--config.train.precision=float8 => unknown train.precision 'float8'
--config.data.cache=disk => unknown data.cache 'disk': known are auto, memory, stream
--config.data.image_size=0 => data.image_size='0' is not understood: write 224, or height x width such as 192x256
--config.data.image_size=32x => data.image_size='32x' is not understood
--config.data.resize=zoom => unknown data.resize 'zoom': known are crop, stretch, pad
--config.data.on_error=ignore => unknown data.on_error 'ignore': known are refuse, skip
--config.train.batch_size=-5 => train.batch_size must be at least 1, got -5
--config.eval.batch_size=0 => eval.batch_size must be at least 1, got 0
--config.train.accumulate=0 => train.accumulate must be at least 1, got 0
--config.train.virtual_replicas=-1 => train.virtual_replicas must not be negative, got -1
--config.train.virtual_replicas=8 --config.optimizer.reduce_dtype=bfloat16 =>
    optimizer.reduce_dtype=bfloat16 cannot be used with train.virtual_replicas, whose sums are exact: leave out one
    of them
--config.train.virtual_replicas=8 --topology=v5e-8 --dry_run =>
    --topology compiles the step without virtual replicas: set train.virtual_replicas=0
--config.train.zero_stage=1 --topology=v5e-8 --dry_run =>
    --topology compiles the step with whole optimizer state: set train.zero_stage=0
--config.train.zero_stage=2 => train.zero_stage must be 0 or 1, got 2
--config.train.batch_size=3 --virtual_devices=4 => train.batch_size=3 is smaller than 4 replicas: use at least 4
--config.train.batch_size=8 --virtual_devices=4 --config.train.accumulate=3 =>
    train.batch_size=8 is smaller than 4 replicas x 3 micro-batches: use at least 12
--config.train.epochs=-1 => train.epochs must not be negative, got -1
--config.train.epochs=0 => give either train.epochs or train.steps and 0 for the other, got 0 and 0
--config.train.steps=5 => give either train.epochs or train.steps and 0 for the other, got 30 and 5
--config.optimizer.learning_rate=-1 => optimizer.learning_rate must not be negative, got -1
--config.optimizer.ema_momentum=1 => optimizer.ema_momentum must be in [0, 1), got 1
--config.optimizer.layer_rates=head => optimizer.layer_rates='head' is not understood: write name=value
--config.optimizer.layer_rates=head=big => head in optimizer.layer_rates must be a number, got 'big'
--config.optimizer.layer_rates=head=0 =>
    head in optimizer.layer_rates must be positive, got 0: freeze layers with model.freeze
--config.optimizer.layer_decay=0 => optimizer.layer_decay must be in (0, 1], got 0
--config.optimizer.decay_exclude=bias --config.optimizer.weight_decay=0 =>
    optimizer.decay_exclude='bias' has nothing to exclude from: set weight_decay
--config.train.patience=-1 => train.patience must not be negative, got -1
'--config.train.monitor=least val_loss' => train.monitor='least val_loss' is not understood: write a metric
--config.train.class_weight=even => train.class_weight='even' is not understood: write name=value
--config.train.class_weight=0=-1 => 0 in train.class_weight must not be negative, got -1
--config.train.loss=sparse_categorical_crosentropy =>
    unknown train.loss 'sparse_categorical_crosentropy': did you mean 'sparse_categorical_crossentropy'?
'--config.train.loss=mse, mae' => train.loss='mse, mae' names 2 losses: give one, or a function that adds them
--config.train.loss=huber(1.0) => the arguments of huber in train.loss='1.0' is not understood: write name=
--config.train.metrics=acuracy => unknown train.metrics 'acuracy': did you mean 'accuracy'? Known are
--config.train.metrics=mae,,acc => train.metrics='mae,,acc' is not understood: write names of Keras or pack
--config.train.metrics=AUC(name=a => train.metrics: ) is missing in 'AUC(name=a'
'--config.train.metrics=mae, mae' => train.metrics='mae, mae' gives mae 2 times: give it once
--config.train.callbacks=EarlyStoping(patience=3) =>
    unknown train.callbacks 'EarlyStoping': did you mean 'EarlyStopping'? Known are BackupAndRestore,
--config.train.label_smoothing=1 => train.label_smoothing must be in [0, 1), got 1
--config.model.options=units => model.options='units' is not understood: write name=value, name=value
--config.name=a/b => name='a/b' becomes a folder
--config.seed=-1 => seed must be between 0 and
--virtual_devices=0 => --virtual_devices must be an integer of at least 1, got 0
--virtual_devices=two => flag --virtual_devices=two: invalid literal for int() with base 10: 'two'
--threads=0 => --threads must be an integer of at least 1, got 0
--devices=first => --devices=first is not understood: use all, none, driver numbers such as 0,3, or idle:2
--devices=1,1 => --devices=1,1 names a device twice
--devices=0 --virtual_devices=2 => --virtual_devices=2 splits the CPU and --devices=0 picks GPUs: use one
--devices=7 => there is no device 7: the driver lists none
--devices=idle:2 => --devices=idle:2 asks for 2 GPUs, found 0: ask for fewer
--strategy=default --virtual_devices=2 => --strategy=default uses one device, --virtual_devices=2 asks for more
--strategy=mirrored => --strategy=mirrored needs at least 2 devices, found 1 (the CPU): use --virtual_devices=2
--strategy=horovod --virtual_devices=2 =>
    --strategy=horovod uses one device per process, this one has 2 virtual CPU devices
--communication=mpi => flag --communication=mpi: value should be one of <auto|ring|nccl>
--communication=nccl --devices=none => --communication=nccl sums between GPUs, and CPUs are asked for: leave it out
--strategy=default --communication=ring =>
    --communication=ring is for --strategy=multi_worker, got --strategy=default: leave it out
--bucket_bytes=-1 => --bucket_bytes must not be negative, got -1
--start_timeout=0 => --start_timeout must be a positive number of seconds, got 0.0
--stall_timeout=-3 => --stall_timeout must be a positive number of seconds, got -3.0
--config.checkpoint.every=often => checkpoint.every='often' is not understood: write 100 steps, 1 epoch
'--config.checkpoint.every=0 steps' => checkpoint.every='0 steps' is not an interval: write off for none
--config.checkpoint.keep=0 => checkpoint.keep must be at least 1, got 0
'--config.checkpoint.best=least loss' => checkpoint.best='least loss' is not understood: write a metric
--config.train.on_nonfinite=ignore => unknown train.on_nonfinite 'ignore'
--config.train.max_rollbacks=0 => train.max_rollbacks must be at least 1, got 0
--config.train.on_nonfinite=rollback --config.checkpoint.every=off =>
    train.on_nonfinite=rollback goes back to a checkpoint: it cannot be used with checkpoint.every=off
--config.checkpoint.best=loss --config.checkpoint.every=off =>
    checkpoint.best=loss is not kept with checkpoint.every=off: leave out one of them
--resume=require --config.checkpoint.every=off => checkpoint.every=off, and a resume is asked for
--resume=never --resume_changed => --resume=never and --resume_changed contradict each other: give one
--resume=maybe => flag --resume=maybe: value should be one of <auto|never|require>
--profile=20 => --profile=20 is not understood: write the first and the last update, such as 20:30
--profile=30:20 => --profile=30:20 is not understood
--profile=1:500 => --profile=1:500 is 500 updates, a trace that no browser opens: choose at most 100
--requeue => --requeue is for Slurm's jobs, and SLURM_JOB_ID is not set
--config.optimizer.reduce_dtype=int8 => unknown optimizer.reduce_dtype 'int8'
--config.optimizer.scale_learning_rate=cubic => unknown optimizer.scale_learning_rate 'cubic'
--config.optimizer.scale_learning_rate=linear =>
    optimizer.scale_learning_rate=linear and optimizer.base_batch=0 do not go together
--config.optimizer.learning_rate=0 --config.optimizer.base_batch=32 --config.optimizer.scale_learning_rate=linear =>
    optimizer.base_batch=32 is the batch that optimizer.learning_rate is for: set both
--config.optimizer.base_batch=32 => optimizer.scale_learning_rate=none and optimizer.base_batch=32 do not go together
--config.optimizer.base_batch=-1 => optimizer.base_batch
--strategy=tpu => --strategy=tpu cannot run here: TensorFlow
--strategy=tpu --devices=0 => --devices=0 is for CPUs and GPUs, and a TPU is used as a whole
--strategy=tpu --virtual_devices=2 => --virtual_devices=2 is for CPUs and GPUs, and a TPU
--strategy=tpu --jit=on => --jit=on is for CPUs and GPUs; a TPU compiles every step: leave it out
--strategy=mirrored --tpu=pod => --tpu=pod asks for a TPU and --strategy=mirrored uses none
'--tpu=a b' => --tpu=a b is not understood: use local, or the name of a TPU in the Cloud
--tpu=pod => --strategy=tpu cannot run here: TensorFlow
--workdir=syntax.py/below => --workdir=syntax.py/below cannot be written (Not a directory): choose another folder
--workdir=run\udcff => --workdir=run\\xff is not UTF-8, as TensorFlow's file names are: choose another name
--flagfile=missing.flags => missing.flags
""")


@pytest.fixture
def files(tmp_path):
    """A folder that, first on PYTHONPATH, forbids to import TensorFlow; beside it what the arguments name."""
    (tmp_path / "syntax.py").write_text("def get_config(:\n")
    (tmp_path / "raises.py").write_text("def get_config():\n    return 1 / 0\n")
    (tmp_path / "empty.py").write_text("\n")
    (tmp_path / "text.keras").write_text("not looked into")
    (tmp_path / "typo.flags").write_text("--epocs=3\n")
    typed = "import tfdist.config as c\ndef get_config():\n    return c.Experiment(data=c.Data(image_size=224))\n"
    (tmp_path / "typed.py").write_text(typed)
    (tmp_path / "number.py").write_text("def get_config():\n    return 3\n")
    poison = tmp_path / "poison"
    poison.mkdir()
    for name in ("tensorflow", "keras", "tensorflow_datasets"):
        (poison / f"{name}.py").write_text(f"raise AssertionError('{name} was imported')\n")
    return poison


def one_line(done, code=2):
    assert done.returncode == code, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("tfdist: ")]
    assert done.stderr.splitlines() == lines and len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize("step", first(1, [5, 1]))
def test_known_without_tensorflow(step, files, tmp_path):
    """Those of one kind stand together, so that every fifth one has some of each."""
    environ = {"PATH": "/usr/bin:/bin", "TFDIST_TOPOLOGY": str(tmp_path)}  # where there is no driver
    many_commands.refuses("tfdist.train", BAD_INPUT[::step], tmp_path, str(files), **environ)


@pytest.mark.parametrize("environ, message", [
    ({"HOROVOD_RANK": "0"}, "HOROVOD_SIZE"),
    ({"TF_CONFIG": json.dumps({"cluster": {"chief": ["a:1"], "worker": ["b:1"]}})}, "TF_CONFIG"),
])  # fmt: skip
def test_auto_says_what_it_found(environ, message, run, files):
    assert message in one_line(run("tfdist.train", path=str(files), **environ))


@pytest.mark.parametrize("name", first(1, ["torch", "banana"]))
def test_another_backend_of_keras(name, run, files):
    said = f"KERAS_BACKEND makes Keras run on {name}, tfdist needs TensorFlow: unset KERAS_BACKEND"
    assert said in one_line(run("tfdist.train", path=str(files), real=True, KERAS_BACKEND=name))


def functions(tmp_path):
    (tmp_path / "mine.py").write_text(
        """
import numpy as np
def empty(): return np.zeros((0, 8, 8, 1)), np.zeros(0, int)
def wrong(): return np.zeros((5, 8, 8, 1)), np.array([0, 1, -2, 1, 0])
def text(): return "no data"
def none(): pass
def several(): return [np.zeros((6, 8, 8, 1))] * 2, np.arange(6) % 2
def model(spec, units): return 7
def optimizer(learning_rate): return "adam"
"""
    )


WITH_TENSORFLOW = cases("""
--config.data.name=digitz => unknown data.name 'digitz': did you mean 'digits'?
--config.data.name=no.such:function => data.name='no.such:function' cannot be imported: No module named 'no'
--config.data.name=mine:nothing => data.name='mine:nothing': module mine has no function 'nothing'
--config.data.name=mine:empty => the data set is empty: give it at least one example
--config.data.name=mine:wrong => label -2 of example 2 is out of range for the data set with 2 classes (0 to 1)
--config.data.name=mine:text => cannot train on str: give NumPy arrays
--config.data.name=mine:none => no data given (got None): give NumPy arrays
--config.data.name=mine:several --config.data.augment=flip =>
    data.augment is for data whose input is one array of images
--config.data.name=mine:several --config.data.image_size=8 => data.image_size is for data whose input is one array
--config.data.name=mine:empty --config.data.options=a=1 => data.options: mine:empty takes no such arguments
""")
MORE_WITH_TENSORFLOW = cases("""
--config.data.train_split=training => unknown data.train_split 'training': digits has t
--config.data.train_split=train[:0] => data.train_split='train[:0]' of digits is empty
--config.data.options=a=1 => data.options='a=1' is for functions, the TFDS data set 'digits' takes none
--config.data.data_dir=mine.py/x => data.data_dir is not usable
--config.model.options=colour=3 => model.options: tfdist.models.zoo.small:cnn takes no such arguments
--config.model.name=mine:model --config.model.options=units=3 => must return a keras.Model, got int
--config.model.freeze=hed => model.freeze: 'hed' matches no layer with weights: did you mean 'head'?
--config.model.name=gpt => needs sequences, the data has shape [8, 8, 1]
--config.optimizer.options=speed=3 =>
    optimizer.options='speed=3' does not fit sgd: Argument(s) not recognized: {'speed': 3}
--config.optimizer.name=mine:optimizer --config.optimizer.options= --config.optimizer.weight_decay=0 =>
    must return a Keras optimizer, got str
'--config.optimizer.warmup=30 epochs' => optimizer.warmup='30 epochs' is 900 updates of 900: leave some for training
--config.optimizer.schedule=step --config.optimizer.schedule_options=boundaries=soon =>
    boundaries in optimizer.schedule_options='soon' are not understood: write 30% 60% 80%
--config.train.class_weight=11=2.0 => unknown class '11' in train.class_weight: did you mean '1'? Known are 0, 1, 2
--config.train.class_weight=balanced --config.data.name=stdlib_text =>
    train.class_weight='balanced' is for data with one class per example: leave it out
--dry_run --config.data.name=mnist => data set 'mnist' is not in
--dry_run --resume=require => --resume=require, and there is no checkpoint in runs/digits/checkpoints
--dry_run --workdir=mine.py => mine.py is not a folder): choose another folder
--dry_run --config.train.patience=1 --config.train.monitor=val_auc =>
    train.monitor=val_auc is not measured: choose one of accuracy, loss, val_accuracy, val_loss
--config.model.name=ResNet50 =>
    model.name='ResNet50' does not fit the data or model.options: Input size must be at least 32x32; Received:
--config.optimizer.name=mine:optimizer --config.optimizer.learning_rate=0 =>
    optimizer.name='mine:optimizer' has no learning rate by default: set optimizer.learning_rate
--config.optimizer.warmup=soon => optimizer.warmup='soon' is not a duration: write 100 steps, 2 epochs
--config.optimizer.schedule=step '--config.optimizer.schedule_options=boundaries=9 epochs 1 epoch' =>
    boundaries in optimizer.schedule_options are updates 270, 30: they must ascend from the end of the warm-up (60)
    to before the end of the run (900)
--config.optimizer.schedule=exponential '--config.optimizer.schedule_options=factor=0.9, every=0.1 steps' =>
    every in optimizer.schedule_options='0.1 steps' is less than an update: write more
--config.optimizer.decay_exclude=bais =>
    optimizer.decay_exclude: 'bais' matches nothing that is trained: known are conv2d
--profile=880:901 => --profile=880:901 is beyond the run's 900 updates: choose earlier ones
--dry_run '--config.train.class_weight=0=0, 1=0, 2=0, 3=0, 4=0, 5=0, 6=0, 7=0, 8=0, 9=0' => every class the weight 0
--dry_run --config.checkpoint.best=val_auc =>
    checkpoint.best=val_auc is not measured: choose one of accuracy, loss, val_accuracy, val_loss
'--config.eval.every=10 steps' => eval.every='10 steps' is not a whole number of epochs of 30 updates
""")


@pytest.mark.parametrize("table", first(1, [WITH_TENSORFLOW, MORE_WITH_TENSORFLOW]))
def test_known_with_tensorflow(table, run, tmp_path, tfds_dir):
    """In one process for all, which costs one start of TensorFlow instead of twenty."""
    functions(tmp_path)
    (tmp_path / "all.py").write_text(
        """
import json, sys
from absl import flags
from tfdist.config import runtime_options
from tfdist.config.commands import command_line
from tfdist.errors import UserError
from tfdist.train import __main__ as train
runtime_options.define_flags()
for arguments in json.load(open("arguments.json")):
    flags.FLAGS.remove_flag_values([n for n in flags.FLAGS if n.partition(".")[0] == "config"])
    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
    sys.argv = ["train", *arguments]
    try:
        command_line.parse(sys.argv)
        train.train_and_evaluate(flags.FLAGS.config, runtime_options.from_flags(flags.FLAGS))
        print("ERROR none")
    except UserError as error:
        print("ERROR", error)
"""
    )
    (tmp_path / "arguments.json").write_text(json.dumps([a for a, _ in table]))
    done = run("all", path=str(tmp_path))
    said = [line.removeprefix("ERROR ") for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    assert len(said) == len(table), done.stdout + done.stderr
    for line, (_, message) in zip(said, table, strict=True):
        assert message in line


@pytest.mark.whole
def test_a_loss_that_is_not_finite_fails_the_run(run, tmp_path):
    arguments = ["--config.model.name=mlp", "--config.optimizer.learning_rate=1e30", "--config.optimizer.warmup=0%"]
    done = run("tfdist.train", *arguments, "--workdir=out")
    line = one_line(done, code=1)
    assert "tfdist: failed: the loss is nan since update " in line and "try a lower learning rate" in line
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["status"] == "failed" and result["reason"] in line
    assert not (tmp_path / "out" / "model.keras").exists()


@pytest.mark.parametrize("number", first(0, [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_stops_after_the_call_and_saves(number, run, tmp_path):
    process = run(
        "tfdist.train", "--config.model.name=mlp", "--config.train.epochs=100000", "--workdir=out", popen=True
    )
    for line in process.stdout:
        if line.startswith("epoch"):
            os.kill(process.pid, number)
            break
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["status"] == "preempted" and signal.Signals(number).name in result["reason"]
    assert np.isfinite(result["weights_norm"])
    assert (tmp_path / "out" / "model.keras").exists()


@pytest.mark.parametrize("command", first(2, list(COMMANDS)[1:]))
def test_version_and_help(command, run, files):
    """Without TensorFlow, and in a terminal of 80 columns."""
    done = run(f"tfdist.{command}", "--version", path=str(files))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"tfdist {tfdist.__version__}\n", "")
    done = run(f"tfdist.{command}", "--help", path=str(files), COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "") and f"python -m tfdist.{command}" in done.stdout
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []


URLS = ["file:///tmp/run", "hdfs://host:9000/x", "HTTPS://x/y", "az://x/y"]
BUCKETS = ["gs://bucket/run1", "s3://bucket/a b", "memory://bucket/x"]


def on_this_machine_alone(url):
    """What is never in a bucket."""
    return [
        lambda: validation.validate(config.Experiment(model=config.Model(name=url + ".keras"))),
        lambda: validation.validate(config.Experiment(model=config.Model(weights=url + ".h5"))),
        lambda: trained_model.check(trained_model.ModelRequest("", url, "", config.Experiment(), {})),
        lambda: launch.make_plan(*launch.parse([f"--log_dir={url}", "--", "script.py"]), {}),
    ]


def anywhere(url):
    """What may be in a bucket."""
    data = [config.Data(name=f"{kind}:{url}") for kind in config.FILES]
    data += [] if url.startswith("gs:") else [config.Data(data_dir=url)]  # which TFDS reads
    return [
        *(lambda d=d: validation.validate(config.Experiment(data=d)) for d in data),
        lambda: runtime_options.ResumeOptions(workdir=url),
        lambda: trained_model.check(trained_model.ModelRequest(url, "", "", config.Experiment(), {})),
        lambda: tfdist.Checkpoints(url),
    ]


@pytest.mark.parametrize("url", [*URLS, *BUCKETS])
def test_a_url_is_no_path(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for ask in [*on_this_machine_alone(url), *(anywhere(url) if url in URLS else [])]:
        with pytest.raises(UserError) as error:
            ask()
        assert f"={url}" in str(error.value) and f" is a URL ({url.partition(':')[0]}:), and only" in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", BUCKETS)
def test_a_bucket_is_a_place_if_its_package_is_there(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for ask in anywhere(url):
        ask()
    assert not list(tmp_path.iterdir())
    scheme = url.partition(":")[0]
    for rest in ("bucket", "bucket/", "/run", "b//x", "b/../x"):
        bad = f"{scheme}://{rest}"
        for ask in anywhere(bad):
            with pytest.raises(UserError, match=f"={bad} names no folder in a bucket: write {scheme}://bucket/folder"):
                ask()
    for bad in (f"{scheme}://key:secret@bucket/x", f"{scheme}://bucket/x?versionId=1", f"{scheme}://bucket/x#1"):
        for ask in anywhere(bad):
            with pytest.raises(UserError, match="has more than a bucket and a folder: leave out '@'"):
                ask()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    package = {"gs": "gcsfs", "s3": "s3fs", "memory": "fsspec"}[scheme]
    extra = {"gs": r"tfdist\[gcs\]", "s3": r"tfdist\[s3\]", "memory": "fsspec"}[scheme]
    for ask in anywhere(url):
        with pytest.raises(UserError, match=f"needs the package {package}, .*: pip install '{extra}'"):
            ask()


def test_what_is_no_url():
    for path in ("runs/a:b", "C:/x", "a//b", "~/x", "://x", ""):
        runtime_options.ResumeOptions(workdir=path)
    tfdist.Checkpoints(pathlib.Path("runs") / "a")
    experiment = config.Experiment(data=config.Data(data_dir="gs://tfds-data/datasets"))
    validation.validate(experiment)  # TFDS reads it, through TensorFlow


def refused(change, *arguments, **kwargs):
    with pytest.raises(UserError) as error:
        change(*arguments, **kwargs)
    assert "\n" not in str(error.value) and len(str(error.value)) < 250
    return str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "field", ["learning_rate", "weight_decay", "clip_norm", "layer_decay", "ema_momentum", "label_smoothing"]
)
def test_no_number(field, value):
    e = config.Experiment()
    group = "train" if field == "label_smoothing" else "optimizer"
    setattr(getattr(e, group), field, value)
    assert refused(validation.validate, e) == f"{group}.{field} must be a finite number, got {value}"


@pytest.mark.parametrize("field, value, with_, shown", [
    ("train.monitor", "val_accuracy", {"train.patience": 2}, "train.patience"),
    ("train.max_rollbacks", 7, {"train.on_nonfinite": "rollback"}, "train.on_nonfinite=rollback"),
    ("data.resize", "pad", {"data.image_size": "8"}, "data.image_size"),
    ("data.on_error", "skip", {"data.name": "csv:a.csv"}, "files to skip"),
    ("data.data_dir", "/data", {"data.name": "mnist"}, "a TFDS name in data.name"),
    ("checkpoint.keep", 9, {"checkpoint.every": "1 epoch"}, "checkpoint.every"),
])  # fmt: skip
def test_a_field_that_changes_nothing_is_told(field, value, with_, shown):
    e = config.Experiment(data=config.Data(name="synthetic"), checkpoint=config.Checkpoint(every="off"))
    assert not validation.without_effect(e)
    group, name = field.split(".")
    setattr(getattr(e, group), name, value)
    assert validation.without_effect(e) == [f"WARNING: config.{field}={value} changes nothing without {shown}"]
    for other, given in with_.items():
        setattr(getattr(e, other.split(".")[0]), other.split(".")[1], given)
    assert not validation.without_effect(e)


@pytest.mark.parametrize(
    "value, shown",
    [(10**30 - 1, str(10**30 - 1)), (-(10**5000), "one with more than 40 digits")],
    ids=["30 digits", "5000 digits"],
)
@pytest.mark.parametrize("name", ["train.epochs", "eval.batch_size", "checkpoint.keep", "seed", "optimizer.clip_norm"])
def test_too_many(name, value, shown):
    e = config.Experiment()
    group, _, field = name.rpartition(".")
    setattr(getattr(e, group) if group else e, field, value)
    assert refused(validation.validate, e) == f"{name} must be at most 1,000,000,000,000, got {shown}"


@pytest.mark.parametrize(
    "text, name", [("a=1e400", "a"), ("a=-1e999", "a"), ("a=(1, [2.0, 1e400])", "a"), ("b={1: 1e400}", "b")]
)
def test_options_that_are_infinite(text, name):
    assert refused(field_syntax.options, "model.options", text).startswith(f"{name} in model.options must be a finite")


@pytest.mark.parametrize("text", ["a=" + "[" * 5000, "a=" + "-" * 100_000 + "1", "a={[]: 1}"])
def test_options_that_are_too_deep(text):
    with pytest.raises(UserError, match="is not understood: write name=value"):
        field_syntax.options("model.options", text)


@pytest.mark.parametrize("text", ["9" * 400, "9999999999999 epochs", "9" * 400 + " seconds", "9" * 400 + "%"])
def test_durations_beyond_all_counting(text):
    e = config.Experiment()
    e.optimizer.warmup = text.replace("seconds", "steps")
    assert " is more than 1,000,000,000,000: write less" in refused(schedule.make, e, 100, 1)
    if "%" not in text:
        assert " is more than 1,000,000,000,000: write less" in refused(schedule.interval, text)


def test_a_run_of_too_many_updates():
    e = config.Experiment()
    e.train.epochs = 10**12
    assert "are 5,000,000,000,000 updates of 32 examples, more than 1,000," in refused(schedule.make, e, 144, 1)


@pytest.mark.parametrize("field", ["threads", "virtual_devices"])
def test_threads_that_would_take_all_memory(field):
    assert refused(runtime_options.PlacementOptions, **{field: 99_999}) == f"--{field} must be at most 1024, got 99999"
    runtime_options.PlacementOptions(**{field: 1024})


@pytest.mark.parametrize("text", ["0=0, 1=0.0", "no=0, yes=0"])
def test_weights_that_leave_no_class(text):
    arrays = Arrays((np.zeros((4, 1), "float32"), np.array([0, 1, 1, 0])))
    data = Loaded(arrays, arrays, 4, Spec((1,), "float32", 2, 1.0, ("no", "yes")))
    assert refused(objective.class_weights, text, data) == (
        f"train.class_weight={text!r} gives every class the weight 0: leave some to be learned"
    )
    assert objective.class_weights("0=0", data) == {0: 0.0}, "the other one weighs 1"
    assert refused(objective.class_weights, "yes=2, 1=3", data).endswith("two weights for the class '1': write one")
    data = Loaded(arrays, arrays, 4, Spec((1,), "float32", 2, 1.0, ("1", "2")))
    assert objective.class_weights("1=3", data) == {0: 3.0}, "a class of the name, not the second one"
    assert refused(objective.class_weights, "0=2, 1=3", data).startswith("unknown class '0' in train.class_weight")
