"""Every adapter in its environment, against the verdict that is expected: python examples/frameworks.

Environments are made beside .venv where they are missing. With names, only those adapters are tried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCH = "torch==2.13.0"  # the same everywhere, and in the same command: another version is gigabytes
ENVIRONMENTS = {
    "transformers-4.45": (TORCH, "transformers==4.45.2", "accelerate", "numpy<2.3"),
    "frameworks": (TORCH, "transformers", "accelerate", "lightning"),
}
LIMIT = 900  # seconds for one adapter: a machine may have other things to do
NAMED = ("torch", "transformers", "accelerate", "lightning")
RIGHT, MEANS, SUMS = "token-mean", "mean-of-means", "sum-of-means"
TAIL, PROCESS, OFTEN = "tail-divided-by-k", "schedule-per-process", "schedule-per-microbatch"
MODES = {"ddp": ("ranked.py", "2"), "accelerate_ranks": ("ranked.py", "2"), "pipeline": ("pipelined.py",)}

# What each adapter must be found to do: all its faults, the weightiest first; none where it is right.
EXPECTED: dict[str, dict[str, tuple[str, ...]]] = {
    "transformers-4.45": {
        "trainer_llama": (MEANS,),
        "trainer_gpt2": (MEANS,),
        "trainer_smoothing": (MEANS,),
        "trainer_own_loss": (MEANS,),
        "trainer_ignored_kwargs": (MEANS,),
        "trainer_tail": (TAIL,),
        "trainer_own_loss_tail": (TAIL,),
    },
    "frameworks": {
        "trainer_llama": (),
        "trainer_gpt2": ("unshifted-count",),  # its class is not among those whose labels the Trainer shifts
        "trainer_smoothing": (),
        "trainer_own_loss": (SUMS,),
        "trainer_own_loss_right": (),
        "trainer_ignored_kwargs": (SUMS,),
        "trainer_bf16": (),
        "trainer_tail": (),
        "trainer_own_loss_tail": (SUMS,),
        "lightning_mean": (MEANS,),
        "lightning_tail": (TAIL,),
        "lightning_right": (),
        "lightning_right_clipped": (),
        "lightning_clipped": (MEANS,),
        "lightning_bf16": (MEANS,),
        "lightning_fp16": (MEANS,),
        "accelerate_mean": (MEANS,),
        "accelerate_tail": (TAIL,),
        "accelerate_right": (),
        "accelerate_bf16": (MEANS,),
        "accelerate_scheduler": (MEANS, OFTEN),
        "accelerate_ranks": (MEANS, PROCESS),
        "ddp_right": (),
        "ddp_mean": (MEANS,),
        "ddp_rank_means": ("rank-means",),
        "ddp_missing_factor": ("missing-world-factor",),
        "pipeline_right": (),
        "pipeline_mean": (MEANS,),
        "pipeline_unscaled": (SUMS,),
        "pipeline_share": ("double-division",),
        "pipeline_sum": ("token-sum",),
    },
}
Say = Callable[[Sequence[str]], tuple[int, str]]


@dataclass(frozen=True)
class Row:
    """One adapter in one environment."""

    environment: str
    adapter: str
    expected: tuple[str, ...]
    found: str

    @property
    def ok(self) -> bool:
        """Whether the audit said what was expected."""
        return self.found == said(self.expected)


def said(faults: Sequence[str]) -> str:
    """All faults in a cell, or the word for none."""
    return ", ".join(faults) or RIGHT


def python(environment: str) -> Path:
    """Its interpreter."""
    return ROOT / f".venv-{environment}" / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def made(environment: str) -> None:
    """Make an environment, unless it is there with all that belongs in it."""
    folder, packages = ROOT / f".venv-{environment}", ENVIRONMENTS[environment]
    mark = folder / "made-of"
    if mark.is_file() and mark.read_text() == "\n".join(packages):
        return
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(python(environment)), "-m", "pip", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, *packages, "-e", str(ROOT)], check=True)
    mark.write_text("\n".join(packages))


def run(command: Sequence[str]) -> tuple[int, str]:
    """Exit status, or 124 after LIMIT seconds; standard output, and the last of standard error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {LIMIT} s"
    return done.returncode, done.stdout or done.stderr[-500:]


def command(environment: str, adapter: str) -> list[str]:
    """What audits an adapter: labkit's own command, or the script for adapters that need several ranks."""
    mode = next((MODES[name] for name in MODES if adapter.startswith(name)), None)
    if mode is None:
        return [str(python(environment)), "-m", "labkit", "audit", "--json", f"{adapter}.py"]
    return [str(python(environment)), mode[0], adapter, *mode[1:]]


def reports(text: str) -> list[dict[str, object]]:
    """The reports at the end of what a command printed: one, or a list; a framework may have spoken before."""
    decoder = json.JSONDecoder()
    for at in (at for at in range(len(text)) if text[at] in "[{" and (not at or text[at - 1] == "\n")):
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            continue
        every = value if isinstance(value, list) else [value]
        if not text[end:].strip() and every and all(isinstance(each, dict) and "verdict" in each for each in every):
            return every
    return []


def tried(environment: str, adapter: str, say: Say = run) -> Row:
    """Audit one adapter; what every rank says, where they differ."""
    expected = EXPECTED[environment][adapter]
    _, text = say(command(environment, adapter))
    cells = dict.fromkeys(said(each["faults"]) for each in reports(text))  # type: ignore[arg-type]
    return Row(environment, adapter, expected, " / ".join(cells) or f"no report: {text.strip()[-200:]}")


def reported(row: Row) -> Row:
    """The same, with a line that says it is done."""
    print(f"{row.environment} {row.adapter}: {row.found}", file=sys.stderr, flush=True)
    return row


def versions(environment: str) -> str:
    """The frameworks that an environment holds."""
    code = f"import importlib.metadata as m\nfor d in {NAMED}:\n try: print(d, m.version(d))\n except Exception: pass"
    return ", ".join(run([str(python(environment)), "-c", code])[1].split("\n")).strip(", ")


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each adapter."""
    wide = max((len(row.adapter) for row in rows), default=0)
    for environment in dict.fromkeys(row.environment for row in rows):
        yield f"\n{environment}: {versions(environment)}"
        for row in (row for row in rows if row.environment == environment):
            mark = "" if row.ok else f"   EXPECTED {said(row.expected)}"
            yield f"  {row.adapter:<{wide}}  {row.found}{mark}"


def main(names: Sequence[str]) -> int:
    """Try the adapters, all or those named; 1 where a verdict differs, 2 for a name that no adapter has."""
    chosen = [(env, each) for env in EXPECTED for each in EXPECTED[env] if not names or each in names]
    if unknown := set(names) - {each for _, each in chosen}:
        print(f"there is no adapter {sorted(unknown)[0]!r}: try one of {', '.join(EXPECTED['frameworks'])}")
        return 2
    for environment in dict.fromkeys(env for env, _ in chosen):
        made(environment)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(lambda pair: reported(tried(*pair)), chosen))
    print("\n".join(table(rows)))
    differ = sum(not row.ok for row in rows)
    print(f"\n{len(rows) - differ} of {len(rows)} as expected")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
