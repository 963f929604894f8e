"""The documentation is checked: links lead somewhere, commands are understood, tables say what the code says."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from torch.distributed.run import parse_args as parse_torchrun

import pipeline
from docs import cli
from pipeline import __main__ as helper
from pipeline import components
from pipeline.arguments import parse_arguments
from pipeline.commands import status
from pipeline.experiment.settings.parameters import PARAMETERS
from pipeline.experiment.settings.validation import SETTINGS_FILES, schema
from pipeline.verbs import VERBS
from tests.support.markdown import DOCS, ROOT, commands, section, sections, snippets, table_rows

README = ROOT / "README.md"
FOLDERS = (DOCS, ROOT / "example_settings", ROOT / ".github")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))])
KINDS = {"tutorial", "how_to", "reference", "explanation"}
CLI = DOCS / "reference/cli.md"
SETTINGS = DOCS / "reference/settings.md"
PYMODULES = DOCS / "reference/pymodules"
CONSOLE = "training-pipeline"
PROGRAMS = {
    CONSOLE,
    "python",
    "python3",
    "torchrun",
    "pip",
    "make",
    "source",
    "export",
    "echo",
    "sleep",
    "done",
}
TOOLS = {"cmp", "grep", "kill", "mkdir", "rm", "tensorboard"}
BASES = {
    "datasets": components.BaseDataset,
    "data_counters": components.BaseDataCounter,
    "data_transforms": components.BaseDataTransform,
    "module_transforms": components.BaseModuleTransform,
    "optim_sched": components.BaseScheduler,
    "hooks": components.BaseHook,
    "trackers": components.BaseTracker,
    "checkpoint_saver": components.BaseCheckpointSaver,
    "early_stopper": components.BaseEarlyStopper,
    "loss_weighter": components.BaseLossWeighter,
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """Return a page without its snippets."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Return the targets of all links to files of ours."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in target]


def anchor(heading: str) -> str:
    """Return the anchor that a reader of Markdown gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file that exists and, if it has an anchor, a heading in it."""
    for target in links(page):
        path, _, wanted = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} leads nowhere"
        if wanted:
            assert wanted in [anchor(part.heading) for part in sections(file)], f"{target} has no such heading"


def test_every_page_can_be_reached_from_the_readme() -> None:
    """The README leads to the map, the map names every page on a line of its own, and indices name their neighbours."""
    site = DOCS / "README.md"
    assert "docs/README.md" in links(README)
    lines = [line for line in site.read_text().splitlines() if re.match(r" *- \[|\[", line)]
    named = [target for line in lines for target in links(site) if f"({target})" in line]
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if page != site]
    assert sorted(named) == sorted(pages)
    for index in DOCS.glob("*/*/README.md"):
        others = [page for page in index.parent.glob("*.md") if page != index]
        assert {page.name for page in others} <= set(links(index))


def test_pages_are_of_four_kinds() -> None:
    """A page belongs to one kind, and the README leads to all of them."""
    assert {page.relative_to(DOCS).parts[0] for page in DOCS.rglob("*.md")} == {*KINDS, "README.md"}
    headings = {part.heading.lower().replace(" ", "_") for part in sections(DOCS / "README.md")}
    assert headings >= KINDS
    anchors = {target.partition("#")[2] for target in links(README)}
    assert anchors >= {anchor(kind.replace("_", " ")) for kind in KINDS - {"tutorial"}}
    assert any(target.startswith("docs/tutorial/") for target in links(README))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name_of)
def test_paths_that_pages_name_exist(page: Path) -> None:
    """A file or folder of the repository that is named in code exists; capitals stand for any name."""
    for path in re.findall(r"`((?:pipeline|tests|docs|benchmarks|example_settings)/[\w./]*)`", prose(page)):
        known = re.sub(r"/[A-Z]+\b.*", "", path)
        assert (ROOT / known).exists(), f"{path} does not exist"


def check_training_line(words: list[str]) -> None:
    if words[0] == "torchrun":
        launched = parse_torchrun(words[1:])
        words = [launched.training_script, *launched.training_script_args]
    else:
        words = [word for word in words[1:] if word != "-m"]
    assert words[0] in ("training_pipeline.py", "training_pipeline")
    if words[1] in VERBS:
        assert helper.main(words[1:]) == 0
    else:
        parse_arguments(words[1:])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_shell_commands_are_accepted_by_the_real_parsers(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command line of a bash snippet is one that the programs understand."""
    for verb in VERBS:
        monkeypatch.setattr(helper._import_verb(verb), "execute", lambda arguments: 0)
    for snippet in [snippet for snippet in snippets(page) if snippet.language in ("bash", "sh")]:
        for words in commands(snippet.text):
            if words[0] == "redirected":
                continue
            assert words[0] in PROGRAMS | TOOLS, f"{words[0]} is not a program we talk about"
            if words[0] == CONSOLE:
                assert helper.main(words[1:]) == 0
            elif words[0] == "torchrun" or {"training_pipeline.py", "training_pipeline"} & set(words[1:3]):
                check_training_line(words)


def test_readme_shows_the_commands_of_the_first_minutes() -> None:
    """The README begins with two commands, then resumes, and has the demo for people in a hurry."""
    shown = [words for part in sections(README) for script in part.snippets("bash") for words in commands(script)]
    run = ["torchrun", "--nproc-per-node=2", "training_pipeline.py", "my_digits"]
    assert shown[:3] == [[CONSOLE, "new", "my_digits"], run, [*run, "--resume"]]
    assert ["make", "demo"] in shown


@pytest.mark.parametrize("page", [README, DOCS / "tutorial/first_run.md"], ids=name_of)
def test_code_of_the_example_is_shown_as_it_is(page: Path) -> None:
    """A pymodule that the README or the tutorial shows is a file of the shipped example, word by word."""
    shown = [snippet for snippet in snippets(page) if "/pymodules/" in snippet.file]
    assert shown
    for snippet in shown:
        file = ROOT / "example_settings/digits/pymodules" / snippet.file.split("/pymodules/")[1]
        assert snippet.text.split("\n", 1)[1] == file.read_text()


def test_readme_names_the_release_and_the_versions_of_python() -> None:
    """The status line has the newest release of the changelog and the versions that the package declares."""
    line = next(line for line in README.read_text().splitlines() if line.startswith("Version "))
    releases = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert line.startswith(f"Version {releases[0]} ")
    declared = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert f"Python {', '.join(declared)} " in line


def test_readme_compares_with_the_figures_of_the_docs() -> None:
    """The comparison has the numbers of Reliability and Performance and no others."""
    compared = [row for row in table_rows(README) if "HF Trainer" in row]
    reliability = [row for row in table_rows(DOCS / "explanation/reliability.md") if "resumed" in row]
    kills = {row[""].split(",")[0]: row for row in reliability}
    # Ours was measured in several ways, the others at two processes.
    kills["this pipeline"] = next(row for row in reliability if row[""] == "this pipeline, 2 processes")
    columns = ("resumed", "of kills inside a write", "finals bit-identical")
    for row, column in zip(compared, columns, strict=False):
        for name, cell in list(row.items())[1:]:
            assert " ".join(kills[name][column].split()[:3]) == cell
    speeds = {row["measure"]: row for row in table_rows(DOCS / "explanation/performance.md") if "measure" in row}
    measures = ("a  steps/s, tiny model", "f  loop blocked by a checkpoint of 1.2 GB ¹")
    for row, measure in zip(compared[len(columns) :], measures, strict=True):
        for name, cell in list(row.items())[1:]:
            figures = speeds[measure].get({"this pipeline": "ours"}.get(name, name), "–")
            assert figures.split()[0] == cell


def test_contributing_names_exactly_the_make_targets() -> None:
    """Make targets that pages name exist, and all targets are in the table for developers."""
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split()
    rows = section(ROOT / "CONTRIBUTING.md", "Set up").rows()
    assert [row[0] for row in rows] == [f"`make {target}`" for target in targets]
    for page in PAGES:
        assert set(re.findall(r"`make ([a-z-]+)`", page.read_text())) <= set(targets)


def test_reference_of_the_command_line_is_that_of_the_parsers() -> None:
    """The generated page is what the parsers say now."""
    assert CLI.read_text() == cli.page(), f"the parsers have changed; run: {cli.COMMAND}"


def help_options(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return the options a help text has just named, those of its examples left aside."""
    text = re.split(r"^(?:examples?|-- FLAGS):$", capsys.readouterr().out, flags=re.MULTILINE)[0]
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def documented_options(heading: str) -> set[str]:
    rows = [*section(CLI, heading).rows(), *section(CLI, "Options of every command").rows()]
    return {option for row in rows for option in re.findall(r"`(--[a-z][a-z-]*)", row[0])}


def test_training_options_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of options and the help of the command name the same options."""
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    assert documented_options("training_pipeline.py") == help_options(capsys)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_verb_options_are_those_of_the_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every verb has a section whose table names the options of its help."""
    with pytest.raises(SystemExit):
        helper.main([verb, "--help"])
    assert documented_options(verb) == help_options(capsys)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_is_shown_in_use(verb: str) -> None:
    """A page that explains how to use a verb calls it."""
    shown = [words for page in (DOCS / "how_to").glob("*.md") for words in all_commands(page)]
    assert any(CONSOLE in words and verb in words for words in shown)


def all_commands(page: Path) -> Iterator[list[str]]:
    for snippet in snippets(page):
        if snippet.language == "bash":
            yield from commands(snippet.text)


def test_exit_codes_of_status_are_documented() -> None:
    """The states and codes of the table are those the verb returns."""
    lines = re.findall(r"^\| (\d) \| (\w+)", section(CLI, "status").body, re.MULTILINE)
    names = {"never": "new", "there": ""}
    documented = {names.get(state, state): int(code) for code, state in lines}
    assert {state: code for state, code in documented.items() if state} == status.EXIT_CODES


def test_every_fault_names_tests_that_exist() -> None:
    """Each row of the table of faults names at least one test, and every test that is named is there."""
    lines = section(DOCS / "explanation/reliability.md", "Faults").body.splitlines()
    rows = [line.strip("|").split(" | ") for line in lines if re.match(r"\| \d", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 61))
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row[3])
        assert named, f"row {row[0]} names no test"
        for file, test in named:
            text = (ROOT / "tests" / file).read_text()
            assert f"def {test or 'test_'}" in text, f"{file}::{test} does not exist"


def test_environment_variables_are_those_of_the_code() -> None:
    """Every variable of ours that the code reads is documented, and no other."""
    code = "".join(path.read_text() for path in (ROOT / "pipeline").rglob("*.py"))
    text = section(DOCS / "reference/run.md", "Environment variables").body
    pattern = r"GORIDEEPSTYLE_[A-Z_]+"
    assert set(re.findall(pattern, text)) == set(re.findall(pattern, code))


def schema_keys(rules: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key below a schema with the default the documentation must show."""
    for key, inner in rules.get("properties", {}).items():
        if "default" in inner:
            default = f"`{json.dumps(inner['default'])}`"
        else:
            otherwise = "`{}`" if "properties" in inner else "derived"
            default = "required" if key in rules.get("required", []) else otherwise
        yield f"{prefix}{key}", default
        places = [(f"{prefix}{key}.", inner), (f"{prefix}{key}[].", inner.get("items", {}))]
        for place, content in places:
            for alternative in [content, *content.get("oneOf", [])]:
                yield from schema_keys(alternative, place)


@pytest.mark.parametrize("name", SETTINGS_FILES)
def test_settings_keys_and_defaults_are_those_of_the_schema(name: str) -> None:
    """Each table has exactly the keys of its schema, each with its default."""
    documented = {row[0].strip("`"): row[2] for row in section(SETTINGS, f"{name}.json").rows()}
    assert documented == dict(schema_keys(schema(name)))


@pytest.mark.parametrize("name", SETTINGS_FILES)
def test_settings_snippets_are_valid(name: str) -> None:
    """Each settings file has an example, and every example passes its schema."""
    snippets = section(SETTINGS, f"{name}.json").snippets("json")
    assert snippets
    for snippet in snippets:
        Draft202012Validator(schema(name)).validate(json.loads(snippet))


def test_every_settings_snippet_belongs_to_a_file() -> None:
    """No JSON example of the page escapes the check above."""
    homes = [part.heading for part in sections(SETTINGS) if part.snippets("json")]
    assert homes == [f"{name}.json" for name in (*SETTINGS_FILES, PARAMETERS)]


@pytest.mark.parametrize("family", BASES)
def test_every_method_of_a_base_class_is_documented(family: str) -> None:
    """The contract on a page has every public method of the base class and of what it inherits."""
    text = (PYMODULES / f"{family}.md").read_text()
    kinds = [kind for kind in BASES[family].__mro__ if kind.__module__.startswith("pipeline.")]
    methods = {name for kind in kinds for name, value in vars(kind).items() if inspect.isfunction(value)}
    for name in methods - {"__init__"}:
        signature = inspect.signature(getattr(BASES[family], name))
        arguments = ", ".join(list(signature.parameters)[1:])
        assert f"`{name}({arguments})`" in text, f"{name}({arguments}) is not documented"


def test_every_exported_name_is_documented() -> None:
    """Whatever an author may import is explained somewhere in docs/reference/pymodules."""
    text = "\n".join(page.read_text() for page in PYMODULES.glob("*.md"))
    missing = [name for name in components.__all__ if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", text)]
    assert missing == []


def policies() -> list[str]:
    exported = {name: getattr(components, name) for name in components.__all__}
    skipped = ("Base", "Stateful", "Loss")
    return [name for name, value in exported.items() if inspect.isclass(value) and not name.startswith(skipped)]


@pytest.mark.parametrize("name", policies())
def test_ready_policies_are_documented_with_their_arguments(name: str) -> None:
    """The signature of every ready policy stands in a table as the code has it."""
    signature = inspect.signature(getattr(components, name))
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    shown = f"{name}{signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)}"
    text = "\n".join(page.read_text() for page in PYMODULES.glob("*.md"))
    assert f"| `{shown}` |" in text


def test_changelog_has_this_version() -> None:
    """The version of the package has an entry, and what is not released yet stands above all others."""
    headings = [part.heading for part in sections(ROOT / "CHANGELOG.md") if part.heading.startswith("[")]
    assert headings[0] == "[Unreleased]"
    assert pipeline.__version__ in [heading.split("]")[0].removeprefix("[") for heading in headings]
