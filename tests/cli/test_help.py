"""`ckptconv help`: the pages of docs/, the help of commands, and what is said where there is
neither.
"""

from __future__ import annotations

import re

import click
import pytest

from ckptconv.cli import help_pages
from ckptconv.cli.commands import OWN, SECTIONS
from ckptconv.cli.main import MEANT, cli
from helpers.program import ROOT, SAMPLES, assert_one_error, run, run_on_terminal

PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


def test_every_page_is_a_topic_with_its_title(tmp_path):
    done = run("help", cwd=tmp_path)
    listed = [line.split(None, 1) for line in done.out.splitlines() if line.startswith("  ")]
    assert done.exit == 0
    assert [name for name, _ in listed] == PAGES
    for name, title in listed:
        assert (ROOT / "docs" / f"{name}.md").read_text().startswith(f"# {title.strip()}\n")


@pytest.mark.parametrize("page", ["limits", "keys"])
def test_a_page_that_is_piped_is_its_markdown(page, tmp_path):
    done = run("help", page, cwd=tmp_path)
    assert (done.exit, done.err) == (0, "")
    assert done.out == (ROOT / "docs" / f"{page}.md").read_text()


@pytest.mark.parametrize("written", ["state-dicts", "State_Dicts", "state dicts", "state-dicts.md"])
def test_a_page_is_found_as_people_write_it(written):
    assert help_pages.page_text(written) == (ROOT / "docs" / "state-dicts.md").read_text()


@pytest.mark.parametrize(
    "written", ["", "../README", "/etc/passwd", "docs/keys", "*", "keys.md.md", "\0"]
)
def test_what_is_no_page_reads_no_file(written):
    assert help_pages.page_text(written) is None


@pytest.mark.parametrize("command", ["convert", "devices", "help"])
def test_a_command_is_answered_with_its_help(command, tmp_path):
    done = run("help", command, cwd=tmp_path)
    assert (done.exit, done.out) == (0, run(command, "--help", cwd=tmp_path).out)
    assert done.out.startswith(f"Usage: ckptconv {command} ")


def test_no_page_has_the_name_of_a_command():
    assert not set(PAGES) & set(cli.list_commands(click.Context(cli)))


@pytest.mark.parametrize(
    ("topic", "meant"),
    [
        ("key", "did you mean keys"),
        ("trsut", "did you mean trust"),
        ("containr", "containers"),
        ("dict", "did you mean state-dicts"),
        ("convrt", "did you mean convert"),
        ("zzz", "ckptconv help lists the topics"),
        ("", "ckptconv help lists the topics"),
        ("\x1b[31mred", "there is no help on '\\x1b[31mred'"),
    ],
)
def test_an_unknown_topic_is_a_usage_error_with_what_it_may_have_meant(topic, meant, tmp_path):
    assert meant in assert_one_error(run("help", topic, cwd=tmp_path), code=2)


def test_a_package_without_its_pages_says_that_there_are_none(monkeypatch, tmp_path):
    monkeypatch.setattr(help_pages, "_FOLDERS", (tmp_path / "a", tmp_path / "b"))
    assert (help_pages.topics(), help_pages.page_text("keys")) == ({}, None)


@pytest.mark.parametrize("shell", ["bash_source", "bash_complete"])
def test_completion_knows_the_topics(shell, tmp_path):
    words = {"COMP_WORDS": "ckptconv help tru", "COMP_CWORD": "2"}
    done = run(cwd=tmp_path, env={"_CKPTCONV_COMPLETE": shell, **words})
    assert ("trust" in done.out) is (shell == "bash_complete")


# On a terminal


def on_terminal(*arguments: str, rows: int, **env: str) -> str:
    """What the program writes to a terminal of `rows` lines; its pager is one that marks what goes
    through it.
    """
    variables = {"COLUMNS": "90", "LINES": str(rows), **env}
    code, shown = run_on_terminal(*arguments, cwd=ROOT, columns=90, rows=rows, env=variables)
    assert code == 0, shown
    return shown


def test_a_terminal_gets_the_page_rendered_and_a_long_one_in_a_pager():
    long = on_terminal("help", "keys", rows=20, PAGER="sed s_^_PAGED:_")
    assert long.count("PAGED:") > 50
    assert help_pages.topics()["keys"] in long and "# Keys" not in long
    assert "```" not in long and "|---|" not in long
    short = on_terminal("help", "remote", rows=1000, PAGER="sed s_^_PAGED:_")
    assert "PAGED:" not in short and "Checkpoints elsewhere" in short and "\x1b[" in short


def test_a_link_on_a_terminal_is_the_command_that_shows_its_page():
    shown = on_terminal("help", "remote", rows=1000, NO_COLOR="1")
    assert ".md" not in shown and "\x1b]8" not in shown
    assert "ckptconv help benchmarks" in shown


def test_a_terminal_without_colours_gets_none():
    shown = on_terminal("help", "remote", rows=1000, NO_COLOR="1")
    assert "Checkpoints elsewhere" in shown
    colour = re.compile(r"\x1b\[(?:[0-9]+;)*[34][0-7](?:;[0-9]+)*m").search
    assert colour(on_terminal("help", "remote", rows=1000)) and not colour(shown)


# Sections of options


def options() -> dict[str, dict[str, str]]:
    """The section of each option by its name, by command."""
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    return {
        name: {param.opts[-1]: param.section for param in command.params if param.opts[0][0] == "-"}
        for name, command in commands.items()
    }


def test_every_option_has_one_section_which_is_the_same_in_all_commands():
    sections: dict[str, set[str]] = {}
    for known in options().values():
        for name, section in known.items():
            sections.setdefault(name, set()).add(section)
    assert {name for name, found in sections.items() if len(found) > 1} == set()
    assert set().union(*sections.values()) == set(SECTIONS)


@pytest.mark.parametrize("command", ["convert", "strip-module", "merge", "batch", "diff", "edit"])
def test_a_command_of_many_options_has_none_outside_of_the_sections(command):
    assert OWN not in options()[command].values()


@pytest.mark.parametrize("command", sorted(options()))
def test_the_help_tells_each_option_once_under_its_heading_in_a_stated_order(command, tmp_path):
    told: dict[str, list[str]] = {}
    for line in run(command, "--help", cwd=tmp_path).out.partition("Examples:")[0].splitlines():
        if heading := re.fullmatch(r"([A-Z][a-z]+):", line):
            told[heading[1]] = []
        elif name := re.match(r"  (?:-[a-zA-Z], )?(--[a-z-]+)", line):
            told[list(told)[-1]].append(name[1])
    assert told.pop("General")[-1] == "--help"
    known = options()[command]
    assert list(told) == [name for name in SECTIONS[:-1] if name in known.values()]
    for section, names in told.items():
        assert names == [name for name, its in known.items() if its == section]


def test_the_columns_of_all_sections_begin_at_the_same_place(tmp_path):
    out = run("convert", "--help", cwd=tmp_path, env={"COLUMNS": "100"}).out
    found = re.findall(r"^(  -[^ ].*?  +)[A-Z]", out.partition("Examples:")[0], re.MULTILINE)
    assert len(found) > 30 and len({len(first) for first in found}) == 1


# Other words


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("info", "did you mean inspect"),
        ("Compare", "did you mean diff"),
        ("strip_module", "did you mean strip-module"),
        ("conver", "did you mean convert"),
        ("avrage", "did you mean average"),
        ("zzz", "error: zzz is not a command; see ckptconv --help"),
        ("\x1b[31m", "\\x1b[31m is not a command"),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(typed, meant, tmp_path):
    assert meant in assert_one_error(run(typed, "in.pt", cwd=tmp_path), code=2)


def test_an_option_without_its_value_offers_the_help_of_its_command(tmp_path):
    told = assert_one_error(run("convert", "in.pt", "out.pt", "--dtype", cwd=tmp_path), code=2)
    assert "'--dtype' requires an argument; see ckptconv convert --help" in told


def test_a_file_alone_is_answered_with_what_shows_it(tmp_path):
    (tmp_path / "my model.pt").write_bytes(b"")
    told = assert_one_error(run("my model.pt", cwd=tmp_path), code=2)
    assert "; ckptconv inspect 'my model.pt' shows what is in a file;" in told
    for typed in ("", "x" * 5000, "\ud800"):
        told = assert_one_error(run(typed, cwd=tmp_path), code=2)
        assert "is not a command" in told and "inspect" not in told


def test_each_word_for_a_command_is_of_one_command_and_names_none():
    words = [word for meant in MEANT.values() for word in meant.split()]
    assert len(words) == len(set(words)) and set(MEANT) <= set(options())
    assert not set(words) & set(options())


def test_an_unknown_option_is_answered_with_the_nearest(tmp_path):
    told = assert_one_error(
        run("convert", "in.pt", "out.pt", "--dtyp", "f16", cwd=tmp_path), code=2
    )
    assert "--dtype" in told


@pytest.mark.parametrize("words", [["--version"], ["-V"]])
def test_the_version_has_two_names(words, tmp_path):
    assert re.fullmatch(r"ckptconv [0-9.]+\n", run(*words, cwd=tmp_path).out)


def test_nothing_is_answered_with_the_help_of_the_program(tmp_path):
    done, asked = run(cwd=tmp_path), run("-h", cwd=tmp_path)
    assert (done.exit, done.out, done.err) == (2, "", asked.out)


# Names that options had once


def test_the_name_that_an_option_had_once_does_the_same_and_is_not_told(tmp_path):
    sample = str(SAMPLES / "tied.pt")
    for command, words, once in (
        ("stats", [sample, "--include", "*weight"], "--match"),
        ("report", [sample, "--html", "a.html", "-f"], "--output"),
        ("report", [sample, "-o", "a.html", "-f", "--against", sample, "--only-b", "."],
         "--only-against"),
        ("batch", [sample, "--out-dir", "all", "--to", "npz", "-n", "--share", "1/1"], "--shard"),
    ):  # fmt: skip
        now = words[-2] if once != "--output" else "--html"
        done = run(command, *words, cwd=tmp_path)
        earlier = run(command, *[once if word == now else word for word in words], cwd=tmp_path)
        assert (earlier.exit, earlier.out, earlier.err) == (done.exit, done.out, done.err)
        assert done.exit == 0 and once not in run(command, "--help", cwd=tmp_path).out


# Widths and colours


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_help_keeps_to_the_width_and_breaks_no_word(columns, tmp_path):
    for command in ("convert", "batch", "diff", ""):
        words = [command, "--help"] if command else ["--help"]
        out = run(*words, cwd=tmp_path, env={"COLUMNS": str(columns)}).out
        told = out.partition("Examples:")[0]
        assert max(map(len, told.splitlines())) <= min(columns, 110) - 2
        broken = [line for line in told.splitlines() if re.search(r"\w-$", line)]
        assert broken == [] and "\b" not in out and not re.search(r" \n", out)


def test_colours_are_as_the_environment_says(tmp_path):
    words = ("inspect", SAMPLES / "fp16.pt", "gone.pt")
    plain = run(*words, cwd=tmp_path)
    assert "\x1b" not in plain.out + plain.err
    assert plain.out == run(*words, cwd=tmp_path).out
    forced = run(*words, cwd=tmp_path, env={"FORCE_COLOR": "1"})
    assert "\x1b[" in forced.out
    assert re.sub(r"\x1b\[[0-9;]*m", "", forced.out) == plain.out
    refused = run(*words, cwd=tmp_path, env={"FORCE_COLOR": "1", "NO_COLOR": "1"})
    assert (refused.out, refused.err) == (plain.out, plain.err)
    error = run("inspect", "gone.pt", cwd=tmp_path, env={"FORCE_COLOR": "1"}).err
    assert error.startswith("\x1b[31m")
    document = run("inspect", SAMPLES / "fp16.pt", "--json", cwd=tmp_path, env={"FORCE_COLOR": "1"})
    assert "\x1b" not in document.out
