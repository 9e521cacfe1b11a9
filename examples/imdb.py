"""Is a film review kind?  Max Woolf's benchmark of 2017: a bidirectional LSTM on IMDb, masked, with recurrent dropout.

    python examples/imdb.py reviews.npz
    python examples/imdb.py reviews.npz --compare   # also times what one writes with torch alone

The file is not part of whorl.  It holds x_train and x_test [reviews, length] of word numbers, padded with 0 on the
left, and y_train and y_test of 0 and 1: the 50,000 reviews of the Large Movie Review Dataset (Maas et al. 2011,
https://ai.stanford.edu/~amaas/data/sentiment), 20,000 words by frequency; .npz.xz is read too.
"""

import argparse
import io
import lzma
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whorl
from whorl.bench.figures import Figures, Plot
from whorl.bench.tables import Table, number

PUBLISHED = (
    ("keras, Google Cloud GPU, TensorFlow (Woolf 2017)", "284 to 329", "0.851"),
    ("keras, 8 CPUs of Google Cloud, TensorFlow (Woolf 2017)", "157", "0.85"),
    ("keras 2.1, TITAN V, TensorFlow 1.5 (keras issue 8885)", "161", ""),
)


def read(path: Path, length: int) -> dict[str, Tensor]:
    """The last `length` words of each review, and whether it is kind."""
    raw = path.read_bytes()
    arrays = np.load(io.BytesIO(lzma.decompress(raw) if path.suffix == ".xz" else raw), allow_pickle=False)
    words = {name: torch.from_numpy(arrays[name][:, -length:].astype(np.int64)) for name in ("x_train", "x_test")}
    return words | {name: torch.from_numpy(arrays[name].astype(np.float32)) for name in ("y_train", "y_test")}


class Classifier(nn.Module):
    """Logits from both directions' last states."""

    def __init__(self, layer: nn.Module, last: Callable[[nn.Module, Tensor, Tensor], Tensor], vocabulary: int) -> None:
        super().__init__()
        self.layer, self.last = layer, last
        self.embedding = nn.Embedding(vocabulary, 128)
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)  # as Keras does
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(128, 1)

    def forward(self, words: Tensor) -> Tensor:
        state = self.last(self.layer, self.embedding(words), words != 0)
        return self.head(self.dropout(state)).squeeze(-1)


def start_as_keras_does(layer: nn.Module) -> nn.Module:
    """Glorot's input weights, orthogonal recurrent ones, biases of 0 but for the forget gate's 1."""
    for name, weight in layer.named_parameters():
        if "bias" in name:
            nn.init.zeros_(weight)
            if "bias_ih" in name:
                nn.init.ones_(weight[64:128])
        else:
            nn.init.xavier_uniform_(weight) if "weight_ih" in name else nn.init.orthogonal_(weight)
    return layer


def masked(layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """whorl: a step whose mask is False leaves the states as they are."""
    return layer(x, mask=mask)[1][0].transpose(0, 1).flatten(1)


def unmasked(layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """torch.nn: padding is read like words, nothing is dropped inside."""
    return layer(x)[1][0].transpose(0, 1).flatten(1)


class Loop(nn.Module):
    """The same as whorl's in torch alone: a loop over time for each direction, a mask of dropout for all steps."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop, self.lstm = drop, nn.LSTM(128, 64, bidirectional=True)  # for its parameters

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        ends, w = [], dict(self.lstm.named_parameters())
        for suffix, order in (("l0", 1), ("l0_reverse", -1)):
            projected = F.linear(x, w[f"weight_ih_{suffix}"], w[f"bias_ih_{suffix}"] + w[f"bias_hh_{suffix}"])
            h = c = x.new_zeros(len(x), 64)
            kept = F.dropout(x.new_ones(1, len(x), 64), self.drop, self.training)
            matrices = w[f"weight_hh_{suffix}"].view(4, 64, 64).transpose(1, 2)
            for step, live in list(zip(projected.unbind(1), mask[..., None].unbind(1), strict=True))[::order]:
                i, f, g, o = (step.view(-1, 4, 64).transpose(0, 1) + (h * kept) @ matrices).unbind(0)
                new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h, c = torch.where(live, torch.sigmoid(o) * torch.tanh(new), h), torch.where(live, new, c)
            ends.append(h)
        return torch.cat(ends, 1)


def difference(words: Tensor, vocabulary: int, seed: int) -> float:
    """By how much the loop's logits and gradients differ from whorl's, without dropout: relative 2-norm, float64."""
    found = []
    for rival in (False, True):
        torch.manual_seed(seed)
        layer = Loop(0.0) if rival else whorl.LSTM(128, 64, bidirectional=True, batch_first=True)
        last = (lambda layer, x, mask: layer(x, mask)) if rival else masked
        model = Classifier(layer, last, vocabulary).double().to(words.device).eval()
        logits = model(words)
        grads = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
        found.append(torch.cat([tensor.flatten() for tensor in (logits.detach(), *grads)]))
    return ((found[0] - found[1]).norm() / found[1].norm()).item()


class Training:
    """A classifier and its optimizer, a step at a time; with --graph its kernels are launched as one CUDA graph."""

    def __init__(self, model: Classifier, data: dict[str, Tensor], given: argparse.Namespace) -> None:
        self.model, self.data, self.given = model.to(given.device), data, given
        self.adam = torch.optim.Adam(model.parameters(), fused=True, capturable=given.graph)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.rows = torch.zeros(given.batch, dtype=torch.long, device=given.device)

    def capture(self) -> None:
        """Make a graph of a step, after one on the stream where it is captured."""
        self.rows.copy_(torch.randperm(len(self.data["x_train"]))[: len(self.rows)])
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step(self.rows)
        with torch.cuda.graph(graph, stream=stream):
            self.step(self.rows)
        self.graph = graph

    def step(self, rows: Tensor) -> None:
        if self.graph is not None and len(rows) == len(self.rows):
            self.rows.copy_(rows)
            self.graph.replay()
            return
        with torch.autocast(self.given.device.type, torch.bfloat16, enabled=self.given.bf16):
            logits = self.model.train()(self.data["x_train"][rows])
        self.adam.zero_grad()
        F.binary_cross_entropy_with_logits(logits.float(), self.data["y_train"][rows]).backward()
        self.adam.step()

    def epoch(self) -> float:
        """One pass over the reviews; the accuracy on the others, as in the benchmark within the time of the epoch."""
        count = len(self.data["x_train"])
        for rows in torch.randperm(count).to(self.given.device).split(self.given.batch):
            self.step(rows)
        others = self.data["x_test"].split(16 * self.given.batch)
        with torch.no_grad(), torch.autocast(self.given.device.type, torch.bfloat16, enabled=self.given.bf16):
            self.model.eval()
            kind = torch.cat([self.model(words) for words in others]) > 0
        right = (kind == (self.data["y_test"] > 0.5)).sum().item()
        return right / len(kind)

    def milliseconds(self, steps: int) -> float:
        """Of a training step: the median."""
        times = []
        for rows in torch.randperm(len(self.data["x_train"])).to(self.given.device).split(self.given.batch)[:steps]:
            start = time.perf_counter()
            self.step(rows)
            if self.given.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)


def main() -> Figures:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("data", type=Path)
    arguments.add_argument("--length", type=int, default=100, help="the last words of each review")
    arguments.add_argument("--epochs", type=int, default=4)
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--drop", type=float, default=0.2, help="recurrent dropout")
    arguments.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--bf16", action="store_true", help="under bfloat16 autocast")
    arguments.add_argument("--engine", default="auto", help="of whorl's layer")
    arguments.add_argument("--graph", action="store_true", help="a training step is one CUDA graph")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--compare", action="store_true", help="also time steps of torch's own")
    arguments.add_argument("--figures", type=Path, help="a JSON file for whorl bench --suite seeds --report")
    given = arguments.parse_args()
    data = {name: tensor.to(given.device) for name, tensor in read(given.data, given.length).items()}
    vocabulary = int(max(data["x_train"].max(), data["x_test"].max())) + 1
    torch.manual_seed(given.seed)
    layer = whorl.LSTM(
        128, 64, bidirectional=True, batch_first=True, recurrent_dropout=given.drop, recurrent_dropout_mode="shared",
        engine=given.engine,
    )  # fmt: skip
    training = Training(Classifier(start_as_keras_does(layer), masked, vocabulary), data, given)
    with torch.autocast(given.device.type, torch.bfloat16, enabled=given.bf16):
        explanation = whorl.explain(training.model, data["x_train"][: given.batch])
    print(explanation)
    training.milliseconds(3)  # compiles, allocates
    if given.graph:
        training.capture()
    epochs = []
    for index in range(given.epochs):
        start = time.perf_counter()
        accuracy = training.epoch()
        epochs.append((time.perf_counter() - start, accuracy))
        print(f"epoch {index + 1}: {epochs[-1][0]:.1f} s, validation accuracy {accuracy:.4f}")
    figures = show(training, epochs, vocabulary, str(explanation), given)
    for table in figures.tables:
        print(table.text())
    if given.figures:
        figures.save(given.figures)
    return figures


def show(
    training: Training, epochs: list[tuple[float, float]], vocabulary: int, said: str, given: argparse.Namespace
) -> Figures:
    """The figures: epochs beside published ones, and steps beside torch's own."""
    seconds, best = statistics.median(time for time, _ in epochs), max(accuracy for _, accuracy in epochs)
    rows = [(name, time, accuracy) for name, time, accuracy in PUBLISHED]
    rows.append((f"whorl, {given.epochs} epoch" + "s" * (given.epochs > 1), number(seconds), f"{best:.4f}"))
    columns = ("", "seconds an epoch", "best validation accuracy")
    tables = [Table("IMDb, an epoch with its validation", columns, tuple(rows), ("Published: maxlen 100, batch 32.",))]
    if given.compare:
        wrong = difference(training.data["x_train"][: given.batch], vocabulary, given.seed)
        assert wrong < 1e-9, f"logits and gradients differ by {wrong}"
        rivals = {
            "whorl": training,
            "torch, a loop over time": Training(
                Classifier(Loop(given.drop), lambda layer, x, mask: layer(x, mask), vocabulary), training.data, given
            ),
            "torch.nn.LSTM, without mask and recurrent dropout": Training(
                Classifier(nn.LSTM(128, 64, bidirectional=True, batch_first=True), unmasked, vocabulary),
                training.data,
                given,
            ),
        }
        times = {}
        for name, rival in rivals.items():
            rival.milliseconds(2)
            if given.graph and rival.graph is None:
                rival.capture()
            times[name] = rival.milliseconds(20)
        steps = tuple((name, number(time), f"{time / times['whorl']:.2f}") for name, time in times.items())
        note = f"Without dropout, in float64, logits and gradients of the loop and of whorl differ by {wrong:.1e}."
        columns = ("", "milliseconds", "times whorl's")
        title = "A training step alone, waited for" + (", as one CUDA graph" if given.graph else "")
        tables.append(Table(title, columns, steps, (note,)))
    text = (
        f"25,000 reviews to learn from, as many to validate on: embedding of 128, bidirectional LSTM(64), dropout 0.5; "
        f"the last {given.length} words, batch {given.batch}, Adam; padding is masked, recurrent dropout {given.drop}; "
        + ("bfloat16 autocast" if given.bf16 else "float32")
        + ("; a training step is one CUDA graph." if given.graph else "."),
    )
    curve = {"whorl": tuple((index + 1.0, accuracy) for index, (_, accuracy) in enumerate(epochs))}
    plot = Plot("Validation accuracy", "epoch", "accuracy", curve)
    numbers = {"seconds an epoch": seconds, "best accuracy": best}
    title = "IMDb: a masked bidirectional LSTM with recurrent dropout"
    return Figures.now(given.device, "imdb", title, text, tables, [plot], {"whorl.explain": said}, numbers)


if __name__ == "__main__":
    main()
