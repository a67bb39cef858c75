"""Lightning made right: each batch brings the N of its window, and the division by K is undone."""

from lit import Module, fitted
from tiny import K, cross_entropy, loss_sum, valid, window

microbatches, windows = window(), 2
for each in microbatches:
    each["N"] = sum(valid(every["labels"]) for every in microbatches)


class Right(Module):
    """The token mean."""

    def training_step(self, batch, _):
        """The loss of a microbatch: its sum over the tokens of the whole window."""
        return K * cross_entropy(self(batch["input_ids"]), batch["labels"], "sum") / batch["N"]


def build():
    """A fresh model and its step."""
    model = Right()
    return model, fitted(model)
