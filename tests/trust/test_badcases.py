"""Hostile and broken files against the real program: answered in one line, quickly, in little
memory, without harm.

The generator of the files and its README say what each one must be answered with; the package
`hostile` has other members of the same families, and families of its own. The files are made anew
in a temporary folder.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import re
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.examples import ALL, crossed, some
from helpers.program import SAMPLES, Finished, assert_one_error
from hostile.cases import GENERATED, GOOD, OUTPUTS, ZEROS, Case, bad
from hostile.families import NEIGHBOURS
from hostile.forked import Server
from hostile.table import listed

pytestmark = pytest.mark.badcases

SECONDS = 10.0
"""The promise is 2; a machine that is slow, or whose other cores are busy, takes longer."""
QUICK = 0.02
"""What `yardstick` gives on a fast machine of 2024 that does nothing else."""
MEMORY = 200_000_000  # above a program that does nothing
TORCH = 300_000_000  # torch itself, which doctor imports to ask for a device that it does not know
TELLING = ("note", "warning")


# ------------------------------------------------------------------------------------------ running


def yardstick() -> float:
    """Seconds of the processor for a million steps of Python."""
    begun = time.process_time()
    for _ in range(1_000_000):
        pass
    return time.process_time() - begun


def assert_in_time(done: Finished) -> None:
    """In as many seconds as allowed, or in more as far as this machine is slow at this moment."""
    assert done.seconds < SECONDS or done.seconds < SECONDS * yardstick() / QUICK


@pytest.fixture(scope="session")
def forked() -> Server:
    """The program, forked for each command from a process that has it imported."""
    return Server()


def quick(cases: Iterable[Case]) -> list[Any]:
    """The cases as parameters: the first of each kind of defect stays in `make test`, the others
    are for `make trust`. A kind: a family, the answers that are right, and how it is given.
    """
    kinds, found = set(), []
    for case in cases:
        kind = (case.category, case.expected, case.option)
        sampled = kind not in kinds and case.file not in COSTLY
        if sampled:
            kinds.add(kind)
        found.append(pytest.param(case, marks=[] if sampled else [pytest.mark.trust], id=case.file))
    return found


COSTLY = {
    "dos_deep_list.pt",
    "dos_deep_values.pt",
    "dos_int_collisions.pt",
    "dos_legacy_keys.pt",
    "dos_raw_tuples.pkl",
    "members_bomb.zip",
    "script_many_attributes.pt",
    "st_zero_sized_million.safetensors",
    "torch_many_views.pt",
}
"""Files that take seconds."""


def products(cases: Iterable[Any]) -> list[Any]:
    """Cases as parameters, with each of their outputs; of a quick one, only one output is quick:
    the odd cases take the first, the even ones the last.
    """
    found = []
    for number, given in enumerate(cases):
        (case,) = given.values
        taken = case.outputs[-(number % 2)]
        found += [
            pytest.param(
                case,
                suffix,
                id=f"{case.file}-{suffix}",
                marks=[*given.marks, *([] if suffix == taken else [pytest.mark.trust])],
            )
            for suffix in case.outputs
        ]
    return found


def labels(done: Finished) -> set[str]:
    """The labels of the lines of a summary: ``keys``, ``device``, ``note``, ..."""
    return {line.split()[0] for line in done.lines[1:]}


def answer_of(done: Finished, telling: tuple[str, ...]) -> str:
    if done.exit:
        return "reject"
    return "warn" if labels(done) & set(telling) else "accept"


def judge(
    case: Case, named: str, suffix: str, done: Finished, cwd: Path, expected: str, idle: int
) -> None:
    """Hold one run against the promises; `named` must stand in an error, `idle` is the memory of a
    run that does nothing.
    """
    assert not (cwd / "CKPTCONV_PWNED").exists(), "the payload was executed"
    right = expected.split("|")
    answer = answer_of(done, (*TELLING, *TOLD_BY.get(case.file, ())))
    if answer == "reject":
        line = assert_one_error(done, code=2 if case.option and done.exit == 2 else 1)
        assert named in line or (case.option and GOOD in line), line
        assert case.field in line, line
        assert len(line) < 5000
        assert [path.name for path in cwd.iterdir() if path.name != GOOD] == []
    else:
        assert done.out == ""
        assert all(line.isprintable() for line in done.lines), done.err
        assert [path.name for path in cwd.iterdir() if path.name != GOOD] == [f"out{suffix}"]
        if check := VALUES.get(case.file):
            check(cwd / f"out{suffix}")
    assert answer in right or (answer == "warn" and "accept" in right), f"{case.what}: {done.err}"
    if right != ["accept"]:
        assert_in_time(done)
        assert done.rss - idle < MEMORY


def measured(request, done: Finished, idle: int) -> None:
    """Note what a run took, for the report of the tests."""
    request.node.user_properties += [
        ("seconds", round(done.seconds, 3)),
        ("megabytes_above_idle", round((done.rss - idle) / 1e6, 1)),
    ]


# ------------------------------------------------------------------------------------------- values


def tensors(path: Path) -> dict:
    """The named tensors of a torch or safetensors file, read by torch or by the safetensors
    library.
    """
    torch = pytest.importorskip("torch")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, weights_only=True)


def leaves(node: Any) -> Iterator[Any]:
    """The tensors of a tree of dicts and lists."""
    if hasattr(node, "resolve_conj"):
        yield node
    elif isinstance(node, (dict, list)):
        for value in node.values() if isinstance(node, dict) else node:
            yield from leaves(value)


def one_tensor(*values: complex) -> Callable[[Path], None]:
    """Checks that each tensor of an output (there may be one in several parts of it) has these
    values.
    """

    def check(path: Path) -> None:
        found = [value.resolve_conj().tolist() for value in leaves(tensors(path))]
        assert found
        assert found == [list(values)] * len(found)

    return check


def all_zero(numel: int) -> Callable[[Path], None]:
    def check(path: Path) -> None:
        assert [
            (value.numel(), int(value.count_nonzero())) for value in tensors(path).values()
        ] == [(numel, 0)]

    return check


class Shapes(pickle.Unpickler):
    """Reads the pickle of a torch output as key → shape; torch's own reader needs half a minute for
    600,000 tensors.
    """

    def find_class(self, module: str, name: str):
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, *_: size
        return dict if name == "OrderedDict" else name

    def persistent_load(self, pid):
        return pid


def empty_million(path: Path) -> None:
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes = {
            key: tuple(entry["shape"]) for key, entry in header.items() if key != "__metadata__"
        }
    else:
        with zipfile.ZipFile(path) as archive:
            shapes = Shapes(io.BytesIO(archive.read("archive/data.pkl"))).load()
    assert shapes == {str(index): (0,) for index in range(600_000)}


def many_views(path: Path) -> None:
    # torch output: DESIGN promises that tied tensors stay shared; safetensors: one copy, the others
    # as aliases in the metadata.
    assert path.stat().st_size < 1 << 23
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "pt") as opened:
            assert list(opened.keys()) == ["w"]
            assert sum(value == "w" for value in opened.metadata().values()) == 100_000
        return
    found = tensors(path)
    assert len(found) == 100_001
    assert len({value.untyped_storage().data_ptr() for value in found.values()}) == 1


FOUR = one_tensor(1, 2, 3, 4)


def _is_four(case: Case) -> bool:
    """Whether the right output of a case is one tensor of the floats 1 to 4."""
    return case.file not in OTHER_VALUES and not case.file.startswith(
        ("rules_", "mapping_", "like_")
    )


OTHER_VALUES = frozenset(
    ("dcp_good", "dcp_good_ranks", "dcp_st_good", "ranks_good", "ranks_good_fsdp1")
)
VALUES: dict[str, Callable[[Path], None]] = {
    "torch_byteorder_big.pt": FOUR,
    "torch_conj_neg_bits.pt": one_tensor(1 - 2j, 3 - 4j),
    "zip_crc_all_zero.pt": FOUR,
    "tar_valid.pt": FOUR,
    "st_terminal_name.safetensors": FOUR,
    "st_leading_space.safetensors": FOUR,
    "st_extra_field.safetensors": FOUR,
    "st_zero_sized_million.safetensors": empty_million,
    "torch_many_views.pt": many_views,
    **{
        case.file: FOUR
        for case in NEIGHBOURS
        if case.expected in ("accept", "warn") and _is_four(case)
    },
    "zip_deflated_long_match.pt": all_zero(len(ZEROS) // 4),
    "torch_empty_huge.pt": lambda path: None,
    "dos_doubled_value.pt": lambda path: None,
    **dict.fromkeys(OTHER_VALUES, one_tensor(1, 2, 3, 4, 1, 2, 3, 4)),
}
"""What the outputs hold, where the answer is to convert."""

TOLD_BY = {"torch_many_views.pt": ("tied",), "exec_left_out.pt": ("skipped",)}
"""Lines of the summary that tell about the oddity of a file, other than notes and warnings."""

OTHERWISE = {
    # 100,000 names for one storage: as a torch file they are written as what they are, one storage
    # with 100,000 names (DESIGN, "Tied tensors: torch: stay shared"). Nothing is multiplied or
    # lost, so there is nothing to tell.
    ("torch_many_views.pt", ".pt"): "accept",
}
"""Answers that the output format changes, by file and output."""


# ------------------------------------------------------------------------------ the generated files

READ = [case for case in GENERATED if case.category != "index"]
INDEX = [case for case in GENERATED if case.category == "index"]


def test_every_generated_file_is_tested(hostile):
    manifest = json.loads((hostile / "manifest.json").read_text())
    assert [(row["file"], row["category"], row["expected"]) for row in manifest] == [
        (case.file, case.category, case.expected) for case in GENERATED
    ]
    assert {case.category for case in READ} == {
        "zip",
        "pickle-exec",
        "pickle-dos",
        "torch",
        "key",
        "legacy",
        "safetensors",
    }


@pytest.mark.parametrize(("case", "suffix"), products(quick(READ)))
def test_hostile_file(case, suffix, hostile, forked, tmp_path, request, figure):
    figure("hostile files converted or refused")
    source = hostile / case.file
    done = forked.run("convert", source, f"out{suffix}", "--no-fsync", cwd=tmp_path)
    measured(request, done, forked.idle_rss)
    expected = OTHERWISE.get((case.file, suffix), case.expected)
    judge(case, source.name, suffix, done, tmp_path, expected, forked.idle_rss)


@pytest.mark.parametrize("case", quick(INDEX))
def test_an_index_of_shards_ends_as_it_should(case, hostile, forked, tmp_path, request):
    source = hostile / case.file
    done = forked.run("convert", source, "out.safetensors", "--no-fsync", cwd=tmp_path)
    measured(request, done, forked.idle_rss)
    judge(case, source.name, ".safetensors", done, tmp_path, case.expected, forked.idle_rss)


@pytest.mark.parametrize("case", quick(INDEX))
def test_a_folder_of_shards_is_answered_as_its_index(case, hostile, forked, tmp_path):
    done = forked.run("convert", (hostile / case.file).parent, "out.pt", cwd=tmp_path)
    assert_in_time(done)
    index = forked.run("convert", hostile / case.file, "out.pt", cwd=tmp_path)
    assert assert_one_error(done) == assert_one_error(index)
    assert list(tmp_path.iterdir()) == []


SHARED = {
    # 40 dicts, each twice in the next: 2**40 paths to one tensor.
    "doubled": bad.P2
    + bad.d((bad.u("w"), bad.tensor()))
    + b"q\x07"
    + b"0}(K\1h\x07K\2h\x07uq\x07" * 40
    + bad.STOP,
    # 5,000 names for one dict of 5,000 names for one tensor.
    "wide": b"".join(
        [
            *(bad.P2, bad.tensor(), b"q\x060}("),
            *(bad.n(index) + b"h\x06" for index in range(5000)),
            b"uq\x070}(",
            *(bad.n(index) + b"h\x07" for index in range(5000)),
            *(b"u", bad.STOP),
        ]
    ),
}


@pytest.mark.trust
@pytest.mark.parametrize(("shape", "depth"), crossed(SHARED, ["50", "2"]))
def test_parts_that_are_shared_are_inspected_in_bounded_time(shape, depth, forked, tmp_path):
    (tmp_path / "in.pt").write_bytes(bad.ckpt(SHARED[shape]))
    done = forked.run("inspect", "in.pt", "--depth", depth, cwd=tmp_path)
    assert done.exit in (0, 1), done.err
    assert_in_time(done)
    assert done.rss - forked.idle_rss < MEMORY


# --------------------------------------------------------------------------------------- neighbours


def seen(paths: Iterable[Path]) -> dict[Path, object]:
    """What is known of files without opening pipes, and the bytes of the small ones."""
    found: dict[Path, object] = {}
    for path in paths:
        for item in [path, *path.rglob("*")]:
            status = item.lstat()
            small = item.is_file() and not item.is_symlink() and status.st_size < 1 << 17
            content = item.read_bytes() if small else b""
            found[item] = status.st_mode, status.st_size, status.st_mtime_ns, content
    return found


class Stage:
    """A case written to disk, a folder to work in, and one for temporary files; the case must be
    untouched afterwards.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.source, self.cwd, self.tmp = (folder / name for name in ("source", "cwd", "tmp"))
        for made in (self.source, self.cwd, self.tmp):
            made.mkdir()
        self.given = case.write(self.source)
        if case.option:
            (self.cwd / GOOD).write_bytes(bad.ckpt(bad.GOOD))
        self._before = seen([self.source])

    def check(self) -> None:
        """Nothing was run, changed or left behind."""
        assert not [
            path
            for folder in (self.source, self.cwd, self.tmp)
            for path in folder.rglob("CKPTCONV_PWNED")
        ], "executed"
        assert list(self.tmp.iterdir()) == []
        assert seen([self.source]) == self._before


@pytest.mark.parametrize(("case", "suffix"), products(quick(NEIGHBOURS)))
def test_neighbour(case, suffix, forked, tmp_path, request, figure):
    stage = Stage(case, tmp_path)
    done = forked.run(*case.arguments(stage.given, f"out{suffix}"), cwd=stage.cwd, tmp=stage.tmp)
    measured(request, done, forked.idle_rss)
    stage.check()
    judge(case, case.file, suffix, done, stage.cwd, case.expected, forked.idle_rss)
    figure("hostile files converted or refused")


def by_turns(case: Case, commands: list[Any], request: pytest.FixtureRequest) -> list[Any]:
    """Two of the commands, which ones the name of the file decides; in `make trust` all of them."""
    if ALL or request.node.get_closest_marker("trust"):
        return commands
    turn = zlib.crc32(case.file.encode()) % len(commands)
    return [commands[turn], commands[turn - 1]]


def looks(case: Case, given: list[Path]) -> list[tuple[list[object], tuple[int, ...]]]:
    """The commands that look at a case and write nothing, and the exit codes that each may have."""
    if case.option == "--like":
        return [
            (["inspect", *given], (0, 1)),
            (["doctor", GOOD, "--like", *given], (0, 1, 2)),
            (["scan", *given], (0, 1, 2)),
        ]
    if case.option:
        return [(["diff", GOOD, GOOD, "--rules", *given], (0, 1, 2)), (["scan", *given], (0, 1, 2))]
    commands: list[tuple[list[object], tuple[int, ...]]] = [
        (["inspect", *given], (0, 1)),
        (["inspect", *given, "--json"], (0, 1)),
        (["doctor", *given, "--values"], (0, 1)),
        (["scan", *given], (0, 1, 2)),
    ]
    if len(given) > 1:
        return commands
    of_one: list[tuple[list[object], tuple[int, ...]]] = [
        (["diff", *given, *given], (0, 2)),
        (["manifest", *given], (0, 1)),
    ]
    return commands + of_one


PROGRESS = re.compile(r"(scanning|reading|comparing): +[0-9]+ %, ").match
"""A line every five seconds, where the machine is slow."""


def assert_only_looked(
    command: list[object], done: Finished, allowed: tuple[int, ...], idle: int
) -> None:
    """What a command that writes nothing may answer: a code that it documents, printable lines, in
    little time and memory.
    """
    told = done.err[-3000:] + done.out[-1000:]
    assert done.exit in allowed, told
    assert "Traceback" not in told
    lines = [line for line in done.lines if not PROGRESS(line)]
    assert len(lines) <= 1, done.err[:3000]
    assert (done.out + done.err).replace("\n", "").isprintable()
    assert_in_time(done)
    assert done.rss - idle < (TORCH if command[0] == "doctor" else 0) + MEMORY


@pytest.mark.property
@pytest.mark.parametrize("case", quick(NEIGHBOURS))
def test_every_way_of_looking_is_as_safe_as_converting(case, forked, tmp_path, figure, request):
    stage = Stage(case, tmp_path)
    for command, allowed in by_turns(case, looks(case, stage.given), request):
        done = forked.run(*command, cwd=stage.cwd, tmp=stage.tmp)
        assert_only_looked(command, done, allowed, forked.idle_rss)
        stage.check()
        figure("looks at hostile files")


WITHOUT_A_PAYLOAD = (
    "exec_set_state_of_tensor.pt",
    "exec_append_to_tensor.pt",
    "exec_storage_class.pt",
    "exec_next_buffer.pt",
)
"""Files that misuse opcodes on what any checkpoint names; there is nothing in them that could be
called.
"""
RUNNING = [
    case
    for case in NEIGHBOURS
    if re.search("exec|runs", case.file)
    and case.option != "--rules"
    and case.file not in WITHOUT_A_PAYLOAD
]


@pytest.mark.parametrize("case", quick(RUNNING))
def test_scan_calls_every_payload_dangerous(case, forked, tmp_path):
    stage = Stage(case, tmp_path)
    done = forked.run("scan", *stage.given, cwd=stage.cwd, tmp=stage.tmp)
    assert done.exit == 1, done.err + done.out
    assert "dangerous" in done.out


@pytest.mark.parametrize(
    "case",
    quick(case for case in READ if case.expected != "accept" or "million" not in case.file),
)
@pytest.mark.property
def test_every_way_of_looking_at_a_generated_file_is_safe(
    case, hostile, forked, tmp_path, figure, request
):
    cwd, tmp = tmp_path / "cwd", tmp_path / "tmp"
    cwd.mkdir()
    tmp.mkdir()
    for command, allowed in by_turns(case, looks(case, [hostile / case.file]), request):
        done = forked.run(*command, cwd=cwd, tmp=tmp)
        assert_only_looked(command, done, allowed, forked.idle_rss)
        if command[0] == "inspect" and "--json" not in command and done.exit:
            assert Path(case.file).name in assert_one_error(done)
        assert [*cwd.iterdir(), *tmp.iterdir()] == []
        figure("looks at hostile files")


def test_neighbours_have_names_of_their_own():
    names = [case.file for case in (*NEIGHBOURS, *GENERATED)]
    assert sorted(set(names)) == sorted(names)


def test_the_page_about_hostile_files_lists_exactly_the_cases():
    assert sorted(listed()) == sorted(case.file for case in (*GENERATED, *NEIGHBOURS))


@pytest.mark.parametrize("suffix", OUTPUTS)
def test_a_tag_that_is_no_text_is_an_error_where_it_is_kept(suffix, forked, tmp_path):
    (tmp_path / "in.pt").write_bytes(
        bad.ckpt(bad.sd(("w", bad.tensor(bad.storage(loc=b"\xed\xa0\x80")))))
    )
    done = forked.run("convert", "in.pt", f"out{suffix}", "--device", "keep", cwd=tmp_path)
    # a pickle can hold half a character, a safetensors header cannot
    if suffix == ".safetensors" or done.exit:
        assert "in.pt" in assert_one_error(done)
        assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]
    assert done.err.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "case", quick(case for case in NEIGHBOURS if case.file.startswith(("exec_", "global_")))
)
def test_what_is_kept_unseen_is_kept_symbolically_or_refused_in_one_line(case, forked, tmp_path):
    stage = Stage(case, tmp_path)
    done = forked.run(
        "convert",
        *stage.given,
        "out.pt",
        "--no-fsync",
        "--unknown",
        "keep",
        cwd=stage.cwd,
        tmp=stage.tmp,
    )
    if done.exit:
        assert case.file in assert_one_error(done)
    assert done.err.replace("\n", "").isprintable()
    assert [path.name for path in stage.cwd.iterdir()] == ([] if done.exit else ["out.pt"])
    stage.check()


# ------------------------------------------------------------------------- damage, within a process


def look_at(path: Path) -> None:
    """Open, inspect and plan; whatever a file holds, nothing but a `CheckpointError` with one
    printable line is raised.
    """
    from ckptconv.convert.options import Options
    from ckptconv.convert.planner import plan_conversion
    from ckptconv.formats.registry import open_by_index
    from ckptconv.inspect.facts import inspect_checkpoint
    from ckptconv.support.errors import CheckpointError

    def planned(checkpoint, suffix: str, unknown: str) -> None:
        try:
            plan_conversion(checkpoint, f"out{suffix}", Options(unknown=unknown))
        except CheckpointError as error:
            assert str(error).isprintable()
            assert str(path) in str(error)

    try:
        with open_by_index(path) as checkpoint:
            inspect_checkpoint(checkpoint, depth=3)
            planned(checkpoint, ".safetensors", "refuse")
            planned(checkpoint, ".pt", "refuse")
            planned(checkpoint, ".pt", "drop")
            planned(checkpoint, ".pt", "keep")
    except CheckpointError as error:
        assert str(error).isprintable()
        assert str(path) in str(error)


def repacked(pickle_: bytes, source: Path) -> bytes:
    """The archive `source` with another pickle and right checksums."""
    with zipfile.ZipFile(source) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/data.pkl")]
        records = [bad.E(name, archive.read(name)) for name in names]
    root = names[0].partition("/")[0]
    return bad.mkzip([bad.E(f"{root}/data.pkl", pickle_), *records])


def sample_pickle(source: Path) -> bytes:
    with zipfile.ZipFile(source) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


def flipped(original: bytes, chance: random.Random) -> bytes:
    """`original` with one to three bytes changed, cut out or put in."""
    changed = bytearray(original)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(changed))
        match chance.randrange(3):
            case 0:
                changed[at] = chance.randrange(256)
            case 1:
                del changed[at : at + chance.randint(1, 4)]
            case _:
                changed[at:at] = chance.randbytes(chance.randint(1, 4))
    return bytes(changed)


SAMPLE = SAMPLES / "namespace_train.pt"


def test_a_pickle_cut_at_any_byte_is_refused(tmp_path):
    from ckptconv.formats.registry import open_by_index
    from ckptconv.support.errors import CheckpointError

    path = tmp_path / "cut.pt"
    for length in range(len(bad.GOOD)):
        path.write_bytes(bad.ckpt(bad.GOOD[:length]))
        with pytest.raises(CheckpointError, match=r"cut\.pt: data\.pkl: "):
            open_by_index(path)


@pytest.mark.property
def test_every_opcode_on_every_small_stack_is_read_or_refused(tmp_path):
    path = tmp_path / "opcode.pt"
    stacks = (
        b"",
        b"(",
        b"N",
        b"}",
        b"](",
        b"})",
        b"}K\1N",
        b"cposix\nmkdir\n)",
        b"(K\1K\2",
        b"N(K\1",
        bad.tensor(),
        bad.tensor() + b"N",
    )
    for opcode in range(256):
        for stack in stacks if ALL else stacks[opcode % 4 :: 4]:
            path.write_bytes(bad.ckpt(bad.P2 + stack + bytes([opcode]) + b"\1\0\0\0\0\0\0\0\n\n."))
            look_at(path)


@pytest.mark.parametrize("seed", some(2, range(4)))
def test_a_damaged_pickle_is_read_or_refused(seed, tmp_path):
    chance = random.Random(seed)
    path = tmp_path / "damaged.pt"
    original = sample_pickle(SAMPLE)
    for _ in range(150):
        path.write_bytes(repacked(flipped(original, chance), SAMPLE))
        look_at(path)


@pytest.mark.parametrize("seed", some(2, range(4)))
def test_a_damaged_archive_is_read_or_refused(seed, tmp_path):
    chance = random.Random(seed)
    path = tmp_path / "damaged.pt"
    for original in (bad.ckpt(bad.GOOD), SAMPLE.read_bytes()):
        for _ in range(150):
            path.write_bytes(flipped(original, chance))
            look_at(path)


@pytest.mark.parametrize("seed", some(2, range(4)))
def test_a_damaged_safetensors_header_is_read_or_refused(seed, tmp_path):
    chance = random.Random(seed)
    path = tmp_path / "damaged.safetensors"
    entries = {
        "__metadata__": {"format": "pt", "b": "w"},
        "w": bad.ti([2, 2], 0, 16),
        "v": bad.ti([4], 16, 32),
    }
    for _ in range(300):
        path.write_bytes(bad.st(flipped(json.dumps(entries).encode(), chance), bad.F4 * 2))
        look_at(path)
