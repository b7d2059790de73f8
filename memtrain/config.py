"""The options of a run, from YAML and the command line.

Nothing here imports torch, so `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import difflib
import os
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from memtrain.command import BadInput, Option, check_name, read_arguments
from memtrain.options import EXCLUSIVE, GROUPS, RunConfig
from memtrain.rules import config_problems

RECIPES = Path(__file__).parent / "recipes"


_FIELDS = {f.name: f for f in fields(RunConfig)}
_TYPES = typing.get_type_hints(RunConfig)


def parse_value(name: str, value: Any) -> Any:
    """A value of YAML, or the text of the command line, in the type of option `name`. Raises BadInput."""
    meta = _FIELDS[name].metadata
    union = typing.get_origin(_TYPES[name]) in (typing.Union, types.UnionType)
    kinds = typing.get_args(_TYPES[name]) if union else (_TYPES[name],)
    if typing.get_origin(kinds[0]) is list:
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if meta["choices"]:  # a set of words: commas between them too, and none of them
            words = [word for item in values for word in str(item).split(",") if word and word.lower() != "none"]
            if wrong := [word for word in words if word not in meta["choices"]]:
                raise BadInput(f"{name}={wrong[0]}: want any of {', '.join(meta['choices'])}; change --{name}")
            return words
        if not values or not all(isinstance(v, str) and v for v in values):
            raise BadInput(f"{name}={value!r}: want one or more names; write --{name} NAME ...")
        return values
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null") and type(None) in kinds
                         and "none" not in meta["choices"]):
        if type(None) in kinds:
            return None
        raise BadInput(f"{name}={value}: want {_describe(name)}; leave the option out for the default")
    if bool in kinds:
        if isinstance(value, bool) or str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
    elif isinstance(value, bool):
        # YAML 1.1 reads a bare no, yes, on, off as a boolean: `mixed_precision: no` is the word no
        value = "yes" if value else "no"
    if int in kinds or float in kinds:
        if str(value) in meta["words"]:
            return str(value)
        try:
            number = int(value) if int in kinds and not isinstance(value, float) else float(value)
        except (TypeError, ValueError):
            number = None
        if int in kinds and isinstance(number, float):
            number = int(number) if number.is_integer() else None
        if number is not None and _in_range(number, meta):
            return number
    elif str in kinds and isinstance(value, (str, int, float)):
        value = str(value)
        if value and (not meta["choices"] or value in meta["choices"]):
            return value
        close = difflib.get_close_matches(value, meta["choices"], n=1)
        if close:
            raise BadInput(f"{name}={value}: want {_describe(name)}; did you mean {close[0]}?")
    raise BadInput(f"{name}={value}: want {_describe(name)}; change --{name}")


def _in_range(number: float, meta: Mapping[str, Any]) -> bool:
    # written so that nan fails, and infinity too
    low, high = meta["minimum"], meta["below"]
    return (low is None or number >= low) and number < (float("inf") if high is None else high)


def option_kinds(names: Iterable[str]) -> dict[str, Option]:
    """How the command line spells these options."""
    hints = {name: _TYPES[name] for name in names}
    return {name: Option(many=typing.get_origin(hint) is list, flag=bool in (typing.get_args(hint) or (hint,)))
            for name, hint in hints.items()}


def _describe(name: str) -> str:
    meta, hint = _FIELDS[name].metadata, _TYPES[name]
    kinds = typing.get_args(hint) or (hint,)
    if bool in kinds:
        return "true or false"
    if meta["choices"]:
        return "one of " + ", ".join(meta["choices"])
    if int in kinds or float in kinds:
        bounds = [f">= {meta['minimum']:g}"] if meta["minimum"] is not None else []
        bounds += [f"< {meta['below']:g}"] if meta["below"] is not None else []
        number = " ".join(["an integer" if int in kinds else "a number", " and ".join(bounds)]).strip()
        return " or ".join([number, *meta["words"]])
    return "text"


def read_recipe(path_or_name: str) -> dict[str, Any]:
    """Options of a YAML file, or of the recipe of that name. Raises BadInput."""
    import yaml

    path = Path(path_or_name)
    if not path.is_file() and (RECIPES / f"{path_or_name}.yaml").is_file():
        path = RECIPES / f"{path_or_name}.yaml"
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
        raise BadInput(f"recipe {path_or_name}: no such file; give a YAML file or one of {names}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInput(f"recipe {path}: cannot be read ({' '.join(str(error).split())}); give a YAML file") from None
    if not isinstance(loaded, dict):
        raise BadInput(f"recipe {path}: want lines of `option: value`, found {type(loaded).__name__}; see memtrain/recipes")
    return {str(key): value for key, value in loaded.items()}


def make_config(*sources: Mapping[str, Any], problems: Sequence[str] = ()) -> RunConfig:
    """The options of all sources, later ones first in rank. Raises one BadInput with a line for every problem."""
    found = list(problems)
    merged: dict[str, Any] = {}
    for source in sources:
        given = {name: value for name, value in source.items() if check_name(name, "", _FIELDS, found)}
        for name in EXCLUSIVE:  # --epochs on the command line replaces max_steps of the recipe, and the other way round
            if str(given.get(name)).lower() not in ("none", "null"):
                for other in EXCLUSIVE:
                    merged.pop(other, None)
        merged |= given
    parsed = {}
    for name, value in merged.items():
        try:
            parsed[name] = parse_value(name, value)
        except BadInput as error:
            found.append(str(error))
            if name in EXCLUSIVE:
                parsed[name] = sys.maxsize  # it was given: no complaint about its absence too
    config = RunConfig(**parsed)
    found += config_problems(config)
    if found:
        raise BadInput("\n".join(dict.fromkeys(found)))
    return config


def load_config(arguments: Sequence[str], default_recipe: str = "tiny") -> RunConfig:
    """`[RECIPE.yaml] [--key value ...]` -> RunConfig. Raises one BadInput with a line for every problem."""
    positionals, options, problems = read_arguments(arguments, option_kinds(_FIELDS))
    if len(positionals) > 1:
        problems.append(f"{' '.join(positionals[1:])}: want at most one recipe, before the options; write --key value")
    recipe: dict[str, Any] = {}
    try:
        recipe = read_recipe(positionals[0] if positionals else default_recipe)
    except BadInput as error:
        problems.append(str(error))
        options.setdefault("max_steps", 1)  # so that the missing recipe is the only complaint about it
    return make_config(recipe, options, problems=problems)


def save_config(config: RunConfig, path: Path) -> None:
    """Write the options as YAML, whole or not at all."""
    import yaml

    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(yaml.safe_dump(asdict(config), sort_keys=False), encoding="utf-8")
    os.replace(temporary, path)


def changed_options(before: Mapping[str, Any], after: RunConfig) -> list[str]:
    """Options that make `after` another run than the one that wrote `before` (a resolved config.yaml)."""
    return [name for name, f in _FIELDS.items()
            if not f.metadata["may_change"] and name in before and before[name] != getattr(after, name)]


def help_text(usage: str) -> str:
    """Every option with its default, grouped, for `--help`."""
    titles = {first: title for title, first in GROUPS.items()}
    lines = [usage]
    defaults = RunConfig()
    for name, f in _FIELDS.items():
        if name in titles:
            lines.append(f"\n{titles[name]}:")
        values = " | ".join(f.metadata["choices"]) or _describe(name)
        default = getattr(defaults, name)
        shown = " ".join(default) if isinstance(default, list) else default
        lines.append(f"  --{name:<24}{f.metadata['text']}  [{values}; default {shown}]")
    return "\n".join(lines)
