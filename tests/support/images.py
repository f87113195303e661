"""The image of deploy/Dockerfile, built and run without a container engine: overlayfs, chroot and namespaces.

It needs root, debootstrap and a network. A step runs as `docker build` runs it, with two differences: the image that
the Dockerfile begins with is that release of Debian with its own Python, and its steps share this machine's network.
"""

import json
import os
import pathlib
import re
import shlex
import shutil

from support import processes

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD_S = 1800
PACKAGES = "ca-certificates,python3-dev,python3-pip"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENTER = """
mount -t overlay overlay -o lowerdir={lower},upperdir={upper},workdir={work} {root}
mount -t proc proc {root}/proc
mount --rbind /dev {root}/dev
mount -t tmpfs tmpfs {root}/dev/shm
for file in hosts resolv.conf; do touch {root}/etc/$file && mount --bind /etc/$file {root}/etc/$file; done
"""


def steps():
    """Yields stage, instruction and arguments of each line of the Dockerfile."""
    stage = ""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / "deploy/Dockerfile").read_text(), flags=re.M))
    for instruction, words in re.findall(r"^([A-Z]+) (.*)$", text, flags=re.M):
        stage = words.split(" AS ")[1] if instruction == "FROM" else stage
        yield stage, instruction, words


class Image:
    """A stage: what its steps have set, and the folders in which they and its parents have written."""

    def __init__(self, folder, name, parent=None):
        self.folder, self.name, self._count = folder, name, 0
        self.layers = [folder / name, *(parent.layers if parent else ())]
        self.layers[0].mkdir()
        self.settings = dict(parent.settings) if parent else {"WORKDIR": "/", "USER": "0"}
        self.environ = dict(parent.environ) if parent else {"PATH": PATH, "HOME": "/root"}

    def command(self, words, upper=None, volumes=(), user=None, **environ):
        """Returns words that run `words` in a container, as its first process, with volumes as pairs of paths."""
        self._count += 1
        lower, upper = self.layers if upper is None else self.layers[1:], upper or self._made("upper")
        root, work = self._made("root"), self._made("work")
        script = ENTER.format(lower=":".join(map(str, lower)) or "/var/empty", upper=upper, work=work, root=root)
        for path, source in volumes:
            script += f"mkdir -p {root}{path}\nmount --bind {source} {root}{path}\n"
        number = user or int(self.settings["USER"])
        who = f"setpriv --reuid={number} --regid={number} --clear-groups --no-new-privs --bounding-set=-all" * bool(
            number
        )
        given = [f"{name}={value}" for name, value in {**self.environ, **environ}.items()]
        inside = f'cd {self.settings["WORKDIR"]} && exec "$@"'
        # By the mark, tests find what is left: the kernel ends no process with its parent that has changed its user.
        started = shlex.join([*given, "sh", "-c", inside, "sh", *words])
        script += f'exec chroot {root} {who} env -i TEST_MARK="$TEST_MARK" {started}'
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", script]

    def _made(self, name):
        path = self.folder / f"{self.name}-{self._count}-{name}"
        path.mkdir()
        return path

    def run(self, command):
        """A step of the Dockerfile, whose files stay."""
        words = self.command(["sh", "-c", command], upper=self.layers[0])
        done = processes.run(words, stdout=processes.PIPE, stderr=processes.STDOUT, text=True, timeout=BUILD_S)
        assert not done.returncode, f"{self.name}: {command}: {done.stdout[-3000:]}"

    def copy(self, sources, target):
        """Copies files, and what is in folders, into a folder."""
        target = self.layers[0] / os.path.join(self.settings["WORKDIR"], target).lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        for source in sources:
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                shutil.copy2(source, target)


def build(target, folder, built):
    """Builds a target and what it needs into `built`, images by name, and returns it."""
    if target in built:
        return built[target]
    mine = [(instruction, words) for stage, instruction, words in steps() if stage == target]
    parent = mine[0][1].split(" AS ")[0]
    image = Image(folder, target, debian(parent, folder, built) if ":" in parent else build(parent, folder, built))
    for instruction, words in mine[1:]:
        if instruction == "RUN":
            image.run(words)
        elif instruction == "COPY":
            *sources, end = words.split()
            root = ROOT
            if sources[0].startswith("--from="):
                root = build(sources.pop(0).removeprefix("--from="), folder, built).layers[0]
            image.copy([root / source.lstrip("/") for source in sources], end)
        elif instruction == "ENV":
            image.environ |= dict(pair.split("=", 1) for pair in shlex.split(words))
        elif instruction in ("ENTRYPOINT", "CMD"):
            image.settings[instruction] = json.loads(words)
        else:
            image.settings[instruction] = words
    built[target] = image
    return image


def debian(name, folder, built):
    """The image that all stages begin with: the release that `python:VERSION-slim-RELEASE` is made of."""
    if name not in built:
        built[name] = Image(folder, "debian")
        made = folder / "debian"
        words = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", name.split("-")[-1], str(made)]
        done = processes.run(words, stdout=processes.PIPE, stderr=processes.STDOUT, text=True, timeout=BUILD_S)
        assert not done.returncode, done.stdout[-3000:]
        # As in the official image: `python`, into whose folders pip may install.
        (made / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        for managed in made.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            managed.unlink()
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", made / "etc/ssl/certs/ca-certificates.crt")
    return built[name]
