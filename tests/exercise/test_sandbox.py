"""What a learner's function may do, and that it ends there: each of these really runs."""

from __future__ import annotations

import inspect
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from labkit.exercise import sandbox
from labkit.exercise.sandbox import Outcome, run

torch.set_num_threads(1)

ENDS = "was still running after 0.3 s, and was stopped: does a loop there end?"


def in_a_thread(function: Callable[..., Any], **options: Any) -> Outcome:
    """The same where no signal arrives: the way of systems without them, and of a notebook's subshells."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(run(function, **options)))
    thread.start()
    thread.join(20)
    return outcomes[0]


def empty_loop() -> None:
    while True:
        pass


caught: list[Exception] = []


def stubborn_loop() -> None:
    while True:
        try:
            sum(n for n in range(50))
        except Exception as error:
            caught.append(error)


def bare_except() -> None:
    while True:
        try:
            for _ in range(50):
                pass
        except:  # noqa: E722
            continue


def prints() -> None:
    while True:
        print("ha")


@pytest.mark.parametrize("where", [run, in_a_thread])
@pytest.mark.parametrize("function", [empty_loop, stubborn_loop, bare_except, prints])
def test_an_endless_loop_is_stopped(function: Callable[[], None], where: Callable[..., Outcome]) -> None:
    start = time.perf_counter()
    outcome = where(function, seconds=0.3)
    assert outcome.late and outcome.error.endswith(ENDS) and function.__name__ in outcome.error
    assert time.perf_counter() - start < 20
    assert where(lambda: 3, seconds=0.3).value == 3 and not caught


def test_a_profiler_set_afterwards_does_not_hang() -> None:
    """A flag of Python 3.11's that stays up makes it loop at the first call that a profiler sees."""
    calls: list[str] = []
    for function in (empty_loop, lambda: 3):
        in_a_thread(function, seconds=0.2)
        sys.setprofile(lambda frame, event, value: calls.append(event))
        try:
            prints.__doc__  # noqa: B018
            (lambda: None)()
        finally:
            sys.setprofile(None)
    assert calls.count("call") >= 2


def test_sleep_is_stopped() -> None:
    def sleeps() -> None:
        time.sleep(60)

    outcome = run(sleeps, seconds=0.3)
    assert outcome.error == f"Line 2 of sleeps, `time.sleep(60)`, {ENDS}" and outcome.seconds < 2


def test_an_import_is_not_broken_off(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\nfor _ in range(60): time.sleep(0.01)\nready = True\n")
    monkeypatch.syspath_prepend(tmp_path)

    def imports() -> bool:
        import slow_to_import  # type: ignore[import-not-found]

        return bool(slow_to_import.ready)

    assert run(imports, seconds=0.2).value is True or sys.modules["slow_to_import"].ready


def test_a_loop_is_stopped_in_a_script_that_is_being_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_exercise.py").write_text(
        "from labkit.exercise import sandbox\n\ndef endless():\n    while True: pass\n\n"
        "outcome = sandbox.run(endless, seconds=0.2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import an_exercise  # type: ignore[import-not-found]

    assert an_exercise.outcome.late


def test_signals_and_threads_are_as_before() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
    try:
        handler, threads = signal.getsignal(signal.SIGALRM), threading.active_count()
        run(empty_loop, seconds=0.1)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        run(lambda: time.sleep(0.2), seconds=5)
        assert seen == [signal.SIGALRM]  # an alarm of others reaches them
        assert signal.getsignal(signal.SIGALRM) is handler
        time.sleep(0.05)
        assert threading.active_count() <= threads
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_limit_is_as_before() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (2**46, before[1]))
        run(lambda: None)
        assert resource.getrlimit(resource.RLIMIT_AS) == (2**46, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_coroutine_is_closed() -> None:
    async def waits() -> None: ...

    assert inspect.getcoroutinestate(run(waits).value) == inspect.CORO_CLOSED  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="no limit of the address space elsewhere")
def test_memory_ends_at_a_gibibyte() -> None:
    def one_tensor() -> None:
        torch.empty(10**12)

    def touched() -> None:
        torch.ones(300_000_000)

    def many() -> None:
        kept = []
        while True:
            kept.append(bytearray(10**8))

    for function in (one_tensor, touched):
        error = run(function, seconds=60).error
        assert f"of {function.__name__}, `torch." in error and "can't allocate memory: you tried to allocate" in error
        assert error.endswith("(more memory than the 1 GiB it may add to what was in use).")
    assert run(many, seconds=60).error == (
        "Line 4 of many, `kept.append(bytearray(10**8))`, raises MemoryError"
        " (more memory than the 1 GiB it may add to what was in use)."
    )
    assert run(lambda: len(bytearray(10**8))).value == 10**8


class Odd(Exception):
    def __str__(self) -> str:
        raise ValueError("no message")


def raises(error: BaseException) -> Callable[[], None]:
    def fails() -> None:
        raise error

    return fails


def calls_itself() -> None:
    calls_itself()


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (raises(ValueError("3 is no count. Nor is 4")), "`raise error`, raises ValueError: 3 is no count."),
        (raises(SystemExit(3)), "raises SystemExit: 3 (it tries to end Python, and shall just return)."),
        (raises(GeneratorExit()), "raises GeneratorExit."),
        (raises(Odd()), "raises Odd."),
        (raises(ZeroDivisionError("division by zero")), "(where no target is valid a count is 0: divide by the count"),
        (calls_itself, "Line 2 of calls_itself, `calls_itself()`, raises RecursionError"),
        (lambda: "x" + 1, 'of <lambda>, `(lambda: "x" + 1'),  # type: ignore[operator]
        (lambda: sum(1 / n for n in [0]), "Line 1 of <lambda>"),
        (object, ""),
    ],
)  # fmt: skip
def test_an_exception_is_told_with_its_line(function: Callable[[], Any], error: str) -> None:
    outcome = run(function)
    assert error in outcome.error and bool(error) == bool(outcome.error) and not outcome.late


def test_keyboard_interrupt_passes_and_all_is_put_back() -> None:
    def interrupted() -> None:
        torch.set_default_dtype(torch.float16)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted)
    assert torch.get_default_dtype() == torch.float32


SEED = 271_828_182  # one that no other test leaves behind
CHANGES: dict[str, Callable[[], object]] = {
    "torch's random numbers": lambda: torch.manual_seed(SEED),
    "numpy's random numbers": lambda: np.random.seed(SEED),
    "Python's random numbers": lambda: random.seed(SEED),
    "Python's recursion limit": lambda: sys.setrecursionlimit(5000),
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float16),
    "torch's grad mode": lambda: torch.set_grad_enabled(False),
    "torch's number of threads": lambda: torch.set_num_threads(2),
    "torch's deterministic mode": lambda: torch.set_deterministic_debug_mode(1),
}


@pytest.mark.parametrize("name", sandbox.STATE)
def test_a_global_change_is_told_and_put_back(name: str) -> None:
    read = sandbox.STATE[name][0]
    before = read()
    assert run(CHANGES[name]).changed == (name,)
    assert read() == before


def test_random_numbers_that_were_only_drawn_are_put_back_too() -> None:
    before = torch.rand(1, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    run(lambda: torch.rand(100))
    assert torch.equal(torch.rand(1), before)


def test_inside_numbers_are_float64_and_gradients_on() -> None:
    with torch.no_grad():
        outcome = run(lambda: ((torch.tensor(1) / torch.tensor(3)).dtype, torch.is_grad_enabled()))
        assert outcome.value == (torch.float64, True) and not outcome.changed
        assert not torch.is_grad_enabled()


def test_output_is_kept_and_cut() -> None:
    assert run(lambda: print("one", "two", sep="\n")).printed == "one\ntwo"
    assert run(lambda: print("error", file=sys.stderr)).printed == "error"
    flood = run(lambda: [print("line", n) for n in range(10_000)]).printed
    assert flood.splitlines() == [*(f"line {n}" for n in range(5)), "… (10,000 lines, 98,890 characters in all)"]
    assert len(run(lambda: print("x" * 10**7)).printed) < 500
    assert run(lambda: sys.stdout.write("no end of line")).printed == "no end of line"


def test_warnings_are_not_shown_and_their_filters_put_back() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        run(lambda: warnings.warn("beware", stacklevel=1))
    assert not shown
    before = list(warnings.filters)
    run(lambda: warnings.simplefilter("ignore"))
    assert warnings.filters == before


def test_a_call_costs_little() -> None:
    run(lambda: None)
    start = time.process_time()
    for _ in range(20):
        run(lambda: None)
    assert (time.process_time() - start) / 20 < 0.05
