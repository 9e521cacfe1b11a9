"""The language-model program behind `whorl train`: text, model, training loop, checkpoints."""
