"""Says what another Keras or TensorFlow has moved, as `make test-against` does: `against.py PYTHON TEST...`.

Runs the tests with PYTHON and with the interpreter of this script, and prints as a table what fails there and passes
here, and which private names of Keras and TensorFlow that tfdist uses are gone there.
"""

import ast
import concurrent.futures
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
INTERNALS = ROOT / "tfdist" / "keras_bridge" / "keras_internals.py"
# The folders of the packages, without importing them, which is what may fail.
ASK = """import importlib.metadata as m, importlib.util as u, json
print(json.dumps({n: [m.version(n), *u.find_spec(n).submodule_search_locations] for n in ("keras", "tensorflow")}))"""


def packages(python):
    """Version and folder of Keras and TensorFlow."""
    return json.loads(subprocess.run([python, "-c", ASK], cwd="/", capture_output=True, text=True, check=True).stdout)


def private_names():
    """What keras_internals.py imports from inside of the packages, and private attributes, each as (module, name)."""
    tree = ast.parse(INTERNALS.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(r"keras\.src|tensorflow\.python", node.module):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr) and ast.unparse(node.value) != "self":
            yield "", node.attr
        elif isinstance(node, ast.Constant) and re.fullmatch(r"_[a-z]\w*", str(node.value)):
            yield "", node.value


def names_there(installed, names):
    """Those of the names whose module, or for attributes any module of the two packages, has the word."""
    places = {name: pathlib.Path(place) for name, (_, place) in installed.items()}
    roots = (places["keras"] / "src", places["tensorflow"] / "python")
    words = {word for root in roots for file in root.rglob("*.py") for word in re.findall(r"\w+", file.read_text())}

    def has(module, name):
        if not module:
            return name in words
        package, *parts = module.split(".")
        path = places[package].joinpath(*parts)
        files = [path.with_suffix(".py"), path / "__init__.py"]
        inside = any(file.exists() and re.search(rf"\b{name}\b", file.read_text()) for file in files)
        return inside or (path / name).is_dir() or (path / f"{name}.py").exists()

    return {name for name in names if has(*name)}


def outcomes(python, tests):
    """Returns by test what became of it: "" where it passed, else the first line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.xml")
        asked = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        done = subprocess.run(asked, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not report.exists():
            sys.exit(f"{' '.join(asked)} exits with {done.returncode}:\n{done.stdout[-2000:]}")
        cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    failed = {case: [*case.iter("failure"), *case.iter("error")] for case in cases}
    return {
        f"{case.get('classname')}.{case.get('name')}": (bad[0].get("message") or "error").splitlines()[0] if bad else ""
        for case, bad in failed.items()
        if case.find("skipped") is None
    }


def main(python, *tests):
    python = str(ROOT / python)
    here, there = packages(sys.executable), packages(python)
    names = set(private_names())
    gone = names_there(here, names) - names_there(there, names)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        passed_here, ran_there = pool.map(lambda chosen: outcomes(chosen, tests), (sys.executable, python))
    # A file that cannot be imported there is one error, under a name that no test has.
    broken = {name: error for name, error in ran_there.items() if error and passed_here.get(name, "") == ""}
    print(f"| moved from Keras {here['keras'][0]}, TensorFlow {here['tensorflow'][0]} | to Keras ", end="")
    print(f"{there['keras'][0]}, TensorFlow {there['tensorflow'][0]} |\n|---|---|")
    for module, name in sorted(gone):
        print(f"| `{module}{'.' if module else ''}{name}` | is gone |")
    for name, error in sorted(broken.items()):
        print(f"| `{name}` | {error[:160].replace('|', '/')} |")
    print(
        f"{len(gone)} of {len(names)} private names are gone, {len(broken)} of {len(ran_there)} tests fail only there"
    )
    return 1 if gone or broken else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
