"""Makes the files of this folder, with tf_keras and tensorflow: python make.py"""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
import numpy as np
import tf_keras as keras
from tf_keras.src.layers.rnn.cudnn_gru import CuDNNGRU
from tf_keras.src.layers.rnn.cudnn_lstm import CuDNNLSTM

layers = keras.layers
HERE = os.path.dirname(os.path.abspath(__file__))


def plain():
    entering = layers.Input((5,))
    y = layers.Embedding(8, 3, mask_zero=True)(entering)
    y = layers.Bidirectional(layers.LSTM(3, return_sequences=True, recurrent_activation="hard_sigmoid"))(y)
    y = keras.Sequential([layers.GRU(4, reset_after=False, return_sequences=True)], name="inside")(y)
    y = layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)], return_sequences=True)(y)
    y = layers.SimpleRNN(3, return_sequences=True)(y)
    y = layers.GRU(3, stateful=False, implementation=1)(y)
    return keras.Model(entering, layers.Dense(2, activation="hard_sigmoid")(y))


def recurrent(lstm, gru):
    return keras.Sequential(
        [
            layers.Input((5, 3)),
            layers.Bidirectional(gru(3, return_sequences=True, name="gru"), name="both"),
            keras.Sequential([lstm(4, return_sequences=True, name="first")], name="inside"),
            gru(2, return_sequences=True, name="second"),
            lstm(3, name="third"),
            layers.Dense(2, name="dense"),
        ]
    )


def mixed(lstm, gru):
    return keras.Sequential(
        [
            layers.Input((2, 5, 3)),
            layers.TimeDistributed(keras.Sequential([layers.Input((5, 3)), gru(4)], name="inside"), name="each"),
            layers.LSTM(3, return_sequences=True, name="modern"),
            lstm(2, name="old"),
            layers.Dense(2, name="dense"),
        ]
    )


def randomise(model):
    generator = np.random.default_rng(0)
    model.set_weights([generator.standard_normal(weight.shape) * 0.5 for weight in model.get_weights()])


def main():
    found = {"tokens": np.random.default_rng(1).integers(0, 8, (3, 5)), "x": np.random.default_rng(2).random((3, 5, 3))}
    model = plain()
    randomise(model)
    model.compile("adam", "mse")
    found["plain"] = model.predict(found["tokens"], verbose=0)
    model.save(os.path.join(HERE, "plain.h5"))
    model.save(os.path.join(HERE, "plain.keras"))

    found["x4"] = np.random.default_rng(3).random((3, 2, 5, 3))
    for name, build, given in (("cudnn", recurrent, "x"), ("mixed", mixed, "x4")):
        cudnn = build(CuDNNLSTM, CuDNNGRU)  # runs on a GPU alone: its outputs are those of what Keras 2 makes of it
        randomise(cudnn)
        cudnn.save(os.path.join(HERE, f"{name}.h5"))
        cudnn.save(os.path.join(HERE, f"{name}.keras"))
        model = build(layers.LSTM, layers.GRU)
        model.load_weights(os.path.join(HERE, f"{name}.h5"))
        found[name] = model.predict(found[given], verbose=0)
    np.savez(os.path.join(HERE, "outputs.npz"), **found)


main()
