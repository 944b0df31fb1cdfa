"""Folders of real files for the tests."""

from __future__ import annotations

import ast
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from ckptconv.support.errors import on_command_line
from helpers.costs import pytest_configure  # noqa: F401 (pytest finds it here)
from helpers.figures import figure, pytest_terminal_summary  # noqa: F401 (pytest finds them here)
from helpers.hostile_generator import GENERATOR
from helpers.paths import CORPUS, PRODUCED, SAMPLES
from helpers.program import close_servers
from helpers.servers import servers  # noqa: F401

MakeOnce = Callable[[str, Callable[[Path], object]], Path]
try:
    import fcntl
except ImportError:  # Windows, where the tests run in one process
    fcntl = None  # type: ignore[assignment]

HERE = Path(__file__).resolve().parent
# there are as many workers as cores, and torch's threads wait by turning in circles
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not os.environ.get("CKPTCONV_GPU"):  # `make gpu` sets it
    # where there is a GPU, DataParallel would move a model there, and torch opens what it refuses
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports when it is imported."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def needs(path: Path, wanted: str) -> bool:
    """Whether importing a file of the tests imports `wanted`, by itself or through others of the
    tests.
    """
    waiting, seen = [path], {path}
    while waiting:
        for name in imports(waiting.pop()):
            if name.partition(".")[0] == wanted or name in OF_TORCH:
                return True
            inner = name.replace(".", "/")
            for found in (
                HERE / f"{inner}.py",
                HERE / inner / "__init__.py",
                HERE / "trust" / f"{inner}.py",
                HERE / "trust" / inner / "__init__.py",
            ):
                if found.is_file() and found not in seen:
                    seen.add(found)
                    waiting.append(found)
    return False


gc.disable()  # until all is collected
# a machine may be slow: no example has a deadline
settings.register_profile("slow machines", deadline=None)
settings.load_profile("slow machines")
OF_TORCH = {"safetensors.torch"}
TORCHLESS = importlib.util.find_spec("torch") is None
collect_ignore = [
    str(path.relative_to(HERE))
    for path in sorted(HERE.rglob("test_*.py"))
    if TORCHLESS and needs(path, "torch")
]
"""Without torch, the files that import it are left out, which the head of the report tells."""
if importlib.util.find_spec("transformers") is None:
    collect_ignore.append("families")  # `make families` has what its files import


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of one mark alone (``-m servers``), files that do not write it are not imported: all of them
    cost half a minute of the processor. (`property` is written nowhere, see below.)
    """
    mark = config.option.markexpr
    if collection_path.suffix != ".py" or not mark.isidentifier() or mark == "property":
        return None
    return None if f"mark.{mark}" in collection_path.read_text("utf-8") else True


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported and collected by now is never garbage: not looked through again.

    The servers of tests are their own, so one authority is trusted, whose key nobody has: those of
    a system take 20 ms at each first connection. Only `make readme` installs what others serve.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    if not any(item.get_closest_marker("readme") for item in session.items):
        for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "SSL_CERT_DIR"):
            os.environ.pop(name, None)
        os.environ["SSL_CERT_FILE"] = str(HERE / "data" / "authority.crt")


def pytest_report_header() -> list[str]:
    """What is left out as a whole."""
    files = len(list(HERE.rglob("test_*.py")))
    return (
        [
            f"torch is not here: {len(collect_ignore)} of {files} test files need it, and are "
            "left out"
        ]
        if TORCHLESS
        else []
    )


def pytest_sessionfinish() -> None:
    """End what the program is forked from."""
    close_servers()


@pytest.fixture(scope="session")
def samples() -> Path:
    """The sample checkpoints of the repository."""
    return SAMPLES


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of checkpoints that other people wrote."""
    folder = CORPUS
    if not (folder / "manifest.json").is_file():
        pytest.skip("the folder of real checkpoints is not here (CKPTCONV_CORPUS)")
    return folder


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> MakeOnce:
    """Makes a folder once for all processes that run the tests: `made_once(name, make)` is the
    folder that `make(folder)` has filled, whoever was first.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder, whole = shared / name, shared / f"{name}.whole"
        with open(shared / f"{name}.lock", "w") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not whole.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                whole.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def worlds(made_once) -> Path:
    """A folder with what two and four gloo processes wrote together; see worlds.py and
    trained_worlds.py.
    """
    return made_once("worlds", write_worlds)


def write_worlds(folder: Path) -> None:
    """Run the processes."""
    command = [sys.executable, "-m", "helpers.trained_worlds", str(folder)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def hostile(made_once) -> Path:
    """The folder of hostile files that the generator writes."""
    if not GENERATOR.is_file():
        pytest.skip("the generator of hostile files is not here (CKPTCONV_BADCASES)")
    command = [sys.executable, str(GENERATOR)]
    return made_once(
        "hostile",
        lambda folder: subprocess.run(
            [*command, folder], cwd=folder, check=True, capture_output=True
        ),
    )


@pytest.fixture(scope="session")
def produced() -> Path:
    """The folder of checkpoints that the frameworks wrote."""
    folder = PRODUCED
    if not folder.is_dir():
        pytest.skip("the folder of produced checkpoints is not here (CKPTCONV_CORPUS)")
    return folder


@pytest.fixture(autouse=True)
def _messages_as_they_are_written() -> Iterator[None]:
    """Errors name options as the code does, by those of the command line, for program and library
    alike; how Python is told of them is what `support/test_wording.py` tests.
    """
    with on_command_line():
        yield
