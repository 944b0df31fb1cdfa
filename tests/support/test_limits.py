"""Every limit: exceeded by one file or call, named by the error, and raised as the error says."""

from __future__ import annotations

import ast
import asyncio
import json
import pickle
import re
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckptconv
from ckptconv import convert_checkpoint, limits, open_checkpoint
from ckptconv.cli.main import cli
from ckptconv.convert.options import Options
from ckptconv.convert.planner import plan_conversion
from ckptconv.formats.folders import dtensors
from ckptconv.formats.folders.dcp import _Nested
from ckptconv.inspect.facts import inspect_checkpoint
from ckptconv.keys.key_map import map_keys
from ckptconv.support import limits as bounds
from ckptconv.support.errors import LimitExceeded, OptionRefused, UnknownOption
from ckptconv.tensors.assembly import check_cover
from helpers import gguf_files, oracle
from helpers.program import ROOT, SAMPLES, assert_one_error, run, run_process

W = torch.arange(4.0)
RAISE = re.compile(r"--limit (\w+)=([\d.]+)")


class Case(NamedTuple):
    """What exceeds a limit: `make` gives, for a folder, the call that is refused while the limits
    are `lowered`.
    """

    make: Callable[[Path], Callable[[], Any]]
    lowered: dict[str, float]


def opened(path: Path) -> Callable[[], None]:
    return lambda: open_checkpoint(path).close()


def saved(tree: Any) -> Callable[[Path], Callable[[], None]]:
    """The call that opens a file of this tree."""

    def make(folder: Path) -> Callable[[], None]:
        torch.save(tree, folder / "in.pt")
        return opened(folder / "in.pt")

    return make


def converted(tree: Any) -> Callable[[Path], Callable[[], None]]:
    """The call that converts a file of this tree."""

    def make(folder: Path) -> Callable[[], None]:
        torch.save(tree, folder / "in.pt")
        return lambda: ckptconv.convert_checkpoint(folder / "in.pt", folder / "out.pt", force=True)

    return make


def deflated(tree: Any) -> Callable[[Path], Callable[[], None]]:
    def make(folder: Path) -> Callable[[], None]:
        torch.save(tree, folder / "in.pt")
        return opened(
            oracle.rezipped(
                folder / "in.pt", folder / "deflated.pt", compression=zipfile.ZIP_DEFLATED
            )
        )

    return make


def zip_of_others(folder: Path) -> Callable[[], None]:
    torch.save({"w": W}, folder / "policy.pth")
    with zipfile.ZipFile(folder / "in.zip", "w") as archive:
        archive.write(folder / "policy.pth", "policy.pth")
        archive.writestr("a.txt", "nothing")
        archive.writestr("b.txt", "nothing")
    return opened(folder / "in.zip")


def pickle_in_zip(folder: Path) -> Callable[[], None]:
    with zipfile.ZipFile(folder / "in.zip", "w") as archive:
        archive.writestr("weights.pkl", pickle.dumps({"w": W}))
    return opened(folder / "in.zip")


def torchscript(folder: Path) -> Callable[[], None]:
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), folder / "in.pt")
    return opened(folder / "in.pt")


def safetensors_file(folder: Path) -> Callable[[], None]:
    ckptconv.save_portable({"w": W}, folder / "in.safetensors")
    return opened(folder / "in.safetensors")


def index_of_shards(folder: Path) -> Callable[[], None]:
    torch.save({"a": W, "b": W + 1}, folder / "in.pt")
    ckptconv.convert_checkpoint(folder / "in.pt", folder / "out.safetensors", max_shard_size=16)
    assert len(list(folder.glob("out-*.safetensors"))) == 2
    return opened(folder / "out.safetensors.index.json")


def model_folder(folder: Path) -> Callable[[], Any]:
    torch.save({"w": W}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text('{"hidden_size": 4}')
    out = folder / "out"
    return lambda: ckptconv.convert_checkpoint(folder, out, with_files=True, force=True)


def rules_file(folder: Path) -> Callable[[], Any]:
    (folder / "rules.json").write_text(json.dumps({"rules": [{"strip-prefix": "module."}]}))
    return lambda: ckptconv.read_key_rules(folder / "rules.json")


def slow_pattern(_: Path) -> Callable[[], Any]:
    rules = ckptconv.KeyRules.of([("regex", "(a+)+$=>x"), ("add-prefix", "y.")], "keep")
    return lambda: map_keys(["a" * 18 + "!", "a"], rules)


def two_trees(folder: Path) -> Callable[[], Any]:
    for name in ("a.pt", "b.pt"):
        torch.save({"model": {"w": W}, "more": [1, [2]]}, folder / name)
    return lambda: ckptconv.diff_checkpoints(folder / "a.pt", folder / "b.pt", whole=True)


def gguf_file(folder: Path) -> Callable[[], None]:
    path = folder / "in.gguf"
    path.write_bytes(gguf_files.gguf(gguf_files.tensor()))
    return lambda: open_checkpoint(path).close()


def split_both_ways(_: Path) -> Callable[[], None]:
    boxes = [((row, column), (1, 1)) for row in range(2) for column in range(2)]
    return lambda: check_cover((2, 2), boxes)


CASES = {
    "pickle_bytes": Case(saved({"w": W}), {"pickle_bytes": 10}),
    "opcode_bytes": Case(saved({"w": W}), {"opcode_bytes": 30}),
    "nodes": Case(saved({"w": W, "epoch": [1, (2, 3)]}), {"nodes": 2}),
    "depth": Case(saved({"w": W, "deep": [[[[[1], 2], 3], 4], 5]}), {"depth": 2}),
    "stack": Case(saved({"w": W, "wide": [[], [], [], []]}), {"stack": 2}),
    "archive_records": Case(saved({"w": W}), {"archive_records": 2}),
    "zip_members": Case(zip_of_others, {"zip_members": 2}),
    "small_record_bytes": Case(saved({"w": W}), {"small_record_bytes": 2}),
    "inflated_ratio": Case(
        deflated({"w": torch.zeros(1000)}), {"inflated_ratio": 2, "inflated_free": 100}
    ),
    "pickle_ratio": Case(
        deflated({"w": W, "same": ["a" * 9, "b" * 900]}), {"pickle_ratio": 1, "pickle_free": 10}
    ),
    "view_ratio": Case(saved({"w": W[:1].expand(1000)}), {"view_ratio": 2, "view_free": 100}),
    "dimensions": Case(saved({"w": W.reshape(2, 1, 2, 1)}), {"dimensions": 3}),
    "sharded_dimensions": Case(split_both_ways, {"sharded_dimensions": 1}),
    "mesh_ranks": Case(lambda _: lambda: dtensors._axis((2, 2), (2, 1)), {"mesh_ranks": 3}),
    "list_gaps": Case(lambda _: lambda: _Nested().put(("list", 5), 0), {"list_gaps": 3}),
    "modules": Case(
        saved(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))), {"modules": 2}
    ),
    "names": Case(
        saved(nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))), {"names": 2}
    ),
    "text_bytes": Case(torchscript, {"text_bytes": 10}),
    "safetensors_header_bytes": Case(safetensors_file, {"safetensors_header_bytes": 10}),
    "gguf_header_bytes": Case(gguf_file, {"gguf_header_bytes": 30}),
    "index_bytes": Case(index_of_shards, {"index_bytes": 10}),
    "shards": Case(index_of_shards, {"shards": 1}),
    "files_in_files": Case(pickle_in_zip, {"files_in_files": 1}),
    "large_int_keys": Case(
        converted({"w": W, "ids": {1 << 62: 1, 1 << 63: 2, 1 << 64: 3}}), {"large_int_keys": 2}
    ),
    "key_tuple": Case(converted({"w": W, "by": {(1, 2, 3): 1}}), {"key_tuple": 2}),
    "companion_bytes": Case(model_folder, {"companion_bytes": 10}),
    "rules_bytes": Case(rules_file, {"rules_bytes": 10}),
    "regex_seconds": Case(slow_pattern, {"regex_seconds": 0.001}),
    "compared_pairs": Case(two_trees, {"compared_pairs": 1}),
}
NEVER_NAMED = {
    "inflated_free": "inflated_ratio",
    "pickle_free": "pickle_ratio",
    "view_free": "view_ratio",
    "open_files": None,
    "unpinned": None,
    "remote_seconds": None,
    "scanned_values": None,
    "scanned_pickles": None,
    "scanned_depth": None,
    "scanned_in_vain": None,
}
"""Limits that no error names: a companion of another limit, or one at which nothing is refused."""


def refused(act: Callable[[], Any], lowered: dict[str, float]) -> LimitExceeded | None:
    try:
        with limits(**lowered):
            act()
    except LimitExceeded as error:
        return error
    return None


@pytest.mark.parametrize("name", CASES)
def test_what_exceeds_a_limit_is_told_its_name_its_value_and_what_raises_it(name, tmp_path):
    act, lowered = CASES[name].make(tmp_path), CASES[name].lowered
    act()  # no limit is exceeded by default
    error = refused(act, lowered)
    assert error is not None and error.limit == name and error.allowed == lowered[name]
    assert f"beyond the limit {name}={lowered[name]}" in str(error)
    assert str(error).isprintable() and len(str(error)) < 1000
    for _ in range(20):  # where the file was not read to its end, the hint doubles the limit
        said, value = RAISE.search(error.hint).groups()
        assert said == name
        if error.needed is not None:
            assert refused(act, lowered | {name: error.needed - 1}).limit == name
        lowered = lowered | {name: type(error.allowed)(value)}
        if (error := refused(act, lowered)) is None:
            return
    pytest.fail(f"still refused: {error}")


def test_every_limit_has_a_case():
    assert set(CASES) | set(NEVER_NAMED) == set(bounds.NAMES)
    assert not set(CASES) & set(NEVER_NAMED)


@pytest.mark.parametrize("name", [name for name, ratio in NEVER_NAMED.items() if ratio])
def test_below_what_is_free_no_ratio_is_asked_for(name, tmp_path):
    case = CASES[NEVER_NAMED[name]]
    act = case.make(tmp_path)
    assert refused(act, case.lowered) is not None
    assert refused(act, case.lowered | {name: 1 << 20}) is None


def zeros_deflated(folder: Path, count: int, nbytes: int) -> Path:
    """A torch file of `count` tensors of `nbytes` zero bytes, packed again by another program."""
    torch.save(
        {f"w{index}": torch.zeros(nbytes // 4) for index in range(count)}, folder / "stored.pt"
    )
    oracle.rezipped(folder / "stored.pt", folder / "in.pt", compression=zipfile.ZIP_DEFLATED)
    (folder / "stored.pt").unlink()
    return folder / "in.pt"


@pytest.mark.trust
def test_many_records_that_inflate_to_little_each_are_a_bomb_together(tmp_path):
    # Each record was held against the limit by itself: a file of 1 MB became 1 GB.
    source = zeros_deflated(tmp_path, 60, 4_000_000)
    assert source.stat().st_size < 300_000
    with pytest.raises(
        LimitExceeded,
        match=r"its deflated records claim to inflate from \d+ to 2400\d+ bytes in total",
    ) as caught:
        open_checkpoint(source)
    assert caught.value.limit == "inflated_ratio"
    done = run_process("convert", source, "out.pt", cwd=tmp_path)
    assert f"--limit inflated_ratio={caught.value.needed}" in assert_one_error(done)
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]
    assert done.rss < 150_000_000
    done = run(
        "convert",
        source,
        "out.pt",
        "--limit",
        f"inflated_ratio={caught.value.needed}",
        cwd=tmp_path,
    )
    assert done.exit == 0, done.err
    assert len(torch.load(tmp_path / "out.pt")) == 60


def test_what_inflates_little_together_is_not_questioned(tmp_path):
    with open_checkpoint(zeros_deflated(tmp_path, 60, 200_000)) as checkpoint:
        assert len(list(checkpoint.tensors())) == 60


def test_the_pickles_of_many_archives_in_an_archive_are_counted_together(tmp_path):
    torch.save(
        {"w": W, "text": ["a" * 1000 + str(index) for index in range(1000)]}, tmp_path / "in.pt"
    )
    inner = oracle.rezipped(
        tmp_path / "in.pt", tmp_path / "deflated.pt", compression=zipfile.ZIP_DEFLATED
    ).read_bytes()
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for index in range(20):
            archive.writestr(f"{index}.pt", inner)
    with pytest.raises(
        LimitExceeded, match="deflated pickles and texts claim to inflate"
    ) as caught:
        open_checkpoint(tmp_path / "all.zip")
    assert caught.value.limit == "pickle_ratio"
    with (
        limits(pickle_ratio=1000, inflated_ratio=1000),
        open_checkpoint(tmp_path / "all.zip") as checkpoint,
    ):
        assert len(list(checkpoint.tensors())) == 20


def test_a_checkpoint_of_many_files_has_what_is_free_once(tmp_path):
    ranks = [
        zeros_deflated(tmp_path, 3, 2_000_000).rename(tmp_path / f"{rank}.pt") for rank in range(5)
    ]
    for rank in ranks:
        open_checkpoint(rank).close()
    with pytest.raises(LimitExceeded, match=r"claim to inflate from \d+ to 1800"):
        open_checkpoint(ranks)


def test_few_open_files_are_enough(tmp_path):
    folder = (
        ROOT
        / "tests"
        / "data"
        / "deepspeed"
        / sorted(item.name for item in (ROOT / "tests/data/deepspeed").iterdir())[0]
    )
    whole, few = tmp_path / "whole.safetensors", tmp_path / "few.safetensors"
    ckptconv.convert_checkpoint(folder, whole)
    with limits(open_files=1):
        ckptconv.convert_checkpoint(folder, few)
    assert few.read_bytes() == whole.read_bytes()


def scanned(folder: Path, data: bytes) -> Callable[[], list[str]]:
    (folder / "in.pkl").write_bytes(data)
    return lambda: [
        item.reason
        for file in ckptconv.scan_checkpoint(folder / "in.pkl").files
        for item in file.findings
    ]


SCANS = {
    "scanned_values": pickle.dumps(list(range(50))),
    "scanned_pickles": pickle.dumps({"a": 1}) * 9,
    "scanned_depth": pickle.dumps([pickle.dumps([pickle.dumps([pickle.dumps({"a": 1})])])]),
}


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_says_where_it_stopped_and_what_makes_it_go_on(name, tmp_path):
    look = scanned(tmp_path, SCANS[name])
    assert look() == []
    most = 2
    with limits(**{name: most}):
        assert any(f"--limit {name}={2 * most}" in reason for reason in look())
    with limits(**{name: 100}):
        assert look() == []


# ---------------------------------------------------------------------------------------- the block


def test_blocks_stand_in_blocks_and_end():
    with limits(depth=5) as outer:
        with limits(view_ratio=7) as inner:
            assert (inner.depth, inner.view_ratio) == (5, 7)
            assert bounds.in_force() is inner
        assert bounds.in_force() is outer
    assert bounds.in_force() == ckptconv.Limits()
    with pytest.raises(ZeroDivisionError), limits(depth=5):
        _ = 1 / 0
    assert bounds.in_force() == ckptconv.Limits()


def test_other_threads_and_tasks_keep_their_own():
    seen = []
    with limits(depth=5):
        thread = threading.Thread(target=lambda: seen.append(bounds.in_force().depth))
        thread.start()
        thread.join()
    assert seen == [1000]

    async def task(depth: int) -> int:
        with limits(depth=depth):
            await asyncio.sleep(0)
            return bounds.in_force().depth

    async def both() -> list[int]:
        return await asyncio.gather(task(3), task(4))

    assert asyncio.run(both()) == [3, 4]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"deepth": 3}, UnknownOption, "there is no limit 'deepth'; did you mean depth?"),
        ({"x": 3}, TypeError, "there is no limit 'x'; they are pickle_bytes, "),
        ({"depth": "3"}, OptionRefused, "depth is a whole number"),
        ({"depth": True}, OptionRefused, "depth is a whole number"),
        ({"depth": 2.5}, OptionRefused, "depth is a whole number"),
        ({"depth": 0}, ValueError, "must be greater than 0"),
        ({"unpinned": 1}, ValueError, "is True or False, not 1"),
        ({"depth": -1}, ValueError, "must be greater than 0"),
        ({"regex_seconds": float("nan")}, ValueError, "must be greater than 0"),
        ({"regex_seconds": float("inf")}, ValueError, "must be greater than 0"),
    ],
)
def test_what_is_no_limit_is_refused(change, error, said):
    with pytest.raises(error, match=re.escape(said)), limits(**change):
        pass
    assert bounds.in_force() == ckptconv.Limits()


def test_an_opened_checkpoint_keeps_its_limits_for_what_is_done_later(tmp_path):
    deep: Any = W + 1
    for _ in range(40):
        deep = [deep]
    torch.save({"model": {"w": W}, "deep": deep}, tmp_path / "in.pt")
    with limits(depth=20), open_checkpoint(tmp_path / "in.pt") as shallow:
        tensors = shallow.tensors()
    with pytest.raises(LimitExceeded, match="depth=20"):
        list(tensors)
    with limits(depth=200):
        checkpoint = open_checkpoint(tmp_path / "in.pt")
    tensors = checkpoint.tensors()
    with limits(depth=20):
        assert len(list(tensors)) == 2  # asked for where nothing else was set
        with pytest.raises(LimitExceeded, match="depth=20"):
            list(checkpoint.tensors())
        with pytest.raises(LimitExceeded, match="depth=20"):
            inspect_checkpoint(checkpoint)
        with pytest.raises(LimitExceeded, match="depth=20"):
            plan_conversion(checkpoint, tmp_path / "out.pt", Options())
    assert inspect_checkpoint(checkpoint).tensors == 2
    plan = plan_conversion(checkpoint, tmp_path / "out.pt", Options())
    with limits(depth=20):
        ckptconv.execute_plan(plan)
    with limits(text_bytes=200), pytest.raises(LimitExceeded, match="depth=30"):
        with limits(depth=30):  # what is set later counts, beside what was set when it was opened
            opened = open_checkpoint(tmp_path / "in.pt")
        list(opened.tensors())
    checkpoint.close()
    assert torch.equal(torch.load(tmp_path / "out.pt")["model"]["w"], W)


def test_an_output_is_read_back_under_the_limits_of_its_plan(tmp_path):
    deep: Any = 1
    for _ in range(1500):
        deep = [deep]
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        torch.save({"model": {"w": W}, "deep": deep}, tmp_path / "in.pt")
    finally:
        sys.setrecursionlimit(before)
    with (
        pytest.raises(LimitExceeded, match="depth=1000"),
        open_checkpoint(tmp_path / "in.pt") as checkpoint,
    ):
        plan_conversion(checkpoint, tmp_path / "out.pt", Options())
    with limits(depth=2000):
        checkpoint = open_checkpoint(tmp_path / "in.pt")
    with checkpoint:
        plan = plan_conversion(checkpoint, tmp_path / "out.pt", Options())
        assert ckptconv.execute_plan(plan, verify=True).verified == 1


def many_dimensions(count: int) -> dict[str, torch.Tensor]:
    """Tensors of so many dimensions, nearly all of size 1, contiguous and not."""
    ones = (1,) * (count - 3)
    return {
        "contiguous": torch.arange(6.0).reshape((*ones, 2, 1, 3)),
        "turned": torch.arange(6.0).as_strided((2, *ones, 1, 3), (1, *ones, 9, 2)),
        "expanded": torch.arange(3.0).as_strided((3, *ones, 4, 1), (1, *ones, 0, 5)),
        "empty": torch.zeros((0, *ones, 2, 3)),
    }


def assert_same_values(found, expected):
    assert {key: (value.shape, value.flatten().tolist()) for key, value in found.items()} == {
        key: (value.shape, value.flatten().tolist()) for key, value in expected.items()
    }


def test_tensors_of_more_dimensions_than_numpy_has_open_as_in_torch(tmp_path):
    torch.save(many_dimensions(65), tmp_path / "in.pt")
    expected = torch.load(tmp_path / "in.pt")
    assert_same_values(ckptconv.load_portable(tmp_path / "in.pt"), expected)
    assert_same_values(ckptconv.load_portable(tmp_path / "in.pt", mmap=False), expected)
    for dtype in (None, "bf16"):
        for name in ("out.pt", "out.safetensors"):
            convert_checkpoint(
                tmp_path / "in.pt", tmp_path / name, dtype=dtype, verify=True, force=True
            )
            found = (load_file if name.endswith("s") else torch.load)(tmp_path / name)
            assert_same_values(found, expected)  # small numbers, exact in bfloat16 too
            assert_same_values(ckptconv.load_portable(tmp_path / name), found)
            assert (
                dtype or not ckptconv.diff_checkpoints(tmp_path / "in.pt", tmp_path / name).values
            )
    ckptconv.save_portable(expected, tmp_path / "saved.pt")
    assert_same_values(torch.load(tmp_path / "saved.pt"), expected)


def test_how_many_dimensions_a_tensor_has_is_a_limit_that_is_raised(tmp_path):
    torch.save(many_dimensions(200), tmp_path / "in.pt")
    with pytest.raises(LimitExceeded, match=r"has 200 dimensions.*--limit dimensions=200"):
        open_checkpoint(tmp_path / "in.pt")
    with limits(dimensions=200):
        assert_same_values(
            ckptconv.load_portable(tmp_path / "in.pt"), torch.load(tmp_path / "in.pt")
        )


def test_what_python_itself_cannot_follow_names_its_own_limit(tmp_path):
    deep: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    with pytest.raises(LimitExceeded, match=r"sys\.setrecursionlimit\(\d+\) raises it"):
        ckptconv.save_portable({"w": W, "deep": deep}, tmp_path / "out.pt")


def test_a_tensor_that_claims_a_terabyte_is_answered_at_once(tmp_path):
    torch.save({"w": torch.zeros(1).expand(1 << 38)}, tmp_path / "in.pt")
    line = assert_one_error(run("convert", "in.pt", "out.safetensors", cwd=tmp_path, limit=20))
    assert (
        "claims 1099511627776 bytes out of a storage of 4, beyond the limit view_ratio=64" in line
    )
    assert "--limit view_ratio=274877906944" in line


def test_many_names_of_one_small_storage_are_not_written_out(tmp_path):
    one = torch.zeros(1 << 10)
    torch.save({f"w{index}": one[index % 7 :][:1000] for index in range(400)}, tmp_path / "in.pt")
    with (
        limits(view_ratio=2, view_free=100_000),
        pytest.raises(LimitExceeded, match="its tensors share memory"),
    ):
        ckptconv.convert_checkpoint(
            tmp_path / "in.pt", tmp_path / "out.safetensors", tied="duplicate"
        )
    assert [item.name for item in tmp_path.iterdir()] == ["in.pt"]


# ------------------------------------------------------------------------------------- command line


def called(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    try:
        cli.main(list(map(str, arguments)), prog_name="ckptconv", standalone_mode=False)
        code = 0
    except SystemExit as done:
        code = int(done.code or 0)
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    "command",
    [
        ("convert", "in.pt", "out.pt"),
        ("strip-module", "in.pt", "out.pt"),
        ("add-module", "in.pt", "out.pt"),
        ("inspect", "in.pt"),
        ("doctor", "in.pt"),
        ("diff", "in.pt", "in.pt"),
    ],
)
def test_every_command_that_opens_a_file_takes_limits(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": W, "deep": [[[1]]]}, "in.pt")
    low = ("--limit", "depth=1000", "--limit", "pickle_bytes=10B")
    code, out, err = called(*command, *low, capsys=capsys)
    assert code and "beyond the limit pickle_bytes=10" in out + err
    raised = re.search(r"--limit pickle_bytes=\d+", out + err)
    assert called(*command, *low, *raised[0].split(), capsys=capsys)[0] == 0
    assert bounds.in_force() == ckptconv.Limits()


def test_a_scan_that_followed_too_much_for_nothing_says_what_makes_it_go_on(tmp_path):
    look = scanned(tmp_path, b"PK\3\4" + b"\x80\2N0N0\xff" * 99)
    assert not any("looks further" in reason for reason in look())
    with limits(scanned_in_vain=20):
        assert any("--limit scanned_in_vain=" in reason for reason in look())


@pytest.mark.trust
def test_a_scan_that_inflated_too_much_says_what_makes_it_go_on(tmp_path):
    with zipfile.ZipFile(tmp_path / "in.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.pkl", pickle.dumps([0] * 1_500_000))
    look = scanned(tmp_path, (tmp_path / "in.zip").read_bytes())
    assert any("--limit pickle_ratio=100 looks further" in reason for reason in look())
    with limits(pickle_ratio=2000):
        assert look() == []


def test_scan_takes_limits(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in.pkl").write_bytes(SCANS["scanned_depth"])
    code, out, _ = called("scan", "in.pkl", "--limit", "scanned_depth=1", capsys=capsys)
    assert code == 0 and "--limit scanned_depth=2 looks further" in out
    assert (
        "looks further"
        not in called("scan", "in.pkl", "--limit", "scanned_depth=9", capsys=capsys)[1]
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("nothing", "--limit is NAME=VALUE"),
        ("depth=", "--limit depth=: its value is not a number"),
        ("depth=few", "--limit depth=few: its value is not a number"),
        ("depth=0", "must be greater than 0"),
        ("regex_seconds=long", "its value is not a number"),
        ("deepth=3", "there is no limit 'deepth'"),
        ("\x1b[31m=1", r"there is no limit '\x1b[31m'"),
    ],
)
def test_what_is_no_limit_is_a_usage_error(value, said, tmp_path):
    line = assert_one_error(
        run("inspect", SAMPLES / "tied.pt", "--limit", value, cwd=tmp_path), code=2
    )
    assert said in line


# ------------------------------------------------------------------------------------ documentation


def documented() -> dict[str, str]:
    """What the class says of each limit, by name."""
    tree = ast.parse((ROOT / "ckptconv" / "support" / "limits.py").read_text())
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    pairs = zip(cls.body, cls.body[1:], strict=False)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def row(name: str, text: str) -> str:
    default = getattr(bounds.DEFAULTS, name)
    told = str(default) if isinstance(default, bool) else f"{default:,}"
    return f"| `{name}` | {told} | {text.replace('``', '`')} |"


def test_the_page_of_limits_is_the_table_of_the_class():
    said = documented()
    assert list(said) == list(bounds.NAMES)
    page = (ROOT / "docs" / "limits.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| `")] == [
        row(name, text) for name, text in said.items()
    ]
