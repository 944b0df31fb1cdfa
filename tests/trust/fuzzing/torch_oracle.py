"""What torch sees in a source and in its output, asked of a process of its own, which may crash or
hang over a hostile file.

Each line on stdin is a JSON list of two paths; each answer one line of JSON: null, or what is
wrong.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

_SECONDS = 20


class TorchOracle:
    """Asks the process, and starts another one when it has died or hangs; what killed it is not a
    find of ours.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.asked = 0
        self.compared = 0

    def __call__(self, source: Path, output: Path) -> str | None:
        self.asked += 1
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([str(source), str(output)]) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], _SECONDS)
            answer = process.stdout.readline() if ready else ""
        except OSError:
            answer = ""
        if not answer:
            self.close()
            return None
        verdict, compared = json.loads(answer)
        self.compared += compared
        return verdict

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "fuzzing.torch_oracle"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(command, text=True, env=env, **pipes)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def compare(source: Path, output: Path) -> tuple[str | None, bool]:
    """What is wrong with an output of a source, and whether torch read the source (what it refuses
    is not compared).
    """
    from ckptconv import CheckpointError, load_portable
    from helpers import oracle

    try:
        load_portable(source)
    except CheckpointError:
        pass
    except Exception as error:
        return f"load_portable: {type(error).__name__}: {error}", False
    # aliases and encodings: torch knows neither
    if source.is_dir() or b"__metadata__" in source.read_bytes():
        return None, False
    try:
        expected = oracle.value_rows(oracle.load(source))
    except Exception:  # it refuses in many ways
        return None, False
    try:
        found = oracle.value_rows(oracle.load(output))
    except Exception as error:
        return f"torch reads the source, but not the output: {type(error).__name__}: {error}", True
    if source.suffix == ".safetensors":  # its keys come in no certain order
        found, expected = sorted(found), sorted(expected)
    if found == expected:
        return None, True
    pairs = [
        f"{ours} / {theirs}"
        for ours, theirs in zip(expected, found, strict=False)
        if ours != theirs
    ]
    return f"torch sees {len(expected)} / {len(found)} values: {'; '.join(pairs)}"[:1000], True


def main() -> None:
    import resource
    import warnings

    import torch

    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in sys.stdin:
        source, output = map(Path, json.loads(line))
        print(json.dumps(compare(source, output)), flush=True)


if __name__ == "__main__":
    main()
