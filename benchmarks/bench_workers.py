"""Measures two workers against bare loops, PyTorch DDP and legacy Keras; prints a table and writes JSON.

    make bench-workers                  (or: python benchmarks/bench_workers.py --rounds=5 --workloads=mlp,cnn)

In each round groups of two processes train in turn, one way at a time; every ratio is the median over rounds of the
ratio within a round. PyTorch and tf_keras take part where they are installed: pip install torch tf_keras.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time

import workloads

HERE = pathlib.Path(__file__).parent
EPOCHS = 1  # measured at a time, after a first one
TARGETS = {  # (our group, other group, other way): by workload
    ("ring", "ring", "bare"): {"mlp": 0.7, "cnn": 0.97, "wide": 0.97},
    ("ring", "ring", "tf_keras"): {"mlp": 4, "cnn": 1.05, "wide": 1.8},
    ("horovod", "horovod", "bare"): {"mlp": 1.0, "cnn": 1.0, "wide": 1.0},
    ("best", "torch", "ddp"): {"mlp": 2.5, "cnn": 1.2, "wide": 1.1},
    ("multi_worker", "default", "tfdist"): {"cnn": 1.8},
}


class Group:
    """Processes that train together, each connected to this one."""

    def __init__(self, name, workload, python=sys.executable):
        self.name, self.size = name, 1 if name == "default" else 2
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(180)
        command = [
            python,
            str(HERE / "worker.py"),
            name,
            workload,
            str(server.getsockname()[1]),
            str(EPOCHS),
        ]
        env = os.environ | {"PYTHONPATH": str(HERE.parent), "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}
        env["TFDIST_BENCH"] = "tf_keras" if importlib.util.find_spec("tf_keras") else ""
        if name == "horovod":
            launches = [([shutil.which("horovodrun", path=os.path.dirname(sys.executable)), "-np", "2", *command], env)]
        else:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = str(free.getsockname()[1])
            world = {} if self.size == 1 else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
            launches = [(command, env | world | ({"RANK": str(r)} if world else {})) for r in range(self.size)]
        self.log = HERE / "out" / f"{name}.log"
        self.log.parent.mkdir(exist_ok=True)
        with open(self.log, "wb") as log:
            self.processes = [subprocess.Popen(words, env=e, stdout=log, stderr=log) for words, e in launches]
        self.talks = []
        for _ in range(self.size):
            self.talks.append(server.accept()[0].makefile("rw"))
        greetings = [json.loads(talk.readline()) for talk in self.talks]
        self.ways = greetings[0]["ways"]
        self.peak_mb = None
        work = workloads.WORKLOADS[workload]
        batch = work.batch * self.size
        self.examples = work.examples * self.size // batch * batch * EPOCHS

    def speed(self, way):
        """Examples per second of all processes."""
        for talk in self.talks:
            print(way, file=talk, flush=True)
        answers = [json.loads(talk.readline()) for talk in self.talks]
        speed = self.examples / max(answer["seconds"] for answer in answers)
        if self.peak_mb is None:  # of the first way, since memory that was taken once counts for all that follow
            self.peak_mb = sum(answer["peak_mb"] for answer in answers)
        print(f"  {self.name} {way}: {speed:,.0f}", file=sys.stderr, flush=True)
        return speed

    def end(self):
        for talk in self.talks:
            talk.close()
        for process in self.processes:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def stream(size=1 << 28):
    """Bytes per second of a plain TCP stream between two processes' worth of threads on this machine."""
    server = socket.create_server(("127.0.0.1", 0))

    def send():
        with socket.create_connection(server.getsockname()) as out:
            block = bytes(1 << 20)
            for _ in range(size >> 20):
                out.sendall(block)

    threading.Thread(target=send, daemon=True).start()
    incoming, _ = server.accept()
    start, got, buffer = time.perf_counter(), 0, bytearray(1 << 20)
    while count := incoming.recv_into(buffer):
        got += count
    return got / (time.perf_counter() - start)


def measure(workload, rounds, names):
    """Rounds of examples per second by group and way, and the most memory of each group's processes together.

    Groups follow each other and do not wait side by side: Horovod's background threads poll, which takes a share of
    the cores even from a group that does nothing.
    """
    rounds_measured, peaks = [], {}
    for _ in range(rounds):
        speeds = {}
        for name in names:
            group = Group(name, workload)
            try:
                for measured in (False, True):  # the first time compiles
                    for way in group.ways:
                        speed = group.speed(way)
                        if measured:
                            speeds[f"{name} {way}"] = speed
                peaks.setdefault(f"{name} {group.ways[0]}", []).append(group.peak_mb)
            finally:
                group.end()
        rounds_measured.append(speeds)
    return rounds_measured, peaks


def first_update(rounds):
    """Seconds from starting two workers to the later one's first update: launched with tfdist, and bare by hand."""
    script = str(HERE / "first_update_workers.py")
    env = os.environ | {"PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}", "TF_CPP_MIN_LOG_LEVEL": "2"}

    def seconds(commands):
        begin = time.time()
        running = [
            subprocess.Popen(c, env=e, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for c, e in commands
        ]
        lines = [line for p in running for line in p.communicate(timeout=120)[0].splitlines()]
        return max(float(line.split()[-1]) for line in lines if "first update at" in line) - begin

    measured = {"tfdist": [], "bare": []}
    for number in range(rounds + 1):
        addresses = []
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as free:
                addresses.append(f"127.0.0.1:{free.getsockname()[1]}")
        cluster = [{"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}} for i in range(2)]
        bare = [([sys.executable, script, "bare"], env | {"TF_CONFIG": json.dumps(c)}) for c in cluster]
        launch = [sys.executable, "-m", "tfdist.launch", "--nproc_per_node=2", "--", script, "tfdist"]
        took = {"tfdist": seconds([(launch, env)]), "bare": seconds(bare)}
        if number:  # the first round fills the disk cache
            for name in took:
                measured[name].append(took[name])
    return measured


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", default="mlp,cnn,wide")
    parser.add_argument("--output", default=str(HERE / "out" / "bench_workers.json"))
    options = parser.parse_args()
    names = [
        "default",
        "multi_worker",
        "ring",
        "horovod",
        *(["torch"] if importlib.util.find_spec("torch") else []),
    ]
    report = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "python": platform.python_version()}
    for workload in options.workloads.split(","):
        rounds, peaks = measure(workload, options.rounds, names)
        report[workload], report[f"{workload}: peak MB"] = rounds, peaks
        for row in rounds:
            row["best tfdist"] = max(row[f"{name} tfdist"] for name in names if name not in ("default", "torch"))
        for name in rounds[0]:
            memory = f"{statistics.median(peaks[name]):10,.0f} MB" if name in peaks else ""
            print(f"{workload:6}{name:24}{statistics.median(r[name] for r in rounds):12,.0f} examples/s{memory}")
        for (ours, theirs, way), targets in TARGETS.items():
            if workload in targets and f"{theirs} {way}" in rounds[0]:
                ratio = statistics.median(r[f"{ours} tfdist"] / r[f"{theirs} {way}"] for r in rounds)
                verdict = "" if ratio >= targets[workload] else "  missed"
                print(f"{workload:6}{ours} / {theirs} {way}: {ratio:.2f} (target {targets[workload]}){verdict}")
    if "wide" in report:
        # Two workers send each gradient once: half of it to be added, half of the sum back.
        parameters = sum(v.size for v in (w for w in workloads.wide().get_weights()))
        rate = statistics.median(r["ring tfdist"] for r in report["wide"]) / 64 * parameters * 4
        plain = statistics.median(stream() for _ in range(5))
        report["bytes_per_second"] = {"wide": rate, "tcp": plain}
        print(f"wide: {rate / 1e6:,.0f} MB/s of gradients from each worker, a plain TCP stream {plain / 1e6:,.0f} MB/s")
    seconds = report["first_update"] = first_update(options.rounds)
    more = statistics.median(a - b for a, b in zip(seconds["tfdist"], seconds["bare"]))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"first update of two workers: launched {median['tfdist']:.2f} s, bare by hand {median['bare']:.2f} s, ", end=""
    )
    print(f"difference {more:+.2f} s (target 1.00)")
    pathlib.Path(options.output).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
