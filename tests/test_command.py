"""What all scripts share, without starting one."""

from __future__ import annotations

import json
import math
import os

import pytest

from memtrain.command import (
    BadInput,
    Option,
    TrainingStopped,
    at_least,
    check_name,
    check_writable,
    one_of,
    read_arguments,
    run_script,
    script_arguments,
    write_json,
)

KNOWN = {"seed": Option(), "dataset": Option(many=True), "compile": Option(flag=True)}


@pytest.mark.parametrize(("arguments", "words", "options"), [
    ([], [], {}),
    (["tiny", "--seed", "1"], ["tiny"], {"seed": "1"}),
    (["--seed=1", "tiny"], ["tiny"], {"seed": "1"}),
    (["--seed="], [], {"seed": ""}),
    (["--seed", "-1"], [], {"seed": "-1"}),
    (["--compile"], [], {"compile": "true"}),
    (["--compile", "false", "word"], ["word"], {"compile": "false"}),
    (["--dataset", "a", "b", "--seed", "3"], [], {"dataset": ["a", "b"], "seed": "3"}),
    (["--dataset=a"], [], {"dataset": ["a"]}),
    (["--seed=a=b"], [], {"seed": "a=b"}),
])
def test_read_arguments(arguments, words, options):
    assert read_arguments(arguments, KNOWN) == (words, options, [])


@pytest.mark.parametrize(("arguments", "problem"), [
    (["--sed", "1"], "--sed: no such option; did you mean --seed?"),
    (["--seed"], "--seed: no value; write --seed VALUE"),
    (["--seed", "--compile"], "--seed: no value; write --seed VALUE"),
    (["--seed", "1", "--seed", "2"], "--seed: given twice; give it once"),
])
def test_arguments_that_are_refused(arguments, problem):
    assert read_arguments(arguments, KNOWN)[2] == [problem]


def test_the_value_of_an_unknown_option_is_no_word():
    assert read_arguments(["--sed", "1", "--dataset", "x"], KNOWN)[0] == []


def test_hyphens_are_underscores():
    assert read_arguments(["--batch-size", "2"], {"batch_size": Option()})[1] == {"batch_size": "2"}


def test_check_name():
    found: list[str] = []
    assert check_name("seed", "--", KNOWN, found) and not found
    assert not check_name("qqqq", "", KNOWN, found) and found == ["qqqq: no such option; see --help"]


def test_script_arguments_report_everything_together():
    with pytest.raises(BadInput) as caught:
        script_arguments(["a", "b", "--top_k", "0", "--heat", "x", "--kind", "z", "--sed", "1"], "usage", ["PATH"],
                         top_k=at_least(int, 1), heat=at_least(float, 0), kind=one_of("x", "y"), seed=int)
    lines = str(caught.value).splitlines()
    assert len(lines) == 5, lines
    for word in ("b: one word too many", "--top_k 0: want a number >= 1", "--heat x: want a number",
                 "--kind z: want one of x, y", "did you mean --seed"):
        assert any(word in line for line in lines), (word, lines)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-0.1"])
def test_numbers_are_finite_and_in_range(text):
    with pytest.raises(BadInput):
        at_least(float, 0)(text)


def test_help_prints_and_ends(capsys):
    with pytest.raises(SystemExit) as end:
        script_arguments(["--help"], "\nusage\n", [])
    assert end.value.code == 0 and capsys.readouterr().out == "usage\n"


@pytest.mark.parametrize(("error", "code", "said"), [
    (BadInput("one\ntwo"), 2, "one\ntwo\n"), (TrainingStopped("stopped"), 3, "stopped\n"), (None, 7, ""),
])
def test_exit_codes(monkeypatch, capsys, error, code, said):
    monkeypatch.delenv("RANK", raising=False)

    def main(arguments):
        if error is not None:
            raise error
        return 7

    with pytest.raises(SystemExit) as end:
        run_script(main)
    assert end.value.code == code and capsys.readouterr().err == said


def test_other_errors_keep_their_traceback():
    def main(arguments):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_script(main)


def test_one_process_speaks(monkeypatch, capsys):
    def main(arguments):
        raise BadInput("found")

    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end:
        run_script(main)
    assert end.value.code == 2 and capsys.readouterr().err == ""


def test_write_json_is_whole_or_absent(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": [1, None]})
    assert json.loads(path.read_text()) == {"a": [1, None]}
    with pytest.raises(ValueError):
        write_json(path, {"a": math.nan})
    assert json.loads(path.read_text()) == {"a": [1, None]}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    link = tmp_path / "link.json"
    link.symlink_to(path)
    write_json(link, {"b": 2})
    assert link.is_symlink() and json.loads(path.read_text()) == {"b": 2}


def test_where_nothing_can_be_written(tmp_path):
    for path, word in ((tmp_path, "not a regular file"), (tmp_path / "no" / "a.json", "no folder"),
                       (tmp_path / ("x" * 300), "cannot be written")):
        with pytest.raises(BadInput, match=word):
            check_writable(path)
        with pytest.raises(BadInput, match=word):
            write_json(path, {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(BadInput, match="may not be written"):
        check_writable(tmp_path / "a.json")


def test_ctrl_c_where_nothing_is_to_save(capsys, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["x"])
    with pytest.raises(SystemExit) as end:
        run_script(interrupted)
    err = capsys.readouterr().err
    assert end.value.code == 130 and "interrupted" in err and "Traceback" not in err
