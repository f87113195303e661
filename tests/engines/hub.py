"""Models of KerasHub that a config describes, without a download, trained as its guides do; nothing of tfdist."""

import keras
import keras_hub
import numpy as np
import tensorflow as tf

hub = keras_hub.models
words = ["the", "quick", "brown", "fox", "jumped", "over", "lazy", "dog", "and", "ran", "away"]
rng = np.random.default_rng(0)
texts = [" ".join(rng.choice(words, 6)) for _ in range(22)]
labels = np.array([len(text) % 3 for text in texts])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
size = dict(num_layers=1, num_heads=2, hidden_dim=16, intermediate_dim=32, dropout=0.0)


def show(name, *numbers):
    print("result", name, *(f"{float(n):.9g}" for n in np.concatenate([np.ravel(n) for n in numbers])), flush=True)


def squares(model):
    return [np.square(w, dtype="float64").sum() for w in model.get_weights()]


keras.utils.set_random_seed(1)
tokenizer = hub.BertTokenizer(vocabulary=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words], lowercase=True)
preprocessor = hub.BertTextClassifierPreprocessor(tokenizer, sequence_length=10)
backbone = hub.BertBackbone(vocabulary_size=16, max_sequence_length=10, **size)
bert = hub.BertTextClassifier(backbone, num_classes=3, preprocessor=preprocessor, dropout=0.0)
# Keras' Adam squares the gradients of a row of an embedding before it adds them up, tfdist afterwards.
bert.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
history = bert.fit(texts, labels, batch_size=8, epochs=2, verbose=0, validation_data=(texts[:7], labels[:7]))
show("BERT", *history.history.values(), bert.evaluate(texts, labels, batch_size=8, verbose=0), squares(bert))
show("outputs of BERT", bert.predict(texts[:5], verbose=0))
bert.save_to_preset("preset")
show("restored BERT", hub.BertTextClassifier.from_preset("preset").predict(texts[:5], verbose=0))

pieces = [*sorted({*"abcdefghijklmnopqrstuvwxyz", "Ġ"}), "Ġt", "he", "Ġthe", "ox", "<|endoftext|>"]
vocabulary = {piece: number for number, piece in enumerate(pieces)}
data = tf.data.Dataset.from_tensor_slices(texts).batch(8)
for name in ("GPT-2", "GPT-2 with LoRA"):
    keras.utils.set_random_seed(2)
    tokenizer = hub.GPT2Tokenizer(vocabulary=vocabulary, merges=["Ġ t", "h e", "Ġt he", "o x"])
    preprocessor = hub.GPT2CausalLMPreprocessor(tokenizer, sequence_length=16)
    backbone = hub.GPT2Backbone(vocabulary_size=len(vocabulary), max_sequence_length=16, **size)
    gpt = hub.GPT2CausalLM(backbone, preprocessor=preprocessor)
    if name != "GPT-2":
        gpt.backbone.enable_lora(rank=2)
    gpt.compile(keras.optimizers.AdamW(1e-2), loss, weighted_metrics=["accuracy"], sampler="greedy")
    history = gpt.fit(data, epochs=2, verbose=0)
    show(name, *history.history.values(), gpt.evaluate(data, verbose=0), squares(gpt))
    print("result", name, len(gpt.trainable_weights), gpt.generate(["the quick", "lazy"], max_length=12))
