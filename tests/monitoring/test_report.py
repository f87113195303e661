"""The report of a run, as a file and as a browser shows it."""

import contextlib
import dataclasses
import html
import json
import math
import os
import pathlib
import re
import shutil
import sys

import numpy as np
import pytest
from conftest import REPOSITORY
from support import processes, shipped

from tfdist.checkpoints import run_folder
from tfdist.monitoring.report import line_chart, run_files
from tfdist.monitoring.report import page as page_lib

PHONE, LAPTOP = {"width": 390, "height": 844}, {"width": 1366, "height": 768}
NASTY = "<script>document.title='taken'</script><img src=http://example.org/x onerror=1>\"'&"


def put(folder, name, content):
    folder.mkdir(parents=True, exist_ok=True)
    lines = content if isinstance(content, list) else [content]
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def experiment(**fields):
    """The default one with some fields changed, by their names on the command line."""
    found = dataclasses.asdict(shipped.digits())
    for name, value in fields.items():
        *path, last = name.split(".")
        (found[path[0]] if path else found)[last] = value
    return found


RESULT = json.loads("""{
  "status": "completed", "reason": "", "strategy": "mirrored", "replicas": 2, "workers": 1, "global_batch": 48,
  "updates": 120, "epochs": 4, "examples_seen": 5748, "seconds": 61.5, "seconds_to_first_update": 4.2,
  "examples_per_second": 1234.5, "history": {}, "evaluation": {"loss": 0.1234, "accuracy": 0.98}, "rollbacks": [],
  "resumed_from": null, "restarts": 0, "versions": {"tfdist": "0.1.0"},
  "weights_sha256": "abababababababababababababababababababababababababababababababab",
  "time": {"input": 21.0, "compute": 33.0, "all_reduce": 4.0, "python": 2.0}, "peak_memory_bytes": 812345678,
  "peak_device_memory_bytes": null, "flops_per_second": 3.1e12, "flops_share": 0.314
}""")
EPOCH = "epoch updates seconds examples_per_second loss val_loss accuracy learning_rate gradient_norm"
SAMPLE = "updates seconds loss learning_rate gradient_norm examples_per_second input all_reduce python cpu memory gpus"


def ran(folder, result=RESULT, **fields):
    """A run folder with an experiment and a result."""
    put(folder, "experiment.json", experiment(**fields))
    put(folder, "result.json", result)
    return folder


def full(folder, samples=3000, **result):
    """A run folder with everything in it; more samples than are drawn."""
    ran(folder, RESULT | result, **{"optimizer.learning_rate": 0.01})
    where = {"strategy": "mirrored", "reason": "2 GPUs here", "replicas": 2, "workers": 1, "cpus": 8}
    put(folder, "environment.json", where)
    rows = [(i, 30 * i, 15.0 * i, 1200.0 + i, 2 / i, 2.5 / i, 1 - 0.5 / i, 0.01 / i, 1 / i) for i in range(1, 5)]
    epochs = [dict(zip(EPOCH.split(), row)) for row in rows]
    put(folder, "history.jsonl", [*epochs, {"evaluation": RESULT["evaluation"], "updates": 120}])
    gpus = [{"number": g, "load": 0.5 + g / 10, "memory_used": 9000, "memory_total": 81920} for g in (0, 3)]
    rest = (0.01, 1.5, 1200.0, 0.35, None, 0.03, 6.5, 700_000_000, gpus)
    rows = [(i * 120 / samples, i * 60 / samples, 2 + math.sin(i), *rest) for i in range(samples)]
    marks = [{"updates": 60, "seconds": 30.0, "mark": mark} for mark in ("checkpoint", "resumed", "rollback")]
    put(folder, "timeline.jsonl", [*(dict(zip(SAMPLE.split(), row)) for row in rows), *marks])
    return folder


def render(folder, result=None):
    page = page_lib.render(folder, result)
    assert "could not be made" not in page, re.search("This part could not.{200}", page)
    return page


# -- what stands in it ------------------------------------------------------


def text_of(page):
    return html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.S)))


def test_all_sections_and_the_key_figures(tmp_path):
    page = render(full(tmp_path / "a", samples=30))
    text = " ".join(text_of(page).split())
    for heading in ("Where the time went", "Learning", "Speed and devices", "Experiment"):
        assert f"<h2>{heading}</h2>" in page
    for title in ("Loss", "Accuracy", "Learning rate", "Gradient norm", "Throughput", "GPU load", "GPU memory", "CPU"):
        assert f"<b>{title}</b>" in page
    for said in (
        "digits completed", "120 updates of 48 examples on 2 replicas · 4 of 30 epochs", "because 2 GPUs here",
        "Loss 0.1234", "Accuracy 0.9800", "Time 61.5 s", "Examples/s 1,234 steady state", "Replicas 2 on 1 worker",
        "Peak memory 812.3 MB", "31.4 % of the peak (MFU)", "waiting for input 35.0 %", "35 % waiting for input",
        "data.cache=memory", "optimizer.learning_rate 0.01 0.0", "resumed", "rollback",
    ):  # fmt: skip
        assert said in text, said


def test_what_happened_to_a_run(tmp_path):
    result = RESULT | {
        "status": "failed",
        "reason": "lost worker 1 (h2): its process ended",
        "resumed_from": 1440,
        "restarts": 2,
        "rollbacks": [{"to": 600, "skipped": [610, 611]}],
    }
    text = text_of(render(full(tmp_path, samples=3), result))
    for said in ("failed", "lost worker 1 (h2)", "Resumed from update 1,440.", "launcher 2 times", "left out 610, 611"):
        assert said in text
    notes = [{"rollback": {"to": 0, "skipped": list(range(n))}, "updates": 0} for n in (2, 20)]
    put(tmp_path, "history.jsonl", notes)
    text = text_of(render(tmp_path, result))
    assert "update 0 and left out 0, 1." in text and "10, 11 and 8 more." in text and "610" not in text


def test_a_value_that_is_not_finite_is_a_gap_and_is_said(tmp_path):
    folder = full(tmp_path, samples=3)
    line = lambda i, loss: {"epoch": i, "updates": 30 * i, "seconds": i, "loss": loss}
    put(folder, "history.jsonl", [line(1, 1.0), line(2, 0.9), line(3, None), line(4, 0.8), line(5, 0.7)])
    page = render(folder)
    assert "Not finite at the end of epoch 3." in page
    loss = page[page.index("<b>Loss</b>") : page.index("<b>Learning rate</b>")]
    assert len(re.findall(r'<polyline points="[^"]*" class="line c1"/>', loss)) == 2, "the gap is bridged"


def test_nothing_in_a_file_becomes_markup(tmp_path):
    folder = full(tmp_path / "run")
    put(folder, "experiment.json", experiment(name=NASTY, **{"model.name": NASTY}) | {NASTY: NASTY})
    strange = {"strategy": NASTY, "reason": NASTY, "host": NASTY, "hosts": [NASTY, NASTY], "flags": {NASTY: NASTY}}
    strange |= {"devices": [NASTY], "gpus": [{"name": NASTY}], "versions": {NASTY: NASTY}}
    put(folder, "environment.json", strange)
    put(folder, "history.jsonl", [{"epoch": 1, "updates": 3, "seconds": 2, NASTY: 0.5, "loss": 1.0}])
    gpus = [{"number": NASTY, "load": 1}]
    put(folder, "timeline.jsonl", [{"updates": 1, "seconds": 1} | more for more in ({"gpus": gpus}, {"mark": NASTY})])
    strange = {"status": NASTY, "reason": NASTY, "rollbacks": [{"to": NASTY, "skipped": [NASTY]}]}
    put(folder, "result.json", RESULT | strange | {"evaluation": {NASTY: 0.5}})
    page = render(folder)
    assert page.count("<script") == 1 and "<img" not in page


# -- charts -----------------------------------------------------------------


def test_a_thinned_curve_keeps_its_extremes():
    rng = np.random.default_rng(0)
    ys = rng.normal(size=20_000).tolist()
    ys[7777], ys[13_000], ys[15_000] = 50.0, -50.0, None
    kept = line_chart.thin(range(20_000), ys)
    assert len(kept) <= line_chart.POINTS + 1
    assert {(7777, 50.0), (13_000, -50.0), (15_000, None), (19_999, ys[-1])} <= set(kept)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert line_chart.thin([1, 2], [3, None]) == [(1, 3), (2, None)]


def test_what_a_rollback_has_undone_is_not_drawn(tmp_path):
    samples = [{"updates": u, "seconds": i, "loss": float(u)} for i, u in enumerate([10, 20, 30, 40, 20, 30, 50])]
    put(tmp_path, "timeline.jsonl", samples)
    page = render(tmp_path)
    line = re.search(r"data-lines=\"([^\"]*)\"", page[max(0, page.index("<b>Loss") - 9999) :])
    drawn = json.loads(html.unescape(line[1]))[0]
    assert drawn["x"] == [10, 20, 30, 50]


# -- writing it -------------------------------------------------------------


def test_a_report_never_makes_a_run_fail(tmp_path, monkeypatch):
    folder = run_folder.RunFolder(str(tmp_path))
    assert page_lib.write(folder, RESULT | {"seconds": np.float32(3)}) == ""
    assert "3.0 s" in (tmp_path / "report.html").read_text()
    monkeypatch.setattr(page_lib, "_header", lambda record: 1 / 0)
    assert page_lib.write(folder, RESULT) == ""
    assert "could not be made: ZeroDivisionError" in (tmp_path / "report.html").read_text()
    monkeypatch.setattr(run_files, "read", lambda *_: 1 / 0)
    assert page_lib.write(folder, RESULT) == "WARNING: no report: ZeroDivisionError: division by zero"
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    problem = page_lib.write(run_folder.RunFolder(str(tmp_path / "file" / "x")), RESULT)
    assert "report.html cannot be written" in problem and "\n" not in problem
    assert page_lib.write(run_folder.RunFolder(str(tmp_path / "other"), writes=False), RESULT) == ""
    assert not (tmp_path / "other").exists()


# -- in a browser -----------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium. In a fixture of its own: Playwright runs a loop of asyncio as long as it lives."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    if program is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextlib.contextmanager
def shown(browser, path, viewport=LAPTOP, **options):
    """The page, which must not complain and must not ask for anything beside itself."""
    context = browser.new_context(viewport=viewport, **options)
    page, odd = context.new_page(), []
    page.on("console", lambda message: odd.append(message.text))
    page.on("pageerror", lambda error: odd.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or odd.append(request.url))
    page.goto(path.as_uri())
    yield page
    assert odd == []
    context.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tfds_dir):
    """A real run, as a person starts it."""
    folder = tmp_path_factory.mktemp("runs")
    flags = ["--config.model.name=mlp", "--config.train.epochs=3", "--config.optimizer.warmup=0%", "--progress=none"]
    env = os.environ | {"TFDS_DATA_DIR": str(tfds_dir), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "tfdist.train", *flags, "--virtual_devices=2", "--workdir=digits"]
    done = processes.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout + done.stderr
    return folder / "digits"


def test_the_report_of_a_real_run(browser, trained):
    result = json.loads((trained / "result.json").read_text())
    assert (trained / "report.html").stat().st_mtime_ns <= (trained / "result.json").stat().st_mtime_ns
    with shown(browser, trained / "report.html") as page:
        assert page.title() == "digits: completed"
        assert page.locator(".broken").count() == 0
        tiles = dict(zip(page.locator(".figures dt").all_inner_texts(), page.locator(".figures b").all_inner_texts()))
        assert tiles["Accuracy"] == f"{result['evaluation']['accuracy']:.4f}"
        assert tiles["Loss"] == f"{result['evaluation']['loss']:.4f}" and tiles["Replicas"] == "2"
        legend = page.locator("figure", has=page.get_by_text("Loss", exact=True)).locator(".legend").inner_text()
        for name in ("loss", "val_loss"):
            assert f"{result['history'][name][-1]:.4f}" in legend
        changed = page.locator("#changed tbody tr").all_inner_texts()
        assert ["model.name", "mlp", "cnn"] in [row.split() for row in changed]
        why = json.loads((trained / "environment.json").read_text())["reason"]
        assert f"mirrored, because {why}" in page.locator("#environment").inner_text()


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """A report with all there can be: wide tables, long names, many classes."""
    folder = tmp_path_factory.mktemp("busy")
    here = full(folder / "run", reason="a-long-word-" * 30)
    (here / "report.html").write_text(page_lib.render(here))
    return here / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, LAPTOP], ids=["phone", "laptop"])
def test_it_fits_the_screen(viewport, scheme, browser, busy):
    with shown(browser, busy, viewport, color_scheme=scheme) as page:
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"], "it scrolls sideways"
        assert page.locator("section").count() == 5 and page.locator(".chart").count() == 10
        for box in (c.bounding_box() for c in page.locator(".chart svg[role=img]").all()):
            assert box["width"] > 250 and box["height"] > 150
        sizes = "[...document.querySelectorAll('body *')].map(e => parseFloat(getComputedStyle(e).fontSize))"
        assert page.evaluate(f"Math.min(...{sizes})") >= 11
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert light == {"light": "rgb(244, 245, 247)", "dark": "rgb(18, 21, 26)"}[scheme]


def test_the_values_under_the_pointer(browser, busy):
    with shown(browser, busy) as page:
        plot = page.locator("figure", has=page.get_by_text("Accuracy", exact=True)).locator(".plot")
        plot.scroll_into_view_if_needed()
        box = plot.locator("svg").first.bounding_box()
        page.mouse.move(box["x"] + 0.52 * box["width"], box["y"] + 50)  # nearest to the second of four epochs
        assert plot.locator(".tip").inner_text().split() == ["updates", "60", "training", "0.75"]
        page.mouse.move(0, 0)
        assert plot.locator(".tip").is_hidden()


def test_markup_in_names_does_nothing(browser, tmp_path):
    test_nothing_in_a_file_becomes_markup(tmp_path)
    path = pathlib.Path(tmp_path / "run" / "report.html")
    path.write_text(page_lib.render(path.parent))
    with shown(browser, path, PHONE) as page:
        assert page.title().startswith(NASTY[:20]) and NASTY[:20] in page.locator("h1").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_no_other_script_runs(browser, busy, tmp_path):
    """Should markup slip in after all, the page's own policy keeps it from doing anything."""
    page_with_more = busy.read_text().replace("</main>", "<script>document.title = 'taken'</script></main>")
    (tmp_path / "more.html").write_text(page_with_more)
    page = browser.new_page()
    page.goto((tmp_path / "more.html").as_uri())
    assert page.title() == "digits: completed" and page.locator(".tip").count() == 10
    page.close()


def test_each_start_of_the_workers(tmp_path):
    row = {"attempt": 0, "nodes": 2, "workers": 4, "from_update": 0, "updates": 50, "ended": "node 1 (h2) is lost"}
    rows = [row | {"seconds_lost": 12.25}, row | {"updates": 70, "ended": "completed", "seconds_lost": None}]
    goodput = {"share": 0.75, "start": 5.0, "training": 15.0}
    text = text_of(render(full(tmp_path, samples=3), RESULT | {"segments": rows, "goodput": goodput}))
    assert "75.0% of the time since the launch ended in the model (start 5.0 s, training 15.0 s)" in text
    assert "Starts of the workers" in text and "node 1 (h2) is lost" in text and "12.25" in text
    assert "Starts of the workers" not in text_of(render(full(tmp_path, samples=3), RESULT | {"segments": rows[1:]}))
