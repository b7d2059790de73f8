"""What all scripts share: reading a command line, ending with the right exit code, writing a JSON file whole."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class BadInput(Exception):
    """Input that cannot be used. Each line of the message says what was found, what is wanted and the remedy.

    Scripts print it on stderr without a traceback and end with exit code 2.
    """


class TrainingStopped(Exception):
    """Training ended to protect what it has. Scripts print the message on stderr and end with exit code 3."""


def run_script(main: Callable[[list[str]], int]) -> None:
    """Run a script's `main(arguments)` and exit with its code, or with that of the error it raised."""
    try:
        code = main(sys.argv[1:])
    except BadInput as error:
        # every process of a run finds the same problems: one of them speaks
        if os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        code = 2
    except TrainingStopped as error:
        print(error, file=sys.stderr)
        code = 3
    except KeyboardInterrupt:
        print("\ninterrupted; the same command does it again, or goes on", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader of a pipe (head, less) went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


@dataclass(frozen=True)
class Option:
    """An option of a command line. many: takes all words up to the next option; flag: may stand without a value."""

    many: bool = False
    flag: bool = False


def check_name(name: str, prefix: str, known: Iterable[str], problems: list[str]) -> bool:
    """Whether `name` is known; if not, `problems` gets a line with the nearest name."""
    if name in known:
        return True
    close = difflib.get_close_matches(name, list(known), n=1)
    problems.append(f"{prefix}{name}: no such option; " + (f"did you mean {prefix}{close[0]}?" if close else "see --help"))
    return False


def read_arguments(arguments: Sequence[str], known: Mapping[str, Option]) -> tuple[list[str], dict[str, Any], list[str]]:
    """(positionals, options, problems) of `WORD ... --key value --key=value --flag`. Values stay text."""
    positionals: list[str] = []
    options: dict[str, Any] = {}
    problems: list[str] = []
    i = 0
    while i < len(arguments):
        word = arguments[i]
        i += 1
        if not word.startswith("--"):
            positionals.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        option = known[name] if check_name(name, "--", known, problems) else None
        values = [text] if equals else []
        while not equals and i < len(arguments) and not arguments[i].startswith("--") and (
                not values or (option is not None and option.many)):
            values.append(arguments[i])
            i += 1
        if option is None:
            continue
        if name in options:
            problems.append(f"--{name}: given twice; give it once")
        if not values and not option.flag:
            problems.append(f"--{name}: no value; write --{name} VALUE")
        else:
            options[name] = values if option.many else (values[0] if values else "true")
    return positionals, options, problems


def script_arguments(arguments: Sequence[str], usage: str, positionals: Sequence[str],
                     **types: Callable[[str], Any]) -> tuple[list[str], dict[str, Any]]:
    """(positionals, options) of a script that takes the named positionals and options of these types.

    Prints `usage` and exits for `--help`. Raises one BadInput with a line for every problem.
    """
    if "--help" in arguments or "-h" in arguments:
        print(usage.strip())
        raise SystemExit(0)
    words, texts, problems = read_arguments(arguments, {name: Option() for name in types})
    if len(words) < len(positionals):
        problems.append(f"{positionals[len(words)]} is missing; see --help")
    if len(words) > len(positionals):
        problems.append(f"{words[len(positionals)]}: one word too many; see --help")
    options = {}
    for name, text in texts.items():
        try:
            options[name] = types[name](text)
        except BadInput as error:
            problems.append(f"--{name} {text}: {error}; see --help")
        except ValueError:
            problems.append(f"--{name} {text}: want {'an integer' if types[name] is int else 'a number'}; see --help")
    if problems:
        raise BadInput("\n".join(problems))
    return words, options


def at_least(kind: type, low: float, below: float = float("inf")) -> Callable[[str], Any]:
    """A type for `script_arguments`: a number of `kind` (int or float), low <= number < below."""
    def parse(text: str) -> Any:
        number = kind(text)
        if not low <= number < below:  # written so that nan fails
            raise BadInput(f"want a number >= {low:g}" + (f" and < {below:g}" if below < float("inf") else ""))
        return number
    return parse


def one_of(*choices: str) -> Callable[[str], str]:
    """A type for `script_arguments`: one of these words."""
    def parse(text: str) -> str:
        if text not in choices:
            raise BadInput(f"want one of {', '.join(choices)}")
        return text
    return parse


def check_writable(path: Path) -> None:
    """Raise BadInput when a file cannot be put at `path`; writes nothing."""
    folder = path.parent
    try:
        if path.exists() and not path.is_file():
            raise BadInput(f"--json {path}: is not a regular file; give the name of a file to write")
        if not folder.is_dir():
            raise BadInput(f"--json {path}: no folder {folder}; create it or give another file")
    except OSError as error:  # a name too long, a folder that may not be searched
        raise BadInput(f"--json {path}: cannot be written ({error.strerror}); give another file") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"--json {path}: folder {folder} may not be written; give a file in another folder")


def write_json(path: Path, content: Any) -> None:
    """Strict JSON (ValueError on nan or infinity), whole or not at all. Raises BadInput where it cannot be written."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    check_writable(path)
    try:
        write_whole(path, text)
    except OSError as error:
        raise BadInput(f"--json {path}: cannot be written ({error.strerror}); give another file") from None


def write_whole(path: Path, text: str) -> None:
    """A file that holds all of `text`, flushed, or is as it was before. Raises OSError."""
    target = Path(os.path.realpath(path))  # a link stays a link
    temporary = target.with_name(f".{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
