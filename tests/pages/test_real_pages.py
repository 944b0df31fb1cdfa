"""Pages of checkpoints that other people wrote, in a real browser: each opens without a word on the
console, with a row for each tensor, and no wider than the window.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptconv
from ckptconv import CheckpointError
from helpers import browser as browsers
from helpers.browser import Browser
from helpers.page_data import data_of, names_of
from helpers.paths import CORPUS, PRODUCED

pytestmark = [
    pytest.mark.browser,
    pytest.mark.corpus,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(
        browsers.missing() is not None and not os.environ.get("CKPTCONV_REQUIRE_BROWSER"),
        reason=browsers.missing() or "",
    ),
]

LARGE = 200_000_000  # bytes: of what is larger, the values are not read
_MANIFEST = CORPUS / "manifest.json"
ENTRIES = json.loads(_MANIFEST.read_text("utf-8")) if _MANIFEST.is_file() else []
LISTED = {entry["file"]: entry["tensors"] for entry in ENTRIES}
FILES = sorted((CORPUS / "files").iterdir()) if LISTED else []
FOLDERS = sorted(
    path
    for path in (*PRODUCED.glob("*"), *PRODUCED.glob("*/*"))
    if path.parent == PRODUCED or path.is_dir()
)
MOST = 500_000  # rows of a table
UNREAD = {  # what has no page, because it is not a checkpoint, or not all of one
    "tracel-ai__burn__tar_multi_dtype.tar", "README.md", "rank0_dtensor.pt", "rank1_dtensor.pt",
    "torchtitan",
}  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsers.browser() as made:
        yield made


def each(paths: list[Path], root: Path) -> pytest.MarkDecorator:
    """Runs a test for each path; where the folder is not here, one test skips and says so."""
    absent = [pytest.param(None, id="absent", marks=pytest.mark.skip(f"{root.name} is not here"))]
    named = [pytest.param(path, id=str(path.relative_to(root))) for path in paths]
    return pytest.mark.parametrize("source", named or absent)


def nbytes(source: Path) -> int:
    files = source.rglob("*") if source.is_dir() else [source]
    return sum(path.stat().st_size for path in files if path.is_file())


def page_of(source: Path, page: Path) -> int | None:
    """The number of tensors of a page that was made; None where there is none, with the error that
    `inspect` has.
    """
    try:
        return ckptconv.report(source, page, values=nbytes(source) <= LARGE).tensors
    except CheckpointError as error:
        assert not page.exists()
        with pytest.raises(type(error)) as raised:
            ckptconv.inspect_checkpoint(source)
        assert str(raised.value) == str(error)
        return None


def assert_opens(browser: Browser, page: Path, tensors: int) -> list[str]:
    """The names in a page that opens as it must, in a window of a desk and in one of a hand."""
    for wide in (1280, 390):
        browser.open(page, wide=wide)
        root = "return document.documentElement"
        assert browser.run(f"{root}.scrollWidth <= {root[7:]}.clientWidth"), wide
        told = f"{tensors:,} tensor{'s' * (tensors != 1)}"
        more = "; the first 500,000 are shown" if tensors > MOST else ""
        assert browser.texts("#found") == [f"{told}{more}"]
        rows = len(browser.texts("#rows .row"))
        assert rows == tensors or 0 < rows < tensors, rows  # those that are in sight
    assert browser.console() == []
    assert browser.run("return window.hit === undefined")
    names = names_of(data_of(page)["files"][0])
    assert len(names) == tensors
    return names


@each(FILES, CORPUS / "files")
def test_a_file_of_the_corpus_has_a_page_that_opens(source, browser, tmp_path):
    """The manifest tells which tensors torch itself finds in it."""
    page = tmp_path / "page.html"
    tensors = page_of(source, page)
    assert (tensors is None) == (source.name in UNREAD)
    if tensors is None:
        return
    names = assert_opens(browser, page, tensors)
    listed = {re.sub(r"\[(\d+)\]", r".\1", found["at"])[1:] for found in LISTED[source.name] or ()}
    if WHOLE.isdisjoint(part for name in listed for part in name.split(".")):
        assert {name for name in listed if len(name) < 100} <= {*names, ""}
        assert len(listed) <= tensors


WHOLE = {"_parameters", "_buffers", "_modules"}
"""The paths of what is in a pickled module, which a page names by its state dict."""


@each(FOLDERS, PRODUCED)
def test_what_a_framework_wrote_has_a_page_that_opens(source, browser, tmp_path):
    page = tmp_path / "page.html"
    tensors = page_of(source, page)
    assert (tensors is None) == (str(source.relative_to(PRODUCED)) in UNREAD)
    if tensors is not None:
        assert_opens(browser, page, tensors)


@pytest.mark.trust
def test_hostile_files_have_a_page_that_opens_or_the_error_of_inspect(hostile, browser, tmp_path):
    opened = refused = 0
    for source in sorted(hostile.iterdir()):
        page = tmp_path / f"{opened + refused}.html"
        try:
            made = ckptconv.report(source, page, values=False)
        except CheckpointError as error:
            with pytest.raises(type(error)) as raised:
                ckptconv.inspect_checkpoint(source)
            assert str(raised.value) == str(error), source.name
            refused += 1
            continue
        assert_opens(browser, page, made.tensors)
        opened += 1
    assert opened > 15 and refused > 40
