"""The driver of the framework adapters, with stand-ins for the frameworks; `make frameworks` has the real ones."""

from __future__ import annotations

import ast
import importlib.util
import json
import pathlib
import re
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

from labkit.audit.judge import ORDER
from tests.lab_in_browser import ROOT

HERE = ROOT / "examples" / "frameworks"
SHARED = {"__main__", "tiny", "lit", "accelerated", "ranked", "pipelined"}


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("frameworks_driver", HERE / "__main__.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


driver = loaded()
PAIRS = [(environment, adapter) for environment in driver.EXPECTED for adapter in driver.EXPECTED[environment]]


def says(*faults: Sequence[str], noise: str = "") -> object:
    reports = [{"verdict": (*each, "token-mean")[0], "faults": list(each)} for each in faults]
    text = noise + json.dumps(reports[0] if len(reports) == 1 else reports, indent=2) + "\n"
    return lambda command: (0, text)


@pytest.mark.parametrize(("environment", "adapter"), PAIRS)
def test_the_expected_verdict_is_ok_and_another_is_not(environment: str, adapter: str) -> None:
    expected = driver.EXPECTED[environment][adapter]
    assert driver.tried(environment, adapter, says(expected)).ok
    assert not driver.tried(environment, adapter, says((*expected, "stale-gradient"))).ok
    assert not driver.tried(environment, adapter, says(("unknown",))).ok


def test_every_rank_must_say_the_same() -> None:
    means, nothing = ("mean-of-means",), ()
    assert driver.tried("frameworks", "pipeline_mean", says(means, means)).ok
    row = driver.tried("frameworks", "pipeline_mean", says(means, nothing))
    assert not row.ok and row.found == "mean-of-means / token-mean"


def test_what_a_framework_prints_before_the_report_is_no_report() -> None:
    noise = "{'train_loss': 3.9, 'epoch': 1.0}\n[rank] hello\n{}\n[]\n"
    assert driver.tried("frameworks", "trainer_llama", says((), noise=noise)).ok
    assert driver.reports(noise) == driver.reports("") == driver.reports('{"verdict": "x"} and more') == []


@pytest.mark.parametrize(
    "said", [(2, "no verdict: the step raises ValueError"), (124, "no answer within 900 s"), (1, "")]
)
def test_no_report_is_never_ok(said: tuple[int, str]) -> None:
    row = driver.tried("frameworks", "trainer_llama", lambda command: said)
    assert not row.ok and row.found == f"no report: {said[1]}"


def test_the_table_marks_what_differs_and_the_status_counts_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def says_right(command: list[str]) -> tuple[int, str]:
        return says(())(command)  # type: ignore[operator,no-any-return]

    monkeypatch.setattr(driver, "made", lambda environment: None)
    monkeypatch.setattr(driver, "versions", lambda environment: "torch 0")
    real = driver.tried
    monkeypatch.setattr(driver, "tried", lambda *pair: real(*pair, says_right))
    assert driver.main(["ddp_right", "pipeline_right"]) == 0
    assert "2 of 2 as expected" in capsys.readouterr().out
    assert driver.main(["ddp_right", "ddp_mean"]) == 1
    out = capsys.readouterr().out
    assert "EXPECTED mean-of-means" in out and "1 of 2 as expected" in out and "torch 0" in out


def test_a_name_that_no_adapter_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main(["trainer_lama"]) == 2 and "there is no adapter 'trainer_lama'" in capsys.readouterr().out


def test_every_adapter_is_there_expected_and_short() -> None:
    files = {path.stem for path in HERE.glob("*.py")} - SHARED
    assert files == {adapter for _, adapter in PAIRS}
    words = {word for _, adapter in PAIRS for each in driver.EXPECTED.values() for word in each.get(adapter, ())}
    assert words <= {*ORDER, "rank-means", "missing-world-factor", "extra-world-factor"}
    for name in files:
        text = (HERE / f"{name}.py").read_text()
        assert len(text.splitlines()) <= 40 and ast.get_docstring(ast.parse(text))


def test_every_environment_pins_the_same_torch_and_labkit_names_no_framework() -> None:
    assert all(driver.TORCH in packages for packages in driver.ENVIRONMENTS.values())
    named = re.compile(r"transformers|lightning|accelerate|deepspeed|megatron|fairseq|fastai|keras|timm", re.IGNORECASE)
    for path in pathlib.Path(ROOT / "labkit" / "audit").glob("*.py"):
        assert not named.search(path.read_text()), path.name


def test_ranks_and_stages_have_commands_of_their_own() -> None:
    assert driver.command("frameworks", "ddp_mean")[1:] == ["ranked.py", "ddp_mean", "2"]
    assert driver.command("frameworks", "pipeline_sum")[1:] == ["pipelined.py", "pipeline_sum"]
    assert driver.command("frameworks", "accelerate_ranks")[1:] == ["ranked.py", "accelerate_ranks", "2"]
    assert driver.command("frameworks", "accelerate_mean")[1:] == [
        "-m",
        "labkit",
        "audit",
        "--json",
        "accelerate_mean.py",
    ]
