"""`ckptconv cleanup`: what is left is listed, and removed when that is asked for."""

from __future__ import annotations

import json

import pytest

from helpers.program import assert_one_error, run

pytest.importorskip("fsspec")

BEFORE = """
import fsspec
files = fsspec.filesystem("memory")
for path in ("/run/.a.pt.0badcafe.ckptconv-part", "/run/in/.b.pt.0badcafe.ckptconv-part"):
    files.pipe_file(path, b"12345")
files.pipe_file("/run/a.pt", b"whole")
import atexit, os, sys
exiting = os._exit
def told(code):
    print("left", sorted(files.store), file=sys.stderr, flush=True)
    exiting(code)
os._exit = told
"""
LEFT = ["/run/.a.pt.0badcafe.ckptconv-part", "/run/a.pt", "/run/in/.b.pt.0badcafe.ckptconv-part"]


def cleanup(cwd, *arguments):
    return run("cleanup", *arguments, cwd=cwd, before=BEFORE)


def test_they_are_only_listed(tmp_path):
    done = cleanup(tmp_path, "memory://run/")
    assert done.exit == 0
    assert "2 unfinished uploads found; add --abort to remove them" in done.out
    assert "memory://run/.a.pt.0badcafe.ckptconv-part, 5 B" in done.out
    assert f"left {LEFT}" in done.err


def test_they_are_removed(tmp_path):
    done = cleanup(tmp_path, "memory://run/", "--abort")
    assert done.exit == 0 and "2 unfinished uploads aborted" in done.out
    assert "left ['/run/a.pt']" in done.err
    one = cleanup(tmp_path, "memory://run/a", "--abort", "--json")
    assert [item["path"] for item in json.loads(one.out)["uploads"]] == [f"memory:/{LEFT[0]}"]
    assert f"left {LEFT[1:]}" in one.err


def test_those_of_processes_that_may_be_alive_are_left_out(tmp_path):
    done = cleanup(tmp_path, "memory://run/", "--older-than", "1", "--abort", "--json")
    told = json.loads(done.out)
    assert told["uploads"] == [] and told["aborted"]
    assert f"left {LEFT}" in done.err


@pytest.mark.parametrize("hours", ["1e300", "inf"])
def test_nothing_is_older_than_all_time(hours, tmp_path):
    """The date so long ago cannot be worked out, which was a traceback."""
    done = cleanup(tmp_path, "memory://run/", "--older-than", hours, "--abort")
    assert done.exit == 0 and "no unfinished uploads" in done.out
    assert f"left {LEFT}" in done.err


def test_hours_are_a_number(tmp_path):
    done = run("cleanup", "memory://run/", "--older-than", "nan", "--abort", cwd=tmp_path)
    assert "--older-than nan is not a number of hours" in assert_one_error(done, code=2)


def test_nothing_is_found_where_nothing_is(tmp_path):
    assert "no unfinished uploads" in cleanup(tmp_path, "memory://other/").out


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("a.pt", "is not in a store"),
        ("https://host/a.pt", "can be read, but not written"),
        ("hf://org/name", "can be read, but not written"),
    ],
)
def test_where_nothing_can_be_left_it_says_so(url, what, tmp_path):
    assert what in assert_one_error(run("cleanup", url, cwd=tmp_path))
