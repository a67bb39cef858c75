"""What others rely on: every public name, one way of imports, and how light `import labkit` is."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import labkit
from labkit.__main__ import main
from labkit.audit import Report
from labkit.batch import Plan
from labkit.device import Machine

ROOT = pathlib.Path(__file__).parents[2]

# A name may be added; one that is taken away breaks a notebook, a lesson or somebody's script.
MATHEMATICS = {
    "acceptance": "Gate Record Side accept",
    "accumulation": "Comparison Tail by_hand compare conditions empty layers tail token_weights trainings weights",
    "audit": "Finding Report audit inspect probe ranks",
    "batch": "Plan Planned Progress Reading Row TwoPlans Wanted Way cuts plan planner progress timeline two_plans "
    "wanted",
    "cadence": "Count Moments adam_step_ratio adam_updates count log_spaced moments path schedules state translated",
    "casebook": "Case FAMILIES Number Overview Ran add all case find overview symptoms titles",
    "clipping": "Clips Ordered clip orders overflow ranks refusal stepped_with taken_apart underflow",
    "data_parallel": "allreduce allreduce_seconds buckets collectives empty_rank fsdp killed overflow recipes timeline "
    "uneven",
    "memory": "Parts Peak Row Step Sweep allocated called classic cut kept parts peak step",
    "noise": "Estimate Norms Voters closed estimate gradients interval norms squared voters",
    "normalization": "GroupVariance METHODS Padding Ranks Remedies Remedy Running Statistics effective_momentum "
    "group_variance padding pooled ranks remedies running statistics",
    "packing": "Boundary Labelled Leak Positioned Positions Waste boundary first leak mixture newest order packed "
    "positions read tightest waste",
    "pipeline": "Way Ways Weighed bubble bubbles cut indivisible losses slices timeline ways weighed weights",
    "roofline": "ACCELERATORS Accelerator Cache Ceiling Counting Machine Precision Rate Row SparsePeak Spread Sweep "
    "WorkingSet attainable bound cache ceiling counting machine measure measuring place precision sparse sparse_peak",
    "throughput": "Pair Row Sweep fitted pair positive row step_seconds sweep",
    # what notebooks, documents and examples import besides
    "corpus": "batch split window",
    "data_parallel.steps": "build rank_means",
    "decision": "Decision decide",
    "device": "quota_threads",
    "errors": "LabError",
    "fit": "Distance Weights distance fit flat gradient",
    "nets": "Transformer next_token_loss valid_tokens",
    "rules": "Rule TABLE add rule",
    "tolerance": "Tolerance tolerance",
    "workers": "MOST Pool close pool run total warm",
}
DOORS = {
    "labs": "accumulation audit batch cadence casebook clipping data_parallel memory noise normalization packing "
    "pipeline roofline throughput",
    "check": "acceptance accumulate accumulate_memory adam_ratio audited block_mask bubble clipped_step ddp_loss "
    "diagnosis frozen global_batch intensity matmul_time momentum next_scale no_sync noise_scale pipeline_loss plan "
    "pooled_variance probe repaired scaled_rate step targets token_mean token_weight tokens_per_second train_step "
    "training_bytes",
}
BESIDE_THE_LABS = "Lab all check class_board errors installation map projector report shown"
FIELDS = {
    Plan: "global_batch tokens_per_update updates",
    Machine: "bandwidth ceiling ridge",
    labkit.fit.Weights: "values residual condition indistinguishable",
    labkit.accumulation.Comparison: "relative_error norm_ratio cosine per_layer token_weights",
    labkit.casebook.Case: "id source run",
    Report: "verdict faults token_weights relative_error optimizer_steps explain to_json",
    labkit.labs.Lab: "set predict step reset redraw choose mode values prediction result score text error figure",
}
SIGNATURES = {
    "fit.fit": "gradient references",
    "batch.plan": "microbatch replicas accumulation sequence_length world tp pp cp",
    "roofline.attainable": "intensity bandwidth ceiling",
    "roofline.measure": "device",
    "accumulation.token_weights": "counts rule",
    "accumulation.compare": "model microbatches rule",
    "cadence.adam_step_ratio": "step accumulation betas",
    "pipeline.bubble": "stages microbatches",
    "audit.audit": "build microbatches loss_sum concat windows objective",
    "audit.inspect": "model",
}


@pytest.mark.parametrize("module", MATHEMATICS)
def test_every_public_name_is_there(module: str) -> None:
    names = vars(importlib.import_module(f"labkit.{module}"))
    assert [name for name in MATHEMATICS[module].split() if name not in names] == []


def test_every_lab_and_every_exercise_has_its_door() -> None:
    labs, exercises = (names.split() for names in DOORS.values())
    assert (len(labs), len(exercises)) == (14, 31)
    assert [*labkit.labs.all()] == labs and [*labkit.check.all()] == exercises
    assert all(callable(getattr(labkit.labs, name)) for name in labs)
    assert all(callable(getattr(labkit.check, name)) for name in exercises)
    assert [name for name in BESIDE_THE_LABS.split() if not hasattr(labkit.labs, name)] == []
    assert labkit.LabError is labkit.errors.LabError


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_are_called_what_they_were(path: str) -> None:
    module, _, name = path.partition(".")
    parameters = inspect.signature(getattr(getattr(labkit, module), name)).parameters
    assert [each for each in SIGNATURES[path].split() if each not in parameters] == []


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_results_have_their_fields(kind: type) -> None:
    names = {*dir(kind), *getattr(kind, "__dataclass_fields__", {})}
    assert [each for each in FIELDS[kind].split() if each not in names] == []


def test_former_names_are_the_same_functions() -> None:
    assert labkit.roofline.sparse_peak is labkit.roofline.sparse and labkit.pipeline.slices is labkit.pipeline.cut


def said(*code: str) -> list[str]:
    """What a fresh interpreter prints."""
    python = [sys.executable, "-c", "\n".join(code)]
    done = subprocess.run(python, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("command", ["audit", "accept"])
def test_the_command_line_takes_both_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([command, "-h"])
    assert capsys.readouterr().out.startswith(f"usage: python -m labkit {command} ")


WIDGETS = ("ipywidgets", "anywidget", "matplotlib")
PICTURES = ("panels", "frame", "learner", "labs", "__main__")


def test_only_panels_and_their_frame_import_widgets_and_pictures() -> None:
    every = [each.name for each in pkgutil.walk_packages(labkit.__path__, "labkit.")]
    mathematics = [name for name in every if not {*name.split(".")} & {*PICTURES}]
    assert len(mathematics) > 100 and "labkit.fit" in mathematics and "labkit.casebook.cases.ranks" in mathematics
    importing = f"for name in {mathematics}:\n importlib.import_module(name)"
    finding = f" for each in {WIDGETS}:\n  if each in sys.modules: sys.exit(f'{{name}} imports {{each}}')"
    assert said("import importlib, sys", importing, finding) == []


def test_importing_labkit_alone_is_light_and_its_doors_open() -> None:
    heavy = {*WIDGETS, "torch", "numpy", "IPython"}
    light = f"import sys, labkit; print(sorted({heavy} & {{*sys.modules}}))"
    assert said(light, "print(labkit.labs.roofline().experiments[0], labkit.fit.fit.__name__)") == ["[]", "ceiling fit"]


def test_the_package_names_its_doors_and_modules_and_nothing_else() -> None:
    assert labkit.__all__ == ["LabError", "check", "labs"]
    assert {"labs", "check", "roofline", "fit", "LabError"} <= {*dir(labkit)}
    for name in ("rooflin", "_labs", "__wrapped__"):
        with pytest.raises(AttributeError, match=rf"^module 'labkit' has no attribute '{name}'$"):
            getattr(labkit, name)
    for door in (labkit.labs, labkit.check):
        with pytest.raises(AttributeError, match=r"^there is no (lab|exercise) 'rooflin': try a"):
            getattr(door, "rooflin")  # noqa: B009
