"""The casebook: every computed pair against the numbers that the public threads give, and what an entry must be."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch

from labkit import LabError, casebook, rules, workers
from labkit.audit import probe
from labkit.casebook import Case, Number, all, entry, find
from labkit.casebook.cases.clipping import unscale_in_the_loop
from labkit.casebook.cases.epochs import window_by_window
from labkit.casebook.cases.ranks import on_ranks
from labkit.casebook.cases.weights import Marked, of_window, total
from labkit.clipping import refusal, stepped_with
from labkit.corpus import made
from labkit.declare import parameters
from labkit.fit import fit
from labkit.nets import VOCABULARY, sequence_gradients

torch.set_num_threads(1)
NAN = math.nan
EXACT = 1e-9

# The numbers of the threads, worked out by hand: number → wrong, right, and how many of their digits are given.
GIVEN: dict[str, dict[str, tuple[float, float, float]]] = {
    "B01": {
        "gradient": ((8 / 1 + 6 / 3) / 2, (8 + 6) / 4, EXACT),
        "weight × N of microbatch 1": (4 / 2, 1, EXACT),
        "weight × N of microbatch 2": (4 / 6, 1, EXACT),
    },
    "B02": {"gradient": (8, 8 / 4, EXACT), "change of the weights": (-0.8, -0.2, EXACT)},
    "B04": {"gradient": (80 / 40 / 4, 80 / 40, EXACT)},
    "B06": {"gradient of the last step": (2 / 4, 2 / 2, EXACT)},
    "B07": {"gradient of rank 0": ((8 / 2 + 6 / 6) / 2, 14 / 8, EXACT)},
    "B08": {"gradient of rank 0": ((8 / 8 + 6 / 8) / 2, 2 * 14 / (8 * 2), EXACT)},
    "B09": {"gradient of rank 0": (4 * 12 / 4, 12 / 4, EXACT)},
    "B13": {"all-reduces": (4, 1, 0), "gradient of rank 0": (55, 55, EXACT), "gradient of rank 1": (55, 55, EXACT)},
    "B15": {"gradient": (6 / 4, 12 / 4, EXACT)},
    "B16": {"first microbatch's part": (2.650, 3, 5e-4), "second microbatch's part": (4.240, 4, 5e-4)},
    "B18": {"gradient": ((4 * 1 / 4 + 4 * 2) / 4, 1 + 2, EXACT)},
    "B20": {"learning rate": (5e-4, 6.25e-5, EXACT), "index of the schedule": (400, 50, 0)},
    "B22": {"weight after the window": (0.970299, 0.99, EXACT)},
    "B23": {"length of the first update": (0.6388, 1, 5e-5)},
    "B24": {
        "what x = 2 becomes": (1, -0.5345, 5e-5),
        "mean that it meets": (1, 4, EXACT),
        "mean that x = 10 meets": (7, 4, EXACT),
        "running mean": (0.79, 0.40, EXACT),
        "running variance": (2.79, 2.7667, 5e-5),
    },
    "B26": {"expected gradient": ((36 + 0 + 0 + 0) / 4, 0.5 * 36, EXACT)},
    "B27": {"gradient": (1.3125, 3, EXACT), "gradient over the calls": (0.4375, 1, EXACT)},
    "B29": {
        "gradient": ((0 + 8 / 4) / 2, 8 / 4, EXACT),
        "gradient, mean by hand": (NAN, 8 / 4, EXACT),
        "logged loss": (NAN, math.log(2), EXACT),
    },
    "B30": {"output of the last token": ((10 + 10 + 2 + 4) / 4, (2 + 4) / 2, EXACT)},
    "B32": {
        "auxiliary loss in the window's loss": (8 * 0.012, 0.012, EXACT),
        "effective coefficient": (0.08, 0.01, EXACT),
    },
    "B35": {"throughput": (8 * 2 * 1024 / 0.5, 2 * 2 * 1024 / 0.5, 0)},
    "B36": {"global batch": (8, 4, 0), "steps": (125, 250, 0), "sequences seen": (500, 1000, 0)},
    "B38": {"MFU": (20.2, 40.4, 0.05)},
    "B40": {"gradient of rank 0": (1, 5.5, EXACT), "gradient of rank 1": (10, 5.5, EXACT), "all-reduces": (0, 1, 0)},
    "B43": {"first step of epoch 2": (15 / 8, 8 / 8, EXACT), "optimizer steps of epoch 1": (7, 8, 0)},
    "B53": {"its position": (5, 2, 0)},
    "B57": {"loss": (math.log(2), math.log(8), EXACT)},
}
THREADS = {
    "B01": "huggingface/transformers#34191", "B02": "Lightning-AI/pytorch-lightning#87",
    "B04": "huggingface/transformers#35808", "B06": "Lightning-AI/pytorch-lightning#19987",
    "B07": "huggingface/transformers#34242", "B08": "meta-pytorch/torchtune#2172", "B09": "neuralmagic/sparseml#135",
    "B13": "huggingface/accelerate#1726", "B15": "pytorch/torchtitan#3575", "B16": "huggingface/transformers#986",
    "B18": "huggingface/accelerate#641", "B20": "huggingface/accelerate#963", "B22": "keras-team/keras#19990",
    "B23": "keras-team/keras#19990", "B24": "pytorch/pytorch#46516", "B26": "allenai/OLMo-core#828",
    "B27": "pytorch/torchtitan#1733", "B29": "karpathy/nanochat#590", "B30": "axolotl-ai-cloud/axolotl#1375",
    "B32": "NVIDIA-NeMo/Automodel#3359", "B35": "huggingface/trl#7100", "B36": "axolotl-ai-cloud/axolotl#3444",
    "B38": "foundation-model-stack/fms-fsdp#89", "B40": "jingyaogong/minimind#853",
    "B43": "meta-pytorch/torchtune#2745", "B53": "hiyouga/LlamaFactory#7318",
    "B57": "huggingface/sentence-transformers#1822",
}  # fmt: skip
IDS = sorted(GIVEN, key=lambda id: (find(id).family == "ranks", id == "B09", id))  # ranks of one pool together
JUDGED = [case.id for case in all() if case.step]


def test_the_book_holds_the_cases_that_are_given_and_no_other() -> None:
    assert sorted(case.id for case in all()) == sorted(GIVEN) == sorted(THREADS)
    assert {case.id: case.source for case in all()} == THREADS


def test_the_order_is_that_of_the_page() -> None:
    assert [case.id for case in all()] == [
        *("B01", "B02", "B04", "B15", "B29", "B32", "B06", "B43", "B07", "B08", "B13", "B40", "B27", "B09"),
        *("B20", "B22", "B23", "B16", "B18", "B24", "B26", "B30", "B53", "B57", "B35", "B36", "B38"),
    ]


@pytest.mark.parametrize("id", IDS)
def test_every_computed_pair_is_that_of_the_thread(id: str) -> None:
    case = find(id)
    found = {number.name: number for number in case.measured()}
    assert next(iter(found)) == case.number == next(iter(GIVEN[id]))
    for name, (wrong, right, digits) in GIVEN[id].items():
        assert found[name].wrong == pytest.approx(wrong, abs=digits, rel=0, nan_ok=True), name
        assert found[name].right == pytest.approx(right, abs=digits, rel=0), name


@pytest.mark.parametrize("id", ["B01", "B09", "B26", "B43"])
def test_run_is_the_compared_pair_and_the_same_every_time(id: str) -> None:
    case, state = find(id), torch.get_rng_state()
    assert case.run() == case.run() == pytest.approx(next(iter(GIVEN[id].values()))[:2])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_gradient_is_linear_in_what_is_given() -> None:
    for scale in (2, 3):
        numbers = of_window([8 * scale], [3 * scale, 2 * scale, scale])(rules.mean_of_means)
        assert numbers["gradient"] == pytest.approx(5 * scale)


def test_marks_tell_the_microbatches_apart() -> None:
    microbatches = made([[[8]], [[3, 2, 1]]])
    model = Marked()
    rules.sum_of_means(model, microbatches)
    assert model.weight.grad is not None
    weights = fit(model.weight.grad, sequence_gradients(Marked(), microbatches)).values
    assert weights.tolist() == pytest.approx([1, 1 / 3]) and total(model) == 10 and total(Marked()) == 0


def test_torch_refuses_a_second_unscale_without_update_and_four_microbatches_fall_off_by_s() -> None:
    assert "has already been called" in refusal(4)
    found = stepped_with(unscale_in_the_loop, Marked(), made([[[n]] for n in (1, 2, 3, 4)]), 4.0, 1.0)
    assert (found[1:5] / torch.tensor([1, 2, 3, 4]) * 4).tolist() == pytest.approx([1 / 64, 1 / 16, 1 / 4, 1])


def test_ranks_can_have_microbatches_of_their_own() -> None:
    numbers = on_ranks([[1], [2]], [[3], [4]])(find("B40").right)
    assert numbers["gradient of rank 0"] == pytest.approx((1 + 2 + 3 + 4) / 2) and numbers["all-reduces"] == 2


def test_every_window_of_an_epoch_holds_all_of_its_microbatches() -> None:
    model, steps = Marked(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: steps.append(total(model)))
    window_by_window(model, optimizer, made([[[1]], [[2]], [[3]], [[4, 6]], [[5]]]), 2)
    assert steps == pytest.approx([(1 + 2) / 2, (3 + 4 + 6) / 3, 5])


# The audit.


@pytest.mark.parametrize("id", JUDGED)
def test_the_audit_says_the_word_of_the_wrong_loop_and_none_of_the_right_one(id: str) -> None:
    case = find(id)
    with warnings.catch_warnings(action="ignore"):
        wrong, right = case.audits()
    assert wrong.verdict == case.word and wrong.faults == (case.word,) and case.word in rules.rule(case.word).word
    if id == "B24":  # the layer is there in both: no loop over microbatches is the large batch
        assert right.faults == wrong.faults and wrong.one_forward > 0.1
    else:
        assert right.right and right.verdict == "token-mean"


def test_most_cases_can_be_audited_and_each_of_those_has_a_word() -> None:
    assert len(JUDGED) >= 12 and {case.id for case in all() if case.word} == set(JUDGED)
    with pytest.raises(LabError, match="case = 'B57' is no training step that the audit can judge: try 'B01'"):
        find("B57").audits()


def test_the_emptied_microbatch_is_what_the_audit_sees() -> None:
    wrong, _ = find("B29").audits()
    full = [int((labels[:, 1:] != -100).sum()) for _, labels in probe(VOCABULARY)]
    assert wrong.counts == (full[0], 0, *full[2:])


# Entries.


@pytest.mark.parametrize("case", all(), ids=lambda case: case.id)
def test_an_entry_has_its_words_its_loops_and_its_threads(case: Case) -> None:
    for words in (case.symptom, case.fault, case.recognise, case.given):
        assert words.endswith((".", "?")) and len(words) > 15
    assert len(case.title) <= 30 and case.family in casebook.FAMILIES and case.wrong is not case.right
    assert case.code().count("def ") >= 2 and f"# {case.id}, wrong" in case.code() and case.wrong.__doc__
    for link in case.links:
        assert link.startswith("https://github.com/") and link.rpartition("/issues/")[2].isdigit()
    page = case._repr_html_()
    assert (
        page.count("<a href=") == 1 + len(case.also)
        and "<pre style" in page
        and case.given.split(",")[0][:9] in page
        and "<strong>Seen:" in page
    )


def mine(**changes: Any) -> Case:
    case = dataclasses.replace(find("B57"), id="C01", topic="mine", source="owner/name#1", also=())
    return dataclasses.replace(case, **changes)


def test_a_new_entry_is_in_the_list_of_the_lab_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "_BOOK", dict(entry._BOOK))
    casebook.add(mine())
    assert "C01 mine" in parameters(casebook.case)["case"].rule.options  # type: ignore[union-attr]
    assert find("C01").run() == find("B57").run()
    *_, found = casebook.case(case="C01 mine")
    assert found.compared.name == "loss" and found.verdicts == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": "B57"}, "id = 'B57' is taken by 'negatives of a microbatch': try another id"),
        ({"family": "weigths"}, "family = 'weigths' is none of weights, .*: try 'weights'"),
        ({"source": "a blog"}, "source = 'a blog' is no owner/name#number: try 'karpathy/nanoGPT#206'"),
        ({"also": ("owner/name#x",)}, "source = 'owner/name#x' is no owner/name#number"),
    ],
)
def test_what_is_no_entry_is_refused(changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "_BOOK", dict(entry._BOOK))
    with pytest.raises(LabError, match=words):
        casebook.add(mine(**changes))
    assert "C01" not in entry._BOOK


def test_a_number_knows_how_far_it_is_off() -> None:
    assert Number("n", 8, 2).ratio == 4 and Number("n", 8, 2).relative_error == 3
    assert Number("n", -1, 2).relative_error == 1.5 and math.isnan(Number("n", 1, 0).ratio)


# The experiments.


def test_a_case_comes_in_pieces() -> None:
    results = list(casebook.case())
    assert [found.progress for found in results] == [0.3, 0.6, 1.0]
    assert math.isnan(results[0].compared.right) and results[0].compared.wrong == 5
    assert results[1].compared.right == 3.5 and results[1].verdicts == ()
    assert results[2].verdicts == ("mean-of-means", "token-mean")
    assert [found.progress for found in casebook.case(case="B57 negatives of a microbatch")] == [0.3, 1.0]


def test_the_overview_counts_what_is_near() -> None:
    *_, found = casebook.overview(within=2)
    ratios = {
        id: abs(wrong / right) for id, (wrong, right, _) in ((id, next(iter(GIVEN[id].values()))) for id in GIVEN)
    }
    assert {title.split()[0]: ratio for title, ratio in zip(found.titles, found.ratios, strict=True)} == pytest.approx(
        ratios, rel=2e-3
    )
    near = {"B01", "B07", "B16", "B18", "B22", "B23", "B24", "B43"}
    assert {id for id, ratio in ratios.items() if 0.5 < ratio < 2} == near and found.near == len(near)
    *_, few = casebook.overview(family="cadence", within=1.05)
    assert [title[:3] for title in few.titles] == ["B20", "B22", "B23"] and few.near == 1


def test_the_overview_reports_every_case_as_it_comes() -> None:
    progress = [found.progress for found in casebook.overview(family="data")]
    assert progress == pytest.approx([1 / 3, 2 / 3, 1])


# Symptoms.


@pytest.mark.parametrize("seed", range(4))
def test_symptoms_are_five_different_words_and_tell_none_of_them(seed: int) -> None:
    found = casebook.symptoms(seed)
    assert len({each.word for each in found}) == len(found) == 5
    assert not [word for word in rules.every() if word in repr(found)] and repr(found).count("\n") == 14
    for each in found:
        assert each.report.faults == (each.word,) and each.report.counts == each.counts
    assert repr(casebook.symptoms(seed + 1)) != repr(found) and {len(each.counts) for each in found} == {3, 4, 5}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Any:
    yield
    workers.close()
