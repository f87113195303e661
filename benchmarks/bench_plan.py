"""Compares what `python -m tfdist.plan` predicts with what trainings over slow links take. Needs root.

    python benchmarks/bench_plan.py --cells=1,4

A host is a network namespace of this machine, so hosts share its cores: the cost of computing is measured with as many
processes at a time as there will be workers, and what processors do with messages is scaled by the same share. The
links are predicted with as ping and a plain stream see them, since a relay takes longer than the latency asked of it.
For each cell a table has that bandwidth in Gbit/s and latency in milliseconds, the seconds of an update as predicted
and as measured, and the ratio; a picture shows all of them.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import slow_links

from tfdist import config
from tfdist.plan import exchange, pair, quantities
from tfdist.plan.cost import PAYLOAD, Compute, Epoch, Job, Machines, MessageWork, NetworkLink

HERE = pathlib.Path(__file__).parent
SECONDS = 3.0
"""For how long computing is measured with each batch size."""
EXPERIMENTS = {
    "mlp": {"model.name": "mlp", "model.options": "units=128", "train.batch_size": 96},
    "conv": {"model.name": "conv_bn", "model.options": "", "train.batch_size": 96},
    "wide": {"model.name": "mlp", "model.options": "units=2048, depth=4", "train.batch_size": 288},
}
"""All of them on digits, with Adam; *wide* has 12.7 M parameters, *conv* six synchronized BatchNorms."""
CELLS = [  # experiment, workers, link, latency
    ("wide", 2, "0.1Gbit", "0ms"),
    ("wide", 2, "1Gbit", "0ms"),
    ("wide", 2, "10Gbit", "0ms"),
    ("wide", 2, "1Gbit", "5ms"),
    ("mlp", 2, "0.1Gbit", "0.1ms"),
    ("mlp", 2, "1Gbit", "20ms"),
    ("mlp", 3, "1Gbit", "5ms"),
    ("conv", 2, "1Gbit", "1ms"),
    ("conv", 2, "0.1Gbit", "5ms"),
    ("conv", 3, "1Gbit", "20ms"),
    ("mlp", 4, "10Gbit", "0ms"),
    ("wide", 4, "0.1Gbit", "0ms"),
]
WITHIN = 0.15


def experiment(name: str) -> config.Experiment:
    made = config.Experiment(name=name)
    for field, value in EXPERIMENTS[name].items():
        group, last = field.split(".")
        setattr(getattr(made, group), last, value)
    return made


def computing(name: str) -> None:
    """Prints what computing costs in this process, and what an update sends."""
    from tfdist.distributed import collectives, connect

    distribution = connect.connect("default", devices="none", threads=1)
    from tfdist.plan.workload import Workload, measured_compute

    wanted = experiment(name)
    workload = Workload(wanted, distribution)
    compute, _ = measured_compute(workload, wanted, SECONDS)
    job = workload.job("float32", collectives.BUCKET_BYTES)
    print(json.dumps({"compute": dataclasses.asdict(compute), "job": dataclasses.asdict(job)}), flush=True)


def measured_computing(name: str, workers: int) -> tuple[Compute, Job]:
    """Returns the mean cost over so many processes that compute at the same time."""
    words = [sys.executable, __file__, f"--computing={name}"]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ()) for _ in range(workers)]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
    mean = {key: statistics.mean(one["compute"][key] for one in found) for key in found[0]["compute"]}
    job = {key: tuple(value) if isinstance(value, list) else value for key, value in found[0]["job"].items()}
    return Compute(**mean), Job(**{**job, "epoch": Epoch(**job["epoch"])})


def environ() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(HERE.parent), "TF_CPP_MIN_LOG_LEVEL": "2"}


def trained(name: str, workers: int, link: NetworkLink, seconds: float) -> float:
    """Trains on so many hosts for some epochs and returns the seconds of an update."""
    per_epoch = -(-1437 // EXPERIMENTS[name]["train.batch_size"])
    epochs = 2 + max(2, round(10 / (seconds * per_epoch)))
    flags = [f"--config.{field}={value}" for field, value in EXPERIMENTS[name].items()]
    flags += [f"--config.train.epochs={epochs}", "--config.checkpoint.every=1000 epochs"]
    flags += ["--strategy=multi_worker", "--threads=1", "--progress=none", "--notensorboard", "--workdir=run"]
    flags += ["--check_agreement=off"]
    with (
        tempfile.TemporaryDirectory() as folder,
        slow_links.hosts(workers, link.bits_per_second, link.latency) as where,
    ):
        running = []
        for rank, host in enumerate(where):
            cluster = {"worker": [f"{slow_links.address(host)}:23456" for host in range(workers)]}
            told = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})}
            words = [*host, sys.executable, "-m", "tfdist.train", *flags]
            with open(pathlib.Path(folder, f"{rank}.log"), "wb") as log:
                given = environ() | told | {"TFDIST_SECRET": "of this benchmark"}
                running.append(subprocess.Popen(words, cwd=folder, env=given, stdout=log, stderr=log))
        codes = [process.wait() for process in running]
        if any(codes):
            sys.exit(pathlib.Path(folder, "0.log").read_text()[-2000:])
        result = json.loads(pathlib.Path(folder, "run", "result.json").read_text())
    return 1437 / per_epoch / result["examples_per_second"]


def seen(link: NetworkLink) -> NetworkLink:
    """Returns a link as ping and a plain stream between two such hosts see it, with whatever makes it here."""
    with slow_links.hosts(2, link.bits_per_second, link.latency) as where:
        measured = slow_links.measured(where, int(link.bits_per_second / 8))
    return NetworkLink(8 * measured.bytes_per_second / PAYLOAD, measured.latency)


def draw(path: pathlib.Path, rows: list[dict]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot()
    ends = [min(min(r["predicted"], r["measured"]) for r in rows) / 1.5]
    ends += [max(max(r["predicted"], r["measured"]) for r in rows) * 1.5]
    axes.fill_between(ends, [e * (1 - WITHIN) for e in ends], [e * (1 + WITHIN) for e in ends], alpha=0.2)
    for name in EXPERIMENTS:
        own = [r for r in rows if r["experiment"] == name]
        axes.plot([r["measured"] for r in own], [r["predicted"] for r in own], "o", label=name)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    axes.set(xlabel="seconds of an update, measured", ylabel="predicted (the band is 15 % to either side)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="", help="numbers of cells; all of them if empty")
    parser.add_argument("--output", default=str(HERE / "out" / "plan"))
    parser.add_argument("--computing", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.computing:
        return computing(options.computing)
    alone = exchange.measure(1, ("float32",))["float32"]
    costs: dict[tuple[str, int], tuple[Compute, Job]] = {}
    waiting: dict[str, float] = {}
    rows = []
    chosen = [CELLS[int(number) - 1] for number in options.cells.split(",")] if options.cells else CELLS
    for name, workers, link, latency in chosen:
        if (name, workers) not in costs:
            costs[name, workers] = measured_computing(name, workers)
        compute, job = costs[name, workers]
        share = max(1.0, workers / len(os.sched_getaffinity(0)))
        work = MessageWork(alone.step_seconds * share, alone.byte_seconds * share)
        nominal = NetworkLink(quantities.bits_per_second(link), quantities.latency_seconds(latency))
        between = seen(nominal)
        if name not in waiting:
            local = Machines(between, {"float32": alone}, compute)
            waiting[name] = pair.sum_seconds(experiment(name), local, job, 1, SECONDS, "ring")
        machines = Machines(between, {"float32": work}, compute, sum_seconds=waiting[name] * share)
        predicted = machines.predict(job, workers)
        measured = trained(name, workers, nominal, predicted.seconds)
        ratio = predicted.seconds / measured
        rows.append(
            {"experiment": name, "workers": workers, "link": link, "latency": latency}
            | {"seen": dataclasses.asdict(between)}
            | {"predicted": predicted.seconds, "measured": measured, "parts": predicted.parts}
        )
        verdict = "" if abs(ratio - 1) <= WITHIN else "  missed"
        told = f"{between.bits_per_second / 1e9:7.3f}{1000 * between.latency:8.3f}"
        print(f"{name:6}{workers:3}{link:>9}{latency:>7}{told}{predicted.seconds:10.4f}", end="")
        print(
            f"{measured:10.4f}{ratio:7.2f}{verdict}  { ({k: round(v, 4) for k, v in predicted.parts.items()}) }",
            flush=True,
        )
    pathlib.Path(options.output).parent.mkdir(exist_ok=True)
    pathlib.Path(f"{options.output}.json").write_text(json.dumps(rows, indent=2) + "\n")
    draw(pathlib.Path(f"{options.output}.png"), rows)
    good = sum(abs(row["predicted"] / row["measured"] - 1) <= WITHIN for row in rows)
    print(f"{good} of {len(rows)} within {WITHIN:.0%}: {options.output}.json, {options.output}.png")


if __name__ == "__main__":
    main()
