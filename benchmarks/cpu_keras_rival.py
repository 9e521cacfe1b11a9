"""A layer of Keras in a process of its own, for `cpu_keras.py`: it builds, checks and times what it is told to.

Runs with the Python of an environment that has Keras and TensorFlow or JAX; whorl and torch need not be there.  Each
line on standard input is one order as JSON, each line on standard output its answer.

    {"do": "build", "layer": "LSTM", "units": 128, "file": "in.npz", "out": "out.npz"}  answer: versions, ways
    {"do": "time", "way": "jit", "steps": 20}  answer: microseconds of each step
"""

import json
import os
import sys
import time

import numpy as np

BACKEND, THREADS = sys.argv[1], int(sys.argv[2])
os.environ |= {"KERAS_BACKEND": BACKEND, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": str(THREADS)}
if hasattr(os, "sched_setaffinity"):  # XLA takes as many threads as it may run on
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
import keras  # noqa: E402

RATE = 1e-6
"""Of the plain gradient step: weights change in every step, too little to matter."""


class OnTensorFlow:
    def __init__(self, layer, dy):
        import tensorflow as tf

        self.version, self.layer, self.weights = tf.__version__, layer, [one.value for one in layer.trainable_weights]

        def gradients(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x)
                loss = tf.reduce_sum(y * dy)
            return y, tape.gradient(loss, [x, *self.weights])

        def step(x):
            _, (dx, *grads) = gradients(x)
            for weight, grad in zip(self.weights, grads, strict=True):
                weight.assign_sub(RATE * grad)
            return dx

        self.gradients, self.tensor = gradients, tf.constant
        self.ways = {"graph": tf.function(step), "xla": tf.function(step, jit_compile=True)}

    def step(self, way, x):
        return self.ways[way](x).numpy()


class OnJax:
    def __init__(self, layer, dy):
        import jax

        self.version, self.layer = jax.__version__, layer
        self.weights = [one.value for one in layer.trainable_variables]
        fixed = [one.value for one in layer.non_trainable_variables]

        def loss(weights, x):
            y, _ = layer.stateless_call(weights, fixed, x)
            return (y * dy).sum(), y

        both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)

        def step(weights, x):
            _, (grads, dx) = both(weights, x)
            return [weight - RATE * grad for weight, grad in zip(weights, grads, strict=True)], dx

        def gradients(x):
            (_, y), (grads, dx) = both(self.weights, x)
            return y, [dx, *grads]

        self.gradients, self.tensor = gradients, jax.numpy.asarray
        self.ways = {"jit": jax.jit(step, donate_argnums=0)}

    def step(self, way, x):
        self.weights, dx = self.ways[way](self.weights, x)
        return np.asarray(dx)


def main():
    rival = inputs = None
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "build":
            data = np.load(order["file"])
            layer = getattr(keras.layers, order["layer"])(order["units"], return_sequences=True)
            layer.build(data["x0"].shape)
            layer.set_weights([data[f"weight{place}"] for place in range(3)])
            rival = {"tensorflow": OnTensorFlow, "jax": OnJax}[BACKEND](layer, data["dy"])
            inputs = [rival.tensor(data[f"x{place}"]) for place in range(4)]
            y, grads = rival.gradients(inputs[0])
            np.savez(order["out"], y=np.asarray(y), **{f"grad{i}": np.asarray(grad) for i, grad in enumerate(grads)})
            answer = {"keras": keras.__version__, BACKEND: rival.version, "ways": list(rival.ways)}
        else:
            answer = []
            for place in range(order["steps"]):
                begin = time.perf_counter()
                rival.step(order["way"], inputs[place % 4])
                answer.append(1e6 * (time.perf_counter() - begin))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
