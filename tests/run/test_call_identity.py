"""Which recorded call of `fit` a call is taken for, where a script leaves out what it has finished."""

from tfdist.run.call_identity import AROUND, FROZEN, PLACE, ROUND, STARTING, UNTOLD, Recorded, find


def facts(number, untold=0):
    same = {PLACE: "line 9", AROUND: "", STARTING: "the same", "optimizer": "sgd", FROZEN: "[]"}
    return same | {ROUND: f"round {number}", UNTOLD: untold}


def test_a_round_that_is_told_and_not_recorded_is_another_call():
    """Members of one seed may differ in what no digest holds, such as a variable that the loss reads."""
    known = {1: Recorded(facts(0), ["seed"], ["end"])}
    assert find(known, 0, facts(0), ["seed"], False) == (1, False)
    assert find(known, 0, facts(1), ["seed"], False) == (2, False)
    assert find(known, 0, facts(1, untold=1), ["seed"], False) == (1, False)
    assert find(known, 0, facts(1, untold=1) | {FROZEN: "[0]"}, ["seed"], False) == (2, False)
