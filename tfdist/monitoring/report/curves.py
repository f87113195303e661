"""The charts of a report: loss and metrics, speed, and load of the devices."""

from tfdist.monitoring.report.html import Html, tag
from tfdist.monitoring.report.line_chart import Line, Mark, plot, value
from tfdist.monitoring.report.run_files import Record, mapping, number, sequence

NO_METRICS = {"epoch", "updates", "seconds", "examples_per_second", "time", "learning_rate", "gradient_norm"}
WORDS = {"input": "waiting for input", "all_reduce": "all-reduce", "python": "Python", "compute": "computing"}
SHARES = ("input", "all_reduce", "python")
_TIMES = ((3 * 3600, 3600, "hours"), (180, 60, "minutes"), (0, 1, "seconds"))


def learning(record: Record) -> Html:
    """Draws loss, metrics, learning rate and gradient norm over updates."""
    epochs, samples = _latest(record.epochs), _latest(record.samples)
    names = {name.removeprefix("val_") for line in epochs for name in line if name not in NO_METRICS}
    if not epochs:
        names = {"loss"} if samples else set()
    marks = [mark for mark in _marks(record, "updates") if mark.kind != "checkpoint"]
    charts = []
    for name in sorted(names, key=lambda name: (name != "loss", name)):
        within = curve("within epochs", samples, name)._replace(faint=True)
        training, validation = curve("training", epochs, name), curve("validation", epochs, f"val_{name}", color=2)
        lines = [training, validation, within] if training.known else [within, training, validation]
        odd = [f"{line['epoch']:.0f}" for line in epochs if None in (line.get(name, 0), line.get(f"val_{name}", 0))]
        note = f"Not finite at the end of epoch {', '.join(odd[:8])}{', ...' * (len(odd) > 8)}." if odd else ""
        charts.append(plot(title(name), lines, marks=marks, note=note, text=value))
    rate = curve("rate", samples or epochs, "learning_rate")
    charts.append(plot("Learning rate", [rate], from_zero=True, marks=marks))
    charts.append(plot("Gradient norm", [curve("norm", samples or epochs, "gradient_norm")], marks=marks))
    return tag("div", *charts, class_="charts") if any(charts) else tag("p", "Nothing was recorded.", class_="note")


def speed(record: Record) -> Html:
    """Draws throughput, shares of time and devices over time, with checkpoints and restarts."""
    samples = [s for s in record.samples if number(s.get("seconds")) is not None]
    lines = samples or [e for e in record.epochs if number(e.get("seconds")) is not None]
    if not lines:
        return tag("p", "Nothing was recorded.", class_="note")
    last = max(number(line["seconds"]) or 0 for line in lines)
    _, unit, across = next(row for row in _TIMES if last >= row[0])
    marks = _marks(record, "seconds", unit)
    over_time = lambda name, key, scale=1.0: [curve(name, lines, key, x="seconds", over=unit, scale=scale)]
    charts = [plot("Throughput", over_time("rate", "examples_per_second"), across, "examples/s", True, marks=marks)]
    # A sample without a rate saw nothing but compilation, and the first with one what follows it in Python.
    rated = {i for i, s in enumerate(samples) if number(s.get("examples_per_second"))}
    steady = [s if i in rated and i > min(rated) else s | dict.fromkeys(SHARES) for i, s in enumerate(samples)]
    shares = [curve(WORDS[key], steady, key, i + 2, x="seconds", over=unit, scale=0.01) for i, key in enumerate(SHARES)]
    charts.append(plot("Time not spent computing", shares, across, "%", True))
    cores = number(record.environment.get("cpus"))
    charts.append(plot("CPU", over_time("busy", "cpu"), across, f"cores of {cores:.0f}" if cores else "cores", True))
    charts.append(plot("Memory of this process", over_time("resident", "memory", 2**30), across, "GiB", True))
    charts.append(plot("GPU load", _gpu_lines(samples, "load", unit, 0.01), across, "%", True))
    used = _gpu_lines(samples, "memory_used", unit, 1024.0)
    total = max((number(g.get("memory_total")) or 0 for s in samples for g in _gpus(s)), default=0)
    charts.append(plot("GPU memory", used, across, f"GiB of {total / 1024:.0f}" if total else "GiB", True))
    return tag("div", *charts, class_="charts")


def title(name: str) -> str:
    """Returns a metric's name as a heading."""
    return (name[:1].upper() + name[1:]).replace("_", " ")


def _latest(lines: list[dict]) -> list[dict]:
    """Returns the lines in order of updates, without those that a rollback has undone."""
    kept: list[dict] = []
    for line in reversed(lines):
        update = number(line.get("updates"))
        if update is not None and (not kept or update < kept[-1]["updates"]):
            kept.append(line)
    return kept[::-1]


def _marks(record: Record, x: str, over: float = 1.0) -> list[Mark]:
    return [Mark(at / over, str(m["mark"])) for m in record.marks if (at := number(m.get(x))) is not None]


def curve(
    name: str, lines: list[dict], key: str, color: int = 1, x: str = "updates", over: float = 1.0, scale: float = 1.0
) -> Line:
    lines = [line for line in lines if key in line]
    ys = [None if (y := number(line[key])) is None else y / scale for line in lines]
    return Line(name, [(number(line[x]) or 0) / over for line in lines], ys, color)


def _gpus(sample: dict) -> list[dict]:
    return [mapping(g) for g in sequence(sample.get("gpus"))]


def _gpu_lines(samples: list[dict], key: str, unit: float, scale: float) -> list[Line]:
    xs = [(number(s["seconds"]) or 0) / unit for s in samples]
    tables = [{g.get("number"): number(g.get(key)) for g in _gpus(s)} for s in samples]
    gpus = list(dict.fromkeys(gpu for row in tables for gpu in row))
    rows = [[None if (y := row.get(gpu)) is None else y / scale for gpu in gpus] for row in tables]
    return [Line(f"GPU {gpu}", xs, [row[i] for row in rows], i % 6 + 1) for i, gpu in enumerate(gpus)]
