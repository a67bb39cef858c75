"""The canvas: what it sends adds up to what a full draw would show, and moving costs little."""

from __future__ import annotations

import io

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from labkit.frame.canvas import Canvas, changed
from labkit.frame.style import COLOURS, DARK, LIGHT, Page, mix
from tests.made import Product, Quick


def made(page: Page = LIGHT) -> tuple[Canvas, Quick]:
    canvas, experiment = Canvas(page), Quick()
    experiment.layout(canvas)
    return canvas, experiment


def full(canvas: Canvas) -> np.ndarray:
    """The same figure drawn at once by savefig, which knows of no blitting."""
    out = io.BytesIO()
    canvas.figure.savefig(out, format="png", dpi=canvas.figure.dpi)
    return np.asarray(Image.open(out).convert("RGB")).astype(int)


def put_together(held: np.ndarray | None, canvas: Canvas) -> np.ndarray:
    """What a page holds after it has drawn the patches."""
    for patch in canvas.patches():
        colours = np.frombuffer(patch.colours, np.uint8).reshape(-1, 4)
        runs = np.repeat(colours, np.frombuffer(patch.lengths, np.uint32), axis=0)
        image = runs.reshape(patch.height, patch.width, 4)[..., :3].astype(int)
        if (patch.height, patch.width) == (round(canvas.figure.bbox.height), round(canvas.figure.bbox.width)):
            held = image.copy()
        assert held is not None
        held[patch.y : patch.y + patch.height, patch.x : patch.x + patch.width] = image
    assert held is not None
    return held


@pytest.mark.parametrize("page", [LIGHT, DARK, Page(ratio=2.0), Page(width=380, font=20)], ids=str)
def test_patches_add_up_to_a_full_draw(page: Page) -> None:
    canvas, experiment = made(page)
    held = None
    for product in (10, 900, 5000, 900, 20):
        canvas.show()
        experiment.draw(canvas, Product(product))
        held = put_together(held, canvas)
        differs = np.abs(held - full(canvas)).max(axis=2) > 40
        assert differs.sum() <= 8


def test_a_move_sends_a_small_part_and_no_move_sends_nothing() -> None:
    canvas, experiment = made()
    canvas.show()
    experiment.draw(canvas, Product(10))
    whole = sum(len(patch.lengths) for patch in canvas.patches())
    experiment.draw(canvas, Product(40))
    assert 0 < sum(len(patch.lengths) for patch in canvas.patches()) < whole / 4
    assert canvas.patches() == []


def test_a_move_keeps_the_background_even_when_limits_move(monkeypatch: pytest.MonkeyPatch) -> None:
    canvas, experiment = made()
    canvas.patches()
    draws = []
    monkeypatch.setattr(FigureCanvasAgg, "draw", lambda self: draws.append(self))
    for product in (10, 2000, 30):
        experiment.draw(canvas, Product(product))
        canvas.patches()
    assert draws == []
    canvas.figure.axes[0].set_xlabel("columns")
    canvas.patches()
    assert len(draws) == 1


def test_ordinary_styling_is_drawn() -> None:
    canvas, _ = made()
    held = put_together(None, canvas)
    canvas.figure.axes[0].set_title("of a teacher")
    styled = put_together(held.copy(), canvas)
    assert (styled != held).any() and (np.abs(styled - full(canvas)).max(axis=2) > 40).sum() <= 8


def test_hidden_means_that_only_a_question_mark_is_drawn() -> None:
    canvas, experiment = made()
    experiment.draw(canvas, Product(500))
    canvas.hide(experiment.axes, 50, 500)
    first = put_together(None, canvas)
    experiment.dot.set_data([50], [100])
    assert canvas.patches() == [] and (first != put_together(None, made()[0])).any()
    canvas.show()
    assert canvas.patches() != []


def test_a_new_page_means_a_new_whole_picture_in_its_colours_and_pixels() -> None:
    canvas, experiment = made()
    light = put_together(None, canvas)
    canvas.restyle(Page(width=400, ratio=2.0, text="#eeeeee", background="#111111"))
    dark = put_together(light, canvas)
    assert dark.shape == (520, 800, 3) and tuple(dark[0, 0]) == (0x11, 0x11, 0x11)
    assert experiment.dot.get_color() == COLOURS["right"][1]


def test_text_has_the_pages_size() -> None:
    canvas, experiment = made(Page(font=20))
    assert experiment.words.get_fontsize() == pytest.approx(15)
    canvas.restyle(Page(font=28))
    assert experiment.words.get_fontsize() == experiment.axes.xaxis.label.get_fontsize() == pytest.approx(21)


def test_clear_leaves_nothing() -> None:
    canvas, _ = made()
    canvas.clear()
    assert canvas.figure.axes == [] and np.all(canvas.draw()[..., :3] == 255)


def picture(*dots: tuple[int, int]) -> np.ndarray:
    pixels = np.zeros((100, 200, 4), np.uint8)
    for y, x in dots:
        pixels[y, x, 0] = 255
    return pixels


def test_changed_rectangles_cover_what_differs_and_split_where_it_pays() -> None:
    assert changed(None, picture()) == [(0, 100, 0, 200)]
    assert changed(picture(), np.zeros((9, 9, 4), np.uint8)) == [(0, 9, 0, 9)]
    assert changed(picture(), picture()) == []
    assert changed(picture(), picture((10, 20), (12, 25))) == [(10, 13, 20, 26)]
    assert changed(picture(), picture((10, 20), (90, 180))) == [(10, 11, 20, 21), (90, 91, 180, 181)]
    assert changed(picture(), picture((10, 20), (10, 180))) == [(10, 11, 20, 21), (10, 11, 180, 181)]


def test_every_role_stands_out_from_light_and_dark() -> None:
    def contrast(a: str, b: str) -> float:
        def luminance(colour: str) -> float:
            parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
            linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

        lights = sorted((luminance(a), luminance(b)))
        return (lights[1] + 0.05) / (lights[0] + 0.05)

    for page in (LIGHT, DARK):
        for role in COLOURS:
            assert contrast(page.colour(role), page.background) >= 3
        assert contrast(page.colour("muted"), page.background) >= 4.5


def test_mix_is_a_weighted_mean() -> None:
    assert mix("#ffffff", "#000000", 0.25) == "#404040"
