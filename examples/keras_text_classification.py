"""Is a sentence kind?  A masked embedding and a bidirectional LSTM with recurrent dropout, trained in Keras on whorl.

    KERAS_BACKEND=torch python examples/keras_text_classification.py

The sentences are made up here: each says that somebody is of some kind, and "not" turns it round.  Bags of words cannot
tell; the order matters.
"""

import argparse

import numpy as np

import whorl
from whorl import keras

WORDS = "- the and is not very friend cat teacher kind gentle warm mean cruel cold".split()  # the first is padding
KIND, CRUEL = ("kind", "gentle", "warm"), ("mean", "cruel", "cold")


def sentences(count: int, seed: int, length: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Token numbers [count, length], zero after the end of each sentence, and whether each is kind."""
    generator = np.random.default_rng(seed)
    tokens, kind = np.zeros((count, length), int), np.zeros((count, 1))
    for row in range(count):
        good, negated = generator.random(2) < 0.5
        subject = [str(generator.choice(["friend", "cat", "teacher"])) for _ in range(generator.integers(1, 4))]
        filler = ["very"] * int(generator.integers(0, 3))
        said = ["the", *" and the ".join(subject).split(), "is", *["not"] * int(negated), *filler]
        said.append(str(generator.choice(KIND if good else CRUEL)))
        tokens[row, : len(said)] = [WORDS.index(word) for word in said]
        kind[row] = good != negated
    return tokens, kind


def classifier(units: int) -> keras.Model:
    """Padding is masked by the embedding, so it changes nothing; the LSTM forgets other units in each batch."""
    model = keras.Sequential([
        keras.layers.Embedding(len(WORDS), 16, mask_zero=True),
        keras.layers.Bidirectional(keras.layers.LSTM(units, dropout=0.1, recurrent_dropout=0.1, seed=1)),
        keras.layers.Dense(1, activation="sigmoid"),
    ])  # fmt: skip
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
    return model


def main() -> float:
    """The accuracy on sentences that the model has not seen."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--sentences", type=int, default=2000)
    arguments.add_argument("--units", type=int, default=32)
    arguments.add_argument("--epochs", type=int, default=5)
    given = arguments.parse_args()
    keras.utils.set_random_seed(0)
    model = classifier(given.units)
    x, kind = sentences(given.sentences, seed=0)
    model.fit(x, kind, epochs=given.epochs, batch_size=64, verbose=2)
    accuracy = model.evaluate(*sentences(500, seed=1), verbose=0)[1]
    print(f"{accuracy:.1%} of unseen sentences are told right")
    print(keras.explain(model, x[:64]))
    return accuracy


if __name__ == "__main__":
    whorl.settings.slow = "allow"  # what runs is printed at the end
    main()
