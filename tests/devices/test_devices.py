"""Tags, map_location and the view of the host, against torch itself, a fake nvidia-smi and faked
CUDA devices.
"""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptconv.devices import host as devices
from ckptconv.devices import mapping, nvidia_smi, tags
from ckptconv.devices.host import Gpu, survey_host, visible_indices
from ckptconv.devices.mapping import TagMap, read_tag_pairs, tag_map
from ckptconv.devices.tags import check_tag
from ckptconv.support.errors import DeviceUnavailable

torch = pytest.importorskip("torch")

GIB = 1 << 30
ELSEWHERE = "ask for cpu, or auto"
ROWS = (
    "0, GPU-aaaa1111-0000, NVIDIA A100-SXM4-80GB, 81920, 1024",
    "1, GPU-aaaa2222-0000, NVIDIA A100-SXM4-80GB, 81920, 70000",
    "2, GPU-bbbb3333-0000, NVIDIA A100-SXM4-80GB, 81920, 60000",
    "3, GPU-cccc4444-0000, NVIDIA A100-SXM4-80GB, 81920, 50000",
)
FOUR = nvidia_smi._read(0, "\n".join(ROWS), frozenset()).gpus


@pytest.fixture(autouse=True)
def bare_host(request, monkeypatch, tmp_path):
    """A host without nvidia-smi, launcher or visibility settings (not for tests of a real GPU)."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def smi(tmp_path) -> Callable[..., None]:
    """Puts an `nvidia-smi` on PATH that prints `rows`, or runs `script`."""

    def put(*rows: str, script: str = "") -> None:
        program = tmp_path / "nvidia-smi"
        lines = [f"echo '{row}'" for row in rows]
        program.write_text("\n".join(["#!/bin/sh", *lines, script, ""]))
        program.chmod(0o755)

    return put


@pytest.fixture
def torch_sees(monkeypatch) -> Callable[..., None]:
    """Makes torch see one CUDA device for each of `free` (bytes; an error where None), and no other
    accelerator.
    """

    def see(
        *free: int | None, built: str | None = "12.8", current: int = 0, uuids: tuple[str, ...] = ()
    ) -> None:
        def mem_get_info(index: int) -> tuple[int, int]:
            if free[index] is None:
                raise RuntimeError("CUDA error: out of memory\nmore lines")
            return free[index], 80 * GIB

        def properties(index: int) -> SimpleNamespace:
            known = {"uuid": uuids[index]} if uuids else {}
            return SimpleNamespace(name=f"Fake {index}", total_memory=80 * GIB, **known)

        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch.version, "hip", None, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(free))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        monkeypatch.setattr(torch.xpu, "is_available", lambda: False)

    return see


@pytest.fixture
def no_torch(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.fixture
def save_tagged(monkeypatch, tmp_path) -> Callable[..., Path]:
    """Saves one tensor per tag with torch.save, each storage carrying that tag."""

    def save(*tags: str) -> Path:
        tensors = {tag: torch.zeros(1) for tag in tags}
        by_address = {tensor.data_ptr(): tag for tag, tensor in tensors.items()}
        path = tmp_path / "tagged.pt"
        with monkeypatch.context() as patch:
            tagger = (
                5,
                lambda storage: by_address[storage.data_ptr()],
                lambda storage, location: None,
            )
            patch.setattr(torch.serialization, "_package_registry", [tagger])
            torch.save(tensors, path)
        return path

    return save


def refusal(function: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(DeviceUnavailable) as caught:
        function(*arguments)
    text = str(caught.value)
    assert text.isprintable(), "an error is one printable line"
    return text


# Tags


@pytest.mark.parametrize(
    ("tag", "canonical"),
    [
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        ("mps", "mps"),
        ("mps:0", "mps"),
        ("cuda", "cuda"),
        ("cuda:0", "cuda:0"),
        ("cuda:127", "cuda:127"),
        ("xpu:3", "xpu:3"),
        ("npu:7", "npu:7"),
        ("hpu", "hpu"),
        ("privateuseone:0", "privateuseone:0"),
        ("mtia", "mtia"),
        ("mlu:1", "mlu:1"),
        ("musa", "musa"),
    ],
)
def test_valid_tags_have_one_canonical_form(tag, canonical):
    assert check_tag(tag) == canonical
    assert check_tag(canonical) == canonical


@pytest.mark.parametrize(
    "tag",
    ["", ":", ":0", "cuda:", "cuda:01", "cuda:-1", "cuda:+1", "cuda: 1", "cuda:1:2", "cuda:128",
        "cuda:255", "cuda1",
     "cuda:" + "9" * 5000, "cuda:١", "cpu:1", "mps:1", "gpu", "0", "keep", "auto", "metal",
     "mkldnn", "cuda:0\n"],
)  # fmt: skip
def test_anything_else_is_refused_with_the_valid_forms(tag):
    text = refusal(check_tag, tag)
    assert "cpu, mps, TYPE and TYPE:N" in text
    assert "npu" in text
    assert "meta tensor" not in text


@pytest.mark.parametrize(
    ("tag", "meant"),
    [("CUDA:1", "cuda:1"), (" Cpu ", "cpu"), ("NPU", "npu"), ("cuda:0\n", "cuda:0")],
)
def test_a_misspelt_tag_is_answered_with_the_right_spelling(tag, meant):
    assert f"write {meant};" in refusal(check_tag, tag)


@pytest.mark.parametrize("tag", ["meta", "meta:0"])
def test_meta_is_refused_because_it_has_no_values(tag):
    assert "a meta tensor has no values" in refusal(check_tag, tag)


def types_that_torch_parses() -> list[str]:
    with pytest.raises(RuntimeError) as caught:
        torch.device("nosuchtype")
    named = re.search(r"Expected one of (.*) device type", str(caught.value))
    assert named
    return named[1].split(", ")


def test_every_tag_of_a_torch_type_is_a_torch_device_and_nothing_sensible_is_refused():
    refused = set()
    for kind in types_that_torch_parses():
        try:
            canonical = check_tag(kind)
        except DeviceUnavailable:
            refused.add(kind)
            continue
        assert torch.device(canonical).type == kind
        for index in (0, 1, 127) if kind not in ("cpu", "mps") else (0,):
            numbered = check_tag(f"{kind}:{index}")
            assert torch.device(numbered).index == (index if ":" in numbered else None)
    assert refused == {"meta", "mkldnn", "opengl", "opencl", "ideep"}


def test_the_name_of_a_loaded_backend_is_a_tag(monkeypatch):
    refusal(check_tag, "openreg:0")
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "openreg")
    assert check_tag("openreg:0") == "openreg:0"


def test_tags_are_checked_without_torch(no_torch):
    assert check_tag("cuda:1") == "cuda:1"
    refusal(check_tag, "openreg:0")


# Tag maps


def test_a_pair_wins_over_the_device_and_the_device_over_the_tag():
    tags = TagMap("cpu", (("cuda:3", "cuda:0"), ("cuda:0", "cuda:1")))
    assert [tags(tag) for tag in ("cuda:3", "cuda:0", "xpu:0", "cpu")] == [
        "cuda:0",
        "cuda:1",
        "cpu",
        "cpu",
    ]


@pytest.mark.parametrize(
    "targets",
    [
        {},
        {"cuda:3": "cuda:0"},
        {"cuda:3": "cuda:0", "cuda:0": "cuda:3"},
        {"cuda": "cpu"},
        {"cuda:0": "cpu", "cpu": "xpu:1", "cuda:30": "cpu", "weird tag": "mps"},
    ],
)
def test_pairs_mean_what_a_dict_means_to_torch_load(targets, save_tagged, monkeypatch):
    tags = ("cpu", "cuda:0", "cuda:3", "cuda:30", "cuda", "weird tag", "xpu:1")
    path, restored = save_tagged(*tags), []

    def restore(storage, location):
        restored.append(location)
        return storage

    monkeypatch.setattr(
        torch.serialization, "_package_registry", [(5, lambda storage: None, restore)]
    )
    torch.load(path, map_location=dict(targets))
    assert restored == [TagMap(None, tuple(targets.items()))(tag) for tag in tags]


def mapped(device, pairs):
    return tag_map(device, read_tag_pairs(pairs).items())


@pytest.mark.parametrize(
    ("device", "pairs", "expected"),
    [
        (None, (), TagMap("cpu")),
        ("cuda:3", (), TagMap("cuda:3")),
        ("cpu:0", (), TagMap("cpu")),
        ("keep", (), TagMap(None)),
        (None, ("cuda:3=cuda:0",), TagMap(None, (("cuda:3", "cuda:0"),))),
        ("keep", ("a=b=cpu",), None),
        (
            "cpu",
            ("cuda:3=cuda:0", "cuda:3=cuda:0", "odd tag=mps:0"),
            TagMap("cpu", (("cuda:3", "cuda:0"), ("odd tag", "mps"))),
        ),
    ],
)
def test_the_options_become_a_tag_map(device, pairs, expected):
    if expected is None:
        assert "is not a device tag" in refusal(mapped, device, pairs)
    else:
        assert mapped(device, pairs) == expected


@pytest.mark.parametrize("pair", ["", "=", "cuda:3", "cuda:3=", "=cpu"])
def test_a_malformed_pair_is_named_and_the_form_shown(pair):
    text = refusal(mapped, None, (pair,))
    assert f"--map-location {pair!r} is not OLD=NEW" in text
    assert "cuda:3=cuda:0" in text


def test_one_tag_cannot_be_sent_to_two_places():
    text = refusal(mapped, None, ("cuda:3=cuda:0", "cuda:3=cpu"))
    assert "sends cuda:3 to both cuda:0 and cpu" in text


def test_auto_is_the_best_device_of_this_host(torch_sees):
    torch_sees(1 * GIB, 2 * GIB)
    assert tag_map("auto") == TagMap("cuda:1")
    assert mapped(None, ("cuda:7=auto",)) == TagMap(None, (("cuda:7", "cuda:1"),))


def test_a_device_that_is_no_tag_is_refused():
    refusal(tag_map, "cuda:01")
    refusal(tag_map, "meta")
    refusal(mapped, None, ("cuda:0=keep",))


# CUDA_VISIBLE_DEVICES

VISIBLE = [
    (None, [0, 1, 2, 3]),
    ("", []),
    ("0", [0]),
    ("2,1", [2, 1]),
    ("3,2,1,0", [3, 2, 1, 0]),
    (" 1 , 0 ", [1, 0]),
    ("0,2,-1,1", [0, 2]),
    ("-1", []),
    ("-1,0", []),
    ("NoDevFiles", []),
    ("1,x,0", [1]),
    ("1,,0", [1]),
    ("1gpu2,2ampere", [1, 2]),
    ("+1,02", [1, 2]),
    ("0,1,0", []),
    ("1;0", [1]),
]
VISIBLE_BY_EXISTENCE = [
    ("0,7,1", [0]),
    ("4", []),
    ("9" * 5000, []),
    ("GPU-cccc4444-0000", [3]),
    ("GPU-cccc,GPU-b", [3, 2]),
    ("GPU-aaaa", []),
    ("GPU-aaaa1,GPU-aaaa,GPU-b", [0]),
    ("GPU-b,GPU-dddd,GPU-c", [2]),
    ("GPU-b,GPU-bbbb3333", []),
    ("GPU-b,", [2]),
    ("GPU-b,1", [2]),
    ("GPU-b, GPU-c", [2]),
    ("1,GPU-b", [1]),
    ("MIG-8932f937-d72c-4106-c12f-20bd9faed9f6", []),
    ("MIG-GPU-aaaa1111-0000/1/0", []),
]


@pytest.mark.parametrize(("env", "expected"), VISIBLE + VISIBLE_BY_EXISTENCE)
def test_visible_devices_are_numbered_by_the_documented_rules(env, expected):
    assert visible_indices(env, FOUR) == expected


@pytest.mark.parametrize(("env", "expected"), [case for case in VISIBLE if case[0] is not None])
def test_visible_integers_are_read_as_torch_reads_them(env, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", env)
    assert torch.cuda._parse_visible_devices() == expected


@pytest.mark.parametrize("env", [env for env, _ in VISIBLE_BY_EXISTENCE if env.startswith("GPU-")])
def test_visible_uuids_are_resolved_as_torch_resolves_them(env, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", env)
    named = torch.cuda._parse_visible_devices()
    assert visible_indices(env, FOUR) == torch.cuda._transform_uuid_to_ordinals(
        named, [gpu.uuid for gpu in FOUR]
    )


def test_no_gpu_is_visible_where_there_is_none():
    assert visible_indices(None, []) == visible_indices("0,1", []) == []


# The survey


def test_the_survey_tells_logical_from_physical(smi, monkeypatch):
    smi(*ROWS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    host = survey_host(ask_torch=False)
    assert [(gpu.physical, gpu.logical) for gpu in host.gpus] == [
        (0, None),
        (1, 1),
        (2, 0),
        (3, None),
    ]
    assert host.gpus[2] == Gpu(
        0, 2, "NVIDIA A100-SXM4-80GB", "GPU-bbbb3333-0000", 81920 << 20, 60000 << 20
    )
    assert (host.visible, host.torch, host.cuda, host.mps, host.xpu, host.notes) == (
        "2,1",
        None,
        2,
        False,
        0,
        (),
    )


def test_a_host_without_nvidia_smi_is_surveyed_in_silence():
    host = survey_host(ask_torch=False)
    assert (host.gpus, host.visible, host.cuda, host.notes) == ((), None, 0, ())


def test_memory_that_nvidia_smi_does_not_tell_and_odd_names_are_read(smi):
    smi("0, GPU-1, NVIDIA GB10, rev 2, [N/A], [N/A]")
    assert survey_host(ask_torch=False).gpus == (
        Gpu(0, 0, "NVIDIA GB10,rev 2", "GPU-1", None, None),
    )


@pytest.mark.parametrize(
    ("rows", "script", "note"),
    [
        (
            ["NVIDIA-SMI has failed: no driver", "second line"],
            "exit 9",
            "nvidia-smi failed (exit 9): NVIDIA-SMI has failed",
        ),
        ([], "exit 3", "nvidia-smi failed (exit 3)"),
        (["No devices were found"], "exit 6", "nvidia-smi says: No devices were found"),
        (["x, GPU-1, Name, 1, 1"], "", "nvidia-smi could not be understood: x, GPU-1"),
        ([], "printf '\\377\\n'", "nvidia-smi could not be understood: \ufffd"),
    ],
)
def test_a_failing_nvidia_smi_becomes_a_note(rows, script, note, smi):
    smi(*rows, script=script)
    host = survey_host(ask_torch=False)
    assert host.gpus == ()
    assert len(host.notes) == 1
    assert note in host.notes[0]
    assert host.notes[0].isprintable()


def test_a_hanging_nvidia_smi_becomes_a_note(smi, monkeypatch):
    smi(script="while :; do :; done")
    monkeypatch.setattr(nvidia_smi, "SECONDS", 0.2)
    host = survey_host(ask_torch=False)
    assert host.gpus == ()
    assert "timed out" in host.notes[0]


def test_an_nvidia_smi_that_is_no_program_becomes_a_note(tmp_path):
    (tmp_path / "nvidia-smi").write_text("not executable")
    assert "nvidia-smi did not answer" in survey_host(ask_torch=False).notes[0]


@pytest.mark.parametrize(
    ("visible", "words"),
    [
        ("0,7,1", ["'7' is not a GPU of this host", "everything after it is hidden"]),
        ("GPU-a,GPU-b", ["'GPU-a' is not a GPU"]),
        ("1,1", ["named twice", "hides all"]),
        ("MIG-8932f937/1/0", ["MIG instance"]),
    ],
)
def test_surprising_visibility_is_noted(visible, words, smi, monkeypatch):
    smi(*ROWS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    notes = survey_host(ask_torch=False).notes
    assert len(notes) == 1
    assert all(word in notes[0] for word in [f"CUDA_VISIBLE_DEVICES={visible}", *words])


@pytest.mark.parametrize("visible", ["", "-1", "0,-1,1", "0,1,2,3", "GPU-b"])
def test_visibility_that_was_meant_is_not_noted(visible, smi, monkeypatch):
    smi(*ROWS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert survey_host(ask_torch=False).notes == ()


def test_differing_gpus_without_a_fixed_order_are_noted(smi, monkeypatch):
    smi(ROWS[0], "1, GPU-t4, Tesla T4, 15360, 15000")
    (note,) = survey_host(ask_torch=False).notes
    assert "CUDA_DEVICE_ORDER is not PCI_BUS_ID" in note
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert survey_host(ask_torch=False).notes == ()


def test_a_torch_without_cuda_beside_gpus_is_noted(smi, torch_sees):
    smi(*ROWS[:2])
    torch_sees(built=None)
    host = survey_host(ask_torch=True)
    assert (host.torch, host.cuda) == (str(torch.__version__), 0)
    assert [gpu.logical for gpu in host.gpus] == [0, 1]
    (note,) = host.notes
    assert "lists 2 GPUs" in note
    assert f"torch {torch.__version__} sees no CUDA device (it is built without CUDA)" in note


def test_torch_numbers_the_gpus_by_uuid_where_it_tells_them(smi, torch_sees):
    smi(*ROWS[:3])
    torch_sees(5 * GIB, 6 * GIB, uuids=("bbbb3333-0000", "aaaa1111-0000"))
    host = survey_host(ask_torch=True)
    assert {gpu.physical: gpu.logical for gpu in host.gpus} == {2: 0, 0: 1, 1: None}
    assert {gpu.physical: gpu.free for gpu in host.gpus} == {
        0: 1024 << 20,
        1: 70000 << 20,
        2: 60000 << 20,
    }
    assert host.cuda == 2


def test_an_older_torch_is_matched_by_place(smi, torch_sees, monkeypatch):
    smi(*ROWS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    torch_sees(5 * GIB, 6 * GIB)
    host = survey_host(ask_torch=True)
    assert {gpu.physical: gpu.logical for gpu in host.gpus} == {3: 0, 1: 1, 0: None, 2: None}


def test_devices_that_only_torch_sees_are_listed(torch_sees):
    torch_sees(5 * GIB, None)
    host = survey_host(ask_torch=True)
    assert host.gpus == (
        Gpu(0, None, "Fake 0", None, 80 * GIB, 5 * GIB),
        Gpu(1, None, "Fake 1", None, 80 * GIB, None),
    )
    assert host.notes == ("torch: CUDA error: out of memory",)


def test_a_broken_driver_gives_notes_and_no_exception(torch_sees, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("driver fell over")

    def warn():
        import warnings

        warnings.warn("CUDA initialization: the NVIDIA driver is too old", stacklevel=1)
        return False

    torch_sees()
    monkeypatch.setattr(torch.cuda, "is_available", warn)
    monkeypatch.setattr(torch.xpu, "is_available", fail)
    monkeypatch.setattr(torch.backends.mps, "is_available", fail)
    host = survey_host(ask_torch=True)
    assert (host.cuda, host.xpu, host.mps) == (0, 0, False)
    assert host.notes.count("torch: driver fell over") == 2
    assert "torch warns: CUDA initialization: the NVIDIA driver is too old" in host.notes


def test_a_torch_that_does_not_import_is_noted_and_a_missing_one_is_not(
    no_torch, monkeypatch, tmp_path
):
    host = survey_host(ask_torch=True)
    assert (host.torch, host.notes) == (None, ())
    (tmp_path / "torch.py").write_text(
        "raise OSError('libcudart.so.12: cannot open shared object file')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    (note,) = survey_host(ask_torch=True).notes
    assert "installed but cannot be imported: libcudart.so.12" in note


# The best device


@pytest.mark.parametrize(
    ("free", "best"),
    [
        ([3 * GIB, 5 * GIB, 4 * GIB], "cuda:1"),
        ([5 * GIB, 5 * GIB], "cuda:0"),
        ([None, 1 * GIB, 2 * GIB], "cuda:2"),
        ([None, 0], "cuda:1"),
        ([None, None], "cuda:0"),
        ([1], "cuda:0"),
        ([], "cpu"),
    ],
)
def test_the_best_cuda_device_has_the_most_free_memory(free, best, torch_sees):
    torch_sees(*free)
    assert devices.best_device() == best


def test_torchrun_gives_each_process_its_own_device(torch_sees, monkeypatch):
    torch_sees(9 * GIB, 1 * GIB)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert devices.best_device() == "cuda:1"


@pytest.mark.parametrize("rank", ["2", "-1", "one"])
def test_a_rank_without_a_device_is_explained(rank, torch_sees, monkeypatch):
    torch_sees(9 * GIB, 1 * GIB)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    text = refusal(devices.best_device)
    assert f"LOCAL_RANK={rank} asks for cuda:{rank}" in text
    assert "2 CUDA devices, cuda:0 and cuda:1" in text
    assert "CUDA_VISIBLE_DEVICES=6,7 makes physical 6 and 7 the logical cuda:0 and cuda:1" in text
    assert "one process per GPU" in text


def test_a_rank_does_not_matter_without_cuda(torch_sees, monkeypatch):
    torch_sees()
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert devices.best_device() == "cpu"


def test_mps_comes_after_cuda_and_xpu_after_mps(torch_sees, monkeypatch):
    torch_sees()
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda index: (index + 1, 9), raising=False)
    assert devices.best_device() == "xpu:1"
    monkeypatch.delattr(torch.xpu, "mem_get_info")
    assert devices.best_device() == "xpu:0"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.best_device() == "mps"


def test_without_torch_nvidia_smi_tells_the_free_memory(no_torch, smi, monkeypatch):
    assert devices.best_device() == "cpu"
    smi(*ROWS)
    assert devices.best_device() == "cuda:1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,2")
    assert devices.best_device() == "cuda:2"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert devices.best_device() == "cuda:1"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert "3 CUDA devices, cuda:0, cuda:1 and cuda:2" in refusal(devices.best_device)


# A device for live tensors


def test_a_device_that_is_here_is_given(torch_sees):
    torch_sees(1, 1, current=1)
    assert devices.require_device("cpu") == devices.require_device("cpu:0") == torch.device("cpu")
    assert devices.require_device("cuda:0") == torch.device("cuda", 0)
    assert devices.require_device("cuda") == torch.device("cuda", 1), (
        "bare cuda is the current device"
    )


def test_an_xpu_is_given_as_a_cuda_device_is(torch_sees, monkeypatch):
    torch_sees()
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 1)
    assert devices.require_device("xpu") == torch.device("xpu", 1)
    assert devices.require_device("xpu:0") == torch.device("xpu", 0)
    assert "this host has 2 XPU devices, xpu:0 and xpu:1;" in refusal(
        devices.require_device, "xpu:2"
    )


@pytest.mark.parametrize("tag", ["meta", "weird", "cuda:01", "", "cuda:0\x1b[31m"])
def test_a_stored_tag_that_is_no_device_is_answered_with_the_remedy(tag):
    text = refusal(devices.require_device, tag)
    assert "is not a device to load to" in text
    assert text.endswith(ELSEWHERE)


def test_a_device_beyond_the_last_is_answered_with_those_that_are_here(torch_sees):
    torch_sees(1, 1)
    text = refusal(devices.require_device, "cuda:3")
    assert (
        text == f"cuda:3 is not here: this host has 2 CUDA devices, cuda:0 and cuda:1; {ELSEWHERE}"
    )
    torch_sees(1)
    assert "this host has 1 CUDA device, cuda:0;" in refusal(devices.require_device, "cuda:1")


def test_a_build_without_cuda_is_named(torch_sees, monkeypatch):
    torch_sees(built=None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    text = refusal(devices.require_device, "cuda")
    assert f"torch {torch.__version__} sees no CUDA device (it is built without CUDA)" in text
    assert "CUDA_VISIBLE_DEVICES" not in text, "the setting is not the reason"
    assert ELSEWHERE in text


@pytest.mark.parametrize(
    ("visible", "count", "words"),
    [
        ("2,3", 2, "CUDA_VISIBLE_DEVICES=2,3 makes physical 2 and 3 the logical cuda:0 and cuda:1"),
        ("5", 1, "CUDA_VISIBLE_DEVICES=5 makes physical 5 the logical cuda:0"),
        ("2,9,3", 1, "CUDA_VISIBLE_DEVICES=2,9,3 makes physical 2 the logical cuda:0"),
        ("GPU-aa,GPU-bb", 2, "makes physical GPU-aa and GPU-bb the logical cuda:0 and cuda:1"),
        ("-1", 0, "CUDA_VISIBLE_DEVICES=-1 leaves no GPU visible"),
        ("", 0, "CUDA_VISIBLE_DEVICES= leaves no GPU visible"),
    ],
)
def test_a_visibility_setting_is_explained(visible, count, words, torch_sees, monkeypatch):
    torch_sees(*[1] * count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert words in refusal(devices.require_device, "cuda:4")


def test_a_driver_that_fails_is_quoted_and_not_raised(torch_sees, monkeypatch):
    def fail():
        raise RuntimeError("CUDA unknown error\nwith a trace")

    torch_sees(1)
    monkeypatch.setattr(torch.cuda, "current_device", fail)
    assert "(torch: CUDA unknown error)" in refusal(devices.require_device, "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", fail)
    assert "sees no CUDA device (torch: CUDA unknown error)" in refusal(
        devices.require_device, "cuda:0"
    )


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("npu:0", "sees no NPU device (import torch_npu first)"),
        ("hpu", "sees no HPU device (import habana_frameworks first)"),
        ("xla:1", "sees no XLA device (import torch_xla first)"),
        ("privateuseone", "sees no PRIVATEUSEONE device (torch: "),
        ("vulkan", "sees no VULKAN device (torch: "),
        ("hip:0", "sees no HIP device (torch: "),
    ],
)
def test_a_foreign_device_that_is_not_here_is_refused_alike(tag, words):
    text = refusal(devices.require_device, tag)
    assert text.startswith(f"{tag} is not here: torch {torch.__version__} {words}")
    assert text.endswith(ELSEWHERE)


def test_a_missing_torch_is_named(no_torch):
    assert "torch is not installed" in refusal(devices.require_device, "cpu")


# map_location


def torch_loads_to(path: Path, map_location: object) -> object:
    try:
        (tensor,) = torch.load(path, map_location=map_location).values()
    except (RuntimeError, AssertionError, AttributeError):
        return "refused"
    return tensor.device


@pytest.mark.parametrize(
    "tag",
    ["cpu", "cuda", "cuda:0", "cuda:90", "mps", "xpu:0", "hpu", "mtia", "npu:0", "ipu", "weird"],
)
@pytest.mark.parametrize(
    "map_location",
    [None, "cpu", torch.device("cpu"), {"cuda:0": "cpu"}, {"cpu": "cuda:90"}],
    ids=str,
)
def test_a_tag_goes_where_torch_load_takes_it(tag, map_location, save_tagged):
    try:
        ours: object = mapping.resolve_map_location(map_location)(tag)
    except DeviceUnavailable:
        ours = "refused"
    assert ours == torch_loads_to(save_tagged(tag), map_location)


def test_a_device_or_its_tag_takes_every_storage(torch_sees):
    torch_sees(1, 1)
    for map_location in ("cuda:1", torch.device("cuda", 1)):
        locate = mapping.resolve_map_location(map_location)
        assert {locate(tag) for tag in ("cpu", "cuda:0", "weird")} == {torch.device("cuda", 1)}


def test_auto_is_asked_once_per_load(torch_sees, monkeypatch):
    torch_sees(1, 2)
    asked = []
    monkeypatch.setattr(devices, "best_device", lambda: asked.append(1) or "cuda:1")
    locate = mapping.resolve_map_location({"cpu": "auto", "cuda:5": "auto"})
    assert [locate(tag) for tag in ("cpu", "cuda:5", "cpu")] == [torch.device("cuda", 1)] * 3
    locate = mapping.resolve_map_location("auto")
    assert [locate(tag) for tag in ("cpu", "weird")] == [torch.device("cuda", 1)] * 2
    assert len(asked) == 2


def test_each_tag_is_looked_up_once(torch_sees, monkeypatch):
    torch_sees(1, 1)
    counted = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: counted.append(1) or 2)
    locate = mapping.resolve_map_location(None)
    assert [locate("cuda:1").index for _ in range(5)] == [1] * 5
    assert len(counted) == 1


@pytest.mark.parametrize(
    "map_location", [0, 1.5, b"cpu", ["cpu"], lambda storage, location: storage]
)
def test_what_is_no_location_is_refused(map_location):
    text = refusal(mapping.resolve_map_location, map_location)
    assert "is not a location" in text
    assert "give a tag, or a dict of tags" in text


def test_a_dict_may_hold_devices(torch_sees):
    torch_sees(1, 1)
    assert mapping.resolve_map_location({"cuda:7": torch.device("cuda", 1)})(
        "cuda:7"
    ) == torch.device("cuda", 1)


@pytest.mark.parametrize("map_location", ["meta", torch.device("meta"), "CPU"])
def test_a_location_that_is_no_tag_is_refused_at_once(map_location):
    refusal(mapping.resolve_map_location, map_location)


# The module


def test_importing_the_module_imports_nothing_heavy():
    heavy = ("torch", "numpy", "subprocess", "json", "shutil", "importlib.util")
    code = (
        "import sys, ckptconv.support.errors; before = set(sys.modules); "
        "import ckptconv.devices.host"
    )
    code += f"\nprint(*(set(sys.modules) - before) & set({heavy}))"
    root = Path(devices.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_the_examples_in_the_docstrings_hold():
    for module in (tags, mapping):
        done = doctest.testmod(module)
        assert done.failed == 0 and done.attempted > 0, module


@pytest.mark.gpu
def test_a_real_cuda_device_is_found_and_given(monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device that torch can use")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    host = survey_host(ask_torch=True)
    seen = {gpu.logical: gpu for gpu in host.gpus if gpu.logical is not None}
    assert sorted(seen) == list(range(torch.cuda.device_count()))
    assert host.cuda == len(seen)
    for logical, gpu in seen.items():
        assert gpu.name == torch.cuda.get_device_name(logical)
        assert 0 < gpu.free <= gpu.total
        assert abs(gpu.total - torch.cuda.get_device_properties(logical).total_memory) < 4 * GIB
    best = devices.require_device(devices.best_device())
    assert torch.ones(2, device=best).sum().item() == 2
    assert devices.require_device("cuda") == torch.device("cuda", torch.cuda.current_device())
    assert "is not here" in refusal(devices.require_device, f"cuda:{host.cuda}")
