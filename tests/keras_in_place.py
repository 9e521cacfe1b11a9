"""A plugin of pytest that puts whorl's layers in the place of Keras' own: for Keras' own tests, see test_keras_own."""

import keras

import whorl.keras

whorl.settings.slow = "allow"
for _name in ("LSTM", "GRU", "SimpleRNN", "RNN", "Bidirectional"):
    for _place in (keras.layers, keras.src.layers):
        setattr(_place, _name, getattr(whorl.keras, _name))
