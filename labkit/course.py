"""The notebooks in their order, and what a learner has done in each: read from the notebooks themselves."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

from labkit.declare import quantity
from labkit.progress import Done

ABOUT = {
    "00_start_here": "why a mean of means is no mean",
    "01_batch_quantities": "what multiplies the batch and what does not, and when two plans can be compared",
    "02_roofline": "how fast one matmul can be, and why a small microbatch is slow",
    "03_mean_or_token_sum": "what each token really weighs in a step, and how to see it",
    "04_data_parallel": "what several processes must agree on, and what their gradients then weigh",
    "05_pipeline": "what a pipeline's schedule costs, and what it does to the gradient",
    "06_batchnorm_and_randomness": "what a microbatch changes although every weight is right",
    "07_adam_and_cadence": "what must happen once in a step, and what becomes of it K times",
    "08_clipping_and_loss_scaling": "in which order to accumulate, unscale, clip and step",
    "09_memory": "what a step keeps for its backward, and which loops keep too much",
    "10_throughput": "which microbatch is fastest, measured where the optimizer steps",
    "11_noise_and_learning_rate": "what a larger batch is good for, and which learning rate it wants",
    "12_packing_and_mixture": "which text is in a step, and what must keep packed documents apart",
    "13_audit": "what your own training step does, and how a fault gets its name",
    "14_casebook": "faults that were really shipped, and how each is recognised",
}
HERE = pathlib.Path(__file__).parent.parent / "notebooks"  # where labkit runs from its repository


@dataclasses.dataclass(frozen=True)
class Notebook:
    """One notebook, and what it asks of a learner."""

    file: str = quantity("its name")
    title: str = quantity("what it is called")
    about: str = quantity("what one knows after it")
    here: bool = quantity("whether it can be opened from where the kernel runs")
    minutes: int | None = quantity("a learner's; None where the notebook is not there to say", "min")
    experiments: tuple[str, ...] = quantity("'topic.name' of each, in order")
    exercises: tuple[str, ...] = quantity("the checker of each, in order")

    def predicted(self, done: Done) -> list[str]:
        """Its experiments for which a prediction was made.

        >>> notebooks()[2].predicted(Done({}, {}))
        []
        """
        return [name for name in self.experiments if name in done.predictions]

    def passed(self, done: Done) -> list[str]:
        """Its exercises that were passed.

        >>> notebooks()[0].passed(Done({}, {"token_mean": "2026-01-01T00:00:00Z"}))
        ['token_mean']
        """
        return [name for name in self.exercises if name in done.exercises]

    def scores(self, done: Done) -> tuple[float, float | None] | None:
        """The closest prediction's score and the latest one's, None where that is far off; None before the first."""
        latest = [each for name in self.predicted(done) if (each := done.last(name))]
        closest = [score for name in self.predicted(done) if (score := done.best(name)) is not None]
        return (min(closest), max(latest, key=lambda each: each.at).score) if closest else None


def notebooks(folder: pathlib.Path | None = None) -> list[Notebook]:
    """All notebooks, in order; one that is not there yet has neither minutes nor experiments.

    >>> [each.title for each in notebooks()][:3]
    ['Start here', 'Batch quantities', 'Roofline']

    folder: where the kernel runs, by default the current one; what is not there is read where labkit lies.
    """
    folder = folder or pathlib.Path.cwd()
    return [_notebook(folder, stem, about) for stem, about in ABOUT.items()]


def _notebook(folder: pathlib.Path, stem: str, about: str) -> Notebook:
    file = f"{stem}.ipynb"
    here = (folder / file).is_file()
    prose, code = _cells(folder / file if here else HERE / file)
    heading = re.search(r"^# (?:\d+ · )?([^:\n]+)", prose, re.MULTILINE)
    title = heading[1].strip() if heading else stem[3:].replace("_", " ").capitalize()
    minutes = re.search(r"[Aa]bout (\d+) minutes", prose)
    return Notebook(
        file,
        title,
        about,
        here,
        int(minutes[1]) if minutes else None,
        tuple(dict.fromkeys(".".join(found) for found in re.findall(r"labkit\.labs\.(\w+)\(\s*[\"'](\w+)[\"']", code))),
        tuple(dict.fromkeys(name for name in re.findall(r"\bcheck\.(\w+)\(", code) if _is_exercise(name))),
    )


def _cells(path: pathlib.Path) -> tuple[str, str]:
    """A notebook's prose and its code; nothing where there is none, or none that can be read."""
    try:
        cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
        kinds = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""
    return tuple("\n".join(text for kind, text in kinds if kind == wanted) for wanted in ("markdown", "code"))  # type: ignore[return-value]


def _is_exercise(name: str) -> bool:
    from labkit import check
    from labkit.check.verdict import is_exercise

    return is_exercise(getattr(check, name, print))
