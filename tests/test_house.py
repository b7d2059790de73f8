"""The house rules: who may import whom, what answers without torch, and how long a file may be."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "memtrain"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "scripts").glob("*.py")])
SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))
LONGEST_FILE_LINES = 350
# each part may import itself and these
BELOW = {
    "command": set(),
    "float_formats": {"command"},
    "options": {"command"},
    "rules": {"options", "command"},
    "config": {"rules", "options", "command", "recipes"},
    "recipes": set(),
    **{name: {"config", "rules", "options", "float_formats", "command"} for name in ("model", "data", "optim")},
}
BELOW["training"] = {"optim", "data", "model", *BELOW["model"]}
BELOW["memory"] = {"training", *BELOW["training"]}
BELOW["scripts"] = {"memory", *BELOW["memory"]}
MAY_IMPORT_ACCELERATE = {"scripts", "training", "memory"}


def part(path: Path) -> str:
    """The part of the house that a source file belongs to."""
    if path.is_relative_to(PACKAGE):
        return path.relative_to(PACKAGE).with_suffix("").parts[0]
    return "scripts"


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, also under TYPE_CHECKING and inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides its direction; write the whole name"
            assert node.module is not None
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def parts_imported(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("memtrain.")} & {*BELOW, "scripts"}


def test_all_sources_are_seen():
    assert len(SOURCES) > 25 and {part(path) for path in SOURCES} - {"__init__"} <= set(BELOW), \
        {part(path) for path in SOURCES} - set(BELOW)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    if part(path) == "__init__":
        assert not imports(path), f"{path} must import nothing"
        return
    wrong = parts_imported(path) - {part(path)} - BELOW[part(path)]
    assert not wrong, f"{path.relative_to(ROOT)} ({part(path)}) imports {', '.join(sorted(wrong))}"
    names = {name.split(".")[0] for name in imports(path)}
    assert "scripts" not in names and "tests" not in names
    if part(path) not in MAY_IMPORT_ACCELERATE:
        assert "accelerate" not in names, f"{path.relative_to(ROOT)} imports accelerate"


def test_no_cycles_between_modules():
    """Also within a part; imports inside functions count."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    graph = {name: imports(path) & set(modules) - {name} for name, path in modules.items()}
    done: set[str] = set()
    while ready := [name for name in graph if name not in done and graph[name] <= done]:
        done |= set(ready)
    assert set(graph) == done, f"import cycle among {sorted(set(graph) - done)}"


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_packages_re_export_nothing(path):
    assert not imports(path)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_long(path):
    count = len(path.read_text(encoding="utf-8").splitlines())
    assert count <= LONGEST_FILE_LINES, f"{path.relative_to(ROOT)} has {count} lines"


WITHOUT_TORCH = """
import runpy, sys
sys.modules.update(dict.fromkeys(("torch", "accelerate", "transformers", "datasets")))  # importing one now fails
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "scripts" / f"{words[0]}.py")
    return subprocess.run([sys.executable, "-c", WITHOUT_TORCH, script, *words[1:]], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_answers_without_torch(script, word):
    done = without_torch(script, word)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert f"{script}.py" in done.stdout and len(done.stdout.splitlines()) > 3, "the command and its options are shown"


@pytest.mark.parametrize(("words", "said"), [
    (("pretrain", "--learning_rat", "1", "--seq_len", "0"), ("did you mean --learning_rate", "seq_len=0")),
    (("evaluate", "--jsn", "x"), ("did you mean --json", "want one")),
    (("generate", "--top_k", "0"), ("PATH is missing", "--top_k 0")),
    (("export_safetensors", "a", "b", "c", "--dtype", "int8"), ("c: one word too many", "--dtype int8")),
])
def test_mistyped_options_answer_without_torch(words, said):
    done = without_torch(*words)
    assert done.returncode == 2 and not done.stdout, done
    assert len(done.stderr.splitlines()) == 2, done.stderr
    assert all(word in done.stderr for word in said), done.stderr


def code_blocks(text: str) -> list[str]:
    """Lines of the fenced blocks of a Markdown text."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.M | re.S)
    return [line.strip() for block in blocks for line in block.splitlines()]


def test_ci_runs_the_test_command_of_the_readme():
    """A command that ends in pytest stands in the README, and .ci/run has the very same line."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line for line in code_blocks(readme) if re.search(r"\bpytest$", line)]
    assert commands, "the README names no test command"
    steps = [line.strip() for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()]
    assert all(command in steps for command in commands), commands
    assert os.access(ROOT / ".ci" / "run", os.X_OK), ".ci/run must be executable"
