"""Makes the folder `gguf`: files of plain types as gguf-py writes them, little-endian, big-endian
and as a set of three, and what its reader finds in them, in `expected.safetensors`; and the
checksums of the values that it gives for blocks of each quantised type, in `blocks.json`.

Run with gguf 0.19, ml_dtypes and safetensors installed:
PYTHONPATH=tests python tests/data/make_gguf.py
"""

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from helpers import gguf_files

FOLDER = Path(__file__).parent / "gguf"
TYPES = (np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64)


def arrays() -> dict[str, np.ndarray]:
    """An array of each plain type that numpy has, each of another shape."""
    numbers = np.random.default_rng(0)
    made = {
        f"blk.{at}.weight": (numbers.standard_normal((2, 3, 4, 5)[at % 4 :]) * 50).astype(kind)
        for at, kind in enumerate(TYPES)
    }
    return {**made, "output_norm.weight": np.arange(7, dtype=np.float32), "scale": np.float32(0.5)}


def write(name: str, *, is_big: bool = False, bfloat16: bool = True, split: int = 0) -> None:
    order = gguf.GGUFEndian.BIG if is_big else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(FOLDER / name, "llama", endianess=order, split_max_tensors=split)
    writer.add_name("Tiny é")
    writer.add_block_count(7)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("general.tags", ["text", 'a "b"'])
    writer.add_array("llama.rope.dimension_sections", [16, 24, -24])
    writer.add_token_list([f"token {number}" for number in range(300)])
    writer.add_token_scores([0.5 * number for number in range(1500)])
    for key, array in arrays().items():
        writer.add_tensor(key, np.asarray(array))
    if bfloat16:
        raw = np.asarray(arrays()["blk.0.weight"]).astype(ml_dtypes.bfloat16).view(np.uint8)
        writer.add_tensor("output.weight", raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    write("little.gguf")
    write("big.gguf", is_big=True, bfloat16=False)
    write("set.gguf", split=4)
    found = {}
    for one in gguf.GGUFReader(FOLDER / "little.gguf").tensors:
        values = np.asarray(one.data)
        if one.tensor_type == gguf.GGMLQuantizationType.BF16:
            values = values.view(ml_dtypes.bfloat16)
        found[one.name] = values.reshape([*map(int, one.shape)][::-1])
    digests = {}
    for name in gguf_files.HALVES:
        kind = gguf.GGMLQuantizationType[name]
        _, nbytes = gguf.GGML_QUANT_SIZES[kind]
        raw = np.frombuffer(gguf_files.blocks(name, nbytes), np.uint8).reshape(-1, nbytes)
        digests[name] = gguf_files.digest(gguf.quants.dequantize(raw.copy(), kind))
    (FOLDER / "blocks.json").write_text(json.dumps(digests, indent=2) + "\n")
    save_file(found, FOLDER / "expected.safetensors")


if __name__ == "__main__":
    main()
