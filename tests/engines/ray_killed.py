"""`examples/ray_train.py` on one worker, and on two, of which one is killed once; writes what each has gone through."""

import os
import pathlib
import signal

import ray
import ray_train

import tfdist

KILLED_AT = 15


def train_killed(config):
    """Trains as the example does, with a callback that notes all updates, and kills rank 1 on its first start."""
    fit = tfdist.fit

    def observed(*args, callbacks, **options):
        import keras

        rank = ray.train.get_context().get_world_rank()
        notes = pathlib.Path(config["checkpoints"]).with_name(f"rank{rank}.txt")
        begun = notes.exists()

        class Notes(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                update = int(self.model.optimizer.iterations)
                with notes.open("a") as file:
                    file.write(f"{os.getpid()} {update} {os.environ['TFDIST_SECRET']}\n")
                if rank == 1 and update == KILLED_AT and not begun:
                    os.kill(os.getpid(), signal.SIGKILL)

        return fit(*args, callbacks=[*callbacks, Notes()], **options)

    tfdist.fit = observed
    ray_train.train(config)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    for workers in (1, 2):
        result = ray_train.trainer(workers, f"on{workers}", "4 steps", train_killed).fit()
        pathlib.Path(f"on{workers}.txt").write_text(f"{result.metrics['loss']:.9g} {result.checkpoint.path}")
