"""Which way imports run: packages import only from those below them, and no modules import each other in a circle."""

import ast
import graphlib
import importlib
import inspect

import pytest
from conftest import REPOSITORY

LIBRARIES = [
    "errors", "config", "cluster", "distributed", "data", "keras_bridge", "models", "step", "checkpoints",
    "verification", "trainer", "monitoring",
]  # fmt: skip
"""The packages below the commands, from the bottom up: each may import from those before it."""
MAY_IMPORT = {
    **{package: LIBRARIES[:i] for i, package in enumerate(LIBRARIES) if i}, "evaluate": [*LIBRARIES, "inference"],
    "predict": [*LIBRARIES, "inference"], "export": [*LIBRARIES, "inference"], "sweep": [*LIBRARIES, "compare"],
    "train": [*LIBRARIES, "topology"], "run": [*LIBRARIES, "launch"],
    **dict.fromkeys(["topology", "launch", "doctor", "compare", "inference", "horovod_build"], LIBRARIES),
}  # fmt: skip
"""Which packages a package may import from, besides itself. Those at the root may import from all."""


def imports():
    """(importing module, imported module) within tfdist, both as dotted names without `tfdist.`."""
    root = REPOSITORY / "tfdist"
    names = {
        ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): p for p in root.rglob("*.py")
    }
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not any(a.name.startswith("tfdist.") for a in node.names), f"{name}: use `from tfdist... import`"
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "tfdist" or node.level:
                continue
            base = node.module.removeprefix("tfdist").lstrip(".")
            for target in {f"{base}.{a.name}".lstrip(".") for a in node.names}:
                if target not in ("__version__", "CallablePackage"):
                    yield name, target if target in names else base


def test_packages_import_only_what_they_may():
    assert {p.name for p in (REPOSITORY / "tfdist").iterdir() if p.is_dir() and p.name != "__pycache__"} == set(
        MAY_IMPORT
    )
    for name, target in imports():
        package, other = name.split(".")[0], target.split(".")[0]
        if package in MAY_IMPORT:
            assert other in [package, *MAY_IMPORT[package]], f"{name} imports {target}"


def test_no_modules_import_each_other_in_a_circle():
    graph = {}
    for name, target in imports():
        graph.setdefault(name, set()).add(target)
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()  # raises CycleError, which names the circle


def test_the_root_holds_four_files_at_most():
    assert len(list((REPOSITORY / "tfdist").glob("*.py"))) <= 4


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_a_function_that_shares_its_name_with_a_command_can_be_called_once_the_package_is_imported(name):
    package = importlib.import_module(f"tfdist.{name}")
    function = package._function
    assert callable(package) and inspect.signature(package) == inspect.signature(function)
    with pytest.raises(TypeError, match=rf"{name}\(\) missing .*required"):
        package()
