"""What is built from this checkout: a wheel with the pages of `ckptconv help` and without tests, an
sdist that runs its own tests, whole links.
"""

from __future__ import annotations

import email
import inspect
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import release
from ckptconv import __version__
from ckptconv.devices.host import INSTALL_TORCH
from ckptconv.io.remote.network import EXTRA
from ckptconv.keys import rule_files
from helpers.program import ROOT, environment

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOME = PROJECT["project"]["urls"]["Homepage"]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDED = ("hatchling", "hatch_fancy_pypi_readme")


def build(target: str, source: Path, folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory",
            str(folder)],
        cwd=source, env=environment(PYTHONPATH=os.environ.get("PYTHONPATH", "")), check=True,
        capture_output=True,
    )  # fmt: skip
    (built,) = [path for path in folder.iterdir() if path.suffix in (".gz", ".whl")]
    return built


@pytest.fixture(scope="module")
def builder() -> None:
    if not os.environ.get("CI"):  # in CI their absence is a failure
        for name in NEEDED:
            pytest.importorskip(
                name, reason="what builds packages is not installed; make test installs it"
            )


@pytest.fixture(scope="module")
def sdist(builder, made_once) -> Path:
    (made,) = made_once("sdist", lambda folder: build("sdist", ROOT, folder)).iterdir()
    return made


@pytest.fixture(scope="module")
def unpacked(sdist, made_once) -> Path:
    def unpack(folder: Path) -> None:
        with tarfile.open(sdist) as archive:
            archive.extractall(
                folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
            )

    (inside,) = made_once("unpacked", unpack).iterdir()
    return inside


@pytest.fixture(scope="module")
def wheel(unpacked, made_once) -> Path:
    """The wheel, built from the sdist as an installer does."""
    (made,) = made_once("wheel", lambda folder: build("wheel", unpacked, folder)).iterdir()
    return made


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def installed(wheel, made_once) -> Path:
    def install(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        command = [*pip, "--target", str(folder), str(wheel)]
        subprocess.run(command, check=True, capture_output=True)

    return made_once("site", install)


def run_installed(installed: Path, *arguments: object, cwd: Path) -> str:
    command = [sys.executable, "-m", "ckptconv", *map(str, arguments)]
    variables = environment(PYTHONPATH=str(installed))
    return subprocess.run(
        command, cwd=cwd, env=variables, check=True, capture_output=True, text=True
    ).stdout


# The wheel


@pytest.mark.trust
def test_the_wheel_holds_the_package_and_the_docs_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ckptconv").rglob("*.py")}
    pages = {f"ckptconv/docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    web = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ckptconv/pages/web").iterdir()}
    data = [*(ROOT / "ckptconv").rglob("*.txt"), *(ROOT / "ckptconv/keys").glob("*.json")]
    lists = {path.relative_to(ROOT).as_posix() for path in data}
    assert len(lists) == 5
    assert names == modules | pages | web | lists | {"ckptconv/py.typed"}


@pytest.mark.trust
def test_what_is_installed_from_the_sdist_converts_and_helps(installed, unpacked, tmp_path):
    where = run_installed(installed, "--version", cwd=tmp_path)
    assert where == f"ckptconv {__version__}\n"
    run_installed(
        installed,
        "convert",
        unpacked / "sample_ckpts/ddp_cuda3.pt",
        "out.safetensors",
        "--verify",
        cwd=tmp_path,
    )
    assert (tmp_path / "out.safetensors").stat().st_size > 1000
    for page in (ROOT / "docs").glob("*.md"):
        assert f"  {page.stem} " in run_installed(installed, "help", cwd=tmp_path)
    assert (
        run_installed(installed, "help", "keys", cwd=tmp_path)
        == (ROOT / "docs/keys.md").read_text()
    )


# The sdist


def test_the_sdist_holds_what_its_tests_and_make_need(unpacked):
    ignored = ("__pycache__", ".cache")
    for folder in ("ckptconv", "docs", "tests", "bench", "sample_ckpts", "tools"):
        ours = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        missing = [
            path
            for path in ours
            if not (unpacked / path).exists() and not set(ignored) & set(path.parts)
        ]
        assert missing == []
    for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "LICENSE", "Makefile", "CITATION.cff",
        "constraints.txt", "pyproject.toml", "mkdocs.yml",
                 "Containerfile", ".dockerignore", ".pre-commit-hooks.yaml"):  # fmt: skip
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        pytest.param(["--collect-only"], " tests", marks=pytest.mark.trust),
        pytest.param(["tests/support/test_choices.py"], " passed", marks=pytest.mark.trust),
    ],
)
def test_the_tests_of_the_sdist_can_be_run_there(arguments, told, unpacked):
    pytest_there = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*pytest_there, *arguments],
        cwd=unpacked,
        env=environment(PYTHONPATH=str(unpacked)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert told in done.stdout.splitlines()[-1]
    assert str(ROOT / "ckptconv") not in done.stdout


# Links


def description(metadata: Message) -> str:
    return metadata.get_payload(decode=True).decode()


def test_every_link_of_the_description_leads_somewhere_from_anywhere(metadata):
    text = description(metadata)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    for link in links:
        assert link.startswith("https://"), link
        inside = re.sub(rf"^{HOME}/(blob|raw)/main/", "", link)
        if inside != link:
            assert (ROOT / inside).exists(), link
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert pictures and all(link.startswith(f"{HOME}/raw/main/") for link in pictures)
    anchors = {"#" + re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ",
        "-") for line in text.splitlines()
               if line.startswith("#")}  # fmt: skip
    assert {link.removeprefix(HOME) for link in links if link.startswith(f"{HOME}#")} <= anchors


def test_the_description_is_the_readme_but_for_its_links(metadata):
    def plain(text: str) -> str:
        return re.sub(r"\]\([^)]+\)", "]()", text).strip()

    assert plain(description(metadata)) == plain((ROOT / "README.md").read_text())
    assert metadata["Description-Content-Type"] == "text/markdown"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_links_of_a_page_are_relative_and_lead_to_a_file(page):
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"
        assert not link.startswith(HOME), (
            f"{page.name}: {link} is in the repository, so a relative link does"
        )


def test_one_address_is_the_home_of_everything():
    assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+", HOME)
    assert set(PROJECT["project"]["urls"]) == {
        "Homepage",
        "Documentation",
        "Source",
        "Issues",
        "Changelog",
    }
    assert all(url.startswith(HOME) for url in PROJECT["project"]["urls"].values())
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert all(change["replacement"].startswith(f"]({HOME}") for change in hook["substitutions"])
    files = [
        *PAGES,
        *(ROOT / "ckptconv").rglob("*.py"),
        ROOT / "pyproject.toml",
        ROOT / "CHANGELOG.md",
    ]
    for path in files:
        for named in re.findall(r"https://[\w.]+/[\w-]+/ckptconv\b", path.read_text()):
            assert named == HOME, f"{path.name}: {named}"


def test_twine_takes_both(sdist, wheel):
    pytest.importorskip("twine", reason="twine is not installed")
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(sdist),
        str(wheel)],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_version_and_one_date_are_told_everywhere():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert release.version() == __version__ == citation["version"]
    assert release.release_date(__version__) == citation["date-released"]


def test_a_version_without_a_dated_section_is_not_released(monkeypatch, capsys):
    monkeypatch.setattr(release, "version", lambda: "99.0.0")
    assert release.main(["dist"]) == 1
    assert "'## 99.0.0 - YYYY-MM-DD'" in capsys.readouterr().err


# What the pages tell to install


def test_an_image_is_built_with_the_licences_of_the_package():
    copied = (ROOT / ".dockerignore").read_text().splitlines()
    for name in (*PROJECT["project"]["license-files"], "README.md", "pyproject.toml"):
        assert f"!{name}" in copied


@pytest.mark.parametrize("page", [*PAGES, ROOT / "Containerfile"], ids=lambda path: path.name)
def test_nothing_is_installed_from_an_index_where_it_is_not(page):
    """ckptconv is not on PyPI: it is installed from a checkout, or from where its repository is."""
    for line in page.read_text().splitlines():
        for words in re.findall(r"pip install ([^`#&\n]+)", line):
            assert not re.search(r"(^|\s)['\"]?ckptconv(\[|'|\"|\s|$)", words), line


# Hooks of pre-commit


def hooks() -> list[dict]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())


def as_pre_commit(hook: dict, folder: Path) -> subprocess.CompletedProcess[str]:
    """The hook's entry on the files that it chooses among those of `folder`, named as pre-commit
    names them.
    """
    names = sorted(path.name for path in folder.iterdir() if re.search(hook["files"], path.name))
    assert names, "a hook that chooses no file is not run"
    program, *words = shlex.split(hook["entry"])
    assert program == "ckptconv"
    command = [sys.executable, "-m", "ckptconv", *words, *names]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )


def test_the_hooks_are_those_that_the_page_names():
    page = (ROOT / "docs" / "pipelines.md").read_text()
    assert [hook["id"] for hook in hooks()] == ["ckptconv-scan", "ckptconv-portable"]
    assert all(f"- id: {hook['id']} " in page and hook["language"] == "python" for hook in hooks())


@pytest.mark.parametrize("hook", ["ckptconv-scan", "ckptconv-portable"])
def test_a_hook_passes_what_is_good_and_fails_on_what_is_not(hook, tmp_path):
    (chosen,) = [item for item in hooks() if item["id"] == hook]
    good = ROOT / "sample_ckpts" / ("ddp_cuda3.pt" if hook == "ckptconv-scan" else "tied.pt")
    (tmp_path / "good.PT").write_bytes(good.read_bytes())
    (tmp_path / "notes.txt").write_text("no checkpoint")
    done = as_pre_commit(chosen, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    bad = (
        b"cposix\nsystem\n(S'true'\ntR."
        if hook == "ckptconv-scan"
        else (ROOT / "sample_ckpts/ddp_cuda3.pt").read_bytes()
    )
    (tmp_path / "bad.ckpt").write_bytes(bad)
    done = as_pre_commit(chosen, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "bad.ckpt" in done.stdout


def test_what_a_hint_installs_is_the_extra_for_it():
    """ckptconv is in no index, so its extras are not either."""
    extras = PROJECT["project"]["optional-dependencies"]
    for name, hint in {"torch": INSTALL_TORCH, "remote": EXTRA}.items():
        assert hint == f"pip install {' '.join(map(repr, extras[name]))}"
    assert f"pip install {extras['yaml'][0]!r}, or write" in inspect.getsource(rule_files)
