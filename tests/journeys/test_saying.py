"""What results and errors say: true of this run, in the words of the caller, fit to be pasted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click import unstyle
from click.testing import CliRunner

import ckptconv
from ckptconv.cli import terminal
from ckptconv.cli.main import cli
from ckptconv.support.errors import CheckpointError, OptionRefused
from ckptconv.support.report import Row
from helpers.paths import SAMPLES

DDP = SAMPLES / "ddp_cuda3.pt"


def said(*arguments: object) -> tuple[int, str]:
    """The exit code of the program and all that it printed."""
    done = CliRunner().invoke(cli, [str(part) for part in arguments])
    return done.exit_code, done.output


def saved(path: Path, **tensors: torch.Tensor) -> Path:
    """A state dict as a torch file."""
    torch.save(tensors, path)
    return path


def test_a_verified_cast_is_equal_after_the_cast(tmp_path):
    _, text = said("convert", DDP, tmp_path / "a.pt", "--verify", "--dtype", "bf16")
    assert (
        "tensors read back, equal to the source after the cast to bfloat16; nothing that the "
        "source names is missing" in text
    )
    _, text = said("convert", DDP, tmp_path / "b.pt", "--verify")
    assert (
        "tensors read back, equal to the source; nothing that the source names is missing" in text
    )


def test_a_verified_output_without_all_keys_says_so(tmp_path):
    _, text = said("convert", DDP, tmp_path / "a.pt", "--verify", "--exclude", "*.bias")
    assert "equal to the source; nothing else that the source names is missing" in text


def test_a_command_is_not_broken_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(terminal.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    fix = f"ckptconv convert {'x' * 40}.pt {'y' * 40}.pt --only model"
    terminal.print_lines([Row("effect", "some words " * 20), Row("fix", fix, is_command=True)])
    shown = unstyle(capsys.readouterr().out)
    assert fix in shown
    assert max(map(len, shown.splitlines()[:3])) <= 60


@pytest.mark.parametrize("command", ["convert", "diff"])
def test_a_glob_of_wrapped_keys_gets_the_hint_that_other_rules_have(command, tmp_path):
    other = tmp_path / "out.pt"
    if command == "diff":
        ckptconv.convert_checkpoint(DDP, other)
    code, text = said(command, DDP, other, "--keys", "strip", "--include", "module.*")
    assert code == (2 if command == "diff" else 1)
    assert (
        "before the rules the keys start with module.; --keys keep leaves the wrapper module"
        in text
    )


def test_keys_that_are_left_out_are_named_as_the_rule_saw_them(tmp_path):
    source = saved(
        tmp_path / "in.pt", **{"module.a.weight": torch.ones(2), "module.b.weight": torch.ones(2)}
    )
    _, text = said("convert", source, tmp_path / "out.pt", "--include", "a.*")
    assert "left out  1 of 2 keys did not match --include 'a.*': b.weight\n" in text
    plan = said("convert", source, tmp_path / "out2.pt", "--include", "a.*", "--json")[1]
    assert '"path": "module.b.weight"' in plan


@pytest.mark.parametrize(
    ("name", "to", "better"),
    [
        ("x.safetensors", "torch", "x.pt"),
        *((f"x{end}", "safetensors", "x.safetensors") for end in (".pt", ".PTH", ".bin", ".ckpt")),
    ],
)
def test_a_name_and_a_format_that_disagree_are_refused(name, to, better, tmp_path):
    code, text = said("convert", DDP, tmp_path / name, "--to", to)
    assert code == 2 and f"write {better}, or leave --to out" in text
    assert not (tmp_path / name).exists()
    with pytest.raises(CheckpointError, match=f"but --to says {to}"):
        ckptconv.convert_checkpoint(DDP, tmp_path / name, to=to)
    with pytest.raises(CheckpointError, match=f"but --to says {to}"):
        ckptconv.save_portable({"a": torch.ones(2)}, tmp_path / name, to=to)


def test_dtypes_that_are_not_counted_are_one_line(tmp_path):
    one = saved(tmp_path / "a.pt", **{f"w{i}": torch.ones(2) for i in range(8)})
    other = saved(
        tmp_path / "b.pt", **{f"w{i}": torch.ones(2, dtype=torch.bfloat16) for i in range(8)}
    )
    _, text = said("diff", one, other, "--ignore-dtype")
    assert "float32 [2] / bfloat16 [2]" not in text
    assert "dtype  float32 / bfloat16: 8 tensors (not counted)\n" in text
    code, text = said("diff", one, other)
    assert code == 1 and "--ignore-dtype compares them" in text
    assert "8 of 8 tensors differ" in text
    one, other = (
        saved(tmp_path / "a.pt", w=torch.ones(2)),
        saved(tmp_path / "b.pt", w=torch.zeros(2)),
    )
    assert "1 of 1 tensor differs" in said("diff", one, other)[1]


def test_a_difference_counts_tensors_and_shows_short_numbers(tmp_path):
    one = saved(
        tmp_path / "a.pt",
        w=torch.full((3,), 1 / 3, dtype=torch.float64),
        v=torch.ones(2),
        z=torch.ones(2),
    )
    other = saved(
        tmp_path / "b.pt",
        w=torch.full((3,), 0.5, dtype=torch.float64),
        v=torch.ones(2),
        z=torch.zeros(2),
    )
    code, text = said("diff", one, other)
    assert code == 1 and "2 of 3 tensors differ" in text
    lines = [line.split("  ") for line in text.splitlines()]
    (w,), (z,) = ([line for line in lines if key in line] for key in "wz")
    assert list(filter(None, map(str.strip, w)))[1:4] == ["3 of 3", "0.3333", "1.0000"]
    assert [text.strip() for text in w][-2:] == ["0.333333333", "0.5"]
    assert "2 of 2, B all 0" in z and "inf" not in text
    assert (
        repr(ckptconv.diff_checkpoints(one, other))
        == "<Difference different: 3 tensors compared, 2 tensors differ>"
    )


def test_a_tensor_that_differs_in_nan_alone_has_no_distance(tmp_path):
    one = saved(tmp_path / "a.pt", w=torch.tensor([1.0, float("nan")]))
    other = saved(tmp_path / "b.pt", w=torch.tensor([1.0, 2.0]))
    _, text = said("diff", one, other)
    line = text.splitlines()[-1].split()
    assert line == ["w", "1", "of", "2,", "1", "NaN", "-", "-", "-", "-", "[1]", "nan", "2.0"]


def test_shards_are_named_by_files_that_exist(tmp_path):
    result = ckptconv.convert_checkpoint(DDP, tmp_path / "q3.pt", max_shard_size="1KB")
    assert "q3.pt.index.json" in repr(result) and "q3.pt.index.json" in repr(result.plan)
    result = ckptconv.convert_checkpoint(DDP, tmp_path / "folder", max_shard_size="1KB")
    assert "→ folder/:" in repr(result)


def test_objects_of_torch_are_taken_for_their_names(tmp_path):
    options = ckptconv.Options(dtype=torch.bfloat16, device=torch.device("cuda:1"))
    assert (options.dtype, options.device) == ("bfloat16", "cuda:1")
    result = ckptconv.convert_checkpoint(
        DDP, tmp_path / "a.pt", dtype=torch.float16, device=torch.device("cuda:1")
    )
    assert {after for _, after in result.plan.casts} == {"float16"}
    state = {"a": torch.ones(2)}
    result = ckptconv.save_portable(
        state, tmp_path / "b.pt", dtype=torch.bfloat16, device=torch.device("cuda:1")
    )
    assert dict(result.plan.locations) == {("cpu", "cuda:1"): 1}


def test_misplaced_arguments_are_told_where_they_go(tmp_path):
    model = torch.nn.Linear(2, 2)
    for match, call in (
        (
            "plan_conversion",
            lambda: ckptconv.convert_checkpoint(DDP, tmp_path / "a.pt", ckptconv.Options()),
        ),
        (r"tolerance=Tolerance\(atol=", lambda: ckptconv.diff_checkpoints(DDP, DDP, atol=1.0)),
        (r"load_into\(model, source\)", lambda: ckptconv.load_into("model.pt", model)),
        ("did you mean strip_prefixes", lambda: ckptconv.KeyRules(strip_prefix="a.")),
        ("a tolerance is 0 or more", lambda: ckptconv.Tolerance(atol=-1)),
        ("OLD=NEW", lambda: ckptconv.Options(rename={"a": 3})),
    ):
        with pytest.raises(OptionRefused, match=match):
            call()


def test_an_open_file_is_not_the_path_of_rules():
    with DDP.open("rb") as file, pytest.raises(OptionRefused, match="an open file is not a path"):
        ckptconv.read_key_rules(file)


def test_a_wrapper_is_quoted():
    assert "carry the wrapper 'module.'" in said("inspect", DDP)[1]
    assert "carry the wrapper 'module.'" in said("doctor", DDP)[1]


def test_an_empty_variable_hides_every_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "empty: every GPU is hidden" in said("devices")[1]


def test_one_key_holds_control_characters(tmp_path):
    source = saved(tmp_path / "in.pt", **{"a\x01": torch.ones(2), "b": torch.ones(2)})
    assert "1 key holds control characters" in said("convert", source, tmp_path / "out.pt")[1]
