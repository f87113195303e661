"""`python -m tfdist.plan`: its formulas against numbers worked out by hand, its messages against a real update."""

import dataclasses
import json
import os
import sys

import keras
import numpy as np
import pytest
from conftest import REPOSITORY
from rich.console import Console
from support import many_commands, processes

import tfdist
from tfdist import config
from tfdist.config import call_length
from tfdist.config.runtime_options import Environment
from tfdist.errors import UserError
from tfdist.plan import cost, exchange, pair, quantities, report, scaling
from tfdist.plan.cost import Compute, Job, Machines, MessageWork, NetworkLink

NOTHING = MessageWork(0.0, 0.0)
PASSES = Compute(0.0, 0.0, 0.01)
GIGABIT = NetworkLink(1e9, 0.0)


def machines(link=GIGABIT, work=NOTHING, compute=PASSES, per_node=1):
    return Machines(link, {"float32": work, "float16": work}, compute, per_node)


def job(*messages, batch=100, accumulate=2, dtype="float32", ready=(), in_passes=()):
    return Job(batch, accumulate, dtype, messages, ready, in_passes)


# -- formulas ----------------------------------------------------------------------------


def test_a_ring_of_four():
    # 7 messages of 1 ms; each worker sends 6/4 of 8 MB at 10 ns a byte: 0.007 + 0.12.
    assert cost.ring(8_000_000, 4, 1e-3, 10e-9) == pytest.approx(0.127)
    assert cost.ring(8_000_000, 1, 1e-3, 10e-9) == 0


def test_an_update_is_computed_and_then_sent():
    # 50 examples take 0.5 s; 12.5 MB over 1 Gbit/s take 0.1 s, and their headers 90 bytes for 1,448.
    found = machines().predict(job(12_500_000), 2)
    assert (found.rows, found.compute) == (50, pytest.approx(0.5))
    assert [found.exposed, found.parts["bandwidth"]] == pytest.approx(2 * [0.1 * 1538 / 1448])
    assert found.updates_per_second == pytest.approx(1 / (0.5 + 0.1 * 1538 / 1448))
    assert found.examples_per_second == pytest.approx(100 / (0.5 + 0.1 * 1538 / 1448))
    assert found.efficiency == pytest.approx(1.0 / (0.5 + 0.1 * 1538 / 1448) / 2)


def test_what_processors_do_with_a_message_is_added():
    # 2 sums of 3 messages of 1 ms; 10 MB at 2 ns, and in each of 2 micro-batches 1 MB and 3 messages; the link is free.
    work = MessageWork(1e-3, 2e-9)
    found = machines(NetworkLink(1e18, 0.0), work).predict(job(4_000_000, 6_000_000, in_passes=(1_000_000,)), 2)
    assert found.parts["messages"] == pytest.approx(12e-3)
    assert found.parts["copies"] == pytest.approx(24e-3)
    assert found.seconds == pytest.approx(0.5 + 12e-3 + 24e-3)


def test_only_gradients_travel_in_the_smaller_type():
    work = {"float32": MessageWork(0.0, 1e-9), "float16": MessageWork(0.0, 3e-9)}
    there = Machines(NetworkLink(1e18, 0.0), work, PASSES)
    found = there.predict(job(1_000_000, dtype="float16", in_passes=(1_000_000,)), 2)
    assert found.parts["copies"] == pytest.approx(3e-3 + 2 * 1e-3)


def test_latency_counts_for_each_step_and_for_one_question():
    found = machines(NetworkLink(1e15, 1e-3)).predict(job(4, in_passes=(4,)), 3)
    # 1 message and 1 in each of 2 micro-batches, 4 steps of 1 ms each and 1 before; 34 examples. After each call, of 1
    # update here, the metrics and an agreement, there and back.
    assert found.exposed == pytest.approx(3 * 5e-3 + 5e-3 + 2e-3)
    assert found.parts["latency"] == pytest.approx(found.exposed)


def test_messages_wait_for_the_link_at_the_same_time():
    link = NetworkLink(1e15, 1e-3)
    assert machines(link).predict(job(*8 * [4]), 3).exposed == pytest.approx(5e-3 + 7e-3)
    assert machines(link).predict(job(*9 * [4]), 3).exposed == pytest.approx(2 * 5e-3 + 7e-3)  # 8 at a time


def test_a_call_has_several_updates():
    # 3 times 4 ms an update; a call lasts 0.2 s, which is 15 updates and 3 times 4 ms, and then 2 times 4 ms.
    nothing = machines(NetworkLink(1e15, 4e-3), compute=Compute(0.0, 0.0, 0.0))
    assert nothing.predict(job(4), 2).seconds == pytest.approx(0.012 + 0.02 / 15, rel=1e-4)
    # An epoch of 20 and a smaller one has 3 such calls, and another 2 times 4 ms at its end.
    short = dataclasses.replace(job(4), epoch=cost.Epoch(20, True))
    assert nothing.predict(short, 2).seconds == pytest.approx(0.012 + (3 * 0.02 + 0.008) / 21)


def test_sums_begin_within_the_backward_pass():
    # 2 workers with 50 examples take 0.5 s in 1 micro-batch, of which the backward pass takes 1/3 s.
    wire = 0.1 * 1538 / 1448  # of 12.5 MB
    early = job(12_500_000, 12_500_000, accumulate=1, ready=(0.5, 1.0))
    assert machines().predict(early, 2).exposed == pytest.approx(wire)  # the first one is through before the end
    link = NetworkLink(1e8, 0.0)
    assert machines(link).predict(early, 2).exposed == pytest.approx(20 * wire - 1 / 6)  # it begins so much earlier
    # With 2 micro-batches the last backward pass is half as long.
    later = dataclasses.replace(early, accumulate=2)
    assert machines(link).predict(later, 2).exposed == pytest.approx(20 * wire - 1 / 12)
    # What processors do for one sum can happen while the link carries another: 2 times 25 ms, of which one is hidden.
    found = machines(work=MessageWork(0.0, 2e-9)).predict(job(12_500_000, 12_500_000, accumulate=1), 2)
    assert found.exposed == pytest.approx(0.05 + 2 * wire - 0.025)
    # What processors do with messages is never hidden: 25 MB at 2 ns.
    found = machines(work=MessageWork(0.0, 2e-9)).predict(early, 2)
    assert found.parts["copies"] == pytest.approx(0.05) and found.exposed > 0.05


def test_workers_of_one_machine_do_not_use_the_link():
    local = machines(per_node=2).predict(job(12_500_000), 1)
    assert (local.workers, local.exposed, local.efficiency) == (2, pytest.approx(0), pytest.approx(1))
    assert machines(per_node=2).predict(job(12_500_000), 2).exposed == pytest.approx(0.15 * 1538 / 1448)


def test_workers_of_one_machine_sum_in_its_memory():
    # 2 workers move 5 bytes for each of the array, 4 workers 7. 1 message of 8 MB and 1 of 1 MB in each micro-batch.
    asked = job(8_000_000, in_passes=(1_000_000,))
    ring, memory = MessageWork(1e-2, 1e-7), MessageWork(1e-3, 2e-9)
    host = cost.HostSums({"float32": memory, "float16": memory}, 5e-4)
    for workers, moved in ((2, 1), (4, 7 / 5)):
        found = dataclasses.replace(machines(work=ring, per_node=workers), host=host).predict(asked, 1)
        assert found.parts["messages"] == pytest.approx(3e-3)
        assert found.parts["copies"] == pytest.approx(moved * 20e-3)
        assert found.parts["waiting"] == pytest.approx(1.5e-3)
        assert found.exposed == pytest.approx(3e-3 + moved * 20e-3 + 1.5e-3)
    by_ring = machines(work=ring, per_node=2)
    for nodes, per_node in ((2, 2), (1, 9), (1, 1)):  # beyond the machine, for too many, and for one
        one, other = (
            dataclasses.replace(by_ring, per_node=per_node, host=h).predict(asked, nodes) for h in (host, None)
        )
        assert one == other


def test_what_two_workers_of_this_machine_wait_for_each_other_is_added_to_each_sum():
    # 1 sum and 1 in each of 2 micro-batches, each of 3 messages of 1 ms: 9 ms of the 15 that two take longer.
    asked, local = job(4, in_passes=(4,)), machines(NetworkLink(1e18, 0.0), MessageWork(1e-3, 0.0))
    each = pair.beyond(15e-3, local, asked)
    assert each == pytest.approx(2e-3) and pair.beyond(5e-3, local, asked) == 0
    found = dataclasses.replace(local, sum_seconds=each).predict(asked, 4)
    assert found.parts["waiting"] == pytest.approx(6e-3)
    assert found.seconds == pytest.approx(0.25 + 3 * 7e-3 + 6e-3)
    assert dataclasses.replace(local, sum_seconds=each).predict(asked, 1).seconds == pytest.approx(1.0)


def test_no_worker_is_without_an_example():
    assert machines().predict(job(batch=7, accumulate=2), 4) is None
    assert machines().predict(job(batch=8, accumulate=2), 4).rows == 2


def test_the_line_through_measurements():
    assert cost.fitted([(10, 1.5), (20, 2.5), (40, 4.5)]) == (pytest.approx(0.5), pytest.approx(0.1))
    assert cost.fitted([(10, 1.0), (20, 2.5)])[0] == 0  # none is negative
    assert cost.fitted([(10, 2.0), (20, 1.0)])[1] == 0
    # 0.7 s are fixed with 1 micro-batch and 1.3 s with 4: 0.2 s each, 0.5 s besides.
    found = cost.compute_of([(10, 1.7), (20, 2.7)], 1, (20, 3.3, 4))
    assert dataclasses.astuple(found) == pytest.approx((0.5, 0.2, 0.1))
    assert cost.compute_of([(10, 1.7), (20, 2.7)], 1, None).micro == pytest.approx(0.7)


def test_the_cost_of_a_message_from_sums_of_two_workers():
    samples = [dict(dtype="float32", bytes=1_000_004, seconds=3.2e-3)]
    samples += [dict(dtype="float32", bytes=4, seconds=1.2e-3)]
    assert dataclasses.astuple(exchange.works(samples, messages=2)["float32"]) == pytest.approx((0.6e-3, 2e-9))


def test_how_long_a_call_lasts():
    assert [call_length.seconds(between) for between in (0.0, 0.005, 0.02, 1.0)] == [0.2, 0.2, 0.4, 1.0]


# -- messages ----------------------------------------------------------------------------


def test_small_gradients_travel_together_and_large_ones_alone():
    from tfdist.plan import workload

    variables = [((1024, 1024), "float32"), ((1024,), "float32"), ((1024, 10), "float32"), ((10,), "float32")]
    found, ready = workload.messages(variables, "float32", 1 << 20)
    # The sums of the losses, 16 bytes, share a bucket with what is small.
    assert found == (4 << 20, 4096 + 40960 + 40 + 16)
    weights = 1024 * 1024 + 1024 + 10240 + 10
    assert ready == pytest.approx((1, (1024 + 10240 + 10) / weights))
    halves, _ = workload.messages(variables, "float16", 1 << 20)
    assert sorted(halves) == [16, 2048 + 20480 + 20, 2 << 20]
    each, ready = workload.messages(variables, "float32", 0)
    assert each == (16, 40, 40960, 4096, 4 << 20)
    assert ready == pytest.approx((0, *(n / weights for n in (10, 10250, 11274)), 1))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_messages_are_those_of_an_update(connect, dtype):
    from tfdist.plan import workload

    here = connect(2)
    sizes = []

    def all_sum(tensors):
        sizes.append([t.shape.num_elements() * t.dtype.size for t in tensors])
        return here.all_sum(tensors)

    with here.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(300), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
    x, y = np.zeros((4, 8), "float32"), np.zeros((4, 4), "float32")
    recording = dataclasses.replace(here, all_sum=all_sum)
    options = dict(distribution=recording, batch_size=4, reduce_dtype=dtype, check_agreement="off", verbose=0)
    tfdist.fit(model, x, y, **options)
    variables = [(tuple(v.shape), v.dtype) for v in model.trainable_variables]
    (one,) = {tuple(found) for found in sizes if len(found) == len(variables) + 1}
    planned, _ = workload.messages(variables, dtype, 0)
    assert sorted(planned) == sorted([*one[:-1], 16])  # the sums are some bytes, which a plan takes to be 16
    assert one[-1] <= 16


# -- what is said ------------------------------------------------------------------------


def test_where_scaling_ends():
    bound = machines(compute=Compute(0.0, 0.0, 0.001))  # 0.1 s for all; the sum of 12.5 MB takes 0.106 s
    half = dataclasses.replace(job(6_250_000), dtype="float16")
    line = scaling.verdict(bound, [scaling.Variant("float32", job(12_500_000)), scaling.Variant("x", half)])
    assert line.startswith("Scaling ends at 1 machine (efficiency 1.00): with 2 it is 0.32, ")
    assert "due to the link's bandwidth. There, a link of 10 Gbit/s makes it 2.6 times as fast" in line
    assert line.endswith("--config.optimizer.reduce_dtype=float16 makes it 1.5 times as fast")
    few = scaling.verdict(machines(), [scaling.Variant("float32", job(4))])
    assert "Scaling ends at 32 machines" in few and "a batch of 100 has examples for 50 machines" in few
    none = scaling.verdict(machines(per_node=64), [scaling.Variant("float32", job(4))])
    assert none.startswith("The batch of 100 examples is too small for one machine of 64 workers")


@pytest.fixture
def made():
    wanted = report.Request((1, 2, 1024), 1, GIGABIT, Environment(), 1.0)
    larger = job(12_500_000, batch=400, accumulate=8)
    variants = [scaling.Variant("float32", job(12_500_000)), scaling.Variant("float16", job(4))]
    variants.append(scaling.Variant("4x batch", larger, other_training=True))
    return report.make(config.Experiment(), wanted, machines(), variants, [])


def test_the_table_fits_80_columns_and_says_what_it_is(made, monkeypatch, capsys):
    monkeypatch.setattr(report, "worst", lambda compute, measured: 0.0)
    monkeypatch.setattr(report, "Console", lambda **given: Console(**given, width=80))
    made.show()
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines) and lines[0].startswith("PREDICTION for digits: multi_worker on CPUs")
    assert made.cells()[1][:5] == ["2", "50", "1.65", "0.82", "18%"]
    assert made.cells()[2][:3] == ["1024", "-", "no examples"]
    assert "| 2 | 50 | 1.65 | 0.82 | 18% |" in made.markdown()
    assert made.record()["prediction"] is True


@pytest.mark.parametrize(
    "text, value", [("10Gbit", 1e10), ("100 Mbit/s", 1e8), ("1.5gbit", 1.5e9), ("56kbit", 56e3), ("400Gbps", 4e11)]
)
def test_bandwidths(text, value):
    assert quantities.bits_per_second(text) == pytest.approx(value)


def test_times_and_numbers():
    assert [quantities.latency_seconds(text) for text in ("0.1ms", "50us", "0s")] == pytest.approx([1e-4, 5e-5, 0])
    assert quantities.counts(["8", "1", "8"]) == (1, 8)
    for wrong in ("-1ms", "1", "1e3ms", "nan", "61s"):
        with pytest.raises(UserError, match="--latency="):
            quantities.latency_seconds(wrong)
    assert [quantities.in_bits(value) for value in (1e10, 2.5e6, 10)] == ["10 Gbit/s", "2.5 Mbit/s", "10 bit/s"]


# -- the command -------------------------------------------------------------------------

REFUSED = {
    "": "--link is missing: give the bandwidth between the machines, such as 10Gbit",
    "--link=10": "--link=10 is not understood: write bits per second, such as 10Gbit",
    "--link=0Gbit": "--link=0Gbit is not understood",
    "--link=10GBps": "--link=10GBps is not understood",
    "--link=1Gbit --latency=fast": "--latency=fast is not understood: write a time one way",
    "--link=1Gbit --nodes=1,zero": "--nodes must be whole numbers from 1 to 65536, such as 1,2,4,8: got 'zero'",
    "--link=1Gbit --nodes=": "--nodes names none: give some",
    "--link=1Gbit --nproc_per_node=0": "--nproc_per_node must be a whole number of at least 1, got 0",
    "--link=1Gbit --threads=0": "--threads must be a whole number of at least 1, got 0",
    "--link=1Gbit --seconds=nan": "--seconds must be more than 0 and at most 600, got nan",
    "--link=1Gbit --config.train.batch_size=auto": "train.batch_size=auto depends on the machine: give a number",
    "--link=1Gbit --config.train.shards=8": "train.shards=8 is not planned with, whose updates take longer",
    "--link=1Gbit --workdir=other": "--workdir=other holds no plan but something: choose another folder",
}


def test_what_cannot_be_used_is_refused_in_one_line_without_tensorflow(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "something").touch()
    each = [words.split() for words in REFUSED]
    ends = many_commands.run("tfdist.plan", each, tmp_path, {}, str(REPOSITORY))
    for said, done in zip(REFUSED.values(), ends, strict=True):
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"tfdist: error: {said}"), done
        assert done.stderr.count("\n") == 1


@pytest.mark.whole
@pytest.mark.parametrize("each", [1, 2])
def test_a_plan_of_this_machine(each, tmp_path, tfds_dir):
    asked = ["--nodes=1,2,64", "--link=1Gbit", "--seconds=0.2", "--threads=1", "--config.model.name=mlp"]
    asked.append(f"--nproc_per_node={each}")
    environ = os.environ | {"TFDS_DATA_DIR": str(tfds_dir), "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, "-m", "tfdist.plan", *asked]
    done = processes.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "plan-digits"
    assert {p.name for p in folder.iterdir()} == {"plan.json", "plan.md", "plan.png"}
    record = json.loads((folder / "plan.json").read_text())
    one, two, most = record["rows"]
    assert (
        (one["float32"]["efficiency"] == 1) == (each == 1)
        and 0 < two["float32"]["efficiency"] < 1
        and most["float32"] is None
    )
    assert [m["accumulate"] for m in record["measured"]] == [1, 1, 1, 4]
    assert set(record["work"]) == {"float32", "float16"}
    assert (record["host"] is None) == (each == 1) == ("sum in its memory" not in done.stdout)
    if each == 2:
        assert record["host"]["work"]["float32"]["byte_seconds"] < record["work"]["float32"]["byte_seconds"]
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.startswith("tfdist: "))
