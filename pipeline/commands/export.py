"""Put modules of experiments and of foreign files into one file of weights."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pipeline.errors import UsageError, nearest
from pipeline.evaluation.exported_module import SUFFIXES, Exported, from_experiment, from_file, writer
from pipeline.paths import ExperimentPaths, data_home, results_names
from pipeline.serialization.torch_files import SAFETENSORS, safetensors_package
from pipeline.system.files import check_output, write_output
from pipeline.system.formatting import shown_bytes, shown_number

EXAMPLE = """\
examples:
  training-pipeline export digits --out digits.pt
  training-pipeline export left:best:trunk right:last:head --out 2.safetensors
  training-pipeline export left right --rename right:head=other --out both.pt
  training-pipeline export resnet.pth --strip-prefix module. --out clean.pt"""
_FILE = re.compile(r"(?P<file>.+\.(?:pt|pth|safetensors))(?::(?P<entry>[^:]+))?")
_MAX_SHOWN = 10
_MODULE_NAME = re.compile(r"[A-Za-z0-9_-]+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sources = "EXP, EXP:POOL or EXP:POOL:MODULE (default: best), or a .pt, .pth or .safetensors FILE or FILE:MODULE"
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=sources)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a .pt or .safetensors file")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    parser.add_argument("--trained-only", action="store_true", help="leave the frozen modules of experiments out")
    parser.add_argument(
        "--adapters", action="store_true", help="leave out frozen modules and all parameters that were not trained"
    )
    _add_pairs(parser, "--rename", "MODULE=NEW", "rename a module; repeatable")
    parser.add_argument("--strip-prefix", default="", metavar="TEXT", help="cut it off the keys of foreign files")
    _add_pairs(parser, "--key-map", "OLD=NEW", "rename keys of foreign files, or how they begin; repeatable")


def _add_pairs(parser: argparse.ArgumentParser, name: str, metavar: str, help_text: str) -> None:
    def parse_pair(word: str) -> tuple[str, str]:
        old, equals, new = word.partition("=")
        if not old or not equals:
            raise argparse.ArgumentTypeError(f"must be {metavar}, but is {word!r} instead")
        return old, new

    parser.add_argument(name, type=parse_pair, action="append", default=[], metavar=metavar, help=help_text)


def execute(arguments: argparse.Namespace) -> int:
    # Before anything is read, which may take long: whether the file can be written at all.
    check_output(arguments.out, SUFFIXES, may_replace=arguments.force)
    if arguments.out.suffix == SAFETENSORS:
        safetensors_package(arguments.out)
    exported: list[Exported] = []
    for word in arguments.sources:
        # Frozen modules come with every pool of an experiment, and are the same in all of them.
        known = {module.full_name for module in exported if module.is_frozen}
        exported += [module for module in _read(word, arguments) if module.full_name not in known]
    if not exported:
        raise UsageError(f"Nothing to export: {', '.join(arguments.sources)} has no modules.")
    if (arguments.strip_prefix or arguments.key_map) and not any(module.is_foreign for module in exported):
        raise UsageError("--strip-prefix and --key-map clean files, but all sources are experiments.")
    modules = _rename(exported, dict(arguments.rename))
    for number, (module, full_name) in enumerate(modules):
        same = [other_name for other, other_name in modules[:number] if other.name == module.name]
        if same:
            raise UsageError(
                f"Every module needs a name of its own, but {same[0]} and {full_name} are both {module.name!r}.",
                f"--rename {full_name}=NEW, or name the modules you want as EXP:POOL:MODULE",
            )
    size = write_output(arguments.out, writer([module for module, _ in modules], arguments.out))
    print("\n".join(_lines(modules, arguments.out, size)))
    return 0


def _read(word: str, arguments: argparse.Namespace) -> list[Exported]:
    """Return the modules that one source stands for."""
    home = data_home(arguments.data_home)
    match = _FILE.fullmatch(word)
    # An experiment may have the name of a file, such as "net.pt", and then comes first.
    if match and word.split(":")[0] not in results_names(home):
        return from_file(Path(match["file"]), match["entry"], arguments.strip_prefix, dict(arguments.key_map))
    name, *rest = word.split(":")
    if len(rest) > 2 or not all(rest):
        raise UsageError(f"A source must be EXP, EXP:POOL, EXP:POOL:MODULE or a file, but is {word!r} instead.")
    pool = rest[0] if rest else "best"
    module = rest[1] if len(rest) > 1 else None
    return from_experiment(
        ExperimentPaths(home, name),
        pool,
        module,
        trained_only=arguments.trained_only or arguments.adapters,
        leaves_constants_out=arguments.adapters,
    )


def _rename(exported: list[Exported], renames: dict[str, str]) -> list[tuple[Exported, str]]:
    """Return each module under its new name, with the full name it had."""
    names: dict[str, str] = {}
    for old, new in renames.items():
        # The name becomes part of the keys of a safetensors file, in which a dot separates it from the rest.
        if not _MODULE_NAME.fullmatch(new):
            raise UsageError(f"A module's name must be letters, digits, '_' and '-', but is {new!r} instead.")
        meant = [module.full_name for module in exported if old in _names(module)]
        if len(meant) > 1:
            fix = f"--rename {meant[-1]}={new}"
            raise UsageError(f"--rename {old!r} must mean one module, but means {', '.join(meant)}.", fix)
        if not meant:
            known = [module.name for module in exported]
            listed = ", ".join(module.full_name for module in exported)
            raise UsageError(f"--rename {old!r} means no module; there are {listed}.{nearest(old, known)}")
        names[meant[0]] = new
    return [(replace(module, name=names.get(module.full_name, module.name)), module.full_name) for module in exported]


def _names(module: Exported) -> set[str]:
    """Return how a module may be called: by its name, with its experiment, and with its pool too."""
    return {module.name, f"{module.source.split(':')[0]}:{module.name}", module.full_name}


def _lines(modules: list[tuple[Exported, str]], out: Path, size: int) -> Iterator[str]:
    width = max(len(module.name) for module, _ in modules)
    digits = max(len(f"{module.num_parameters:,}") for module, _ in modules)
    for module, full_name in modules:
        # A renamed module is shown with the name it had.
        origin = module.source if module.full_name == full_name else full_name
        place = f" ({module.place})" if module.place else ""
        yield f"  {module.name:{width}}  {module.num_parameters:>{digits},} parameters  from {origin}{place}"
        if module.dropped:
            more = f" and {len(module.dropped) - _MAX_SHOWN} more" if len(module.dropped) > _MAX_SHOWN else ""
            yield f"  {'':{width}}  dropped: {', '.join(module.dropped[:_MAX_SHOWN])}{more}"
    count = sum(module.num_parameters for module, _ in modules)
    yield f"wrote {out}: {shown_number(len(modules), 'module', 'modules')}, {count:,} parameters, {shown_bytes(size)}"
