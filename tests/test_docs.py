"""What README.md, docs/ and their neighbours name is there: files, functions, flags, fields, make's targets.

Imports no TensorFlow: files are looked at, modules are parsed, and flags are those that each command's `--help` lists.
"""

import ast
import concurrent.futures
import dataclasses
import functools
import pathlib
import re
import subprocess
import sys

import pytest
from support import docs_commands

import tfdist
from tfdist import __main__ as commands
from tfdist.config import Experiment

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")),
    *sorted([*ROOT.glob("docs/*.md"), ROOT / "docs/evidence/tests.md"]),
]
COMMANDS = tuple(commands.COMMANDS)
FOREIGN = {"epochs": "a script", "signal": "sbatch, timeout", "array": "sbatch", "logdir": "tensorboard"}
FOREIGN["dist"] = "pytest"
"""Flags of other programs that the pages show."""
GROUPS = tuple(f.name for f in dataclasses.fields(Experiment) if f.name not in ("name", "seed"))
PATH = re.compile(r"(?:tfdist|tests|docs|benchmarks|configs|flags|notebooks|deploy)/[\w./*-]*(?::[\w.]+)?")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def blocks(page):
    """Fenced blocks, each line a command with its continuations joined and without its comment."""
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            yield re.sub(r"\s+#.*", "", line)


def spans(page):
    """Text between backticks, outside of fenced blocks."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose)]


@functools.cache
def slugs(page):
    """The anchors of a page, as GitHub makes them of its headings."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@functools.cache
def names(path):
    """Functions, classes, their methods, and constants of a module, from its text."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{n.name}" for n in inner if isinstance(n, ast.FunctionDef)}
            found |= {f"{node.name}.{n.target.id}" for n in inner if isinstance(n, ast.AnnAssign)}
    return found


def is_there(text):
    """Whether a path, with `*` or a function behind a colon, is in the repository, or made by it."""
    path, _, name = text.partition(":")
    if path.startswith("benchmarks/out/"):
        return True
    if "*" in path:
        return any(ROOT.glob(path))
    if not (ROOT / path).exists():
        return False
    # Behind the colon of a config stands what its get_config() takes.
    return not name or path.startswith("configs/") or name in names(ROOT / path)


def has_module(dotted):
    """Whether `tfdist.a.b` is a module, a name in one, or a public name."""
    parts = dotted.split(".")
    if parts[1] in tfdist.__all__ and len(parts) == 2:
        return True
    path = ROOT.joinpath(*parts)
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    home = ROOT.joinpath(*parts[:-1])
    for file in (home.with_suffix(".py"), home / "__init__.py"):
        if file.exists() and (parts[-1] in names(file) or re.search(rf"\b{parts[-1]}\b", file.read_text())):
            return True
    return False


@functools.cache
def flags_of():
    """Flags by command, as its `--help` lists them."""

    def listed(command):
        asked = [sys.executable, "-m", f"tfdist.{command}", "--help"]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120)
        found = set(re.findall(r"^\s+(?:-\w, )?--(?:\[no\])?(\w+)", done.stdout, re.M))
        assert found, done.stderr
        return found | {"help", "flagfile"}

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return dict(zip(COMMANDS, pool.map(listed, COMMANDS)))


def has_field(dotted):
    """Whether `a.b` is a field of an experiment."""
    owner = Experiment()
    for part in dotted.split("."):
        if not dataclasses.is_dataclass(owner) or part not in {f.name for f in dataclasses.fields(owner)}:
            return False
        owner = getattr(owner, part)
    return True


def flags_in(text):
    return re.findall(r"(?<![\w-])--([a-zA-Z][\w.]*)", text)


def assert_known(flags, known, where):
    for flag in flags:
        if flag.startswith("config."):
            assert has_field(flag.removeprefix("config.")), f"{where}: there is no field --{flag}"
        else:
            assert {flag, flag.removeprefix("no")} & known, f"{where}: there is no flag --{flag}"


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert "make test" in "\n".join(lines)


@every_page
def test_lines_are_at_most_120_columns_wide_outside_of_tables(page):
    assert [line for line in page.read_text().splitlines() if len(line) > 120 and not line.startswith("|")] == []


@every_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in slugs(file), f"{page.name} links to {target}: {sorted(slugs(file))}"


@every_page
def test_files_and_names_exist(page):
    for span in spans(page):
        if PATH.fullmatch(span):
            assert is_there(span), f"{page.name} names {span}"
        if re.fullmatch(r"tfdist(\.\w+)+", span):
            assert has_module(span), f"{page.name} names {span}"
    for line in blocks(page):
        for path in re.findall(r"(?:configs|flags)/\w+\.\w+", line):
            assert is_there(path), f"{page.name} names {path}"


@every_page
def test_flags_and_fields_exist(page):
    known = flags_of()
    anywhere = set().union(*known.values(), FOREIGN, {"config"})
    for text in [*spans(page), *blocks(page)]:
        where = f"{page.name}: {text}"
        command = re.search(r"python -m tfdist\.(\w+)(.*)", text)
        if not command:
            assert_known([] if text.startswith(("kubectl ", "docker ")) else flags_in(text), anywhere, where)
        else:
            name, rest = command.groups()
            assert name in known, where
            own, _, passed_on = rest.partition(" -- ")
            takes_config = {"config"} if name not in ("launch", "horovod_build", "export", "topology") else set()
            assert_known(flags_in(own), known[name] | takes_config, where)
            assert_known(flags_in(passed_on), known["train"] | {"config"}, where)
        field = re.match(rf"({'|'.join(GROUPS)})\.(?!(?:keras|json|fit|py)\b)\w+", text)  # files, model.fit
        if field and text in spans(page):
            assert has_field(field[0]), f"{where}: there is no such field"


@pytest.mark.parametrize("page", docs_commands.PAGES)
def test_every_block_of_commands_is_run_or_says_why_not(page):
    docs_commands.blocks(page, (ROOT / page).read_text())


def test_the_reference_lists_the_public_names():
    listed = re.findall(r"^\.\. auto\w+:: tfdist\.(\w+)", (ROOT / "docs/api.rst").read_text(), re.M)
    assert sorted(listed) == sorted(tfdist.__all__)


@every_page
def test_make_has_these_targets(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for text in [*spans(page), *blocks(page)]:
        made = re.match(r"make ([\w-]+)$", text.strip())
        assert not made or made[1] in targets, f"{page.name}: make {made and made[1]}"


def test_the_table_of_packages_says_what_may_be_imported():
    body = ast.parse((ROOT / "tests/test_packages.py").read_text()).body
    rule = [n for n in body if isinstance(n, ast.Assign) and n.targets[0].id in ("LIBRARIES", "MAY_IMPORT")]
    scope = {}
    exec(compile(ast.Module(rule, []), "test_packages.py", "exec"), scope)
    libraries, told = [], {}
    for line in (ROOT / "docs/developing.md").read_text().splitlines():
        cells = line.split("|")[1:-1]
        packages = [pathlib.Path(p).stem for p in re.findall(r"`tfdist/(\w+(?:/|\.py))`", cells[0])] if cells else []
        if len(cells) != 3 or not packages:
            continue
        allowed = set(re.findall(r"`(\w+)`", cells[2])) | set(libraries if "all above" in cells[2] else ())
        told |= dict.fromkeys(packages, allowed)
        if packages[0] in scope["LIBRARIES"]:
            libraries += packages
    assert told.pop("errors") == set()
    assert told == {package: set(allowed) for package, allowed in scope["MAY_IMPORT"].items()}


def programs():
    """Yields the Python programs of the pages that begin where one begins; that of README is in `make test`."""
    for page in PAGES:
        for i, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)):
            if re.match(r"import (tfdist|keras)\n|def train\(", block):
                marks = [] if page.name == "README.md" else [pytest.mark.whole]
                yield pytest.param(block, marks=marks, id=f"{page.name}-{i}")


@pytest.mark.parametrize("program", programs())
def test_programs_run_as_they_stand(program, tmp_path, tfds_dir):
    """Written to a file and run in an empty folder, with the errors of a real start."""
    (tmp_path / "program.py").write_text("import tfdist\n" * program.startswith("def") + program)
    environ = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "TFDS_DATA_DIR": str(tfds_dir)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
