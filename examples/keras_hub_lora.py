"""Fine-tunes a GPT-2 of KerasHub with LoRA: a few thousand numbers train, all others stay as they are.

tfdist run --virtual_devices=2 examples/keras_hub_lora.py
"""

import keras
import keras_hub
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
hub = keras_hub.models
rng = np.random.default_rng(0)
verbs = {"dog": "barks", "cat": "sleeps", "bird": "sings"}
animals = rng.choice(list(verbs), 320)
texts = [f"the {rng.choice(['old', 'young'])} {animal} {verbs[animal]}" for animal in animals]

# model = hub.GPT2CausalLM.from_preset("gpt2_base_en")  # in place of the next lines: downloads the weights of GPT-2
pieces, merges = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "<|endoftext|>"], []  # Ġ is a space
for word in ("the", *(f"Ġ{word}" for word in ("old", "young", "growls", *verbs, *verbs.values()))):
    for i in range(1, len(word)):
        merges.append(f"{word[:i]} {word[i]}")
        pieces.append(word[: i + 1])
vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
tokenizer = hub.GPT2Tokenizer(vocabulary=vocabulary, merges=list(dict.fromkeys(merges)))
size = dict(num_layers=1, num_heads=2, hidden_dim=64, intermediate_dim=64, max_sequence_length=8, dropout=0.0)
backbone = hub.GPT2Backbone(vocabulary_size=len(vocabulary), **size)
model = hub.GPT2CausalLM(backbone, preprocessor=hub.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8))


def train(learning_rate, epochs):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(learning_rate), loss, weighted_metrics=["accuracy"], sampler="greedy")
    return model.fit(tf.data.Dataset.from_tensor_slices(texts).batch(8), epochs=epochs, verbose=2).history["loss"][-1]


train(3e-3, epochs=3)  # what a preset would have learned
texts = [text.replace("barks", "growls") for text in texts]  # what is new
model.backbone.enable_lora(rank=4)
trained = sum(int(np.prod(w.shape)) for w in model.trainable_weights)
loss = train(1e-2, epochs=3)
text = model.generate("the old dog", max_length=6)
print(f"loss {loss:.6f}, {trained} of {model.count_params()} numbers trained: {text!r}")
