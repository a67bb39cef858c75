"""A Trainer with label smoothing."""

from tiny import cross_entropy, llama, trained, valid, window

microbatches, windows = window(), 2


def loss_sum(model, microbatch):
    """The smoothed loss summed over valid tokens, and their number."""
    logits, labels = model(microbatch["input_ids"]).logits, microbatch["labels"]
    return cross_entropy(logits, labels, "sum", label_smoothing=0.1), valid(labels)


def build():
    """A fresh model and its step."""
    model = llama()
    return model, trained(model, label_smoothing_factor=0.1)
