"""What training scripts keep beside tensors: its plain form opens with weights_only, and says what
it says of the object.
"""

from __future__ import annotations

import argparse
import collections
import copyreg
import datetime
import decimal
import fractions
import functools
import io
import pathlib
import sys
import time
import types
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp

from ckptconv import convert_checkpoint, load_portable, open_checkpoint
from ckptconv.inspect.facts import inspect_checkpoint
from ckptconv.support.errors import RefusedObject
from helpers import oracle
from helpers.paths import DATA
from helpers.program import run

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)
UTC, ZONE = datetime.timezone.utc, datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))


def written(value: Any, folder: Path, protocol: int = 2, **options: Any) -> Any:
    """What the plain form of a value is, as torch itself reads it from the output."""
    torch.save({"w": torch.ones(1), "value": value}, folder / "source.pt", pickle_protocol=protocol)
    convert_checkpoint(folder / "source.pt", folder / "out.pt", fsync=False, force=True, **options)
    found = oracle.load(folder / "out.pt")["value"]
    whole = load_portable(folder / "source.pt", whole=True)["value"] if not options else found
    assert repr(whole) == repr(found)
    return found


def called(func: Any, *args: Any) -> Any:
    return type("Forged", (), {"__reduce__": lambda _: (func, args)})()


def with_state(func: Any, state: Any, *args: Any) -> Any:
    return type("Forged", (), {"__reduce__": lambda _: (func, args, state)})()


def two_moments() -> Any:
    """A dtype whose unit, put into the code of one, would make that of two numbers."""
    said = ({}, (b"s],M8[s", 1, 1, 1))
    return with_state(np.dtype, (4, "<", None, None, None, -1, -1, 0, said), "M8", False, True)


DATES = [
    datetime.datetime(2024, 2, 29, 23, 59, 58, 7),
    datetime.datetime(1, 1, 1),
    datetime.datetime(2024, 7, 1, 12, tzinfo=UTC),
    datetime.datetime(9999, 12, 31, tzinfo=ZONE),
    datetime.date(2024, 12, 31),
    datetime.time(1, 2, 3, 4),
    datetime.time(1, 2, tzinfo=ZONE),
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", DATES, ids=str)
def test_dates_are_their_iso_text(value, protocol, tmp_path):
    found = written(value, tmp_path, protocol)
    assert type(found) is str and type(value).fromisoformat(found) == value


@pytest.mark.parametrize(
    "value",
    [datetime.timedelta(days=3, microseconds=1), datetime.timedelta(-1, 5), datetime.timedelta()],
)
def test_a_duration_is_its_seconds(value, tmp_path):
    found = written(value, tmp_path)
    assert type(found) is float and datetime.timedelta(seconds=found) == value


def test_zones_are_text_and_one_that_needs_a_table_is_refused(tmp_path):
    assert written(UTC, tmp_path) == "UTC" and written(ZONE, tmp_path) == "UTC-03:30"
    assert (
        written(datetime.timezone(datetime.timedelta(hours=2), "CEST"), tmp_path)
        == "CEST (UTC+02:00)"
    )
    zoneinfo = pytest.importorskip("zoneinfo")
    try:
        zone = zoneinfo.ZoneInfo("Europe/Berlin")
    except zoneinfo.ZoneInfoNotFoundError:
        pytest.skip("no time zones are installed here")
    with pytest.raises(RefusedObject, match=r"value.*: zoneinfo\.ZoneInfo"):
        written(datetime.datetime(2024, 1, 1, tzinfo=zone), tmp_path)


NUMBERS = [
    *(range(3), range(10, -5, -4), range(0), slice(1, None, 2), slice(None)),
    *(decimal.Decimal("1.10"), decimal.Decimal("-1e-400"), decimal.Decimal("NaN")),
    *(
        fractions.Fraction(-1, 3),
        fractions.Fraction(10**40),
        uuid.UUID(int=5),
        uuid.UUID(int=6, is_safe=uuid.SafeUUID.safe),
    ),
    *(np.datetime64("2024-02-29T23:59:58.000000007"), np.datetime64("2024"), np.datetime64("NaT")),
    *(np.timedelta64(5, "s"), np.timedelta64(-3, "M"), np.datetime64("2024-02-29", "7D")),
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_other_numbers_are_their_text_and_a_range_its_numbers(value, protocol, tmp_path):
    found = written(value, tmp_path, protocol)
    assert found == list(value) if type(value) is range else found == str(value)
    told = inspect_checkpoint(tmp_path / "source.pt").odd_objects
    assert [item.has_plain_form for item in told] == [True], told


@pytest.mark.parametrize(
    "value",
    [pathlib.PurePosixPath("/usr/lib"), pathlib.PureWindowsPath("C:/a/b"),
     pathlib.PurePosixPath("a/b"), pathlib.PurePosixPath()],
    ids=repr,
)  # fmt: skip
def test_a_path_is_its_text(value, tmp_path):
    assert written(value, tmp_path) == str(value)


def test_what_old_pythons_pickled_otherwise_is_its_text(tmp_path):
    assert written(called(datetime.date, "\x07\xe8\x0c\x1f"), tmp_path) == "2024-12-31"
    rebuilt, said = copyreg._reconstructor, {"lr": 5}
    given = with_state(rebuilt, said, argparse.Namespace, object, None)
    assert written(given, tmp_path) == said
    for base in ((object, 5), (dict, {"more": 1})):
        with pytest.raises(RefusedObject, match=r"value: copyreg\._reconstructor"):
            written(with_state(rebuilt, said, argparse.Namespace, *base), tmp_path)


def test_what_a_fraction_of_old_pythons_says_is_its_text(tmp_path):
    class Old:
        def __reduce__(self) -> Any:
            return fractions.Fraction, ("-1/3",)

    assert written(Old(), tmp_path) == "-1/3"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (called(range, 0, 10**12), "range"),
        (called(range, 0, 10**400), "range"),
        (called(range, 0, 5, 0), "range"),
        (called(slice, 0, "end", None), "slice"),
        (called(decimal.Decimal, "9" * 5000), "Decimal"),
        (called(decimal.Decimal, "one"), "Decimal"),
        (called(fractions.Fraction, "1e999999999"), "Fraction"),
        (called(fractions.Fraction, 1, 0), "Fraction"),
        (called(np.dtype("M8[s]").type, 5, "s"), "datetime64"),
        (np.array(["2024"], "M8[D]"), "numpy array of M8"),
        (called(datetime.timezone, called(datetime.date, 2024, 1, 2)), "timezone"),
        (called(datetime.timezone, called(datetime.timedelta, 0, "60", 0)), "timezone"),
        (called(datetime.timezone, called(datetime.timedelta, 1.0)), "timezone"),
        (called(datetime.timezone, 3600), "timezone"),
        (called(datetime.datetime, b"\x07\xe8\x0c\x1f"), "datetime"),
        (datetime.timedelta(days=999_999_999, microseconds=1), "timedelta"),
        (with_state(uuid.UUID, {"int": 1 << 128}), "UUID"),
        (with_state(uuid.UUID, {"int": "5"}), "UUID"),
        (with_state(datetime.date, {"zone": 1}, b"\x07\xe8\x0c\x1f"), "date"),
        (called(np._core.multiarray.scalar, np.dtype("f8")), "scalar"),
        (called(np._core.multiarray.scalar, np.dtype("f8"), b"1234"), "scalar"),
        (called(np._core.multiarray.scalar, np.dtype("f8"), 5), "scalar"),
        (called(np._core.multiarray.scalar, np.dtype("M8"), bytes(8)), "scalar|datetime64"),
        (called(np._core.multiarray.scalar, called(np.dtype, "M8"), bytes(8)), "datetime64"),
        (called(np._core.multiarray.scalar, two_moments(), bytes(16)), "datetime64"),
        (called(collections.deque, "abc"), "deque"),
        (called(collections.deque, [1], -1), "deque"),
        (called(pathlib.PurePosixPath, 5), "PosixPath"),
    ],
)
def test_what_is_long_or_none_of_them_is_refused_quickly(value, name, tmp_path):
    begun = time.process_time()
    with pytest.raises(RefusedObject, match=f"value: .*{name}") as raised:
        written(value, tmp_path)
    assert "do not load" not in str(raised.value) and time.process_time() - begun < 2


def test_a_date_that_is_none_is_refused(tmp_path):
    class Forged:
        def __reduce__(self) -> Any:
            return datetime.date, (b"\x07\xe8\x0c\x20",)

    with pytest.raises(RefusedObject, match=r"value: datetime\.date"):
        written(Forged(), tmp_path)


def test_bytes_in_memory_are_bytes(tmp_path):
    held = io.BytesIO(b"abc\xff" * 3)
    held.seek(4)
    assert written([held, held], tmp_path) == [held.getvalue()] * 2


def test_bytes_in_memory_are_bytes_in_dcp_too(tmp_path):
    tree = {"model": {"w": torch.ones(2)}, "dataloader": {"rank0": io.BytesIO(b"state"), "n": 3}}
    dcp.save(tree, checkpoint_id=tmp_path / "dcp")
    convert_checkpoint(tmp_path / "dcp", tmp_path / "out.pt", fsync=False, verify=True)
    found = oracle.load(tmp_path / "out.pt")
    assert found["dataloader"] == {"rank0": b"state", "n": 3} and torch.equal(
        found["model"]["w"], torch.ones(2)
    )


PARTIALS = {
    "functools.partial(torch.nn.modules.normalization.LayerNorm, eps=1e-06)": functools.partial(
        nn.LayerNorm, eps=1e-6
    ),
    "functools.partial(builtins.int, '3', base=5)": functools.partial(int, "3", base=5),
    "functools.partial(torch.nn.modules.linear.Linear, dtype=torch.float16)": functools.partial(
        nn.Linear, dtype=torch.float16
    ),
    "functools.partial(torch.nn.functional.relu, inplace=True)": functools.partial(
        nn.functional.relu, inplace=True
    ),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("text", PARTIALS)
def test_a_partial_is_its_text(text, protocol, tmp_path):
    assert written({"norm": PARTIALS[text]}, tmp_path, protocol) == {"norm": text}


@pytest.mark.parametrize(
    "value",
    [
        functools.partial(exec, "1"),
        functools.partial(int, torch.ones(1)),
        functools.partial,
        with_state(functools.partial, (int, (), {"a b": 1}, None), int),
        with_state(functools.partial, (int, (), {f"a{n}": n for n in range(51)}, None), int),
        with_state(io.BytesIO, (b"abc", 0, {"name": "x"})),
    ],
)
def test_a_partial_that_hides_something_is_refused(value, tmp_path):
    if value is functools.partial:
        value = functools.partial(value, int)
        value.note = "x"
    with pytest.raises(RefusedObject, match=r"value: (functools\.partial|_io\.BytesIO)"):
        written(value, tmp_path)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_class_is_its_name(protocol, tmp_path):
    found = written({"cls": nn.Linear, "types": [int, torch.float16, int]}, tmp_path, protocol)
    assert (
        found["cls"] == "torch.nn.modules.linear.Linear"
        and found["types"][0] == found["types"][2] == "builtins.int"
    )


@pytest.mark.parametrize(
    "value",
    [print, ..., torch.add, {nn.Linear: 1}, {"x": [exec]}],
    ids=["print", "ellipsis", "torch.add", "a key", "in a list"],
)
def test_functions_and_classes_elsewhere_are_refused(value, tmp_path):
    with pytest.raises(RefusedObject):
        written(value, tmp_path)


class Sub(torch.Tensor):
    """A subclass of tensors that its class alone knows."""


def test_a_class_that_a_tensor_needs_is_not_made_a_name(tmp_path):
    sub = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8).as_subclass(Sub)
    torch.save({"cls": Sub, "w": torch.ones(1), "odd": sub}, tmp_path / "source.pt")
    with pytest.raises(RefusedObject):
        convert_checkpoint(tmp_path / "source.pt", tmp_path / "out.pt", fsync=False)


def test_the_summary_says_what_became_of_each(tmp_path):
    tree = {
        "w": torch.ones(1),
        "cls": nn.Linear,
        "at": datetime.date(2024, 1, 1),
        "b": io.BytesIO(b"x"),
    }
    torch.save(tree, tmp_path / "in.pt")
    done = run("convert", "in.pt", "out.pt", "--no-fsync", cwd=tmp_path)
    for text in (
        "cls (torch.nn.modules.linear.Linear, its name)",
        "as ISO text",
        "without the position",
    ):
        assert text in done.err
    how = {
        item["path"]: item["how"]
        for item in run("convert", "in.pt", "2.pt", "--json", cwd=tmp_path).json()["rewritten"]
    }
    assert how["cls"] == "its name" and how["at"] == "as ISO text"


# ------------------------------------------------------------------------- made by their frameworks


def test_configurations_are_what_omegaconf_says_that_they_are_and_lists_of_fastcore_are_lists(
    tmp_path,
):
    for source in ("omegaconf.2.pt", "omegaconf.4.pt"):
        plan = convert_checkpoint(DATA / source, tmp_path / "out.pt", fsync=False, force=True).plan
        found, expected = oracle.load(tmp_path / "out.pt"), oracle.load(DATA / "omegaconf.plain.pt")
        assert repr(found) == repr(expected) and repr(
            load_portable(DATA / source, whole=True)
        ) == repr(expected)
        assert found["shared"] is found["cfg"]["model"]["sizes"]
        assert [item.path for item in plan.rewritten][:1] == [
            "cfg"
        ] and "interpolations as text" in plan.rewritten[0].how
        assert not any(item.path.startswith("cfg.") for item in plan.rewritten)
        with open_checkpoint(DATA / source) as checkpoint:
            assert all(odd.has_plain_form for odd in inspect_checkpoint(checkpoint).odd_objects)


def test_a_configuration_with_an_object_of_an_unknown_class_names_its_place(tmp_path):
    with pytest.raises(RefusedObject, match=r"cfg\.color: "):
        convert_checkpoint(DATA / "omegaconf.enum.pt", tmp_path / "out.pt", fsync=False)


def test_a_history_of_mmengine_keeps_its_values(produced, tmp_path):
    convert_checkpoint(produced / "mmengine.pth", tmp_path / "out.pt", fsync=False, verify=True)
    found = oracle.load(tmp_path / "out.pt")["message_hub"]["log_scalars"]["train/loss"]
    assert found["max_length"] == 1000000 and found["_log_history"].tolist() == [0.1]
    assert found["_count_history"].tolist() == [1]
    assert (
        found["statistics_methods"]["mean"] == "mmengine.logging.history_buffer.HistoryBuffer.mean"
    )
    convert_checkpoint(
        produced / "mmengine.pth", tmp_path / "out.safetensors", only="state_dict", fsync=False
    )
    assert set(load_file(tmp_path / "out.safetensors")) == set(
        oracle.load(tmp_path / "out.pt")["state_dict"]
    )


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_history_is_read_from_every_protocol(protocol, monkeypatch, tmp_path):
    code = """
import numpy as np
class HistoryBuffer:
    def __init__(self):
        self.max_length, self._log_history = 9, np.array([0.5, 1.5])
        self._count_history = np.array([1, 2])
        self.statistics_methods = {"mean": HistoryBuffer.mean}
    def mean(self):
        return 0
"""
    module = types.ModuleType("mmengine.logging.history_buffer")
    exec(code, module.__dict__)
    for name in ("mmengine", "mmengine.logging", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    found = written(module.__dict__["HistoryBuffer"](), tmp_path, protocol)
    assert torch.equal(found["_log_history"], torch.from_numpy(np.array([0.5, 1.5])))
    assert found["statistics_methods"] == {
        "mean": "mmengine.logging.history_buffer.HistoryBuffer.mean"
    }


def test_a_file_of_fastai_and_blobs_of_detectron_become_both(produced, tmp_path):
    for suffix in ("pt", "safetensors"):
        assert (
            run(
                "convert", str(produced / "fastai.pth"), f"a.{suffix}", "--no-fsync", cwd=tmp_path
            ).exit
            == 0
        )
    blobs = str(produced / "detectron_blobs.pkl")
    assert (
        run("convert", blobs, "b.safetensors", "--only", "blobs", "--no-fsync", cwd=tmp_path).exit
        == 0
    )
    expected = np.load(blobs, allow_pickle=True)["blobs"]
    found = load_file(tmp_path / "b.safetensors")
    held = {
        key: value for key, value in expected.items() if isinstance(value, (np.ndarray, np.generic))
    }
    assert set(held) == set(found)
    assert all(np.array_equal(found[key].numpy(), np.asarray(value)) for key, value in held.items())
