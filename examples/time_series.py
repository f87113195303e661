"""Forecasts a time series: windows of the past by `timeseries_dataset_from_array`, an LSTM, the value 6 steps ahead.

tfdist run --virtual_devices=2 examples/time_series.py
"""

import keras
import numpy as np

keras.utils.set_random_seed(1)
PAST, AHEAD = 24, 6
hours = np.arange(3000)
noise = np.random.default_rng(0).normal(size=3000)
level = np.sin(2 * np.pi * hours / 24) + 0.5 * np.sin(2 * np.pi * hours / 168) + 0.1 * noise  # by day and by week
columns = np.stack([level, hours % 24 / 24], axis=-1).astype("float32")


def windows(first, last):
    past, future = columns[first : last - AHEAD], level[first + PAST + AHEAD - 1 : last].astype("float32")
    return keras.utils.timeseries_dataset_from_array(past, future, sequence_length=PAST, batch_size=128)


train, test = windows(0, 2400), windows(2400, 3000)
layers = [keras.Input((PAST, 2)), keras.layers.LSTM(16), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile(keras.optimizers.Adam(2e-2), "mse", metrics=["mae"])
model.fit(train, epochs=4, validation_data=test, verbose=2)
loss, error = model.evaluate(test, verbose=0)
naive = np.abs(level[2400 + PAST + AHEAD - 1 :] - level[2400 + PAST - 1 : -AHEAD]).mean()
print(f"test loss {loss:.6f}, mae {error:.4f}; that nothing changes in {AHEAD} hours is off by {naive:.4f}")
