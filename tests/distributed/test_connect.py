"""`tfdist.connect` as cells of a notebook call it."""

import logging

import tensorflow as tf

import tfdist


def test_asked_again_it_returns_what_it_returned(connect):
    two = tfdist.connect("mirrored", virtual_devices=2)
    assert tfdist.connect("mirrored", virtual_devices=2) is two
    assert tfdist.connect("mirrored", virtual_devices=3) is not two
    assert tfdist.connect("mirrored", virtual_devices=2, jit="on") is not two


def test_it_is_shown_in_a_line(connect):
    assert repr(connect(1)) == "<Distribution default: 1 replica, here on CPU:0>"
    assert repr(connect(2)) == "<Distribution mirrored: 2 replicas, here on CPU:0, CPU:1>"


def test_tensorflow_does_not_tell_of_each_strategy(connect):
    assert tf.get_logger().level == logging.WARNING
