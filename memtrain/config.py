"""The options of a run, from YAML and the command line.

Nothing here imports torch, so `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import types
import typing
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from memtrain.command import BadInput, Option, check_name, read_arguments
from memtrain.options import EXCLUSIVE, GROUPS, RunConfig
from memtrain.rules import config_problems

RECIPES = Path(__file__).parent / "recipes"
NO_LETTERS = {"Cc", "Cs", "Zl", "Zp"}  # control characters, halves of surrogate pairs, ends of lines
LARGEST = 2**63  # more than any counter or size of this world
LONGEST_NAME_BYTES, LONGEST_PATH_BYTES = 255, 4000  # of Linux file systems; less than PATH_MAX, as our own names come below
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

_FIELDS = {f.name: f for f in fields(RunConfig)}
_TYPES = typing.get_type_hints(RunConfig)


def parse_value(name: str, value: Any) -> Any:
    """A value of YAML, or the text of the command line, in the type of option `name`. Raises BadInput."""
    meta = _FIELDS[name].metadata
    if any(unicodedata.category(letter) in NO_LETTERS for item in (value if isinstance(value, list) else [value])
           if isinstance(item, str) for letter in item):
        raise BadInput(f"{name}={value!r}: holds characters that no value has; change --{name}")
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
        for item in values:
            _check_text(name, item)
        return values
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null") and type(None) in kinds
                         and "none" not in meta["choices"]):
        if type(None) in kinds:
            return None
        raise BadInput(f"{name}={value}: want {_describe(name)}; leave the option out for the default")
    if bool in kinds:
        if str(value).lower() in BOOLEANS:
            return BOOLEANS[str(value).lower()]
    elif isinstance(value, bool):
        # programs that read YAML 1.1 take a bare no for a boolean: `mixed_precision: no` is the word no
        value = "yes" if value else "no"
    if int in kinds or float in kinds:
        if str(value) in meta["words"]:
            return str(value)
        number = _number(value, int in kinds)
        if number is not None and _in_range(number, meta):
            return number
    elif str in kinds and isinstance(value, (str, int, float)):
        value = str(value)
        if value and (not meta["choices"] or value in meta["choices"]):
            _check_text(name, value)
            return value
        close = difflib.get_close_matches(value, meta["choices"], n=1)
        if close:
            raise BadInput(f"{name}={value}: want {_describe(name)}; did you mean {close[0]}?")
    raise BadInput(f"{name}={value}: want {_describe(name)}; change --{name}")


def _check_text(name: str, text: str) -> None:
    """Raises BadInput for a text that can be neither a path nor a name."""
    if (not text.isascii() and text != text.encode("utf-8", "replace").decode()) or any(ord(letter) < 32 for letter in text):
        raise BadInput(f"{name}={text!r}: holds letters that no name has; change --{name}")
    if any(len(part.encode()) > LONGEST_NAME_BYTES for part in text.split("/")) or len(text.encode()) > LONGEST_PATH_BYTES:
        raise BadInput(f"{name}={text[:40]}...: longer than a path may be; change --{name}")
    if os.path.expanduser(text).startswith("~"):
        raise BadInput(f"{name}={text}: no such user's home; change --{name}")


def _number(value: Any, whole: bool) -> int | float | None:
    """The number that a value or its text is (`whole`: an integer, which may be written 1e3), or None."""
    try:
        if whole and not isinstance(value, float):
            with contextlib.suppress(ValueError):
                return int(value)
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if not whole else int(number) if number.is_integer() else None


def _in_range(number: float, meta: Mapping[str, Any]) -> bool:
    # written so that nan fails, and infinity too
    low, high = meta["minimum"], meta["below"]
    largest = LARGEST if isinstance(number, int) else float("inf")
    return (low is None or number >= low) and number < (largest if high is None else high)


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


def _text_loader() -> Any:
    """A reader of YAML in which a value is the text that stands there, as on a command line, and a key stands once.

    YAML 1.1 makes a boolean of `no` and `on`, text of `1e-4`, 174 of `0256`, and lets a second `seed:` win without a word.
    """
    import yaml

    class TextLoader(yaml.BaseLoader):
        def construct_scalar(self, node: yaml.ScalarNode) -> Any:
            return None if node.style is None and node.value in ("", "~", "null", "Null", "NULL") else node.value

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and names.count(key.value) > 1:
                    lines = [other.start_mark.line + 1 for other, _ in node.value if other.value == key.value]
                    raise yaml.YAMLError(f"{key.value} stands in lines {' and '.join(map(str, lines))}, want it once")
            return super().construct_mapping(node, deep)

    return TextLoader


def read_recipe(path_or_name: str) -> dict[str, Any]:
    """Options of a YAML file, or of the recipe of that name, each the text (or texts) that stands there. Raises BadInput."""
    import yaml

    path = Path(path_or_name)
    if not path.is_file() and (RECIPES / f"{path_or_name}.yaml").is_file():
        path = RECIPES / f"{path_or_name}.yaml"
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_text_loader())
    except FileNotFoundError:
        names = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
        raise BadInput(f"recipe {path_or_name}: no such file; give a YAML file or one of {names}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        remedy = "indent with spaces instead of tabs" if "\\t" in str(error) else "give a YAML file"
        raise BadInput(f"recipe {path}: cannot be read ({' '.join(str(error).split())}); {remedy}") from None
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
    with temporary.open("w", encoding="utf-8") as file:
        yaml.safe_dump(asdict(config), file, sort_keys=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def changed_options(before: Mapping[str, Any], after: RunConfig) -> list[str]:
    """Options that make `after` another run than the one that wrote `before` (a resolved config.yaml)."""
    def was(name: str) -> Any:
        with contextlib.suppress(BadInput):
            return parse_value(name, before[name])

    return [name for name, f in _FIELDS.items()
            if not f.metadata["may_change"] and name in before and was(name) != getattr(after, name)]


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
