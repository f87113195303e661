"""Measures tfdist beside a bare loop, Keras' fit, Keras on JAX and PyTorch where they are installed, and a bare script.

    make bench                                  (or: python benchmarks/bench.py --rounds=5 --workloads=mlp,cnn)
    python benchmarks/bench.py --against=v1.0   beside another commit: exit code 1 where a row is a tenth slower

Every way has a process of its own, with one thread per replica. In each round they train in turn, and every ratio is
the median over rounds of the ratio within a round, since a machine's speed drifts.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
TARGETS = {
    ("mlp", 1): {"bare": 0.85, "keras": 2.5, "torch": 1},
    ("cnn", 1): {"bare": 0.97, "keras": 1.05, "torch": 1},
    ("wide", 1): {"bare": 0.97, "keras": 1.4, "torch": 1},
    ("mlp", 2): {"keras": 1.05, "jax": 1.05, "torch": 1.05},
    ("cnn", 2): {"keras": 1.05, "jax": 1.05, "torch": 1.05},
    ("wide", 2): {"keras": 1.05, "jax": 1.05, "torch": 1.05},
}
NO_SLOWER = 0.9
"""With --against: a ratio below it is a failure."""


class Contestant:
    """A process that trains one workload in one way when it is asked to."""

    def __init__(self, words: list, tree: pathlib.Path = HERE.parent, **environ: str):
        env = os.environ | {"PYTHONPATH": str(tree), "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}
        env |= {"PYTHONWARNINGS": "ignore"} | environ
        self._words = words
        self._process = subprocess.Popen(
            [sys.executable, *map(str, words)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self) -> dict[str, float]:
        print("go", file=self._process.stdin, flush=True)
        said = self._process.stdout.readline()
        return json.loads(said) if said else sys.exit(f"{' '.join(map(str, self._words))} has failed")

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


def ways(workload: str, replicas: int, without: set[str]) -> dict[str, Contestant]:
    """Starts a process for each way that can be measured here."""
    ours = HERE / "contestants.py"
    made = {"tfdist": lambda: Contestant([ours, workload, replicas, "tfdist"])}
    if replicas == 1:
        made["bare"] = lambda: Contestant([ours, workload, 1, "bare"])
    made["keras"] = lambda: Contestant([ours, workload, replicas, "keras"])
    if importlib.util.find_spec("jax"):
        made["jax"] = lambda: Contestant([HERE / "keras_on_jax.py", workload, replicas], KERAS_BACKEND="jax")
    if importlib.util.find_spec("torch"):
        made["torch"] = lambda: Contestant([HERE / "on_torch.py", workload, replicas])
    return {name: start() for name, start in made.items() if name not in without}


def measured(contestants: dict[str, Contestant], rounds: int) -> list[dict[str, dict[str, float]]]:
    """Returns each round's measures by way; the first round, in which things are compiled, does not count."""
    try:
        taken = []
        for number in range(rounds + 1):
            turn = list(contestants) if number % 2 else list(reversed(contestants))
            taken.append({name: contestants[name].measure() for name in turn})
        return taken[1:]
    finally:
        for contestant in contestants.values():
            contestant.end()


def compared(rounds: list[dict], ours: str, theirs: str) -> float:
    """Returns how many times as fast ours is."""
    speed = lambda row, name: row[name]["examples_per_second"]
    return statistics.median(speed(row, ours) / speed(row, theirs) for row in rounds)


def median(rounds: list[dict], name: str, what: str) -> float:
    return statistics.median(row[name][what] for row in rounds)


def start(rounds: int) -> dict[str, list[float]]:
    """Seconds from process start to the first update, of tfdist and the bare script in turn, and of --help."""
    seconds = {"tfdist": [], "script": [], "help": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            options = ["--config.train.epochs=1", "--config.optimizer.warmup=0%", "--progress=none"]
            work = f"{folder}/{number}"
            subprocess.run(
                [sys.executable, "-m", "tfdist.train", *options, f"--workdir={work}"], check=True, capture_output=True
            )
            ours = json.loads(pathlib.Path(work, "result.json").read_text())["seconds_to_first_update"]
            done = subprocess.run(
                [sys.executable, HERE / "first_update.py"], check=True, capture_output=True, text=True
            )
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-m", "tfdist.train", "--help"], capture_output=True)
            if number:  # the first round prepares the data and fills the disk cache
                seconds["tfdist"].append(ours)
                seconds["script"].append(float(done.stdout.split()[-1]))
                seconds["help"].append(time.perf_counter() - begin)
    return seconds


def table(options: argparse.Namespace) -> dict:
    """Measures and prints all rows, and returns what was measured."""
    report = {}
    print(
        f"{'workload':9}{'replicas':>9}  {'tfdist':>12}{'MB':>7}  {'beside':8}{'speed':>12}{'MB':>7}{'ratio':>8}",
        end="",
    )
    print(f"{'target':>8}")
    for replicas in map(int, options.replicas.split(",")):
        for name in options.workloads.split(","):
            rounds = measured(ways(name, replicas, set(options.without.split(","))), options.rounds)
            report[f"{name}/{replicas}"] = rounds
            own = f"{median(rounds, 'tfdist', 'examples_per_second'):12,.0f}{median(rounds, 'tfdist', 'peak_mb'):7,.0f}"
            for other in (way for way in rounds[0] if way != "tfdist"):
                ratio = compared(rounds, "tfdist", other)
                theirs = (
                    f"{median(rounds, other, 'examples_per_second'):12,.0f}{median(rounds, other, 'peak_mb'):7,.0f}"
                )
                target = TARGETS[name, replicas].get(other)
                verdict = "" if target is None else f"{target:8.2f}{'' if ratio >= target else '  missed'}"
                print(f"{name:9}{replicas:9d}  {own}  {other:8}{theirs}{ratio:8.2f}{verdict}", flush=True)
    seconds = report["start"] = start(options.rounds)
    more = statistics.median(a - b for a, b in zip(seconds["tfdist"], seconds["script"]))
    typical = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"first update of digits: {typical['tfdist']:.2f} s, bare script {typical['script']:.2f} s, ", end="")
    print(f"difference {more:+.2f} s (target 0.50); --help {typical['help']:.2f} s (target 0.50)")
    return report


@contextlib.contextmanager
def checked_out(revision: str):
    """A folder with another commit of this repository."""
    git = ["git", "-C", str(HERE.parent)]
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder, "tree")
        done = subprocess.run([*git, "worktree", "add", "--detach", tree, revision], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"--against={revision} cannot be checked out: {done.stderr.strip().splitlines()[-1]}")
        try:
            yield tree
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", tree], check=True)


def against(revision: str, options: argparse.Namespace) -> dict:
    """Measures this tree beside another commit; the report names the rows that are slower."""
    report = {"slower": []}
    with checked_out(revision) as tree:
        for replicas in map(int, options.replicas.split(",")):
            for name in options.workloads.split(","):
                words = [HERE / "contestants.py", name, replicas, "tfdist"]
                both = {"now": Contestant(words), revision: Contestant(words, tree)}
                rounds = report[f"{name}/{replicas}"] = measured(both, options.rounds)
                ratio = compared(rounds, "now", revision)
                verdict = "" if ratio >= NO_SLOWER else "  slower"
                print(f"{name:9}{replicas:9d}  {ratio:.3f} of the speed of {revision}{verdict}", flush=True)
                report["slower"] += [f"{name}/{replicas}"] * bool(verdict)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", default="mlp,cnn,wide")
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--without", default="", help="ways to leave out, such as jax,torch")
    parser.add_argument("--against", default="", help="a commit to compare with, instead of the other ways")
    parser.add_argument("--output", default=str(HERE / "out" / "bench.json"))
    options = parser.parse_args()
    report = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "python": platform.python_version()}
    report |= against(options.against, options) if options.against else table(options)
    pathlib.Path(options.output).parent.mkdir(exist_ok=True)
    pathlib.Path(options.output).write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {options.output}")
    if report.get("slower"):
        sys.exit(f"slower than {options.against} by more than a tenth: {', '.join(report['slower'])}")


if __name__ == "__main__":
    main()
