"""The layout of the map, held against what areas have to be."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import ckptconv
from ckptconv.pages.treemap import HEIGHT, WIDTH, Cell, cells_of, squarified
from helpers.page_scenes import model


def pixels(boxes: list[tuple[float, float, float, float]], scale: int = 4) -> np.ndarray:
    """How many boxes cover each of the points of a fine grid."""
    covered = np.zeros((HEIGHT * scale, WIDTH * scale), np.uint8)
    for x, y, w, h in boxes:
        # the points in the middle of each square of the grid
        left, top = np.ceil(np.array([x, y]) * scale - 0.5).astype(int)
        right, bottom = np.ceil(np.array([x + w, y + h]) * scale - 0.5).astype(int)
        covered[top:bottom, left:right] += 1
    return covered


def weights(count: int, seed: int) -> list[float]:
    return sorted(np.random.default_rng(seed).pareto(1, count) + 0.01, reverse=True)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 100])
@pytest.mark.parametrize("seed", range(3))
def test_boxes_fill_the_room_once_in_the_shares_of_their_weights(count, seed):
    some = weights(count, seed)
    boxes = squarified(some, (0, 0, WIDTH, HEIGHT))
    areas = np.array([w * h for _, _, w, h in boxes])
    np.testing.assert_allclose(areas / areas.sum(), np.array(some) / sum(some), rtol=1e-9)
    assert areas.sum() == pytest.approx(WIDTH * HEIGHT)
    assert (pixels(boxes) == 1).all()


def test_boxes_of_one_size_are_nearly_square():
    boxes = squarified([1.0] * 60, (0, 0, WIDTH, HEIGHT))
    assert max(max(w / h, h / w) for _, _, w, h in boxes) < 2


def test_every_byte_is_in_one_box_and_no_two_overlap():
    names = [f"layers.{at}.{kind}" for at in range(40) for kind in ("q.weight", "mlp.up", "norm")]
    sizes = [1000 + 10 * at for at in range(len(names))]
    cells = cells_of(names, sizes)
    leaves = [cell for cell in cells if not cell.is_group]
    assert sorted(at for cell in leaves for at in cell.tensors) == list(range(len(names)))
    assert sum(cell.nbytes for cell in leaves) == sum(sizes)
    assert pixels([cell.box for cell in leaves]).max() == 1
    for cell in cells:
        assert cell.nbytes == sum(sizes[at] for at in cell.tensors)


def group_of(cell: Cell, cells: list[Cell]) -> int:
    """The place of the innermost group around a cell; -1 for the whole."""
    x, y, w, h = cell.box
    around = [
        (one.box[2] * one.box[3], at)
        for at, one in enumerate(cells)
        if one.is_group
        and one.depth == cell.depth - 1
        and one.box[0] <= x
        and one.box[1] <= y
        and x + w <= one.box[0] + one.box[2]
        and y + h <= one.box[1] + one.box[3]
    ]
    return min(around)[1] if around else -1


def test_areas_in_a_group_are_as_bytes():
    names = list(model())
    sizes = [100 * (at + 1) for at in range(len(names))]
    cells = cells_of(names, sizes)
    density: dict[int, list[float]] = {}
    for cell in cells:
        ratio = cell.box[2] * cell.box[3] / cell.nbytes
        density.setdefault(group_of(cell, cells), []).append(ratio)
    assert len(density) > 5
    for ratios in density.values():
        np.testing.assert_allclose(ratios, ratios[0], rtol=1e-9)


def test_names_that_are_a_group_and_a_tensor_at_once_are_both():
    cells = cells_of(["a", "a.b", "a.b.c", "a", ""], [100, 100, 100, 100, 100])
    leaves = [cell for cell in cells if not cell.is_group]
    assert sorted(at for cell in leaves for at in cell.tensors) == [0, 1, 2, 3, 4]


def test_what_is_too_small_for_a_box_shares_one():
    cells = cells_of(["large", *(f"small{at}" for at in range(5000))], [10**9, *[1] * 5000])
    [rest] = [cell for cell in cells if cell.is_rest]
    assert rest.label == "5,000 more" and len(rest.tensors) == 5000
    assert len(cells) == 2


def test_nothing_has_no_boxes():
    assert cells_of([], []) == [] and cells_of(["empty"], [0]) == []


def test_the_page_has_the_map_without_a_script(tmp_path):
    torch.save(model(), tmp_path / "model.pt")
    ckptconv.report(tmp_path / "model.pt", tmp_path / "model.html")
    text = (tmp_path / "model.html").read_text("utf-8")
    [drawn] = re.findall(r'<div class="mapbox" id="map-0">(<svg.*?</svg>)</div>', text)
    names = list(model())
    sizes = [one.nbytes for one in model().values()]
    sizes[-1] = 0  # tied to the first
    assert drawn.count("<rect") == len(cells_of(names, sizes))
    kinds = {word for kind in re.findall(r'<rect class="(.*?)"', drawn) for word in kind.split()}
    assert {"c0", "c1", "group"} <= kinds
