"""The documentation is exercised: snippets run, tables say what the code says, links lead somewhere."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from jsonschema import Draft202012Validator
from torch.distributed.run import parse_args as parse_torchrun

import pipeline
from pipeline import __main__ as helper
from pipeline import components
from pipeline.arguments import parse_arguments
from pipeline.commands import status
from pipeline.experiment.pymodules.loader import FAMILIES, SINGLES
from pipeline.experiment.settings.validation import SETTINGS_FILES, schema
from pipeline.lifecycle.mode import inspect_results
from pipeline.paths import ExperimentPaths
from pipeline.progress import TRAINING, Progress
from pipeline.store.compare import first_difference
from pipeline.system.disk import Disk
from tests.support.markdown import DOCS, ROOT, commands, section, sections, snippets
from tests.support.running import run_inside, run_process

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
PYMODULE_PAGES = sorted((DOCS / "pymodules").glob("*.md"))
PROGRAMS = {"python", "python3", "torchrun", "pip", "make", "source", "export", "echo", "sleep", "done"}
TOOLS = {"grep", "mkdir", "rm", "tensorboard"}
COMMIT_OFTEN = "training.checkpoint_every_steps=2"
BASES = {
    "datasets": components.BaseDataset,
    "data_counters": components.BaseDataCounter,
    "data_transforms": components.BaseDataTransform,
    "module_transforms": components.BaseModuleTransform,
    "optim_sched": components.BaseScheduler,
    "trackers": components.BaseTracker,
    "checkpoint_saver": components.BaseCheckpointSaver,
    "early_stopper": components.BaseEarlyStopper,
    "loss_weighter": components.BaseLossWeighter,
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# ---------------------------------------------------------------------- links


def anchor(heading: str) -> str:
    """Return the anchor that a reader of Markdown gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file that exists and, if it has an anchor, a heading in it."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        path, _, wanted = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} leads nowhere"
        if wanted:
            assert wanted in [anchor(one.heading) for one in sections(file)], f"{target} has no such heading"


def test_every_page_can_be_reached_from_the_readme() -> None:
    """Nobody has to guess that a page of ours exists."""
    readme = (ROOT / "README.md").read_text()
    indices = sorted(DOCS.glob("*/README.md"))
    assert indices
    assert all(f"({name_of(page)})" in readme for page in [*DOCS.glob("*.md"), *indices])
    for index in indices:
        others = [page for page in index.parent.glob("*.md") if page != index]
        assert all(f"({page.name})" in index.read_text() for page in others)


# ---------------------------------------------------------------------- commands


def check_training_line(words: list[str]) -> None:
    if words[0] == "torchrun":
        launched = parse_torchrun(words[1:])
        words = [launched.training_script, *launched.training_script_args]
        if launched.module and words[0] == "pipeline":
            assert helper.main(words[1:]) == 0
            return
    else:
        words = [word for word in words[1:] if word != "-m"]
    assert words[0] in ("training_pipeline.py", "training_pipeline")
    parse_arguments(words[1:])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_shell_commands_are_accepted_by_the_real_parsers(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command line of a bash snippet is one that the programs understand."""
    for verb in helper._VERBS:
        monkeypatch.setattr(helper._module(verb), "execute", lambda arguments: 0)
    for snippet in [one for one in snippets(page) if one.language in ("bash", "sh")]:
        for words in commands(snippet.text):
            if words[0] == "redirected":
                continue
            assert words[0] in PROGRAMS | TOOLS, f"{words[0]} is not a program we talk about"
            if words[:3] == ["python", "-m", "pipeline"]:
                assert helper.main(words[3:]) == 0
            elif words[0] == "torchrun" or {"training_pipeline.py", "training_pipeline"} & set(words[1:3]):
                check_training_line(words)


def test_readme_shows_the_commands_of_the_first_minutes() -> None:
    """The first screen has the demo, an experiment of one's own and its continuation."""
    found = [
        words for one in sections(ROOT / "README.md") for script in one.snippets("bash") for words in commands(script)
    ]
    assert found[0] == ["make", "demo"]
    run = ["torchrun", "--nproc-per-node=2", "training_pipeline.py", "my_digits"]
    expected = [["python", "-m", "pipeline", "new", "my_digits"], run, [*run, "--resume"]]
    assert [words for words in found if words in expected] == expected


def test_readme_names_exactly_the_make_targets() -> None:
    """Make targets in the README exist, and all targets are in its table."""
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split()
    assert [row[0] for row in section(ROOT / "README.md", "Make targets").rows()] == [
        f"`make {one}`" for one in targets
    ]
    named = re.findall(r"`make ([a-z-]+)`", (ROOT / "README.md").read_text())
    assert set(named) <= set(targets)


def help_options(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return the options a help text has just named, those of its examples left aside."""
    text = re.split(r"^(?:examples?|-- FLAGS):$", capsys.readouterr().out, flags=re.MULTILINE)[0]
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def documented_options(heading: str) -> set[str]:
    rows = section(DOCS / "running.md", heading).rows()
    return {row[0].strip("`").split()[0] for row in rows if row[0].startswith("`--")}


def test_training_options_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of options and the help of the command name the same options."""
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    assert documented_options("Options") == help_options(capsys)


@pytest.mark.parametrize("verb", sorted(helper._VERBS))
def test_verb_options_are_those_of_the_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every verb has a section whose table names the options of its help."""
    with pytest.raises(SystemExit):
        helper.main([verb, "--help"])
    assert documented_options(verb) == help_options(capsys)


def test_exit_codes_of_status_are_documented() -> None:
    """The states and codes of the table are those the verb returns."""
    lines = re.findall(r"^\| (\d) \| (\w+)", section(DOCS / "running.md", "status").body, re.MULTILINE)
    names = {"never": "new", "there": ""}
    found = {names.get(state, state): int(code) for code, state in lines}
    assert {state: code for state, code in found.items() if state} == status.EXIT_CODES


def test_every_fault_names_tests_that_exist() -> None:
    """Each row of the table of faults names at least one test, and every test that is named is there."""
    lines = section(DOCS / "reliability.md", "Faults").body.splitlines()
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
    text = section(DOCS / "running.md", "Environment variables").body
    pattern = r"GORIDEEPSTYLE_[A-Z_]+"
    assert set(re.findall(pattern, text)) == set(re.findall(pattern, code))


# ---------------------------------------------------------------------- settings


def schema_keys(rules: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key below a schema with the default the documentation must show."""
    for key, inner in rules.get("properties", {}).items():
        if "default" in inner:
            default = f"`{json.dumps(inner['default'])}`"
        else:
            default = "required" if key in rules.get("required", []) else "`{}`"
        yield f"{prefix}{key}", default
        places = [(f"{prefix}{key}.", inner), (f"{prefix}{key}[].", inner.get("items", {}))]
        for place, content in places:
            for alternative in [content, *content.get("oneOf", [])]:
                yield from schema_keys(alternative, place)


@pytest.mark.parametrize("name", SETTINGS_FILES)
def test_settings_keys_and_defaults_are_those_of_the_schema(name: str) -> None:
    """Each table has exactly the keys of its schema, each with its default."""
    documented = {row[0].strip("`"): row[2] for row in section(DOCS / "settings.md", f"{name}.json").rows()}
    assert documented == dict(schema_keys(schema(name)))


@pytest.mark.parametrize("name", SETTINGS_FILES)
def test_settings_snippets_are_valid(name: str) -> None:
    """Each settings file has an example, and every example passes its schema."""
    snippets = section(DOCS / "settings.md", f"{name}.json").snippets("json")
    assert snippets
    for snippet in snippets:
        Draft202012Validator(schema(name)).validate(json.loads(snippet))


def test_every_settings_snippet_belongs_to_a_file() -> None:
    """No JSON example of the page escapes the check above."""
    homes = [one.heading for one in sections(DOCS / "settings.md") if one.snippets("json")]
    assert homes == [f"{name}.json" for name in SETTINGS_FILES]


# ---------------------------------------------------------------------- pymodules


class Variant(NamedTuple):
    """The files that one section of a page shows together."""

    page: str
    heading: str
    files: dict[str, str]


def variants() -> list[Variant]:
    found = []
    for page in PYMODULE_PAGES:
        for one in sections(page):
            files = {snippet.split("\n")[0].removeprefix("# "): snippet for snippet in one.snippets("python")}
            if files:
                found.append(Variant(page.stem, one.heading, files))
    return found


@pytest.fixture(scope="module")
def digits_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data home in which a small version of the example has trained for an epoch."""
    home = tmp_path_factory.mktemp("docs")
    assert helper.main(["new", "digits", "--data-home", str(home)]) == 0
    images = home / "experiment_settings/digits/pymodules/utils/images.py"
    small = re.sub(r'(arrays\["\w+"\])', r"\1[:250]", images.read_text())
    assert small.count("[:250]") == 2
    images.write_text(small)
    weights = {"model.classifier.weight": torch.ones(10, 64), "model.classifier.bias": torch.zeros(10)}
    (home / "module_ckps").mkdir()
    torch.save(weights, home / "module_ckps/pretrained.pt")
    done = run_process(home, "--stop-after-epoch", "1", name="digits")
    assert done.returncode == 0, done.stderr
    words = ["digits:best:backbone", "digits:frzn:edges", "--out", str(home / "module_ckps/parts.pt")]
    assert helper.main(["export", *words, "--data-home", str(home)]) == 0
    return home


class EndsInsideAnEpoch(Disk):
    """Lets a run end right after the commit of step 2 of epoch 2."""

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if target == target.parents[2] / "experiment_results/parts/state.json":
            progress = json.loads(target.read_text())["progress"]
            if (progress["epoch"], progress["step"]) == (2, 2):
                raise KeyboardInterrupt


@pytest.mark.parametrize("variant", variants(), ids=lambda variant: f"{variant.page}: {variant.heading}")
def test_pymodule_snippets_run_and_resume(variant: Variant, digits_home: Path, tmp_path: Path) -> None:
    """Put into the example, the files of a section train, and train to the same bits when interrupted and resumed."""
    home = shutil.copytree(digits_home, tmp_path / "home")
    for name in ("whole", "parts"):
        folder = shutil.copytree(home / "experiment_settings/digits", home / "experiment_settings" / name)
        for path, text in variant.files.items():
            (folder / "pymodules/trackers").mkdir(exist_ok=True)
            assert (folder / path).parent.is_dir(), f"{path} must say where the snippet belongs"
            (folder / path).write_text(text)
    words = ("--stop-after-epoch", "2")
    run_inside(home, "--set", COMMIT_OFTEN, *words, name="whole")
    with contextlib.suppress(KeyboardInterrupt):
        run_inside(home, "--set", COMMIT_OFTEN, *words, name="parts", disk=EndsInsideAnEpoch())
    # The lock goes with the objects of the run that was interrupted.
    gc.collect()
    assert inspect_results(ExperimentPaths(home, "parts")).progress == Progress(TRAINING, epoch=2, step=2)
    run_inside(home, "--resume", *words, name="parts")
    results = home / "experiment_results"
    assert (results / "whole/data/loss_weight_data/loss_weights_2.json").exists()
    assert first_difference(results / "whole/data", results / "parts/data") is None


@pytest.mark.parametrize("family", [*FAMILIES, *SINGLES])
def test_every_family_has_a_page_with_an_example(family: str) -> None:
    """Each family has a page that shows at least one file of it and says what is saved."""
    page = DOCS / "pymodules" / f"{family}.md"
    shown = [path for variant in variants() if variant.page == family for path in variant.files]
    assert any(path.startswith((f"pymodules/{family}/", f"pymodules/{family}.py")) for path in shown)
    assert section(page, "In the results").body.strip()


@pytest.mark.parametrize("family", BASES)
def test_every_method_of_a_base_class_is_documented(family: str) -> None:
    """The contract on a page has every public method of the base class and of what it inherits."""
    text = (DOCS / "pymodules" / f"{family}.md").read_text()
    kinds = [kind for kind in BASES[family].__mro__ if kind.__module__.startswith("pipeline.")]
    methods = {name for kind in kinds for name, value in vars(kind).items() if inspect.isfunction(value)}
    for name in methods - {"__init__"}:
        signature = inspect.signature(getattr(BASES[family], name))
        arguments = ", ".join(list(signature.parameters)[1:])
        assert f"`{name}({arguments})`" in text, f"{name}({arguments}) is not documented"


def test_every_exported_name_is_documented() -> None:
    """Whatever an author may import is explained somewhere in docs/pymodules."""
    text = "\n".join(page.read_text() for page in PYMODULE_PAGES)
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
    text = "\n".join(page.read_text() for page in PYMODULE_PAGES)
    assert f"| `{shown}` |" in text


# ---------------------------------------------------------------------- results


def path_patterns() -> list[str]:
    """Return the documented paths below data/ as regular expressions."""
    cells = [row[0] for row in section(DOCS / "results.md", "data/").rows()]
    paths = [path for cell in cells for path in re.findall(r"`([^`]+)`", cell)]
    return [re.sub(r"\b[A-Z]+\b|(?<=_)N\b", "[^/]+", path) + (".+" if path.endswith("/") else "") for path in paths]


def test_paths_of_results_are_documented(digits_home: Path) -> None:
    """Every file below data/ fits a documented path, and every documented path has files."""
    data = digits_home / "experiment_results/digits/data"
    files = [path.relative_to(data).as_posix() for path in data.rglob("*") if path.is_file()]
    patterns = path_patterns()
    assert [file for file in files if not any(re.fullmatch(one, file) for one in patterns)] == []
    unused = [one for one in patterns if not any(re.fullmatch(one, file) for file in files)]
    # The ready checkpoint savers have no state.
    assert unused == ["checkpoint_saver_data/.+"]


def test_top_of_results_is_documented(digits_home: Path) -> None:
    """The tree of the page names everything that lies in a results folder."""
    tree = section(DOCS / "results.md", "Results").body
    for entry in (digits_home / "experiment_results/digits").iterdir():
        assert f" {entry.name}{'/' if entry.is_dir() else ''}" in tree


def results_snippets() -> list[str]:
    return [snippet for one in sections(DOCS / "results.md") for snippet in one.snippets("python")]


@pytest.mark.parametrize("snippet", results_snippets())
def test_snippets_that_read_results_work(snippet: str, digits_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are read as the page says, and nothing of this package is needed for it."""
    monkeypatch.chdir(digits_home)
    assert "pipeline" not in snippet
    exec(compile(snippet, os.fspath(DOCS / "results.md"), "exec"), {})


def test_sharded_experiment_of_the_page_trains_and_opens_with_torch(
    digits_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module with units of its own trains sharded, and its folder is read as the page says."""
    module, reading = (text for one in sections(DOCS / "sharding.md") for text in one.snippets("python"))
    home = shutil.copytree(digits_home, tmp_path / "home")
    folder = shutil.copytree(home / "experiment_settings/digits", home / "experiment_settings/sharded")
    (folder / module.split("\n")[0].removeprefix("# ")).write_text(module)
    run_inside(home, "--set", "training.parallelism=fsdp", "--stop-after-epoch", "0", name="sharded")
    monkeypatch.chdir(home)
    exec(compile(reading, os.fspath(DOCS / "sharding.md"), "exec"), {})


def test_changelog_has_this_version() -> None:
    """The version of the package has an entry."""
    headings = [one.heading for one in sections(ROOT / "CHANGELOG.md")]
    assert f"[{pipeline.__version__}]" in headings
