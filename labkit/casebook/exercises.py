"""The exercises of the casebook: symptoms to name, and a shipped loop to mend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from labkit import rules
from labkit.audit import Report, audit
from labkit.audit import probe as probes
from labkit.audit.bug_hunt.suspects import loss_sum
from labkit.casebook.symptoms import HOW_MANY, Symptom, symptoms, weights_in_words
from labkit.corpus import Window
from labkit.device import quota_threads
from labkit.errors import LabError
from labkit.exercise import sandbox
from labkit.exercise.verdict import Function, Verdict, aside, exercise, refusal, within
from labkit.nets import IGNORE, VOCABULARY, Transformer
from labkit.wording import three, times

# What each word of cadence says of one window: the count, its name, and whether it would be K.
COUNTED = {
    "schedule-per-microbatch": ("schedule_steps", "the schedule would step"),
    "adam-count-per-microbatch": ("adam_count", "Adam would count"),
    "moments-per-microbatch": ("optimizer_steps", "the optimizer would step"),
    "step-per-microbatch": ("optimizer_steps", "the optimizer would step"),
    "clip-per-microbatch": ("clips", "a clip would be called"),
}
UNSEEN = ("decay-per-microbatch", "ema-per-microbatch", "momentum-per-microbatch")
CLOSE = 1e-6  # of a fitted weight


@exercise
def diagnosis(answers: Sequence[str] | Mapping[int, str], seed: int = 0) -> Verdict:
    """Judge the words given to `labkit.casebook.symptoms(seed)`, in order or by number from 1.

    >>> diagnosis(["mean-of-means"] * 5).passed
    False

    The sentence says of the first wrong word what speaks against it in the numbers of its symptom.
    """
    questions, checks = symptoms(seed), [f"symptom {at}" for at in range(1, HOW_MANY + 1)]
    words, why = _answers(answers)
    if why:
        return Verdict(False, tuple((check, False) for check in checks), why, "")
    objections = [_against(symptom, word) for symptom, word in zip(questions, words, strict=True)]
    sentences = (f"Symptom {at}: {objection}" for at, objection in enumerate(objections, 1) if objection)
    results = tuple((check, not objection) for check, objection in zip(checks, objections, strict=True))
    return Verdict(not any(objections), results, next(sentences, "Right: all five are named."), "")


def _answers(answers: object) -> tuple[list[str], str]:
    """Five words, or why these are none."""
    if isinstance(answers, Mapping):
        missing = [at for at in range(1, HOW_MANY + 1) if at not in answers]
        if missing:
            return [], f"There is no answer to symptom {missing[0]}: give a word for each of 1 to {HOW_MANY}."
        answers = [answers[at] for at in range(1, HOW_MANY + 1)]
    if isinstance(answers, str) or not isinstance(answers, Sequence):
        return [], f"This is a {type(answers).__name__}: give a list of {HOW_MANY} words."
    if len(answers) != HOW_MANY:
        return [], f"These are {len(answers)} answers, and there are {HOW_MANY} symptoms."
    return list(answers), ""


def _against(symptom: Symptom, word: object) -> str:
    """What in the numbers speaks against a word; nothing where it is the right one."""
    if word == symptom.word:
        return ""
    try:
        rule = rules.rule(str(word))
    except LabError as error:
        return f"{error}." if isinstance(word, str) else f"{word!r} is no word: try 'mean-of-means'."
    if rule.word in COUNTED:
        return _counts_against(symptom, rule.word)
    if rule.word in UNSEEN:
        return f"{word} leaves no trace in these numbers, and they are not those of a right step. {_evidence(symptom)}"
    if rule.word == "tail-divided-by-k":
        return _tail_against(symptom)
    prediction = _prediction(symptom, rule)
    if not prediction:
        return f"{word} is not what these numbers show. {_evidence(symptom)}"
    if prediction == weights_in_words(symptom):
        return f"The weights are those of {word}, and something else is off. {_evidence(symptom)}"
    return f"under {word} the weights × N would be {prediction}, and they are {weights_in_words(symptom)}."


def _counts_against(symptom: Symptom, word: str) -> str:
    field, would = COUNTED[word]
    count, K = getattr(symptom.report, field), len(symptom.counts)
    if count == K:
        return f"{would} {times(K)}, and that happened, but it is not all. {_evidence(symptom)}"
    often = times(int(count)) if count == count and count else "never"
    return f"under {word} {would} {times(K)} in one window, and that happened {often}. {_evidence(symptom)}"


def _tail_against(symptom: Symptom) -> str:
    shares = [w * n for w, n in zip(symptom.report.token_weights, symptom.counts, strict=True)]
    K, N = len(symptom.counts), sum(symptom.counts)
    if max(shares) - min(shares) > CLOSE * max(shares):
        figures = ", ".join(three(each) if abs(each) > CLOSE else "0" for each in shares)
        return f"under tail-divided-by-k weight × count is the same for all, N over the declared K; it is {figures}."
    declared = N / shares[0]
    return f"the means are divided by {three(declared)}, and the window has {K}: a tail is divided by more than it has."


def _prediction(symptom: Symptom, rule: rules.Rule) -> str:
    """The weights × N of a rule that follows from counts alone, as they are said."""
    if rule.needs != "counts" or rule.topic != "accumulation":
        return ""
    window = Window(tuple((n,) for n in symptom.counts), positions=0, labelled=0, steps=len(symptom.counts))
    return ", ".join(three(w) for w in rule.weights(window).tolist())


def _evidence(symptom: Symptom) -> str:
    """What is off, in numbers and without the word."""
    report, K = symptom.report, len(symptom.counts)
    signs = [
        f"{name} {times(int(value))}"
        for name, value in (("the schedule stepped", report.schedule_steps), ("Adam counted", report.adam_count))
        if value == value and value > 1
    ]
    if report.clips == K:
        signs.append(f"a clip was called {times(K)}")
    if any(abs(w - 1) > CLOSE for w in report.token_weights):
        signs.append(f"the weights × N are {weights_in_words(symptom)}, and 1 is right")
    return f"Look here: {'; '.join(signs)}."


# The repair.

MAX_NORM = 0.5
PROBES = (("unequal microbatches", 4), ("a window that K does not fill", 3), ("a microbatch without a target", 4))
CLIPPED, SCHEDULED = f"one clip at {MAX_NORM}, of the whole gradient", "one step of the schedule, after the optimizer's"
CLIP_OFF = 1e-4  # clip_grad_norm_ adds a little to the norm that it divides by
FOR_CLIP, FOR_SCHEDULE = ("clip-",), ("schedule-",)


class Trial:
    """A learner's step in a training, and what went through its optimizer."""

    def __init__(self, function: Function) -> None:
        self.function, self.longest, self.early = function, 0.0, False

    def build(self) -> tuple[nn.Module, Callable[[list[Any]], object]]:
        """A model with its step, the same weights each time."""
        model = Transformer(seed=7, dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

        def before(*_: Any) -> None:
            squares = [float(p.grad.norm()) ** 2 for p in model.parameters() if p.grad is not None]
            self.longest = max(self.longest, sum(squares) ** 0.5)
            self.early |= scheduler.last_epoch > 0 and not optimizer.state

        optimizer.register_step_pre_hook(before)
        return model, lambda microbatches: self.function(model, optimizer, scheduler, microbatches)


@exercise
@quota_threads(1)
def repaired(step: Function, *, seconds: float = 15.0) -> Verdict:
    """Judge `step(model, optimizer, scheduler, microbatches)`: the shipped loop of the notebook, mended.

    >>> def nothing(model, optimizer, scheduler, microbatches):
    ...     pass
    >>> repaired(nothing).sentence.partition(":")[0]
    'no-step'

    Right is one optimizer step on the token mean of the window, clipped once at 0.5, then one step of the schedule,
    for windows of any K. `microbatches`: a list of (tokens, labels). Judged by `labkit.audit.audit`, each step called
    twice. `seconds`: for all probes together.
    """
    checks = dict.fromkeys((*(check for check, _ in PROBES), CLIPPED, SCHEDULED), False)
    if why := refusal(step, "model", "optimizer", "scheduler", "microbatches"):
        return Verdict(False, tuple(checks.items()), why, "")
    outcomes: list[sandbox.Outcome] = []
    sentences: list[str] = []
    for at, (check, K) in enumerate(PROBES):
        remaining = seconds - sum(outcome.seconds for outcome in outcomes)
        outcomes.append(sandbox.run(_judge, step, K, at == 2, seconds=max(remaining, 0.01)))
        answer: Any = outcomes[-1].value
        report, words, clipped, scheduled = answer or (None, outcomes[-1].error, "", "")
        hidden = report and any(
            word.startswith(FOR_CLIP) for word in report.faults
        )  # behind it no weight can be judged
        checks[check] = not words and not hidden
        if at == 0 and report:
            checks |= {CLIPPED: not clipped, SCHEDULED: not scheduled}
        faults = [words if at == 0 else within(check, words)] if words else []
        sentences = sentences or [*faults, *(each for each in (clipped, scheduled) if each and each != words)]
    praise = "Right: one step on the token mean of whatever the window holds, clipped once, and the schedule once."
    sentence = " ".join(sentences) or praise
    outcome = next((each for each in outcomes if each.error), outcomes[0])
    return Verdict(not sentences, tuple(checks.items()), sentence + aside(outcome), outcome.printed)


def _judge(step: Function, K: int, emptied: bool) -> tuple[Report | None, str, str, str]:
    """The report, and sentences on its weights, its clip and its schedule, empty where they are right."""
    microbatches = probes(VOCABULARY, accumulation=K)
    if emptied:
        microbatches[1][1].fill_(IGNORE)
    trial = Trial(step)
    try:
        report = audit(trial.build, microbatches, loss_sum, windows=2)
    except LabError as error:
        return None, f"No verdict: {error}.", "", ""
    sentences = {each.word: f"{each.word}: {each.said} The fix: {each.fix}." for each in report.details}
    clips = " ".join(words for word, words in sentences.items() if word.startswith(FOR_CLIP))
    schedules = " ".join(words for word, words in sentences.items() if word.startswith(FOR_SCHEDULE))
    others = " ".join(words for word, words in sentences.items() if not word.startswith((*FOR_CLIP, *FOR_SCHEDULE)))
    if "no-step" in sentences:
        return report, others, others, others
    return report, others, clips or _clip(report, trial, bool(others)), schedules or _schedule(report, trial)


def _clip(report: Report, trial: Trial, weighed: bool) -> str:
    if trial.longest > MAX_NORM * (1 + CLIP_OFF):
        what = "no clip was called" if not report.clips else f"a clip was called {times(report.clips)}"
        long = f"A gradient of length {three(trial.longest)} was stepped with, and {MAX_NORM} is allowed"
        return f"{long}; {what}. Clip once, after the loop and before optimizer.step()."
    if trial.longest < MAX_NORM * (1 - CLIP_OFF) and not weighed:
        return f"The longest gradient that was stepped with has length {three(trial.longest)}: clip at {MAX_NORM}."
    return ""


def _schedule(report: Report, trial: Trial) -> str:
    if report.schedule_steps == 0:
        return "The schedule never stepped: call scheduler.step() once, after optimizer.step()."
    if trial.early:
        return "The schedule stepped before the optimizer: its first learning rate is never used. Step it after."
    return ""
