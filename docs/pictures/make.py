"""Makes the pictures of README.md from a real run: `.venv/bin/python docs/pictures/make.py`, in a minute.

The run is `tfdist train --virtual_devices=2` in an empty folder. `terminal-*.svg` is what it printed, with the middle
epochs left out; `report-*.png` is the top of its report.html in Chromium. Each exists for light and for dark pages.
"""

import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import rich._export_format
import rich.console
import rich.terminal_theme
import rich.text
from playwright import sync_api

HERE = pathlib.Path(__file__).resolve().parent
COMMAND = ("train", "--virtual_devices=2")
THEMES = {"light": rich.terminal_theme.DEFAULT_TERMINAL_THEME, "dark": rich.terminal_theme.MONOKAI}
# Rich's template loads its font from a server; readers have a monospaced one, and `textLength` keeps the columns.
TEMPLATE = re.sub(r"@font-face \{\{.*?\}\}", "", rich._export_format.CONSOLE_SVG_FORMAT, flags=re.S)
TEMPLATE = TEMPLATE.replace("rgba(255,255,255,0.35)", "rgba(128,128,128,0.5)")  # a white frame is lost on white pages
LIMIT = 200_000


def train(folder):
    """Returns the lines that the run prints."""
    command = [sys.executable, "-m", "tfdist", *COMMAND]
    # With an empty cache the equivalence check is made and shown, also if an earlier run has passed it.
    environ = os.environ | {"XDG_CACHE_HOME": folder}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True, timeout=600)
    return done.stdout.splitlines()


def draw_terminal(lines):
    """Writes the terminal as SVG: the first three epochs and the last."""
    epochs = [line for line in lines if line.startswith("epoch")]
    left_out = set(epochs[3:-1])
    shown = [line for line in lines if line not in left_out and "checkpoint" not in line]
    shown.insert(shown.index(epochs[-1]), "...")
    for name, theme in THEMES.items():
        console = rich.console.Console(record=True, width=max(map(len, shown)) + 1, file=io.StringIO())
        console.print(rich.text.Text.assemble(("$ ", "green"), (" ".join(["tfdist", *COMMAND]), "bold")))
        for line in shown:
            text = rich.text.Text(line)
            text.highlight_regex(r"^tfdist:", "cyan")
            text.highlight_regex(r"1 and 2 replicas agree", "bold green")
            console.print(text, soft_wrap=True)
        console.save_svg(
            str(HERE / f"terminal-{name}.svg"), title="", theme=theme, code_format=TEMPLATE, unique_id="terminal"
        )


def photograph(report):
    """Writes the top of the report as PNG, down to the end of its first row of curves."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_api.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name in THEMES:
            page = browser.new_page(viewport={"width": 1100, "height": 945}, color_scheme=name)
            page.goto(report.as_uri())
            page.screenshot(path=HERE / f"report-{name}.png")
        browser.close()


def main():
    with tempfile.TemporaryDirectory() as folder:
        draw_terminal(train(folder))
        photograph(pathlib.Path(folder, "runs/digits/report.html"))
    for picture in sorted(p for p in HERE.iterdir() if p.suffix in (".png", ".svg")):
        size = picture.stat().st_size
        print(f"{picture.name}: {size:,} bytes")
        if size > LIMIT:
            sys.exit(f"{picture.name} has {size:,} bytes, more than {LIMIT:,}")


if __name__ == "__main__":
    main()
