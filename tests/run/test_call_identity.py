"""Which recorded call of `fit` a call is taken for, where a script leaves out what it has finished."""

import time

from tfdist.run.call_identity import AROUND, FROZEN, LOOPS, PLACE, ROUND, STARTING, UNTOLD, Recorded, _told, find


def facts(number, untold=0, loops=""):
    same = {PLACE: "line 9", AROUND: "", STARTING: "the same", "optimizer": "sgd", FROZEN: "[]"}
    return same | {ROUND: f"round {number}", LOOPS: loops, UNTOLD: untold}


def test_a_round_that_is_told_and_not_recorded_is_another_call():
    """Members of one seed may differ in what no digest holds, such as a variable that the loss reads."""
    known = {1: Recorded(facts(0), ["seed"], ["end"])}
    assert find(known, 0, facts(0), ["seed"], False) == (1, False)
    assert find(known, 0, facts(1), ["seed"], False) == (2, False)
    assert find(known, 0, facts(1, untold=1), ["seed"], False) == (1, False)
    assert find(known, 0, facts(1, untold=1) | {FROZEN: "[0]"}, ["seed"], False) == (2, False)


def test_an_argument_alone_that_is_another_leaves_equal_input_the_same_call():
    """Such as the first round that a script makes in this start; members differ in a variable of the loop."""
    known = {1: Recorded(facts(0, loops="2"), ["seed"], None)}
    assert find(known, 0, facts(1, loops="2"), ["seed"], False) == (1, False)
    assert find(known, 0, facts(1, loops="3"), ["seed"], False) == (2, False)
    assert find(known, 0, facts(1, loops="2"), ["another"], False) == (2, False)


def test_a_date_in_the_name_of_a_folder_tells_no_round():
    dated = [time.strftime(form) for form in ("run-%Y%m%d-%H%M%S-1", "run-%Y-%m-%d_%H:%M:%S-1", "run-%Y%m%d-1")]
    assert [_told(name, True) for name in dated] == [["run--1"]] * 3
    assert _told("sales-2019-03-01.csv", True) == ["sales-2019-03-01.csv"]
