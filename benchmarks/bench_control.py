"""Control traffic of many workers, through the package `cluster` alone: no TensorFlow, and no training.

    python benchmarks/bench_control.py [16 64 256]

The chief has a process of its own, and so has the last worker, which comes when all others wait, and is killed at the
end. The others are threads of two processes. All are on this machine, so that they also share its cores. The table goes
to docs/evidence/control_traffic.md; what each column means stands there.
"""

import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tfdist.cluster import registration, wire  # noqa: E402
from tfdist.cluster.discovery import Cluster  # noqa: E402

PAGE = ROOT / "docs/evidence/control_traffic.md"
IDLE_S = 5.0  # in which messages and processor time are counted
HEAD = """# Control traffic of many workers

`python benchmarks/bench_control.py` writes this page: {cores} cores, all workers on one machine, as threads of four
processes, without TensorFlow. Every worker has one connection, to the chief, for registration, heartbeats (one a second
each way) and votes. Its sockets, messages and memory grow with the number of workers and no faster.

| workers | s from the last arrival to agreement | s of a vote | s until all know of a death | sockets: chief, other | \
messages sent a second: chief, other | processor time of the chief | memory of the chief, MiB |
|--:|--:|--:|--:|--:|--:|--:|--:|
"""
TAIL = """
* **Agreement**: all workers but the last wait; from its start of registration until all know that everyone is there.
* **A vote**: all workers give a value at the same time, until the last has those of all.
* **A death**: SIGKILL to the last worker, until every other one knows which is lost.
* **Sockets** are open descriptors more than before. **Memory** is the resident size of the chief's process.

With an all-to-all exchange each worker would hold as many sockets as the chief does here. The answer to a registration
lists the addresses of all workers: once, at the start, the bytes that the chief sends grow with the square of their
number, some 1 MB at 256. The answer to a vote has one value where all workers agree, and all values otherwise. The
figures are those of the run that made this page, and no promise.
"""


def node(ranks, size, port):
    """Runs some of the workers, and answers commands of standard input with a JSON line each."""
    sent, peers, before = [0], {}, len(os.listdir("/proc/self/fd"))
    tell = wire.Connection.tell
    wire.Connection.tell = lambda self, message: (sent.__setitem__(0, sent[0] + 1), tell(self, message))[1]

    def each(function):
        """Calls it for each worker at once; returns when the last one has returned."""
        threads = [threading.Thread(target=function, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic()

    def meet(rank):
        cluster = Cluster("the benchmark", rank, size, 0, 1, f"127.0.0.1:{port}", secret="of the benchmark")
        peers[rank] = registration.meet(cluster, {})
        peers[rank]._watch.acknowledged.set()  # else the loss of a worker would end this process

    def busy():
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    for line in sys.stdin:
        began, cpu, sent[0] = time.monotonic(), busy(), 0
        if line.strip() == "meet":
            end = each(meet)
        elif line.strip() == "vote":
            end = each(lambda rank: peers[rank].gather("the benchmark", rank))
        elif line.strip() == "idle":
            time.sleep(IDLE_S)
            end = time.monotonic()
        else:
            end = each(lambda rank: peers[rank]._watch.wait_for_failure(60))
            assert all(f"lost worker {size - 1} " in p.failure for p in peers.values()), peers
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        said = dict(
            began=began, end=end, sent=sent[0], cpu=busy() - cpu, sockets=len(os.listdir("/proc/self/fd")) - before
        )
        print(json.dumps(said | {"mib": pages * resource.getpagesize() / 2**20}), flush=True)
    os._exit(0)


def measure(size):
    """Returns a row of the table."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    half = size // 2
    shares = [[0], list(range(1, half)), list(range(half, size - 1)), [size - 1]]
    words = [sys.executable, __file__, "node"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    nodes = [subprocess.Popen([*words, json.dumps([share, size, port])], **pipes) for share in shares]

    def ask(command, whom):
        for process in whom:
            process.stdin.write(command + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in whom]

    for process in nodes[:3]:
        process.stdin.write("meet\n")
        process.stdin.flush()
    time.sleep(5)  # until all of them wait
    (last,) = ask("meet", nodes[3:])
    met = [*(json.loads(process.stdout.readline()) for process in nodes[:3]), last]
    vote, idle = ask("vote", nodes), ask("idle", nodes)
    for process in nodes[:3]:
        process.stdin.write("death\n")
        process.stdin.flush()
    time.sleep(1)
    killed = time.monotonic()
    nodes[3].send_signal(signal.SIGKILL)
    known = max(json.loads(process.stdout.readline())["end"] for process in nodes[:3])
    for process in nodes:
        process.stdin.close()
        process.wait()
    agreed = max(m["end"] for m in met) - last["began"]
    voted = max(v["end"] for v in vote) - max(v["began"] for v in vote)
    chief, others = idle[0], idle[1:]
    per_other = sum(o["sent"] for o in others) / (size - 1) / IDLE_S
    return (
        f"| {size} | {agreed:.2f} | {voted:.3f} | {known - killed:.2f} | {chief['sockets']}, "
        f"{sum(o['sockets'] for o in others) / (size - 1):.1f} | {chief['sent'] / IDLE_S:.0f}, {per_other:.1f} | "
        f"{100 * chief['cpu'] / IDLE_S:.1f} % | {chief['mib']:.0f} |"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["node"]:
        node(*json.loads(sys.argv[2]))
    rows = []
    for count in [int(n) for n in sys.argv[1:]] or [16, 64, 256]:
        rows.append(measure(count))
        print(rows[-1], flush=True)
    PAGE.write_text(HEAD.format(cores=os.cpu_count()) + "\n".join(rows) + "\n" + TAIL)
