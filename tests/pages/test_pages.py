"""Pages as text: what is in them, how large they are, that nothing of a file is markup."""

from __future__ import annotations

import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptconv
from ckptconv.pages import html
from ckptconv.pages.columns import packed
from ckptconv.pages.facts import Shared, page_tensors, shared_storages
from ckptconv.pages.html import SCRIPTS
from ckptconv.support.errors import OutputRefused
from ckptconv.values.named import named_values
from helpers.page_data import data_of, names_of, numbers_of, places_of, rows_of
from helpers.page_scenes import HOSTILE, LONG, many, model
from helpers.program import SAMPLES, run

WEB = Path(html.__file__).parent / "web"
MODELS = sorted(path for path in SAMPLES.glob("*.pt"))


def page_of(source: Path, tmp_path: Path, **given: object) -> Path:
    made = tmp_path / "page.html"
    ckptconv.report(source, made, force=True, **given)  # type: ignore[arg-type]
    return made


@pytest.fixture
def saved(tmp_path) -> Path:
    torch.save(model(), tmp_path / "model.pt")
    return tmp_path / "model.pt"


# ----------------------------------------------------------------------------------- what it shows


@pytest.mark.parametrize("source", MODELS, ids=lambda path: path.stem)
def test_every_tensor_stands_in_the_page_once_under_each_name(source, tmp_path):
    [file] = data_of(page_of(source, tmp_path))["files"]
    with ckptconv.open_checkpoint(source) as checkpoint:
        expected = [item.name for item in named_values(checkpoint).values]
    assert names_of(file) == expected
    assert len(file["kind"]) == len(file["device"]) == len(expected) > 0


def test_facts_about_tensors_are_those_that_torch_has(saved, tmp_path):
    [file] = data_of(page_of(saved, tmp_path))["files"]
    tensors = torch.load(saved, weights_only=True)
    found = {
        name: (kind[0], tuple(kind[1]), kind[2], kind[3])
        for name, kind in zip(
            names_of(file), [file["kinds"][at] for at in file["kind"]], strict=True
        )
    }
    assert found == {
        name: (str(one.dtype).removeprefix("torch."), tuple(one.shape), one.numel(), one.nbytes)
        for name, one in tensors.items()
    }


def test_statistics_are_those_of_numpy(saved, tmp_path):
    data = data_of(page_of(saved, tmp_path, values=True))
    values = data["files"][0]["values"]
    figures = rows_of(numbers_of(values["figures"], 5), 4)
    quantiles = rows_of(numbers_of(values["quantiles"], 4), len(data["quantiles"]))
    bars = [
        values["histograms"][at : at + values["bins"]]
        for at in range(0, len(values["histograms"]), values["bins"])
    ]
    for at, (name, tensor) in enumerate(torch.load(saved, weights_only=True).items()):
        numbers = tensor.double().numpy().ravel()
        finite = numbers[np.isfinite(numbers)]
        expected = (finite.min(), finite.max(), finite.mean(), finite.std(ddof=1))
        np.testing.assert_allclose(figures[at], expected, rtol=2**-18, err_msg=name)
        ranked = np.quantile(finite, data["quantiles"], method="inverted_cdf")
        np.testing.assert_allclose(quantiles[at], ranked, rtol=2**-7, err_msg=name)
        assert values["zeros"][at] == np.count_nonzero(finite == 0)
        assert values["nan"].get(str(at), 0) == np.count_nonzero(np.isnan(numbers))
        counts, _ = np.histogram(finite, values["bins"])
        if len(finite) == len(numbers) and counts.max() > 1 and "norm" not in name:
            most = bars[at].index(max(bars[at], key=_height))
            assert counts[most] >= 0.8 * counts.max(), name


def _height(letter: str) -> int:
    return "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_".index(letter)


@pytest.mark.parametrize(("letters", "bits"), [(5, 18), (4, 12)])
def test_packed_numbers_are_near(letters, bits):
    some = np.random.default_rng(0).standard_normal(500) * np.logspace(-300, 300, 500)
    some = np.concatenate([some, [0.0, -0.0, 1.0, np.inf, -np.inf, 5e-324, 1.797e308, -3.0]])
    found = numbers_of(packed(some, letters), letters)
    np.testing.assert_allclose(found, some, rtol=2.0 ** -(bits + 1), atol=1e-300)
    assert all(map(math.isnan, numbers_of(packed(np.array([np.nan, -np.nan]), letters), letters)))
    assert packed(np.array([]), letters) == ""


def test_large_integers_are_exact(tmp_path):
    torch.save({"step": torch.tensor(2**62 + 1), "few": torch.tensor([3])}, tmp_path / "step.pt")
    values = data_of(page_of(tmp_path / "step.pt", tmp_path, values=True))["files"][0]["values"]
    assert values["exact"] == {"0": [str(2**62 + 1)] * 2}


def test_shared_and_unused_bytes_are_those_of_the_storages(tmp_path):
    base = torch.arange(100.0)
    views = {"a": base[:10], "b": base[5:20], "same": base[5:20], "own": torch.ones(3)}
    torch.save(views, tmp_path / "views.pt")
    [file] = data_of(page_of(tmp_path / "views.pt", tmp_path))["files"]
    assert file["shared"] == [[400, 80, [0, 1, 2]]]
    assert file["same"] == {"2": 1}
    with ckptconv.open_checkpoint(tmp_path / "views.pt") as checkpoint:
        found = named_values(checkpoint).values
    assert shared_storages([item.ref for item in found]) == (Shared((0, 1, 2), 400, 80),)
    made = page_tensors(found, [None] * 4)
    assert [item.same_as for item in made] == [None, None, 1, None]


def test_a_storage_is_shared_by_several_tensors_or_with_bytes_of_none(tmp_path):
    base, rest, own = torch.arange(100.0), torch.arange(50.0), torch.arange(9.0)
    torch.save({"a": base, "b": base[60:], "c": rest[:20], "d": own}, tmp_path / "views.pt")
    with ckptconv.open_checkpoint(tmp_path / "views.pt") as checkpoint:
        refs = [item.ref for item in named_values(checkpoint).values]
        assert shared_storages(refs) == (Shared((0, 1), 400, 400), Shared((2,), 200, 80))


def test_repeated_layers_are_one_series(saved, tmp_path):
    text = page_of(saved, tmp_path, values=True).read_text("utf-8")
    captions = re.findall(r"<figcaption><bdi>(.*?)</bdi>", text)
    assert captions == [
        "model.layers.#.mlp.up.weight",
        "model.layers.#.attn.k.weight",
        "model.layers.#.attn.q.weight",
        "model.layers.#.norm.weight",
    ]
    assert "Profile over depth" not in page_of(saved, tmp_path).read_text("utf-8")


def test_the_head_says_what_inspect_scan_and_the_fix_say(tmp_path):
    text = page_of(SAMPLES / "ddp_cuda3.pt", tmp_path).read_text("utf-8")
    assert "not portable: needs cuda:3" in text
    assert "scan: holds only what ordinary checkpoints hold" in text
    [command] = re.findall(r"<code>(.*?)</code>", text)
    assert (
        command
        == f"ckptconv convert {SAMPLES / 'ddp_cuda3.pt'} {SAMPLES / 'ddp_cuda3'}-portable.pt"
    )
    torch.save({"w": torch.ones(1)}, tmp_path / "fine.pt")
    fine = page_of(tmp_path / "fine.pt", tmp_path).read_text("utf-8")
    assert "opens anywhere as it is (torch.load)" in fine and "<code>" not in fine


# -------------------------------------------------------------------------------------- comparison


def test_a_comparison_has_each_key_once_with_the_distance_that_numpy_finds(saved, tmp_path):
    ours = torch.load(saved, weights_only=True)
    theirs = {name: one.clone() for name, one in ours.items()}
    theirs["model.layers.2.attn.q.weight"] += 0.01
    theirs["model.layers.3.attn.q.weight"] *= -1
    theirs["model.embed.weight"] = theirs["model.embed.weight"].half()
    theirs["model.layers.0.attn.k.weight"] = torch.ones(2)
    del theirs["model.layers.0.norm.weight"]
    theirs["new.bias"] = torch.ones(1)
    torch.save(theirs, tmp_path / "other.pt")
    data = data_of(page_of(saved, tmp_path, against=tmp_path / "other.pt"))
    names = [names_of(file) for file in data["files"]]
    pairs = data["pairs"]
    states = {}
    for a, b, state in zip(
        places_of(pairs["a"]), places_of(pairs["b"]), pairs["state"], strict=True
    ):
        shown = {names[side][at] for side, at in enumerate((a, b)) if at is not None}
        assert len(shown) == 1 and not shown & states.keys()
        states[shown.pop()] = data["states"][state]
    expected = dict.fromkeys(ours | theirs, "same") | {
        "model.layers.2.attn.q.weight": "values differ",
        "model.layers.3.attn.q.weight": "values differ",
        "model.embed.weight": "dtype differs",
        "model.layers.0.attn.k.weight": "shape differs",
        "model.layers.0.norm.weight": "only in A",
        "new.bias": "only in B",
    }
    assert states == expected
    measures = rows_of(numbers_of(pairs["measures"], 5), 3)
    assert len(measures) == 2
    for row, found in zip(pairs["differing"], measures, strict=True):
        name = names[0][places_of(pairs["a"])[row] or 0]
        one, other = (side[name].double().numpy().ravel() for side in (ours, theirs))
        lengths = np.linalg.norm(one) * np.linalg.norm(other)
        apart = one - other
        exact = (
            np.linalg.norm(apart) / np.linalg.norm(other),
            one @ other / lengths,
            abs(apart).max(),
        )
        np.testing.assert_allclose(found, exact, rtol=2**-17)


def test_diff_writes_the_page_of_its_own_options(tmp_path):
    torch.save({"module.w": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "b.pt")
    done = run("diff", "a.pt", "b.pt", "--keys", "strip", "--html", "d.html", cwd=tmp_path)
    assert done.exit == 0 and done.out.startswith("same"), done.err
    assert [names_of(file) for file in data_of(tmp_path / "d.html")["files"]] == [["w"], ["w"]]
    again = run("diff", "a.pt", "b.pt", "--html", "d.html", cwd=tmp_path)
    assert again.exit == 2 and "exists; add --force" in again.err
    assert run("diff", "a.pt", "b.pt", "--html", "d.html", "--force", cwd=tmp_path).exit == 1
    assert run("diff", "a.pt", "b.pt", "--force", cwd=tmp_path).exit == 2


# ------------------------------------------------------------------------------------------ hostile


class _Elements(HTMLParser):
    """All start tags of a page with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def elements(page: Path) -> list[tuple[str, dict[str, str | None]]]:
    parser = _Elements()
    parser.feed(page.read_text("utf-8"))
    return parser.found


def test_names_of_a_hostile_file_are_no_markup(tmp_path):
    torch.save({key: torch.ones(2) for key in HOSTILE}, tmp_path / "hostile.pt")
    page = page_of(tmp_path / "hostile.pt", tmp_path, values=True)
    text = page.read_text("utf-8")
    found = elements(page)
    assert [tag for tag, _ in found if tag in ("script", "img", "style", "iframe", "link")] == [
        "style", "script", "script",
    ]  # fmt: skip
    assert not [name for _, held in found for name in held if name.startswith("on")]
    assert not [held for tag, held in found if {"href", "src", "style"} & held.keys()]
    [raw] = re.findall(r' id="data">(.*?)</script>\n<script>', text, re.DOTALL)
    assert not set("<>&") & set(raw) and raw.isascii()
    assert len(text) < 200_000  # of names of a megabyte, some hundred characters
    names = names_of(data_of(page)["files"][0])
    assert len(names) == len(HOSTILE)
    assert all(name.isprintable() and len(name) < 600 for name in names)
    hidden = {"\x00", "\x1b", "\u202e", "\u200f", "\u2028", "\u2029"}
    assert not hidden & set(text)
    assert sum(name.startswith("long.x") for name in names) == 2 and LONG not in text


def test_file_names_classes_and_metadata_are_no_markup(tmp_path):
    from safetensors.torch import save_file

    evil = "<script>window.hit=1<!--"
    place = tmp_path / f'{evil.replace("/", "")}".safetensors'
    save_file({"w": torch.ones(1)}, place, {evil: evil, "&amp;": "\u202e"})
    page = page_of(place, tmp_path)
    assert evil not in page.read_text("utf-8") and "\u202e" not in page.read_text("utf-8")
    assert [tag for tag, _ in elements(page)].count("script") == 2


def test_the_policy_allows_only_what_is_in_the_page(saved, tmp_path):
    import base64
    import hashlib

    text = page_of(saved, tmp_path).read_text("utf-8")
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for kind, tag in (("script-src", "script"), ("style-src", "style")):
        [inner] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_the_script_makes_no_markup_of_texts_and_asks_nobody():
    parts = {path.stem: path.read_text("utf-8") for path in (WEB).glob("*.js")}
    assert sorted(parts) == sorted(SCRIPTS)
    for name, text in parts.items():
        for word in (
            "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(",
            "fetch(", "XMLHttpRequest", "WebSocket", "sendBeacon", "import(", "Worker(", "srcdoc",
        ):  # fmt: skip
            assert word not in text, (name, word)


# ------------------------------------------------------------------------------- bytes and outputs


def test_the_same_input_makes_the_same_page(saved, tmp_path):
    first = page_of(saved, tmp_path, values=True).read_bytes()
    assert page_of(saved, tmp_path, values=True).read_bytes() == first
    done = run("report", "model.pt", "-o", "cli.html", "--values", cwd=tmp_path)
    assert done.exit == 0
    assert run("report", "model.pt", "-o", "cli2.html", "--values", cwd=tmp_path).exit == 0
    text = (tmp_path / "cli.html").read_text("utf-8")
    assert text == (tmp_path / "cli2.html").read_text("utf-8")
    assert str(tmp_path) not in text


def test_a_page_of_2000_tensors_is_small(tmp_path):
    many(tmp_path / "many.safetensors", 2000)
    plain = page_of(tmp_path / "many.safetensors", tmp_path).stat().st_size
    full = page_of(tmp_path / "many.safetensors", tmp_path, values=True).stat().st_size
    assert plain < 200_000 and full < 500_000


@pytest.mark.trust
def test_a_page_of_100000_tensors_is_not_large(tmp_path):
    many(tmp_path / "many.safetensors", 100_000)
    plain = page_of(tmp_path / "many.safetensors", tmp_path).stat().st_size
    full = page_of(tmp_path / "many.safetensors", tmp_path, values=True).stat().st_size
    assert plain < 2_500_000 and full < 10_000_000


def test_what_is_there_is_replaced_only_with_force(saved, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("mine")
    with pytest.raises(OutputRefused, match="exists"):
        ckptconv.report(saved, page)
    assert page.read_text() == "mine"
    with pytest.raises(OutputRefused, match="exists"):  # before anything is looked at
        ckptconv.report(tmp_path / "absent.pt", page)
    ckptconv.report(saved, page, force=True)
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "page.html"}


def test_the_checkpoint_itself_is_never_replaced(saved, tmp_path):
    (tmp_path / "link.pt").symlink_to(saved)
    before = saved.read_bytes()
    for name in ("model.pt", "link.pt"):
        done = run("report", "model.pt", "-o", name, "--force", cwd=tmp_path)
        assert done.exit == 1 and "is read by this run" in done.err
    done = run("diff", saved, "model.pt", "--html", "model.pt", "--force", cwd=tmp_path)
    assert done.exit == 2 and saved.read_bytes() == before


def test_a_page_without_tensors_can_be_made(tmp_path):
    torch.save({"epoch": 1}, tmp_path / "none.pt")
    data = data_of(page_of(tmp_path / "none.pt", tmp_path, values=True))
    assert names_of(data["files"][0]) == []


class _Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("echo hit",)


def test_a_dangerous_file_has_a_page_that_says_so(tmp_path):
    torch.save({"w": torch.ones(1), "x": _Runs()}, tmp_path / "evil.pt")
    text = page_of(tmp_path / "evil.pt", tmp_path).read_text("utf-8")
    assert "DANGEROUS: do not load" in text and "system" in text
