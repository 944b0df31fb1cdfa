"""`devices --export`: what shells evaluate, given what real nvidia-smi versions print, and when
nothing is printed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptconv.devices import gpu_choice, nvidia_smi
from ckptconv.devices.gpu_choice import choose_gpus, settings
from ckptconv.support.errors import DeviceUnavailable
from helpers.examples import crossed
from helpers.paths import DATA
from helpers.program import ROOT, assert_one_error, environment, run, run_process

ANSWERS = DATA / "nvidia-smi"
EXITS = {"driver-not-loaded": 9, "version-mismatch": 18, "no-devices": 6, "lost": 15, "inforom": 14}
SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh", "ksh") if shutil.which(shell)]
ORDER = "export CUDA_DEVICE_ORDER=PCI_BUS_ID"


@pytest.fixture(autouse=True)
def bare_host(monkeypatch, tmp_path):
    """Nothing on PATH but what `smi` puts there, and no variables that choose GPUs."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def program(tmp_path) -> Callable[[str, str], None]:
    """Puts a shell script on PATH."""

    def put(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return put


@pytest.fixture
def smi(program) -> Callable[[str], None]:
    """Puts an nvidia-smi on PATH that answers as a file of tests/data/nvidia-smi."""

    def put(name: str) -> None:
        modes = ANSWERS / f"{name}.modes.txt"
        told = f"exec /bin/cat {shlex.quote(str(modes))}" if modes.exists() else "exit 2"
        rows = f"/bin/cat {shlex.quote(str(ANSWERS / name))}.txt; exit {EXITS.get(name, 0)}"
        program("nvidia-smi", f'case "$1" in *mig.mode*) {told};; *) {rows};; esac')

    return put


def rows(*lines: str) -> str:
    return "\n".join(f"echo {shlex.quote(line)}" for line in lines)


def chosen(**wanted: int) -> str:
    return choose_gpus(**wanted).visible


def refusal(**wanted: int) -> str:
    with pytest.raises(DeviceUnavailable) as caught:
        choose_gpus(**wanted)
    assert str(caught.value).isprintable()
    return str(caught.value)


def export(*arguments: str, tmp_path: Path, **env: str):
    return run(
        "devices", "--export", *arguments, cwd=tmp_path, env={"PATH": str(tmp_path / "bin"), **env}
    )


# The choice


@pytest.mark.parametrize(
    ("answer", "visible"),
    [
        ("titan-x-8", "0,5,2,3,7,6,4,1"),
        ("v100-4", "0,1,2,3"),
        ("two-kinds", "1,0"),
        ("gb10", "0"),
        ("mig-not-permitted", "0"),
        ("inforom", "0"),
        ("broken", "1"),
    ],
)
def test_the_gpus_with_the_most_free_memory_come_first_and_equals_by_index(answer, visible, smi):
    smi(answer)
    assert chosen() == visible


@pytest.mark.parametrize(
    ("wanted", "visible"),
    [
        ({"count": 2}, "0,5"),
        ({"min_free": 6_000_000_000}, "0,5,2,3,7,6,4"),
        ({"min_free": 5766 << 20}, "0,5"),
        ({"min_free": 5000 << 20, "count": 3}, "0,5,2"),
        ({"count": 8}, "0,5,2,3,7,6,4,1"),
    ],
)
def test_count_and_free_memory_narrow_the_choice(wanted, visible, smi):
    smi("titan-x-8")
    assert chosen(**wanted) == visible


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"count": 9}, "9 GPUs wanted, but only 8 can be seen"),
        (
            {"min_free": 20_000_000_000},
            "1 GPU with 19074 MiB free wanted, but none of 8 can be used: GPU 0 has 11404 MiB free",
        ),
        (
            {"min_free": 11000 << 20, "count": 2},
            "2 GPUs with 11000 MiB free wanted, but 1 of 8 can be used: GPU 1 has 2174",
        ),
    ],
)
def test_too_few_gpus_are_refused_with_what_there_is(wanted, words, smi):
    smi("titan-x-8")
    assert words in refusal(**wanted)


def test_memory_that_is_not_told_is_not_taken_for_enough(smi, program):
    smi("gb10")
    assert "GPU 0 does not report its free memory" in refusal(min_free=1)
    program("nvidia-smi", rows("0, GPU-1-1, A, 81920, [N/A]", "1, GPU-1-2, A, 81920, 5"))
    assert chosen() == "1,0"
    assert chosen(count=1) == "1"


def test_a_broken_gpu_is_passed_over_and_named(smi):
    smi("broken")
    assert choose_gpus().notes == ("GPU 0 says [Unknown Error] instead of its memory",)
    assert "none of 1 can be used" not in refusal(count=2)
    assert "1 of 2 can be used: GPU 0 says [Unknown Error]" in refusal(count=2)


def test_a_gpu_in_mig_mode_is_passed_over_and_the_others_are_named_by_uuid(smi):
    smi("a100-4")
    choice = choose_gpus(count=2)
    assert (
        choice.visible
        == "GPU-b4199570-ed3c-2a6b-646a-af77be93eac5,GPU-1a4dff29-ab6d-9f64-f125-8b7cebdaac4a"
    )
    assert "GPU 0 is in MIG mode" in choice.notes[0]
    assert "3 of 4 can be used: GPU 0 is in MIG mode" in refusal(count=4)


def test_where_all_gpus_are_in_mig_mode_none_is_chosen(program):
    program(
        "nvidia-smi",
        'case "$1" in *mig.mode*) echo "0, Enabled";; *) '
        f"{rows('0, GPU-1-1, A100, 81920, 81000')};; esac",
    )
    assert "none of 1 can be used: GPU 0 is in MIG mode" in refusal()


def test_numbers_with_gaps_become_uuids(program):
    program("nvidia-smi", rows("0, GPU-aa-1, A, 100, 5", "2, GPU-aa-2, A, 100, 6"))
    assert chosen() == "GPU-aa-2,GPU-aa-1"


@pytest.mark.parametrize("uuid", ["$(reboot)", "GPU-1;ls", "GPU-", "", "MIG-1-1", "GPU-aa-1\u0661"])
def test_a_name_that_is_no_uuid_is_never_printed(uuid, program):
    program("nvidia-smi", rows("0, GPU-aa-1, A, 100, 5", f"2, {uuid}, A, 100, 6"))
    assert "which is not a UUID" in refusal()


def test_a_warning_beside_a_whole_list_is_passed_on(smi):
    smi("inforom")
    assert choose_gpus().notes == (
        "nvidia-smi says: WARNING: infoROM is corrupted at gpu 0000:B3:00.0",
    )


# CUDA_VISIBLE_DEVICES is set already


@pytest.mark.parametrize(
    ("env", "visible"),
    [
        ("1,2,3", "2,3,1"),
        ("3,1", "3,1"),
        ("7", "7"),
        (" 4 , 0 ", "0,4"),
        ("1,5,-1,0", "5,1"),
        ("GPU-86fe97db,GPU-004f693d", "0,1"),
        ("GPU-2090c509-a97a-e2fe-68f4-cf9e874c36f2", "2"),
    ],
)
def test_what_is_visible_limits_the_choice_and_the_numbers_stay_physical(
    env, visible, smi, monkeypatch
):
    smi("titan-x-8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", env)
    assert chosen() == visible
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert chosen() == visible, "evaluating it again changes nothing"


@pytest.mark.parametrize("env", ["", "-1", "99", "GPU-ffff", "0,0", "none"])
def test_where_no_gpu_is_visible_there_is_nothing_to_choose(env, smi, monkeypatch):
    smi("titan-x-8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", env)
    choice = choose_gpus()
    assert (choice.gpus, settings(choice, "sh")) == ((), [])
    assert choice.notes == (f"CUDA_VISIBLE_DEVICES={env} leaves no GPU visible",)
    assert "none of 0 can be used: CUDA_VISIBLE_DEVICES=" in refusal(count=1)


@pytest.mark.parametrize(
    "env", ["MIG-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-GPU-aaaa1111-0000/1/0"]
)
def test_a_mig_instance_that_is_named_stays(env, smi, monkeypatch):
    smi("a100-4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", env)
    assert f"CUDA_VISIBLE_DEVICES={env} names a MIG instance" in refusal()


def test_indices_that_cuda_may_count_otherwise_are_refused_until_the_order_is_set(smi, monkeypatch):
    smi("two-kinds")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "fastest first" in refusal()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in refusal()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert chosen() == "0"
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    for env in (
        "0,1",
        "1,0",
        "GPU-00000000-0000-0000-0000-00000000000b,GPU-00000000-0000-0000-0000-00000000000a",
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", env)
        assert chosen() == "1,0", "all of them, whatever their order"


# nvidia-smi fails


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            "driver-not-loaded",
            "nvidia-smi failed (exit 9): NVIDIA-SMI has failed because it couldn't communicate",
        ),
        ("version-mismatch", "nvidia-smi failed (exit 18): Failed to initialize NVML"),
        (
            "lost",
            "nvidia-smi failed (exit 15): Unable to determine the device handle for GPU "
            "0000:02:00.0",
        ),
    ],
)
def test_an_nvidia_smi_that_fails_is_an_error_that_quotes_it(answer, words, smi, tmp_path):
    smi(answer)
    assert words in assert_one_error(export(tmp_path=tmp_path))


@pytest.mark.parametrize(
    "script",
    [
        f"{rows('0, GPU-aa-1, A, 100, 5', 'Unable to determine the device handle')}; exit 255",
        rows("0, GPU-aa-1, A, 100, 5", "[N/A], GPU-aa-2, A, 100, 5"),
        rows("utter nonsense"),
        "exit 1",
        "printf '\\377\\376\\n'",
    ],
)
def test_a_list_that_is_not_whole_is_no_list(script, program, tmp_path):
    program("nvidia-smi", script)
    assert "nvidia-smi" in assert_one_error(export(tmp_path=tmp_path))


@pytest.mark.parametrize("which", ["mig.mode", "memory.free"])
def test_an_nvidia_smi_that_hangs_is_given_up_and_ended(which, program, monkeypatch, tmp_path):
    sleep = shutil.which("sleep", path=os.defpath)
    script = (
        f'case "$1" in *{which}*) echo $$ > {tmp_path}/pid; exec {sleep} 60;; *) '
        f"{rows('0, GPU-aa-1, A, 9, 5')};; esac"
    )
    program("nvidia-smi", script)
    monkeypatch.setattr(gpu_choice, "SECONDS", 1.0)
    begin = time.monotonic()
    assert "timed out after 1 seconds" in refusal()
    assert time.monotonic() - begin < 5
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises((ProcessLookupError, ChildProcessError)):
        for _ in range(100):
            os.waitpid(pid, os.WNOHANG)
            time.sleep(0.05)


def test_an_nvidia_smi_that_cannot_run_is_an_error(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text("not executable")
    assert "nvidia-smi did not answer" in assert_one_error(export(tmp_path=tmp_path))


# Hosts without GPUs


def test_a_host_without_nvidia_smi_has_nothing_to_evaluate(tmp_path):
    done = export(tmp_path=tmp_path)
    assert (done.exit, done.out, done.err) == (0, "", "note: this host has no NVIDIA GPU\n")
    assert "none of 0 can be used" in assert_one_error(export("--count", "1", tmp_path=tmp_path))
    assert "none of 0 can be used" in assert_one_error(
        export("--min-free", "1GB", tmp_path=tmp_path)
    )


def test_an_nvidia_smi_that_finds_no_device_is_such_a_host(smi, tmp_path):
    smi("no-devices")
    done = export(tmp_path=tmp_path)
    assert (done.exit, done.out) == (0, "")
    assert "note: this host has no NVIDIA GPU\n" in done.err


# The command


@pytest.mark.parametrize(
    ("shell", "lines"),
    [
        ((), [ORDER, "export CUDA_VISIBLE_DEVICES=1,0"]),
        (("--shell", "sh"), [ORDER, "export CUDA_VISIBLE_DEVICES=1,0"]),
        (
            ("--shell", "fish"),
            ["set -gx CUDA_DEVICE_ORDER PCI_BUS_ID", "set -gx CUDA_VISIBLE_DEVICES 1,0"],
        ),
        (
            ("--shell", "powershell"),
            ["$env:CUDA_DEVICE_ORDER = 'PCI_BUS_ID'", "$env:CUDA_VISIBLE_DEVICES = '1,0'"],
        ),
        (
            ("--shell", "cmd"),
            ['set "CUDA_DEVICE_ORDER=PCI_BUS_ID"', 'set "CUDA_VISIBLE_DEVICES=1,0"'],
        ),
    ],
)
def test_each_shell_gets_its_own_words(shell, lines, smi, tmp_path):
    smi("two-kinds")
    done = export(*shell, tmp_path=tmp_path)
    assert (done.exit, done.out.splitlines(), done.err) == (0, lines, "")


def test_json_has_the_choice_as_fields(smi, tmp_path):
    smi("two-kinds")
    document = export("--json", "--count", "1", tmp_path=tmp_path).json()
    assert (document["cuda_visible_devices"], document["cuda_device_order"], document["notes"]) == (
        "1",
        "PCI_BUS_ID",
        [],
    )
    (gpu,) = document["gpus"]
    assert (gpu["physical"], gpu["free_bytes"], gpu["total_bytes"]) == (1, 16000 << 20, 16384 << 20)
    assert (gpu["name"], gpu["uuid"]) == (
        "NVIDIA GeForce RTX 3080 Ti",
        "GPU-00000000-0000-0000-0000-00000000000b",
    )
    failed = export("--json", "--count", "3", tmp_path=tmp_path)
    assert failed.exit == 1
    assert "only 2 can be seen" in json.dumps(failed.json())
    (tmp_path / "bin" / "nvidia-smi").unlink()
    document = export("--json", tmp_path=tmp_path).json()
    assert (document["cuda_visible_devices"], document["cuda_device_order"], document["gpus"]) == (
        None,
        None,
        [],
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--export", "--min-free", "lots"), "'lots' is not a size"),
        (("--export", "--min-free", ""), "'' is not a size"),
        (("--export", "--count", "0"), "0 is not in the range"),
        (("--export", "--shell", "csh"), "'csh' is not one of"),
        (("--count", "2"), "--count needs --export"),
        (("--min-free", "8GB"), "--min-free needs --export"),
        (("--shell", "sh"), "--shell needs --export"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(arguments, words, tmp_path):
    done = run("devices", *arguments, cwd=tmp_path)
    assert words in assert_one_error(done, code=2)


def test_one_of_json_and_shell_can_be_printed(tmp_path):
    done = run("devices", "--export", "--json", "--shell", "sh", cwd=tmp_path)
    assert done.exit == 2 and "--json and --shell" in done.json()["error"]["what"]


def test_torch_is_never_imported(smi, tmp_path):
    smi("two-kinds")
    (tmp_path / "fake" / "torch").mkdir(parents=True)
    (tmp_path / "fake" / "torch" / "__init__.py").write_text("raise SystemExit(99)")
    path = os.pathsep.join((str(tmp_path / "fake"), str(ROOT)))
    assert run_process("devices", cwd=tmp_path, env={"PYTHONPATH": path}).exit == 99, (
        "the fake torch is found"
    )
    variables = {"PATH": str(tmp_path / "bin"), "PYTHONPATH": path}
    assert run_process("devices", "--export", cwd=tmp_path, env=variables).exit == 0


# Evaluated


@pytest.fixture
def ckptconv(program) -> None:
    program("ckptconv", f'exec {shlex.quote(sys.executable)} -m ckptconv "$@"')


def evaluated(
    shell: str, script: str, tmp_path: Path, **env: str
) -> subprocess.CompletedProcess[str]:
    variables = environment(PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin", **env)
    command = [shutil.which(shell, path="/usr/bin:/bin:/usr/local/bin") or shell, "-c", script]
    return subprocess.run(
        command,
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SHOWN = "sh -c 'echo \"${CUDA_DEVICE_ORDER-unset} ${CUDA_VISIBLE_DEVICES-unset}\"'"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_that_evaluates_it_hands_it_to_programs(shell, smi, ckptconv, tmp_path):
    smi("titan-x-8")
    done = evaluated(shell, f'eval "$(ckptconv devices --export --count 3)"; {SHOWN}', tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "PCI_BUS_ID 0,5,2\n", "")


@pytest.mark.parametrize(
    ("answer", "shell"), crossed(["titan-x-8", "driver-not-loaded", "lost"], SHELLS)
)
def test_a_refusal_leaves_what_was_set(answer, shell, smi, ckptconv, tmp_path):
    smi(answer)
    line = 'eval "$(ckptconv devices --export --min-free 900GB)"'
    done = evaluated(shell, f"{line}; {SHOWN}", tmp_path, CUDA_VISIBLE_DEVICES="3,4")
    assert done.stdout == "unset 3,4\n"
    assert done.stderr.startswith("error: ")
    strict = f'lines=$(ckptconv devices --export --min-free 900GB) && eval "$lines" && {SHOWN}'
    done = evaluated(shell, strict, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_on_a_host_without_gpus_a_script_goes_on(shell, ckptconv, tmp_path):
    done = evaluated(shell, f'set -eu; eval "$(ckptconv devices --export)"; {SHOWN}', tmp_path)
    assert (done.returncode, done.stdout) == (0, "unset unset\n")


# The test data


def test_every_answer_has_a_source_and_the_exit_code_that_it_is_given():
    page = (ANSWERS / "README.md").read_text()
    for path in ANSWERS.glob("*.txt"):
        (line,) = [line for line in page.splitlines() if line.startswith("|") and path.name in line]
        assert "<https://" in line
        assert line.split("|")[3].strip() == str(EXITS.get(path.name.split(".")[0], 0))


def test_without_the_question_for_partitions_nvidia_smi_runs_once(program, tmp_path):
    program("nvidia-smi", f'echo "$1" >> {tmp_path}/asked; {rows("0, GPU-aa-1, A, 9, 5")}')
    assert len(nvidia_smi.ask_gpus().gpus) == 1
    assert (tmp_path / "asked").read_text().count("\n") == 1
