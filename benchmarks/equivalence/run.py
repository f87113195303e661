"""Trains one model by every tool on 1 to 4 devices; writes docs/evidence/equivalence.md, its figures and its pictures.

    make equivalence            (or: python benchmarks/equivalence/run.py --tools="tfdist;PyTorch" --epochs=4)

With `--tools`, rows of other tools stay as they were. Each tool is compared with *its own* training on one device, so
nothing counts against a tool that computes otherwise than another. Logs and weights of all runs stay in
benchmarks/out/equivalence. A tool that is not installed is left out.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys

import numpy as np
import problem

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
WORK = ROOT / "benchmarks/out/equivalence"
SECONDS = 600
WORLDS = (1, 2, 3, 4)
BIN, TORCH, JAX, TF_KERAS = (ROOT / name / "bin" for name in (".venv", ".venv-torch", ".venv-jax", ".venv-tf-keras"))
RUN = [BIN / "python", "-m", "tfdist", "run"]
KEEP = ["--checkpoint_every=20 updates"]
"""tfdist's own way of surviving a kill, in place of BackupAndRestore."""


def horovodrun(world: int, command: list) -> list:
    return command if world == 1 else [BIN / "horovodrun", "-np", world, *command]


def torchrun(world: int, script: str, *words: str) -> list:
    command = [script, *words]
    if world == 1:
        return [TORCH / "python", *command]
    return [TORCH / "torchrun", "--standalone", "--nproc_per_node", world, *command]


@dataclasses.dataclass(frozen=True)
class Tool:
    """A way to train: its row's name, and its command on so many devices, once per process if `tf_config`."""

    name: str
    command: object
    color: str | None = None  # in the picture
    tf_config: bool = False
    keeps: str = "BACKUP"  # how it is told where to keep its checkpoints: this variable, or this flag
    remark: str = ""

    def installed(self) -> bool:
        program = pathlib.Path(self.command(2)[0])
        return (program if program.is_absolute() else HERE / program).exists()


FIT = "keras_fit.py"
EXPERT = "what an expert adds: "
TOOLS = (
    Tool(
        "tfdist, mirrored",
        lambda n: [*RUN, *([f"--virtual_devices={n}"] if n > 1 else []), FIT],
        "#0072b2",
        keeps="--workdir",
    ),
    Tool(
        "tfdist, multi_worker", lambda n: [*RUN, *([f"--nproc_per_node={n}"] if n > 1 else []), FIT], keeps="--workdir"
    ),
    Tool("tfdist, Horovod", lambda n: horovodrun(n, [*RUN, FIT]), keeps="--workdir"),
    Tool(
        "tfdist, 12 virtual replicas",
        lambda n: [*RUN, "--virtual_replicas=12", *([f"--virtual_devices={n}"] if n > 1 else []), FIT],
        keeps="--workdir",
        remark="BatchNorm of each virtual replica by itself, on one device too",
    ),
    Tool(
        "Keras, MirroredStrategy",
        lambda n: [BIN / "python", FIT, "mirrored" if n > 1 else "one", n],
        remark="crashes with the optimizer's `gradient_accumulation_steps` (keras issue 20582)",
    ),
    Tool(
        "Keras, MirroredStrategy, no accumulation",
        lambda n: [BIN / "python", FIT, "mirrored" if n > 1 else "one", n, "whole"],
        "#d55e00",
    ),
    Tool(
        "Keras, MirroredStrategy, synchronized BatchNorm",
        lambda n: [BIN / "python", FIT, "mirrored" if n > 1 else "one", n, "whole", "synchronized"],
        "#e69f00",
        remark=EXPERT + "BatchNorm over all replicas",
    ),
    Tool(
        "Keras 3, Horovod's DistributedOptimizer",
        lambda n: horovodrun(n, [BIN / "python", FIT, "horovod"]),
        "#000000",
        remark="rank 0's weights: each rank trains a model of its own",
    ),
    Tool("Keras on JAX, DataParallel", lambda n: [JAX / "python", FIT, "data_parallel", n]),
    Tool(
        "Keras on JAX, DataParallel, whole batches only",
        lambda n: [JAX / "python", FIT, "data_parallel", n, "dropped"],
        "#56b4e9",
        remark=EXPERT + "the last 65 examples are left out, on one device too; 96 divides by 2, 3 and 4",
    ),
    Tool(
        "tf_keras, MultiWorkerMirroredStrategy",
        lambda n: [TF_KERAS / "python", "tf_keras_workers.py"],
        "#cc79a7",
        tf_config=True,
        remark="no accumulation: its optimizers have none",
    ),
    Tool("PyTorch DDP", lambda n: torchrun(n, "torch_ddp.py"), "#009e73"),
    Tool(
        "PyTorch DDP, exact",
        lambda n: torchrun(n, "torch_ddp.py", "exact"),
        "#999999",
        remark=EXPERT + "own BatchNorm over ranks, since SyncBatchNorm refuses CPUs, own sampler, own division",
    ),
    Tool("Accelerate", lambda n: torchrun(n, "torch_accelerate.py")),
    Tool(
        "Lightning",
        lambda n: [TORCH / "python", "torch_lightning.py", n],
        remark="the sampler that it adds for DDP shuffles, as its documentation says, so the order is another",
    ),
    Tool("DeepSpeed, ZeRO 1", lambda n: torchrun(n, "torch_deepspeed.py")),
)


def free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def train(tool: Tool, world: int, out: pathlib.Path, log: pathlib.Path, **env: object) -> str:
    """Trains in a process group, and returns '' or the last line of what went wrong."""
    out.mkdir(parents=True, exist_ok=True)
    environ = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "RANK", "WORLD_SIZE")}
    environ |= {"OUT": str(out), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environ |= {name: str(value) for name, value in env.items()}
    words = [str(word) for word in tool.command(world)]
    if "BACKUP" in environ and tool.keeps != "BACKUP":
        at = words.index("run") + 1
        words[at:at] = [f"{tool.keeps}={environ.pop('BACKUP')}", *KEEP]
    ports = free_ports(world + 1)
    environ["FREE_PORT"] = str(ports[-1])
    launches = [environ]
    if tool.tf_config and world > 1:
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports[:world]]}
        tasks = [{"cluster": cluster, "task": {"type": "worker", "index": i}} for i in range(world)]
        launches = [environ | {"TF_CONFIG": json.dumps(task)} for task in tasks]
    with open(log, "ab") as sink:
        processes = [
            subprocess.Popen(words, cwd=HERE, env=e, stdout=sink, stderr=sink, start_new_session=True) for e in launches
        ]
    try:  # the last rank is the one that is killed: its launcher, or the platform, then ends the others
        codes = (
            [process.wait(SECONDS) for process in reversed(processes)][::-1]
            if "KILL_AT" not in env
            else [processes[-1].wait(SECONDS)]
        )
    except subprocess.TimeoutExpired:
        codes = ["hangs"]
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not any(codes):
        return ""
    lines = [
        line.strip()
        for line in log.read_text(errors="replace").splitlines()
        if re.match(r"\S*(Error|error)\b.*:", line)
    ]
    return "hangs" if codes == ["hangs"] else (lines or [f"exit code {codes}"])[-1]


def weights(out: pathlib.Path, epoch: int) -> list[np.ndarray]:
    with np.load(out / f"epoch-{epoch}.npz") as arrays:
        return [arrays[name].astype("float64") for name in arrays.files]


def distance(out: pathlib.Path, reference: pathlib.Path, epoch: int) -> float:
    """Returns the largest relative distance of one weight array, |a - b| / |b| in the Euclidean norm."""
    pairs = zip(weights(out, epoch), weights(reference, epoch), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def epochs_to(accuracy: float, out: pathlib.Path, seed: int, epochs: int) -> int | None:
    x, y = problem.data(seed)
    reached = (e for e in range(1, epochs + 1) if problem.judge(weights(out, e), x, y)[1] >= accuracy)
    return next(reached, None)


NOTABLE = re.compile(r"uneven|divi[sd]|duplicat|pad|sync|batch.?norm|clip|differ|agree|checked|shard", re.I)
NOISE = re.compile(r"Error|Traceback|cuda|onednn|rebuild tensorflow|disable_caching|deprecat|find_unused", re.I)


def said(log: pathlib.Path, alone: pathlib.Path) -> list[str]:
    """Returns the lines about what may differ that a tool printed on two devices and not on one."""

    def plain(text: str) -> str:
        return re.sub(r"[\d.:\[\]-]+", "#", text.strip())

    before = {plain(line) for line in alone.read_text(errors="replace").splitlines()}
    lines = {plain(line): line.strip() for line in log.read_text(errors="replace").splitlines()}
    return [
        line[:160]
        for key, line in lines.items()
        if key not in before and NOTABLE.search(line) and not NOISE.search(line)
    ]


def measure(tool: Tool, epochs: int) -> dict:
    """Returns the row of a tool; a key that is missing was not reached."""
    name = re.sub(r"\W+", "-", tool.name)
    folder, row = WORK / name, {"name": tool.name, "remark": tool.remark, "distance": {}, "failed": {}, "by_epoch": {}}
    shutil.rmtree(folder, ignore_errors=True)

    def run(label, world, **env):
        out = folder / label
        failure = train(tool, world, out, folder / f"{label}.log", EPOCHS=epochs, **env)
        if failure and "KILL_AT" not in env:
            row["failed"][label] = failure
        return out

    folder.mkdir(parents=True)
    runs = {n: run(f"world-{n}", n) for n in WORLDS}
    for n in WORLDS[1:]:
        if f"world-{n}" not in row["failed"]:
            row["by_epoch"][n] = [distance(runs[n], runs[1], e) for e in range(1, epochs + 1)]
            row["distance"][n] = row["by_epoch"][n][-1]
    if "world-1" in row["failed"] or "world-2" in row["failed"]:
        return row
    row["said"] = said(folder / "world-2.log", folder / "world-1.log")
    row["loss"] = {n: problem.judge(weights(runs[n], epochs))[0] for n in (1, 2)}
    plain = [run(f"plain-{n}", n, NORM="layer", EXAMPLES=4032) for n in (1, 2)]
    if not {"plain-1", "plain-2"} & row["failed"].keys():
        row["plain"] = distance(plain[1], plain[0], epochs)
    for label, then in (("kill", 2), ("other", 1)):
        env = {"BACKUP": folder / f"{label}-backup"}
        run(label, 2, KILL_AT=epochs // 2 + 1, **env)
        out = run(label, then, **env)
        if label not in row["failed"]:
            row[label] = distance(out, runs[then], epochs)
    reached = {1: [], 2: []}
    for n in (1, 2):
        for seed in (0, 1, 2):
            out = runs[n] if seed == 0 else run(f"seed-{seed}-{n}", n, SEED=seed)
            reached[n].append(epochs_to(0.98, out, seed, epochs))
    row["epochs_to_98"] = reached
    return row


def figure(value: float | None) -> str:
    if value is None:
        return "—"
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-") if value < 1e-3 else f"{value:.3f}"


def table(rows: list[dict]) -> str:
    columns = ("2 devices", "3", "4", "LayerNorm, full batches: 2", "killed, same 2", "killed, resumed on 1")
    columns = ("tool", *columns, "loss on 1, 2", "epochs to 98 % on 1, 2", "reported")
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "--:|" * (len(columns) - 2) + "---|"]
    for i, row in enumerate(rows, 1):
        distances = [figure(row["distance"].get(str(n))) for n in WORLDS[1:]]
        rest = [figure(row.get(key)) for key in ("plain", "kill", "other")]
        loss = ", ".join(f"{value:.6f}" for value in row.get("loss", {}).values()) or "—"
        reached = row.get("epochs_to_98", {})
        median = ", ".join(str(int(statistics.median(v))) if None not in v else "not reached" for v in reached.values())
        reported = "yes" if row.get("said") else "error" if "loss" not in row else "no"
        lines.append(
            f"| {row['name']} [{i}](#notes) | " + " | ".join([*distances, *rest, loss, median or "—", reported]) + " |"
        )
    return "\n".join(lines)


def clean(text: str) -> str:
    """Takes what belongs to this machine out of a line."""
    return re.sub(r"/\S*/", "…/", text.replace(str(ROOT), ".")).replace("|", "\\|")


def notes(rows: list[dict]) -> str:
    lines = []
    for i, row in enumerate(rows, 1):
        parts = [row["remark"]] if row["remark"] else []
        for label, failure in row["failed"].items():
            parts.append(f"{label}: `{clean(failure)[:140]}`")
        parts += [f"reported: `{clean(line)}`" for line in row.get("said", [])[:2]]
        lines.append(f"{i}. **{row['name']}**: " + "; ".join(parts or ["nothing reported"]) + ".")
    return "\n".join(lines)


def picture(rows: list[dict], path: pathlib.Path, dark: bool) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    ink = "#e6e6e6" if dark else "#1a1a1a"
    colors = {tool.name: tool.color for tool in TOOLS}
    with pyplot.rc_context(
        {"svg.hashsalt": "tfdist", "font.size": 10}
        | dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink)
    ):
        drawn, axes = pyplot.subplots(figsize=(8.4, 4.2))
        lines = [
            (row, [max(d, 1e-9) for d in row["by_epoch"]["2"]])
            for row in rows
            if "2" in row["by_epoch"] and colors[row["name"]]
        ]
        for row, values in lines:
            color = "#e6e6e6" if dark and colors[row["name"]] == "#000000" else colors[row["name"]]
            updates = [21 * (e + 1) for e in range(len(values))]
            axes.plot(
                updates, values, color=color, linewidth=2.5 if "tfdist" in row["name"] else 1.5, label=row["name"]
            )
        axes.set(
            yscale="log",
            ylim=(1e-8, 10),
            xlabel="updates",
            ylabel="distance of the weights\nfrom the same tool on one device",
        )
        axes.grid(axis="y", alpha=0.2)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
        drawn.savefig(path, bbox_inches="tight", transparent=True, metadata={"Date": None})
        pyplot.close(drawn)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default="", help="only tools whose names begin so, between semicolons")
    parser.add_argument("--epochs", type=int, default=problem.EPOCHS)
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs/evidence")
    parser.add_argument("--parallel", type=int, default=2, help="tools at a time")
    options = parser.parse_args()
    chosen = [tool for tool in TOOLS if not options.tools or tool.name.startswith(tuple(options.tools.split(";")))]
    chosen = [tool for tool in chosen if tool.installed()]
    with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
        rows = []
        for row in pool.map(lambda tool: measure(tool, options.epochs), chosen):
            rows.append(row)
            print(row["name"], row["distance"], row["failed"], file=sys.stderr, flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    record = options.output / "equivalence.json"
    known = {row["name"]: row for row in json.loads(record.read_text())} if record.exists() else {}
    known |= {row["name"]: row for row in json.loads(json.dumps(rows))}  # with the keys that JSON makes
    rows = [known[tool.name] for tool in TOOLS if tool.name in known]
    missing = [tool.name for tool in TOOLS if tool.name not in known]
    record.write_text(json.dumps(rows, indent=1) + "\n")
    for name, dark in (("light", False), ("dark", True)):
        picture(rows, options.output / f"equivalence-{name}.svg", dark)
    page = (HERE / "page.md").read_text()
    page = (
        page.replace("TABLE", table(rows))
        .replace("NOTES", notes(rows))
        .replace("MISSING", ", ".join(missing) or "none")
    )
    (options.output / "equivalence.md").write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
