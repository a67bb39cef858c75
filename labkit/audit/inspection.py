"""What in a model makes accumulation more than a sum, looked up before anything runs."""

from __future__ import annotations

import inspect as source
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from labkit.declare import quantity

BATCH = "in a microbatch it normalises by that microbatch: a different function from the one of the whole batch"
STATE = "its running statistics move at every forward pass, K times an optimizer step"
RANDOM = "it draws new numbers at every forward pass: another partition gets other numbers"
DRAWS = re.compile(
    r"\b(dropout|alpha_dropout|rand|randn|randint|randperm|rand_like|randn_like|bernoulli|multinomial)\w*\("
)
WRITES = r"self\.{}\s*(=[^=]|\+=|-=|\*=|\.\w*[a-z]_\(|\[.*\]\s*=)"


@dataclass(frozen=True)
class Finding:
    """One layer that accumulation has to know about."""

    name: str = quantity("the layer's name in the model")
    layer: str = quantity("its class")
    kind: str = quantity("looks at the batch, keeps state, or draws random numbers")
    means: str = quantity("what that means for accumulation")


def inspect(model: nn.Module) -> list[Finding]:
    """Layers that depend on the batch, keep running state or draw random numbers, and what each means.

    >>> [(each.name, each.kind) for each in inspect(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.1)))]
    [('0', 'looks at the batch'), ('0', 'keeps state'), ('1', 'draws random numbers')]

    Known layers are judged by class and mode, layers of your own by the source of their forward, and marked "seems to".
    A frozen BatchNorm (eval mode, or no gradient of its statistics) and a dropout of 0 are no findings.
    """
    return [
        Finding(name, type(module).__name__, kind, means)
        for name, module in model.named_modules()
        for kind, means in _layer(module)
    ]


def _layer(module: nn.Module) -> Iterator[tuple[str, str]]:
    if isinstance(module, _NormBase):
        yield from _norm(module)
    elif isinstance(module, _DropoutNd):
        if module.training and module.p > 0:
            yield "draws random numbers", RANDOM
    elif isinstance(module, (nn.RReLU, nn.RNNBase, nn.MultiheadAttention)):
        if module.training and (isinstance(module, nn.RReLU) or module.dropout > 0):
            yield "draws random numbers", RANDOM
    elif type(module).__name__ == "_SpectralNorm":
        if module.training:
            yield "keeps state", "each forward pass is a step of its power iteration: K steps an optimizer step"
    elif not type(module).__module__.startswith("torch."):
        yield from _own(module)


def _norm(module: _NormBase) -> Iterator[tuple[str, str]]:
    own = module.training or module.running_mean is None
    if isinstance(module, _BatchNorm) and own:
        yield "looks at the batch", BATCH
    if module.training and module.running_mean is not None and module.momentum != 0:
        yield "keeps state", STATE


def _own(module: nn.Module) -> Iterator[tuple[str, str]]:
    try:
        forward = source.getsource(type(module).forward)
    except (OSError, TypeError):
        return
    code = re.sub(r"#.*|\"\"\".*?\"\"\"", "", forward, flags=re.DOTALL if '"""' in forward else 0)
    if match := DRAWS.search(code):
        yield "draws random numbers", f"its forward seems to call {match.group(1)}: {RANDOM}"
    for name, _ in module.named_buffers(recurse=False):
        if re.search(WRITES.format(re.escape(name)), code):
            yield "keeps state", f"its forward seems to change the buffer {name}, K times an optimizer step"
