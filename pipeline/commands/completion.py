"""Print what makes a shell complete verbs, options and names of experiments."""

from __future__ import annotations

import argparse
from importlib import import_module

from pipeline.command_lines import CONSOLE_COMMAND
from pipeline.paths import DATA_HOME_VARIABLE, RESULTS_FOLDER, SETTINGS_FOLDER
from pipeline.verbs import VERBS

EXAMPLE = """\
examples:
  source <(training-pipeline completion bash)
  source <(training-pipeline completion zsh)
  training-pipeline completion fish | source"""
# Both shells run this: zsh emulates the completion of bash.
_BASH = """\
_training_pipeline_names() {{
  local home="${{{variable}:-.}}" folder
  for folder in "$home"/{settings}/*/ "$home"/{results}/*/; do
    [ -d "$folder" ] && basename "$folder"
  done | sort -u
}}
_training_pipeline() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{verbs}"
  elif [[ "$word" == -* ]]; then
    case "${{COMP_WORDS[1]}}" in
{options}
    esac
  else
    words="$(_training_pipeline_names)"
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -F _training_pipeline {command}
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])


def execute(arguments: argparse.Namespace) -> int:
    options = {verb: _options(verb) for verb in VERBS}
    if arguments.shell == "fish":
        print(_fish(options), end="")
    else:
        print((_ZSH if arguments.shell == "zsh" else "") + _bash(options), end="")
    return 0


def _options(verb: str) -> dict[str, str]:
    """Return the long options of a verb with what they mean."""
    module = import_module(f"pipeline.commands.{verb.replace('-', '_')}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    parser.add_argument("--data-home", help="where experiments lie")
    return {
        option: str(action.help).split(";")[0]
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }


def _bash(options: dict[str, dict[str, str]]) -> str:
    cases = "\n".join(f'      {verb}) words="{" ".join(known)}" ;;' for verb, known in options.items())
    return _BASH.format(
        variable=DATA_HOME_VARIABLE,
        settings=SETTINGS_FOLDER,
        results=RESULTS_FOLDER,
        verbs=" ".join(options),
        options=cases,
        command=CONSOLE_COMMAND,
    )


def _fish(options: dict[str, dict[str, str]]) -> str:
    complete = f"complete -c {CONSOLE_COMMAND}"
    home = f"(set -q {DATA_HOME_VARIABLE}; and echo ${DATA_HOME_VARIABLE}; or echo .)"
    names = f"(path basename {home}/{{{SETTINGS_FOLDER},{RESULTS_FOLDER}}}/*/ 2>/dev/null | sort -u)"
    lines = [f"{complete} -f"]
    for verb, known in options.items():
        lines.append(f"{complete} -n __fish_use_subcommand -a {verb} -d {_quoted(VERBS[verb])}")
        for option, meaning in known.items():
            is_verb = f'"__fish_seen_subcommand_from {verb}"'
            lines.append(f"{complete} -n {is_verb} -l {option.removeprefix('--')} -d {_quoted(meaning)}")
    lines.append(f"{complete} -n 'not __fish_use_subcommand' -a '{names}'")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
