"""What a callback changes within fit and could not take effect is refused."""

import keras
import numpy as np
import pytest

import tfdist


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_callback_that_compiles_the_model_is_refused(connect, epoch):
    class Compiles(keras.callbacks.Callback):
        def on_epoch_begin(self, now, logs=None):
            if now == epoch:
                with connect(1).scope():
                    self.model.compile("adam", "mae")

    with connect(1).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    with pytest.raises(tfdist.UserError, match="a callback compiled the model within fit"):
        tfdist.fit(model, x, y, epochs=3, callbacks=[Compiles()], distribution=connect(1), verbose=0)
    tfdist.fit(model, x, y, distribution=connect(1), verbose=0)
