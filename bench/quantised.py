"""What dequantising costs: `convert --dequantize`, by one thread and by two, against `cp` of its
output, and the peak of memory; each scheme on random codes. `make bench-quantised`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SIZE = int(os.environ.get("BENCH_QUANTISED_MB", "512"))
"""MB of values in bfloat16, for each scheme."""
ROUNDS = 3
ROWS = COLUMNS = 4096
TYPES = {"u1": "U8", "i4": "I32", "f4": "F32", "f2": "F16", "i8": "I64"}
Tensors = dict[str, Any]


def fp8(name: str, draw: np.random.Generator) -> Tensors:
    codes = draw.integers(0, 126, (ROWS, COLUMNS), dtype=np.uint8)
    scale = draw.random((ROWS // 128, COLUMNS // 128), dtype=np.float32)
    return {f"{name}.weight": ("F8_E4M3", codes), f"{name}.weight_scale_inv": scale}


def words(draw: np.random.Generator, *shape: int) -> Any:
    return draw.integers(-(1 << 31), 1 << 31, shape, dtype=np.int32)


def gptq(name: str, draw: np.random.Generator) -> Tensors:
    groups = ROWS // 128
    return {
        f"{name}.qweight": words(draw, ROWS // 8, COLUMNS),
        f"{name}.qzeros": words(draw, groups, COLUMNS // 8),
        f"{name}.scales": draw.random((groups, COLUMNS), dtype=np.float32).astype("f2"),
        f"{name}.g_idx": (np.arange(ROWS) // 128).astype("i4"),
    }


def packed(name: str, draw: np.random.Generator) -> Tensors:
    scale = draw.random((ROWS, COLUMNS // 128), dtype=np.float32).astype("f2")
    return {
        f"{name}.weight_packed": words(draw, ROWS, COLUMNS // 8),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": np.array([ROWS, COLUMNS]),
    }


def experts(name: str, draw: np.random.Generator) -> Tensors:
    blocks = COLUMNS // 32
    return {
        f"{name}_blocks": draw.integers(0, 256, (2, ROWS // 2, blocks, 16), dtype=np.uint8),
        f"{name}_scales": draw.integers(120, 130, (2, ROWS // 2, blocks), dtype=np.uint8),
    }


def nf4(name: str, draw: np.random.Generator) -> Tensors:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [ROWS, COLUMNS]}
    weight = f"{name}.weight"
    return {
        weight: draw.integers(0, 256, (ROWS * COLUMNS // 2, 1), dtype=np.uint8),
        f"{weight}.absmax": draw.random(ROWS * COLUMNS // 64, dtype=np.float32),
        f"{weight}.quant_map": np.linspace(-1, 1, 16, dtype=np.float32),
        f"{weight}.quant_state.bitsandbytes__nf4": np.frombuffer(
            json.dumps(state).encode(), np.uint8
        ),
    }


SCHEMES = {
    "fp8 in blocks": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "GPTQ 4 bit": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128}),
    "int4 packed": (
        packed,
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"all": {"weights": {"num_bits": 4, "group_size": 128}}},
        },
    ),
    "MXFP4 of gpt-oss": (experts, {"quant_method": "mxfp4"}),
    "nf4": (nf4, {"quant_method": "bitsandbytes"}),
}


def write(folder: Path, scheme: str) -> Path:
    make, config = SCHEMES[scheme]
    draw = np.random.default_rng(0)
    header: dict[str, Any] = {}
    parts, at = [], 0
    for number in range(max(1, SIZE * 1_000_000 // (2 * ROWS * COLUMNS))):
        for name, value in make(f"layers.{number}.proj", draw).items():
            kind, array = value if isinstance(value, tuple) else (None, value)
            kind = kind or TYPES[array.dtype.str[1:]]
            ends = [at, at + array.nbytes]
            header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": ends}
            parts.append(array)
            at += array.nbytes
    raw = json.dumps(header).encode()
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for array in parts:
            file.write(array.tobytes())
    told = {"torch_dtype": "bfloat16", "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(told))
    return path


def timed(command: list[str], threads: int, out: Path) -> tuple[float, int]:
    """Seconds and peak of memory (kB) of a command that makes `out`, which is removed before."""
    out.unlink(missing_ok=True)
    begin = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, "CKPTCONV_THREADS": str(threads)})
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} failed")
    return time.perf_counter() - begin, usage.ru_maxrss


def measured(scheme: str, folder: Path) -> tuple[float, float, float, int]:
    source, out = write(folder, scheme), folder / "out.safetensors"
    convert = [sys.executable, "-m", "ckptconv", "convert", str(source), str(out), "-q"]
    convert += ["--dequantize", "--no-fsync"]
    copy = folder / "copy.safetensors"
    one, two, copies, peak = [], [], [], 0
    for _ in range(ROUNDS):
        one.append(timed(convert, 1, out)[0])
        seconds, memory = timed(convert, 2, out)
        two.append(seconds)
        peak = max(peak, memory)
        copies.append(timed(["cp", str(out), str(copy)], 1, copy)[0])
        copy.unlink()
    return min(one), min(two), min(copies), peak


def main() -> None:
    print("| scheme | one thread | two | cp of the output | two threads / cp | one / two | peak |")
    print("|---|---|---|---|---|---|---|")
    for scheme in SCHEMES:
        folder = Path(tempfile.mkdtemp(dir=os.environ.get("BENCH_DIR")))
        try:
            one, two, copy, peak = measured(scheme, folder)
        finally:
            shutil.rmtree(folder)
        print(
            f"| {scheme}, {SIZE} MB of values | {one:.2f} s | {two:.2f} s | {copy:.2f} s | "
            f"{two / copy:.1f} | {one / two:.1f} | {peak / 1000:.0f} MB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
