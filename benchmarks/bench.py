"""Measures tfdist against a bare loop, Keras' fit (on JAX, too, if installed) and a bare script.

    make bench                                  (or: python benchmarks/bench.py --rounds=5 --workloads=mlp,cnn)

Every ratio is the median over rounds in which all ways ran in turn within one process, one thread per replica.
"""

import argparse
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
    ("mlp", 1): {"bare": 0.7, "keras": 2.5},
    ("cnn", 1): {"bare": 0.97, "keras": 1.05},
    ("wide", 1): {"bare": 0.95, "keras": 1.4},
    ("mlp", 2): {"keras": 1.5},
    ("cnn", 2): {"keras": 1.05},
    ("wide", 2): {"keras": 1.2},
}


def throughput(name, replicas, rounds):
    """Rounds of examples per second by way."""
    command = [sys.executable, HERE / "contestants.py", name, str(replicas), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} on {replicas} replicas failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def start(rounds):
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workloads", default="mlp,cnn,wide")
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--output", default=str(HERE / "out" / "bench.json"))
    options = parser.parse_args()
    report = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "python": platform.python_version()}
    print(f"{'workload':9}{'replicas':>9}  {'tfdist':>12}  {'against':8}{'speed':>12}{'ratio':>8}{'target':>8}")
    for replicas in map(int, options.replicas.split(",")):
        for name in options.workloads.split(","):
            rounds = throughput(name, replicas, options.rounds)
            report[f"{name}/{replicas}"] = rounds
            ours = statistics.median(r["tfdist"] for r in rounds)
            for other in (way for way in rounds[0] if way != "tfdist"):
                ratio = statistics.median(r["tfdist"] / r[other] for r in rounds)
                speed = statistics.median(r[other] for r in rounds)
                target = TARGETS[name, replicas].get(other)
                verdict = "" if target is None else f"{target:8.2f}{'' if ratio >= target else '  missed'}"
                print(f"{name:9}{replicas:9d}  {ours:12,.0f}  {other:8}{speed:12,.0f}{ratio:8.2f}{verdict}")
    seconds = start(options.rounds)
    report["start"] = seconds
    more = statistics.median(a - b for a, b in zip(seconds["tfdist"], seconds["script"]))
    median = {k: statistics.median(v) for k, v in seconds.items()}
    print(f"first update of digits: {median['tfdist']:.2f} s, bare script {median['script']:.2f} s, ", end="")
    print(f"difference {more:+.2f} s (target 0.50); --help {median['help']:.2f} s (target 0.50)")
    pathlib.Path(options.output).parent.mkdir(exist_ok=True)
    pathlib.Path(options.output).write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
