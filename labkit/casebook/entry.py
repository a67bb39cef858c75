"""What an entry of the casebook is, and the list of all of them."""

from __future__ import annotations

import difflib
import html
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from labkit.audit import Report, audit, probe
from labkit.audit.bug_hunt.suspects import loss_sum
from labkit.casebook import cases
from labkit.declare import quantity
from labkit.device import quota_threads
from labkit.errors import LabError
from labkit.listing import sources
from labkit.nets import VOCABULARY
from labkit.wording import show

Loop = Callable[..., Any]
Numbers = Mapping[str, float]
Build = Callable[[], tuple[nn.Module, Callable[[list[Any]], object]]]
FAMILIES = {
    "weights": "what a token weighs",
    "ranks": "several processes",
    "cadence": "what advances once",
    "clipping": "clipping and scaling",
    "layers": "layers and masks",
    "data": "rows and batches",
    "counting": "what is counted",
}


@dataclass(frozen=True)
class Number:
    """One number of a case, as the wrong loop gives it and as the right one does."""

    name: str = quantity("what it is")
    wrong: float = quantity("what the wrong loop gives")
    right: float = quantity("what the right loop gives")

    @property
    def ratio(self) -> float:
        """The wrong number over the right one; NaN where the right number is 0."""
        return self.wrong / self.right if self.right else float("nan")

    @property
    def relative_error(self) -> float:
        """|wrong − right| / |right|; NaN where the right number is 0."""
        return abs(self.ratio - 1)


def call(loop: Loop) -> Any:
    """What a loop returns that needs nothing: a number, or several by name."""
    return loop()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault that was shipped: what was seen, the loop that did it, the right one, and what both are run on.

    >>> mean_of_means = find("B01")
    >>> mean_of_means.run(), mean_of_means.links[0]
    ((5.0, 3.5), 'https://github.com/huggingface/transformers/issues/34191')

    `measure(loop)` runs a loop and returns a number, or several by name, the one that is compared first. `step(loop)`
    makes of a loop what `labkit.audit` takes; `word` is what the audit says of the wrong one.
    """

    id: str
    topic: str
    family: str
    source: str
    symptom: str
    fault: str
    recognise: str
    given: str
    number: str
    wrong: Loop
    right: Loop
    also: tuple[str, ...] = ()
    versions: str = ""
    unit: str = ""
    measure: Callable[[Loop], float | Numbers] = call
    word: str = ""
    step: Callable[[Loop], Build] | None = None
    microbatches: Callable[[], list[Any]] = lambda: probe(VOCABULARY)
    concat: Callable[[list[Any]], Any] | None = None

    @property
    def title(self) -> str:
        """Id and topic."""
        return f"{self.id} {self.topic}"

    @property
    def links(self) -> tuple[str, ...]:
        """Where the public threads can be read; GitHub leads from an issue's address to a pull request's."""
        return tuple(address(each) for each in (self.source, *self.also))

    def numbers(self, loop: Loop) -> Numbers:
        """Run one of the loops: its numbers by name, the compared one first."""
        measurement = self.measure(loop)
        return measurement if isinstance(measurement, Mapping) else {self.number: float(measurement)}

    def measured(self) -> tuple[Number, ...]:
        """Run both loops: every number, wrong and right, the compared one first."""
        return paired(self.numbers(self.wrong), self.numbers(self.right))

    @quota_threads(1)
    def run(self) -> tuple[float, float]:
        """Run both loops: the compared number, wrong and right."""
        first = self.measured()[0]
        return first.wrong, first.right

    def audit(self, loop: Loop) -> Report:
        """What the audit says of one of the loops; LabError where it is no step that can be judged.

        >>> find("B01").audit(find("B01").wrong).verdict
        'mean-of-means'
        """
        if not self.step:
            raise LabError(f"case = {self.id!r} is no training step that the audit can judge: try 'B01'")
        return audit(self.step(loop), self.microbatches(), loss_sum, concat=self.concat)

    def audits(self) -> tuple[Report, Report]:
        """The same of the wrong loop, and of the right one."""
        return self.audit(self.wrong), self.audit(self.right)

    def code(self) -> str:
        """The source of both loops."""
        loops = (("wrong", self.wrong), ("right", self.right))
        return "\n\n".join(f"# {self.id}, {which}\n{sources(loop)}" for which, loop in loops)

    def _repr_html_(self) -> str:
        paragraphs = (
            ("Seen", self.symptom),
            ("Run on", self.given),
            ("The fault", self.fault),
            ("How to recognise it", self.recognise),
        )
        lines = [f"<p><strong>{name}:</strong> {html.escape(words)}</p>" for name, words in paragraphs]
        threads = ", ".join(
            f'<a href="{link}">{html.escape(each)}</a>'
            for each, link in zip((self.source, *self.also), self.links, strict=True)
        )
        origin = f"<p><strong>Found in:</strong> {threads}; versions: {html.escape(self.versions or 'not given')}.</p>"
        code = f'<pre style="white-space: pre; overflow-x: auto">{html.escape(self.code())}</pre>'
        return f"<h4>{html.escape(self.title)}</h4>{''.join(lines)}{origin}{code}"


def paired(wrong: Numbers, right: Numbers) -> tuple[Number, ...]:
    """The numbers of two loops side by side.

    >>> paired({"gradient": 8.0}, {"gradient": 2.0})[0].ratio
    4.0
    """
    return tuple(Number(name, float(wrong[name]), float(right[name])) for name in wrong)


def address(thread: str) -> str:
    """The address of a thread on GitHub.

    >>> address("karpathy/nanoGPT#206")
    'https://github.com/karpathy/nanoGPT/issues/206'

    Raises LabError for anything but owner/name#number.
    """
    repository, _, number = thread.partition("#")
    if repository.count("/") != 1 or not number.isdigit():
        raise LabError(f"source = {thread!r} is no owner/name#number: try 'karpathy/nanoGPT#206'")
    return f"https://github.com/{repository}/issues/{number}"


_BOOK: dict[str, Case] = {}


def add(*cases: Case) -> None:
    """Put cases into the book; LabError for an id that is taken, a family that is none, a source that is no thread."""
    for case in cases:
        if case.id in _BOOK:
            raise LabError(f"id = {case.id!r} is taken by {_BOOK[case.id].topic!r}: try another id")
        if case.family not in FAMILIES:
            near = difflib.get_close_matches(case.family, FAMILIES, 1, 0.0)[0]
            raise LabError(f"family = {case.family!r} is none of {', '.join(FAMILIES)}: try {near!r}")
        for thread in (case.source, *case.also):
            address(thread)
        _BOOK[case.id] = case


def all() -> list[Case]:
    """Every case, family by family.

    >>> len(all()), all()[0].title
    (27, 'B01 mean of means')
    """
    for module in pkgutil.iter_modules(cases.__path__, f"{cases.__name__}."):
        importlib.import_module(module.name)
    return sorted(_BOOK.values(), key=lambda case: list(FAMILIES).index(case.family))


def find(id: str) -> Case:
    """The case of that id, or of that title.

    >>> find("B011")
    Traceback (most recent call last):
    labkit.errors.LabError: there is no case 'B011': try 'B01'
    """
    known = {case.id: case for case in all()}
    word = id.split(" ")[0]
    if word not in known:
        raise LabError(f"there is no case {id!r}: try {difflib.get_close_matches(word, known, 1, 0.0)[0]!r}")
    return known[word]


def says(case: Case, numbers: Sequence[Number]) -> str:
    """The numbers of a case in a sentence.

    >>> says(find("B57"), find("B57").measured())
    'loss: wrong 0.6931 nat, right 2.079 nat.'
    """
    units = [f" {case.unit}" if case.unit and at == 0 else "" for at in range(len(numbers))]
    parts = [
        f"{each.name}: wrong {show(each.wrong)}{unit}, right {show(each.right)}{unit}"
        for each, unit in zip(numbers, units, strict=True)
    ]
    return "; ".join(parts) + "."
