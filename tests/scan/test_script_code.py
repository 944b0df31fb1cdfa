"""The code in TorchScript archives: what writes files when torch loads it is told, what only
computes is plain.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
import zipfile
from pathlib import Path

import pytest

from ckptconv import limits, scan_checkpoint
from ckptconv.scan.script_code import judge_operator, judged_code, judged_flatbuffer, script_records
from helpers.examples import some
from helpers.program import run

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Writer(torch.nn.Module):
    """A module that writes a file when it is loaded."""

    def __init__(self, path: str):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.training = True
        self.path = path

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, bool, str]:
        return (self.weight, self.training, self.path)

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool, str]):
        self.weight = state[0]
        self.training = state[1]
        self.path = state[2]
        torch.save(state[0], state[2])

    def forward(self, x):
        return x + self.weight


CALL = "torch.save((state)[0], (state)[2])"


@pytest.fixture(scope="module")
def writer(tmp_path_factory) -> Path:
    """The archive of a module that writes the file `mark` beside it, as torch writes it."""
    folder = tmp_path_factory.mktemp("writer")
    torch.jit.script(Writer(str(folder / "mark"))).save(str(folder / "bad.pt"))
    return folder / "bad.pt"


def is_marked_by(load) -> bool:
    """Whether a mark is made by a call; it is removed."""
    path, mark = load
    mark.unlink(missing_ok=True)
    with contextlib.suppress(RuntimeError):
        torch.jit.load(path)
    found = mark.exists()
    mark.unlink(missing_ok=True)
    return found


def edited(
    source: Path, target: Path, new: str, *, rename=str, compression: int = zipfile.ZIP_STORED
) -> Path:
    """The archive with another call in its `__setstate__`, and without what tells torch where the
    text came from.
    """
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as made:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith(".py"):
                assert CALL in content.decode()
                content = content.decode().replace(CALL, new).encode()
            if not name.endswith(".debug_pkl"):
                made.writestr(rename(name), content)
    return target


WAYS = {
    "torch.save": CALL,
    "ops": "ops.aten.save((state)[0], (state)[2])",
    "the function in a variable": "f = torch.save\n    _9 = f((state)[0], (state)[2])",
    "the namespace in a variable": "t = torch\n    _9 = t.save((state)[0], (state)[2])",
    "all namespaces in a variable": "o = ops\n    _9 = o.aten.save((state)[0], (state)[2])",
    "one namespace in a variable": "a = ops.aten\n    _9 = a.save((state)[0], (state)[2])",
    "by a text": 'getattr(torch, "save")((state)[0], (state)[2])',
    "blanks": "torch . save ((state)[0], (state)[2])",
    "form feeds": "torch\f.\vsave((state)[0], (state)[2])",
    "a comment between": "(torch\n # torch.save\n. # x\nsave)((state)[0], (state)[2])",
    "a line that goes on": "torch.\\\n save((state)[0], (state)[2])",
    "behind a text of three quotes": '_8 = """a"b\\""""\n    torch.save((state)[0], (state)[2])',
    "behind a text with a quote": "_8 = '\"'\n    torch.save((state)[0], (state)[2])",
    "behind a text that ends in a backslash": '_8 = "\\\\"\n    torch.save((state)[0], (state)[2])',
    "behind a number": "_8 = 5.\n    torch.save((state)[0], (state)[2])",
    "behind a number, in brackets": "_8 = (5.\n + 1., torch.save((state)[0], (state)[2]))",
    "behind a comment": "# it's \"\n    torch.save((state)[0], (state)[2])",
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_an_archive_that_writes_a_file_when_torch_loads_it_is_dangerous(way, writer, tmp_path):
    path = edited(writer, tmp_path / "edited.pt", WAYS[way])
    assert is_marked_by((path, writer.parent / "mark")), "the archive does what it should"
    scan = scan_checkpoint(path)
    assert scan.level == "dangerous" and not (writer.parent / "mark").exists()
    assert run("scan", path, cwd=tmp_path).exit == 1


def test_what_torch_itself_writes_of_it_is_dangerous(writer):
    assert is_marked_by((writer, writer.parent / "mark"))
    (finding,) = scan_checkpoint(writer).dangerous
    assert (
        finding.name == "torch.save"
        and finding.where.startswith("bad/code/__torch__")
        and finding.at > 100
    )


@pytest.mark.parametrize(
    "rename", [str.upper, lambda name: name.replace("code/", "CODE/").replace(".py", ".Py")]
)
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_code_is_found_as_torch_finds_it(rename, compression, writer, tmp_path):
    path = edited(writer, tmp_path / "edited.pt", CALL, rename=rename, compression=compression)
    if compression == zipfile.ZIP_STORED:
        assert is_marked_by((path, writer.parent / "mark"))
    assert scan_checkpoint(path).level == "dangerous"


def test_bytecode_for_mobiles_is_looked_into(writer, tmp_path):
    mobile = pytest.importorskip("torch.jit.mobile")
    mark, module = writer.parent / "mark", torch.jit.load(writer)
    module._save_for_lite_interpreter(str(tmp_path / "bad.ptl"))
    plain = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    plain._save_for_lite_interpreter(str(tmp_path / "good.ptl"))
    with (
        zipfile.ZipFile(tmp_path / "bad.ptl") as old,
        zipfile.ZipFile(tmp_path / "only.ptl", "w") as made,
    ):
        for name in old.namelist():
            made.writestr(
                name,
                old.read(name).replace(b"torch.save", b"torch.size")
                if "code/" in name
                else old.read(name),
            )
    mark.unlink(missing_ok=True)
    mobile._load_for_lite_interpreter(str(tmp_path / "bad.ptl"))
    assert mark.exists()
    assert {finding.name for finding in scan_checkpoint(tmp_path / "only.ptl").dangerous} == {
        "aten::save"
    }
    assert scan_checkpoint(tmp_path / "good.ptl").level == "plain"


def test_a_flatbuffer_for_mobiles_is_never_plain(writer, tmp_path):
    mark, module = writer.parent / "mark", torch.jit.load(writer)
    plain = torch.jit.script(torch.nn.Linear(2, 2))
    try:
        module._save_for_lite_interpreter(str(tmp_path / "bad.ff"), _use_flatbuffer=True)
        plain._save_for_lite_interpreter(str(tmp_path / "good.ff"), _use_flatbuffer=True)
    except RuntimeError:
        pytest.skip("this torch writes no flatbuffers")
    assert is_marked_by((tmp_path / "bad.ff", mark))
    assert scan_checkpoint(tmp_path / "bad.ff").level == "dangerous"
    assert scan_checkpoint(tmp_path / "good.ff").level == "unknown"


def old_archive(
    path: Path, code: str, *, key: str = "code/net.py", record: str = "old/code/net.py"
) -> Path:
    """An archive as torch 1.1 to 1.3 wrote them; its main module has its code in `record`."""
    model = {
        "protoVersion": "5",
        "mainModule": {"torchscriptArena": {"key": key}, "name": "Net"},
        "tensors": [],
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("old/version", "1\n")
        archive.writestr(record, code)
        archive.writestr("old/model.json", json.dumps(model))
    return path


OLD_CODE = (
    "op_version_set = 1\ndef forward(self,\n    x: Tensor) -> Tensor:\n  {}\n  return "
    "torch.relu(x)\n"
)


def test_the_code_of_before_torch_1_4_is_judged_wherever_its_model_says_that_it_stands(tmp_path):
    assert (
        scan_checkpoint(
            old_archive(tmp_path / "good.pt", OLD_CODE.format("_0 = torch.add(x, x)"))
        ).level
        == "plain"
    )
    bad = OLD_CODE.format('torch.save(x, "mark")')
    assert scan_checkpoint(old_archive(tmp_path / "bad.pt", bad)).level == "dangerous"
    assert (
        scan_checkpoint(old_archive(tmp_path / "odd.pt", bad, key="T/0", record="old/t/0")).level
        == "dangerous"
    )
    with zipfile.ZipFile(tmp_path / "broken.pt", "w") as archive:
        archive.writestr("old/model.json", "{")
    assert scan_checkpoint(tmp_path / "broken.pt").level == "unknown"


class Kept(torch.nn.Module):
    """A module with a state of its own, submodules of odd names, and texts that speak of what is
    dangerous.
    """

    def __init__(self):
        super().__init__()
        self.ops = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.GELU()])
        self.mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        self.save = torch.nn.Identity()
        self.steps = 3

    @torch.jit.export
    def __getstate__(self) -> tuple[int, bool]:
        return (self.steps, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[int, bool]):
        self.steps = state[0] + 1
        self.training = state[1]

    @torch.jit.export
    def load(self, x):
        return self.save(x)

    def forward(self, x):
        if x.numel() == 0:
            raise ValueError("use torch.save(x, 'path') and ops.aten.save; it's better")
        for op in self.ops:
            x = op(x)
        return self.load(self.mixed(x)) + torch.zeros(2) + x[:, :1]


class Looped(torch.nn.Module):
    def forward(self, x, words: list[str]):
        found: dict[str, int] = {}
        for word in words:
            found[word.upper().strip()] = len(word)
        with torch.no_grad():
            y = torch.einsum("ij,kj->ik", x, x).softmax(-1)
        return (
            torch.cat([y, y.t()]).to(torch.float16),
            sorted(found.keys()),
            torch.svd(x)[1],
            f"{len(found)}",
        )


def modules() -> dict[str, torch.nn.Module]:
    nn, one = torch.nn, torch.ones(2, 2)
    made = {
        "own state": torch.jit.script(Kept()),
        "control flow": torch.jit.script(Looped()),
        "lstm": torch.jit.script(nn.LSTM(2, 2, num_layers=2, bidirectional=True)),
        "transformer": torch.jit.script(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2, enable_nested_tensor=False)
        ),
        "convolutions": torch.jit.script(
            nn.Sequential(
                nn.Conv2d(1, 2, 3),
                nn.BatchNorm2d(2),
                nn.Dropout(),
                nn.MaxPool2d(2),
                nn.ConvTranspose2d(2, 1, 3),
            )
        ),
        "embeddings": torch.jit.script(
            nn.ModuleDict({"forward_": nn.Embedding(3, 2), "b": nn.EmbeddingBag(3, 2)})["b"]
        ),
        "losses": torch.jit.script(nn.CrossEntropyLoss()),
        "activations": torch.jit.script(
            nn.Sequential(nn.GELU(), nn.SiLU(), nn.Hardswish(), nn.PReLU(), nn.Softmax(1))
        ),
        "traced": torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.LayerNorm(2)), one),
        "traced lstm": torch.jit.trace(nn.LSTM(2, 2), torch.ones(1, 1, 2)),
        "frozen": torch.jit.freeze(
            torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).eval()
        ),
    }
    if "fbgemm" in torch.backends.quantized.supported_engines:
        dynamic = torch.ao.quantization.quantize_dynamic(
            nn.Sequential(nn.Linear(2, 2), nn.ReLU()), {nn.Linear}
        )
        made["quantized"] = torch.jit.script(dynamic)
    return made


def test_ordinary_archives_are_plain(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = modules()
    for name, module in made.items():
        module.save(str(tmp_path / "good.pt"))
        (file,) = scan_checkpoint(tmp_path / "good.pt").files
        assert [finding for finding in file.findings if finding.level != "plain"] == [], name


def test_every_operator_that_this_torch_has_for_tensors_is_known():
    names = {
        schema.name.split("::")[1]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
    }
    if torch.__version__.startswith("2.13."):
        assert {name for name in names if judge_operator("aten", name).level != "plain"} == {
            "save",
            "from_file",
        }
    assert {name for name in names if judge_operator("aten", name).level == "dangerous"} == {
        "save",
        "from_file",
    }


@pytest.mark.parametrize(("text", "level"), [
    ("torch.add(x, x)", None),
    ("torch.from_file(path, True, 10)", "dangerous"),
    ("ops.prim.rpc_sync(to, f)", "dangerous"),
    ("rpc_async(to, f, (x,))", "dangerous"),
    ("ops.torchvision.nms(x, x, 0.5)", "unknown"),
    ("ops.mine.run(x)", "unknown"),
    ("torch.an_operator_of_tomorrow(x)", "unknown"),
    ("torch.save_out(x, path)", "unknown"),
    ("y = __torch__.torch.classes.mine.Engine(x)", "unknown"),
    ("y = __torch__.torch.classes.quantized.LinearPackedParamsBase(x)", None),
    ("# torch.save(x, path)", None),
    ("_0 = 'torch.save(x, path)'", None),
    ("  ops : __torch__.Ops\n  torch : Tensor\n  def ops(self: __torch__.X) -> int:\n    return "
     "self.ops.torch.save", None),
    ("y = self.torch.save(x)", None),
    ("f(torch)", "dangerous"),
    ("{1: ops}", "dangerous"),
])  # fmt: skip
def test_code_is_judged_by_what_it_calls(text, level):
    assert {called.verdict.level for called in judged_code(text.encode())} == (
        {level} if level else set()
    )


@pytest.mark.parametrize(("text", "level"), [
    ("torch . from_file (path, True, 10)", "dangerous"),
    ("ops.prim.rpc_sync(to, f)", "dangerous"),
    ("torch.add(x, x)", None),
    ("mytorch.from_file(path)", None),
])  # fmt: skip
def test_texts_in_a_flatbuffer_are_judged_by_what_they_call(text, level):
    raw = bytes(7) + text.encode() + bytes(5)
    assert [called.verdict.level for called in judged_flatbuffer(raw)] == [level] * bool(level)


def test_code_in_an_archive_that_is_no_torchscript_is_left_alone():
    assert script_records(["a/code/train.py", "a/data.pkl"]) == {}
    assert script_records(["a/code/x.py", "b/constants.pkl"]) == {}
    assert script_records(["a/code/x.py", "A/CONSTANTS.PKL"]) == {"a/code/x.py": "text"}
    assert script_records(["p/.data/ts_code/code/x.py"]) == {"p/.data/ts_code/code/x.py": "text"}


def test_more_code_than_the_limit_is_not_called_plain(writer, tmp_path):
    with limits(text_bytes=200):
        scan = scan_checkpoint(edited(writer, tmp_path / "edited.pt", CALL))
    assert scan.level == "unknown" and any(
        "code of more than 200 bytes" in item.reason for item in scan.files[0].findings
    )


@pytest.mark.trust
@pytest.mark.parametrize(
    "piece",
    some(
        4,
        [
            b'"',
            b"'\n",
            b'"""',
            b'\\"',
            b".",
            b"torch.",
            b"#",
            b". #",
            b"5.\n",
            b"'''\\",
            b"torch.\n#\\\n",
        ],
    ),
)
def test_code_made_to_take_long_does_not(piece):
    begun = time.process_time()
    judged_code(piece * (1_000_000 // len(piece)))
    assert time.process_time() - begun < 20


def with_tail(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(100))


def with_odd_name(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("bad/../x", b"x")


@pytest.mark.parametrize("change", [with_tail, with_odd_name], ids=["a tail", "an odd name"])
def test_an_archive_that_torch_follows_and_scan_does_not_is_dangerous(change, writer, tmp_path):
    target = tmp_path / "bad.pt"
    target.write_bytes(writer.read_bytes())
    change(target)
    assert is_marked_by((target, writer.parent / "mark"))
    assert scan_checkpoint(target).level == "dangerous"
