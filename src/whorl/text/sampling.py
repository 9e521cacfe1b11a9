"""Text that a model writes."""

import torch

from whorl.errors import InputError
from whorl.text.model import LanguageModel


def sample(
    model: LanguageModel, prompt: torch.Tensor, length: int, temperature: float = 0.8, seed: int = 0
) -> torch.Tensor:
    """`length` tokens, int64 [length] on the CPU, that the model writes after `prompt`.

    Args:
        model: it runs in eval mode and comes back as it was.
        prompt: token numbers [tokens], at least one.
        length: how many tokens to write.
        temperature: 1 draws from the model's own distribution; towards 0 the likeliest token wins.
        seed: of the draws, which are the same on every device for the same probabilities.

    Raises:
        InputError: an empty prompt, or a temperature that is not above 0.
    """
    if not len(prompt) or temperature <= 0:
        got = f"{len(prompt)} tokens and {temperature}"
        raise InputError(f"a sample needs a prompt of at least one token and a temperature above 0: got {got}.")
    generator = torch.Generator().manual_seed(seed)
    written, states, training = [], None, model.training
    tokens = prompt.long().to(model.device)[:, None]
    model.eval()
    with torch.no_grad():
        for _ in range(length):
            logits, states = model(tokens, states)
            chances = torch.softmax(logits[-1, 0].cpu().double() / temperature, 0)
            written.append(torch.multinomial(chances, 1, generator=generator))
            tokens = written[-1].to(model.device)[:, None]
    model.train(training)
    return torch.cat(written) if written else torch.zeros(0, dtype=torch.int64)
