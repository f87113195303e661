"""Settings of the site that `make site` builds: Sphinx with MyST, from the same pages that GitHub shows.

TensorFlow and Keras are not installed for it: autodoc reads tfdist's docstrings and signatures with mocks in their
place. Pages that stand elsewhere in the repository are copied to _generated/, beside one that `--help` of each command
makes. Nothing is fetched, when it is built or when it is read.
"""

import os
import pathlib
import re
import subprocess
import sys

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from sphinx.ext.autodoc.mock import _MockObject  # noqa: E402

import tfdist  # noqa: E402
from tfdist.__main__ import COMMANDS  # noqa: E402

# Annotations such as `tf.Tensor | None` are evaluated in named tuples, and mocks know no `|`.
_MockObject.__or__ = _MockObject.__ror__ = lambda self, other: self
_attribute = _MockObject.__getattr__


def _getattr(self, name):
    """Returns a mock, but not of what a mock would wrap: it wraps itself, without end."""
    if name == "__wrapped__":
        raise AttributeError(name)
    return _attribute(self, name)


_MockObject.__getattr__ = _getattr

project = "tfdist"
author = "tfdist developers"
copyright = author
release = version = tfdist.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "pictures", "requirements.txt"]
myst_heading_anchors = 4  # as GitHub makes them, by which the pages link to each other
myst_links_external_new_tab = False
default_role = "code"
highlight_language = "text"  # commands and what they print; else Sphinx colors them as Python
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = f"tfdist {release}"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}

autodoc_mock_imports = [
    *("tensorflow", "keras", "tensorflow_datasets", "google_crc32c", "GPUtil", "tensorboard", "cloudpickle"),
    "matplotlib",
]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
# Types of other libraries, and of tfdist's inside, have no page to lead to.
nitpick_ignore_regex = [("py:.*", r".*")]

# What the pages link to outside of docs/, and where the site has it.
COPIES = {
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "benchmarks/README.md": "benchmarks.md",
}
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def link(page, target, anchor):
    """Returns the end of a Markdown link from a page of the repository, as the site needs it; "" for no link."""
    path = os.path.normpath(page.parent / target)
    inside = os.path.relpath(path, ROOT)
    if inside.startswith("examples/") and page.parent.name == "examples":
        return f"](#{os.path.basename(inside).replace('.', '')})"
    if inside in COPIES:
        return f"](/_generated/{COPIES[inside]}{anchor})"
    if DOCS in pathlib.Path(path).parents and path.endswith(".md"):
        return f"](/{os.path.relpath(path, DOCS)}{anchor})"
    if inside == "README.md":
        return "](/index.md)"
    return ""


def relinked(page, text):
    """Returns Markdown with links that the site has; those to files that it does not have become text."""

    def one(match):
        end = link(page, match[2], match[3] or "")
        return f"[{match[1]}{end}" if end else match[1]

    return re.sub(rf"\[([^\]]*){LINK.pattern}", one, text)


def generate(app):
    """Writes docs/_generated/."""
    folder = DOCS / "_generated"
    folder.mkdir(exist_ok=True)
    for source, name in COPIES.items():
        (folder / name).write_text(relinked(ROOT / source, (ROOT / source).read_text()))
    readme = ROOT / "examples" / "README.md"
    pages = [relinked(readme, readme.read_text())]
    for path in sorted(readme.parent.glob("*.py")):
        pages += [f"## {path.name}", f"```python\n{path.read_text()}```"]
    (folder / "examples.md").write_text("\n\n".join(pages))
    lines = ["# Flags of each command", ""]
    for command in COMMANDS:
        environ = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
        asked = [sys.executable, "-m", f"tfdist.{command}", "--help"]
        told = subprocess.run(asked, env=environ, capture_output=True, text=True, check=True, timeout=120).stdout
        lines += [f"## tfdist {command}", "", "```text", told.strip(), "```", ""]
    (folder / "flags.md").write_text("\n".join(lines))


def read(app, name, content):
    """Leads the links of a page of docs/ to pages of the site."""
    path = DOCS / f"{name}.md"
    if path.parent == DOCS and path.exists():
        content[0] = relinked(path, content[0])


def fences(app, kind, name, thing, options, lines):
    """Turns the fenced examples of docstrings, which are Markdown, into reStructuredText."""
    text = re.sub(
        r"^```python\n(.*?)^```$",
        lambda found: "::\n\n" + re.sub(r"^", "    ", found[1], flags=re.M) + "\n",
        "\n".join(lines),
        flags=re.S | re.M,
    )
    lines[:] = text.splitlines()


def shown(app, kind, name, thing, options, signature, returns):
    """Shows a default that is a function by its name, and not by its place in memory."""
    return (re.sub(r"<function ([\w.]+) at 0x\w+>", r"\1", signature), returns) if signature else None


def setup(app):
    app.connect("builder-inited", generate)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", fences, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", shown)
