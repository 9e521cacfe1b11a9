"""Text that a model writes."""

import math

import torch

from whorl.errors import InputError
from whorl.text.model import LanguageModel
from whorl.text.vocabulary import Vocabulary


def sample(
    model: LanguageModel,
    prompt: torch.Tensor,
    length: int,
    temperature: float = 0.8,
    seed: int = 0,
    top_k: int | None = None,
) -> torch.Tensor:
    """`length` tokens, int64 [length] on the CPU, that the model writes after `prompt`.

    Args:
        model: it runs in eval mode and comes back as it was.
        prompt: token numbers [tokens], at least one.
        length: how many tokens to write.
        temperature: 1 draws from the model's own distribution, less from its likelier tokens; 0 takes the likeliest.
        seed: of the draws, which are the same on every device for the same probabilities.
        top_k: draw from so many of the likeliest tokens; None: from all.

    Raises:
        InputError: an empty prompt, a value out of range, or a model whose predictions are no numbers.
    """
    if not len(prompt):
        raise InputError("the prompt is empty: give one of at least one token.")
    for name, value, least in (("length", length, 0), ("top_k", top_k, 1), ("seed", seed, 0)):
        if value is not None and not least <= value < 2**63:
            raise InputError(f"{name} is {value}: write a whole number from {least} on.")
    if not 0 <= temperature < math.inf:
        raise InputError(f"temperature is {temperature}: write a number from 0 on.")
    generator = torch.Generator().manual_seed(seed)
    written: list[int] = []
    states, training = None, model.training
    tokens = prompt.long().to(model.device)[:, None]
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(length):
                logits, states = model(tokens, states)
                written.append(_draw(logits[-1, 0].cpu().double(), temperature, generator, top_k))
                tokens = torch.full((1, 1), written[-1], device=model.device)
    finally:
        model.train(training)
    return torch.tensor(written, dtype=torch.int64)


def encoded(vocabulary: Vocabulary, prompt: bytes) -> torch.Tensor:
    """A prompt as token numbers [tokens].

    Raises:
        InputError: it is not UTF-8, where the tokens are not bytes, or has characters that the model does not know.
    """
    try:
        return vocabulary.encode(prompt)
    except UnicodeDecodeError as error:
        raise InputError(
            f"the prompt is not UTF-8 (at byte {error.start}): its tokens are {vocabulary.kind}."
        ) from error


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator, top_k: int | None) -> int:
    if not logits.isfinite().all():
        raise InputError("the model predicts no numbers: its training diverged; train anew with a lower learning rate.")
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        kept = torch.topk(logits, top_k)
        logits = torch.full_like(logits, -math.inf).scatter(0, kept.indices, kept.values)
    chances = torch.softmax((logits - logits.max()) / temperature, 0)
    return int(torch.multinomial(chances, 1, generator=generator))
