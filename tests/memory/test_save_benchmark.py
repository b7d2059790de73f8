"""The pause of training for a checkpoint that is written behind it."""

import json

import pytest
from jobs import run_main


@pytest.mark.parametrize(("shape", "most"), [("tiny", 1.0), pytest.param("small", 0.25, marks=pytest.mark.slow)])
def test_pause(tmp_path, shape, most):
    outcome = run_main("benchmark", ["save", "--shape", shape, "--repeats", 2, "--json", tmp_path / "save.json"])
    assert outcome.code == 0 and "ratio" in outcome.out, outcome
    (row,) = json.loads((tmp_path / "save.json").read_text())["rows"]
    assert 0 < row["ratio"] < most and row["writing_seconds"] > row["pause_seconds"]
    assert row["saved_bytes"] > 12 * 5e6, "weights and two moments"
