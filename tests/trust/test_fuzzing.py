"""The fuzzer, in small: some hundred files, always the same ones; and the proof that it notices
what it looks for.

``make fuzz`` runs it without end; see docs/maintainers/fuzzing.md.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fuzzing import trial
from fuzzing.hunt import Hunt, load_find, mutation, save_find, work_folder
from fuzzing.inputs import Seed, Trial
from fuzzing.mutations import mutate
from fuzzing.seeds import make_seeds
from fuzzing.structures import STRUCTURES, structures
from fuzzing.trial import Find, run
from helpers.examples import examples
from helpers.program import SAMPLES

pytestmark = pytest.mark.filterwarnings("ignore")
NUMBER = 20261121


@pytest.fixture(scope="module")
def seeds(tmp_path_factory) -> list[Seed]:
    return make_seeds(tmp_path_factory.mktemp("seeds"), foreign=False)


@pytest.fixture
def work() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


def told(hunt: Hunt) -> str:
    return "\n".join(hunt.tally.lines(1))


# -------------------------------------------------------------------------------------------- hunts


@pytest.mark.trust
def test_mutated_files_are_converted_right_or_refused(seeds, work, tmp_path, figure):
    others = [seed for seed in seeds if seed.target != "quantised"]
    hunt = Hunt(others, work, tmp_path / "finds", seed=NUMBER, workers=1, mode="mutations")
    hunt.run(300, cases=60)
    assert not hunt.tally.signatures, told(hunt)
    assert sum(hunt.tally.executions.values()) == 60
    figure("executions fuzzed", 60)
    assert len(hunt.tally.executions) > 12
    assert sum(hunt.tally.accepted.values()) > 15
    assert hunt.tally.compared > 0


def test_mutated_quantised_weights_have_the_right_values_or_are_refused(seeds, work, figure):
    chance = random.Random(NUMBER)
    quantised = [seed for seed in seeds if seed.target == "quantised"]
    verdicts = [run(mutate(seed, quantised, chance), work) for seed in quantised * 2]
    figure("executions fuzzed", len(verdicts))
    assert [find for verdict in verdicts for find in verdict.finds] == []
    assert sum(verdict.accepted for verdict in verdicts) > 5
    assert sum(verdict.refused for verdict in verdicts) > 20


@pytest.mark.property
@pytest.mark.parametrize("number", range(len(STRUCTURES)), ids=sorted(STRUCTURES))
def test_made_up_files_are_converted_right_or_refused(number, work, figure):
    import torch  # by name: a step that imports it would take its time for the file's

    assert torch
    verdicts = [run(trial, work) for _, trial in structures(number, NUMBER, examples(36))]
    figure("executions fuzzed", len(verdicts))
    assert [find for verdict in verdicts for find in verdict.finds] == []
    assert any(verdict.accepted for verdict in verdicts)
    assert any(verdict.refused for verdict in verdicts)


def test_good_files_are_right(seeds, work):
    for seed in {seed.target: seed for seed in seeds}.values():
        verdict = run(seed.trial, work)
        assert not verdict.finds, (seed.name, verdict.finds)
        # Two ways of five are tried. Of several checkpoints in one file, only those to torch need
        # no choice among them.
        assert verdict.accepted or seed.target == "members", seed.name


def test_good_quantised_weights_are_right(seeds, work):
    for seed in seeds:
        if seed.target == "quantised":
            verdict = run(seed.trial, work)
            assert not verdict.finds and verdict.accepted == 2, (seed.name, verdict.finds)


def test_a_run_can_be_repeated(seeds):
    assert [mutation(number, 7, seeds) for number in range(50)] == [
        mutation(number, 7, seeds) for number in range(50)
    ]
    assert mutation(1, 7, seeds) != mutation(1, 8, seeds)
    assert list(structures(6, 7)) == list(structures(6, 7))


# -------------------------------------------------------------------------- what the fuzzer notices

SAMPLE = Trial({"in.pt": (SAMPLES / "tied.pt").read_bytes()}, ("in.pt",))


def kinds(work: Path) -> set[str]:
    return {find.kind for find in run(SAMPLE, work).finds}


def instead(monkeypatch: pytest.MonkeyPatch, name: str, work: Callable[..., Any]) -> None:
    """Let the fuzzer call `work` with the function that it would have called, and its arguments."""
    original = getattr(trial, name)
    monkeypatch.setattr(trial, name, lambda *given, **more: work(original, *given, **more))


@pytest.mark.parametrize(
    "error", [KeyError, RecursionError, MemoryError, AssertionError, OverflowError, UnicodeError]
)
def test_every_other_exception_is_a_find(error, work, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise error("x")

    monkeypatch.setattr(trial, "open_checkpoint", fail)
    assert kinds(work) == {error.__name__}


def test_a_step_without_end_is_a_find(work, monkeypatch):
    def spin(*_: Any, **__: Any) -> None:
        while True:
            pass

    monkeypatch.setattr(trial, "SECONDS", 0.2)
    monkeypatch.setattr(trial._Watch.step, "__kwdefaults__", {"seconds": 0.2, "refusing": True})
    monkeypatch.setattr(trial, "scan_checkpoint", spin)
    begin = time.process_time()
    assert kinds(work) == {"slow"}
    assert time.process_time() - begin < 5


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the peak of memory can be reset on Linux only",
)
def test_memory_is_a_find(work, monkeypatch):
    instead(
        monkeypatch,
        "scan_checkpoint",
        lambda scan, path: [bytearray(b"x") * 250_000_000, scan(path)][1],
    )
    assert kinds(work) == {"memory"}


def test_a_file_left_behind_is_a_find(work, monkeypatch):
    def litter(execute: Callable[..., Any], plan: Any, **options: Any) -> Any:
        (plan.output.parent / ".x.tmp").write_bytes(b"x")
        return execute(plan, **options)

    instead(monkeypatch, "execute_plan", litter)
    assert kinds(work) == {"left behind"}


def test_a_changed_input_is_a_find(work, monkeypatch):
    instead(
        monkeypatch, "scan_checkpoint", lambda scan, path: [scan(path), path.write_bytes(b"x")][0]
    )
    assert "input changed" in kinds(work)


def test_an_output_of_other_values_is_a_find(work, monkeypatch):
    other = SAMPLES / "fp16.pt"
    instead(
        monkeypatch,
        "execute_plan",
        lambda execute, plan, **options: [
            execute(plan, **options),
            shutil.copy(other, plan.output),
        ][0],
    )
    assert "differs" in kinds(work)


def off_by_one(output: Path) -> None:
    """Let all weights of an output be others; they are read back after the tool's own check."""
    from safetensors.torch import load_file, save_file

    if output.suffix == ".safetensors":
        values = load_file(output)
        weights = [key for key in values if not key.endswith("bias")]
        save_file({**values, **{key: values[key] + 1 for key in weights}}, output)


@pytest.mark.parametrize("scheme", ["fp8", "packed", "gptq", "experts", "nvfp4", "nf4"])
def test_other_values_of_quantised_weights_are_a_find(seeds, work, monkeypatch, scheme):
    instead(
        monkeypatch,
        "execute_plan",
        lambda execute, plan, **options: [execute(plan, **options), off_by_one(plan.output)][0],
    )
    [seed] = [seed for seed in seeds if seed.name == f"quantised:{scheme}"]
    assert {find.kind for find in run(seed.trial, work).finds} == {"other value"}


def test_values_of_what_does_not_fit_are_a_find(seeds, work):
    from fuzzing.plain_weights import other_value

    [seed] = [seed for seed in seeds if seed.name == "quantised:fp8"]
    for name, content in seed.trial.files.items():
        (work / name).write_bytes(content.replace(b"[16, 8]", b"[16, 9]"))
    output = work / "out"
    shutil.copy(work / "model.safetensors", output)
    wrong = other_value(work, output)
    assert wrong is not None and "dequantised" not in wrong  # 24 columns: 3 blocks of 9 too
    (work / "config.json").write_text(seed.trial.files["config.json"].decode().replace("8]", "99]"))
    wrong = other_value(work, output)
    assert wrong is not None and "scales for a grid" in wrong


def test_an_imported_payload_is_a_find(work, monkeypatch):
    def load(scan: Callable[..., Any], path: Path) -> Any:
        import fuzzing.payload

        assert fuzzing.payload
        return scan(path)

    instead(monkeypatch, "scan_checkpoint", load)
    assert kinds(work) == {"executed"}
    assert "fuzzing.payload" not in sys.modules


def test_an_error_that_does_not_name_the_file_is_a_find(work, monkeypatch):
    def fail(*_: Any) -> None:
        raise trial.CheckpointError("is wrong")

    monkeypatch.setattr(trial, "scan_checkpoint", fail)
    assert kinds(work) == {"error without file"}


def test_a_find_is_saved_whole(tmp_path):
    nested = Trial({"a/in.pt": b"x", "b": b""}, ("a/in.pt", "b"), "like")
    assert (
        load_find(save_find(tmp_path, "zip-1-2", nested, Find("slow", "scan", "\ud800"))) == nested
    )
