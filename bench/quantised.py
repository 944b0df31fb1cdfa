"""What dequantising costs: `convert --dequantize`, by one thread and by two, against `cp` of its
output, and the peak of memory; each scheme on random codes. `make bench-quantised`.

Where BENCH_PEERS is a Python that has torch, safetensors, compressed-tensors, bitsandbytes, gguf
and transformers, the code of the frameworks runs in turn with it. The seconds of processors are
told too: they say more on a machine that has other work to do. BENCH_DIR is where files are
written, BENCH_QUANTISED_MB how much, BENCH_ROUNDS how often. Names of schemes choose among them.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PEERS = os.environ.get("BENCH_PEERS", "")
SIZE = int(os.environ.get("BENCH_QUANTISED_MB", "512"))
"""MB of values in bfloat16, for each scheme."""
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
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


def q4_k(draw: np.random.Generator) -> bytes:
    """A GGUF file of one tensor for each 4096 x 4096 values, written by gguf-py's rules."""
    count = tensors_of()
    blocks = draw.integers(0, 256, (ROWS * COLUMNS // 256, 144), dtype=np.uint8)
    blocks[:, :4] = np.array([0.01, 0.02], "<f2").view(np.uint8)
    head = [b"GGUF", (3).to_bytes(4, "little"), count.to_bytes(8, "little"), bytes(8)]
    for number in range(count):
        name = f"blk.{number}.ffn_up.weight".encode()
        head += [len(name).to_bytes(8, "little"), name, (2).to_bytes(4, "little")]
        head += [COLUMNS.to_bytes(8, "little"), ROWS.to_bytes(8, "little")]
        head += [(12).to_bytes(4, "little"), (number * blocks.nbytes).to_bytes(8, "little")]
    raw = b"".join(head)
    return raw + bytes(-len(raw) % 32) + blocks.tobytes() * count


def tensors_of() -> int:
    return max(1, SIZE * 1_000_000 // (2 * ROWS * COLUMNS))


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
    "Q4_K, as float32": (q4_k, {}),
}

READ = """
import os, sys, torch
from safetensors.torch import load_file, save_file
source, out = sys.argv[1:]
made = {}
def parts():
    read = load_file(source)
    for name in sorted({key.partition(".proj")[0] + ".proj" for key in read}):
        inner = name + "."
        yield name, {k.removeprefix(inner): v for k, v in read.items() if k.startswith(inner)}
"""
CONVERTED = """
import os, sys
from compressed_tensors.entrypoints.convert import convert_checkpoint, %s as Dequantizer
folder = os.path.dirname(sys.argv[1])
convert_checkpoint(folder, sys.argv[2], Dequantizer.from_pretrained(folder))
"""
CODE = {
    "fp8 in blocks": CONVERTED % "FP8BlockDequantizer",
    "int4 packed": READ
    + """
from compressed_tensors.compressors import PackedQuantizationCompressor as Packed
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
args = QuantizationArgs(num_bits=4, group_size=128, strategy="group", symmetric=True)
scheme = QuantizationScheme(targets=["Linear"], weights=args)
for name, part in parts():
    made[name + ".weight"] = Packed.decompress(part, scheme)["weight"].bfloat16()
save_file(made, out)
""",
    "GPTQ 4 bit": READ  # as the torch kernel of gptqmodel, which needs a compiler to be installed
    + """
shifts = torch.arange(0, 32, 4, dtype=torch.int32)
for name, part in parts():
    words, zeros, scale, index = (part[key] for key in ("qweight", "qzeros", "scales", "g_idx"))
    codes = (words[:, None] >> shifts[None, :, None] & 15).to(torch.int8)
    zeros = (zeros[:, :, None] >> shifts & 15).to(torch.int8).reshape(scale.shape) + 1 & 15
    index = index.long()
    value = scale[index] * (codes.reshape(-1, words.shape[1]) - zeros[index])
    made[name + ".weight"] = value.T.contiguous().bfloat16()
save_file(made, out)
""",
    "MXFP4 of gpt-oss": READ
    + """
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
read = load_file(source)
for key in read:
    if key.endswith("_blocks"):
        name = key.removesuffix("_blocks")
        made[name] = convert_moe_packed_tensors(read[key], read[name + "_scales"])
save_file(made, out)
""",
    "nf4": READ
    + """
from bitsandbytes.functional import QuantState, dequantize_4bit
for name, part in parts():
    state = QuantState.from_dict({k: v for k, v in part.items() if k != "weight"}, device="cpu")
    made[name + ".weight"] = dequantize_4bit(part["weight"], state)
save_file(made, out)
""",
    "Q4_K, as float32": """
import sys
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
tensors = GGUFReader(sys.argv[1]).tensors
save_file({one.name: dequantize(one.data, one.tensor_type) for one in tensors}, sys.argv[2])
""",
}
"""What the frameworks' own code does of it: from the file to a file."""


def write(folder: Path, scheme: str) -> Path:
    make, config = SCHEMES[scheme]
    draw = np.random.default_rng(0)
    if make is q4_k:
        path = folder / "model.gguf"
        path.write_bytes(q4_k(draw))
        return path
    header: dict[str, Any] = {}
    parts, at = [], 0
    for number in range(tensors_of()):
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


class Run(NamedTuple):
    """Seconds of the clock and of the processors, and the peak of memory in kB."""

    wall: float
    busy: float
    peak: int


LAUNCHER = """
import os, subprocess, sys, time
begin, null = time.perf_counter(), subprocess.DEVNULL
process = subprocess.Popen(sys.argv[1:], stdout=null, stderr=null)
_, status, usage = os.wait4(process.pid, 0)
print(time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
sys.exit(bool(status))
"""
"""A process starts with the peak of memory of the one that starts it: a small one has to."""


def timed(command: list[str], threads: int, out: Path) -> Run:
    """A command that makes `out`, which is removed before."""
    if out.is_dir():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)
    told = subprocess.run(
        [sys.executable, "-S", "-c", LAUNCHER, *command],
        env={**os.environ, "CKPTCONV_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )
    if told.returncode:
        raise SystemExit(f"{command} failed")
    wall, busy, peak = told.stdout.split()
    return Run(float(wall), float(busy), int(peak))


def measured(scheme: str, folder: Path) -> dict[str, list[Run]]:
    """The runs of each side, which take turns."""
    model = folder / "model"
    model.mkdir()
    source, out = write(model, scheme), folder / "out.safetensors"
    convert = [sys.executable, "-m", "ckptconv", "convert", str(source), str(out), "-q"]
    convert += ["--dequantize", "--no-fsync"]
    copy, other = folder / "copy.safetensors", folder / "other.safetensors"
    found: dict[str, list[Run]] = {"one": [], "two": [], "cp": [], "peer": []}
    for _ in range(ROUNDS):
        found["one"].append(timed(convert, 1, out))
        found["two"].append(timed(convert, 2, out))
        found["cp"].append(timed(["cp", str(out), str(copy)], 1, copy))
        copy.unlink()
        if PEERS:
            run = [PEERS, "-c", CODE[scheme], str(source), str(other)]
            found["peer"].append(timed(run, 2, other))
    return found


def ratio(found: dict[str, list[Run]], one: str, other: str, what: str) -> str:
    """The median of the ratios of neighbouring runs, and their range."""
    pairs = zip(found[one], found[other], strict=True)
    ratios = sorted(getattr(a, what) / getattr(b, what) for a, b in pairs)
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.1f} ({ratios[0]:.1f}-{ratios[-1]:.1f})"


def row(scheme: str, found: dict[str, list[Run]]) -> str:
    def median(side: str, what: str) -> str:
        runs = found[side]
        return f"{statistics.median(getattr(run, what) for run in runs):.2f}" if runs else "-"

    peaks = [max((run.peak for run in found[side]), default=0) // 1000 for side in ("two", "peer")]
    cells = [
        f"{scheme}, {SIZE} MB of values",
        *(f"{median(side, 'wall')} ({median(side, 'busy')})" for side in found),
        ratio(found, "two", "cp", "wall"),
        ratio(found, "one", "two", "wall"),
        ratio(found, "peer", "two", "wall") if PEERS else "-",
        ratio(found, "peer", "two", "busy") if PEERS else "-",
        f"{peaks[0]} / {peaks[1]}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    print(
        "| scheme | one thread, s (of processors) | two | cp of the output | framework | two / cp "
        "| one / two | framework / two | the same in seconds of processors | peak MB |"
    )
    print(f"|{'---|' * 10}")
    for scheme in sys.argv[1:] or SCHEMES:
        folder = Path(tempfile.mkdtemp(dir=os.environ.get("BENCH_DIR")))
        try:
            print(row(scheme, measured(scheme, folder)), flush=True)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
