"""`fstep trace`, over runs of the demo's model."""

import json

import pytest

from fstep import cli
from fstep.models.demo import demo_model


def fstep(capsys, *argv):
    """Exit code and both outputs of a command line."""
    code = cli.main([*map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that differ in the seed, and what they answered."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (3, 4):
        asked = ("--temperature", 0.8, "--seed", seed, "--max-tokens", 4, "--num-blocks", 64, "The sea is", "One two")
        assert cli.main(["generate", "--trace", str(folder / f"{seed}.jsonl"), *map(str, asked)]) == 0
    return folder


def test_show_has_a_line_for_each_call_and_step(runs, capsys):
    code, out, _ = fstep(capsys, "trace", "show", runs / "3.jsonl")
    lines = out.splitlines()
    assert code == 0
    assert f"model    {demo_model()}" in lines
    assert "           add 0: 3 prompt tokens" in lines
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 4
    assert steps[0].startswith("step    0  5 tokens of 0 3, 1 2; new 0, 1; gave 0 [")
    assert lines[-2].endswith("ended 0 (length), 1 (length)")
    assert lines[-1] == "4 steps, 2 requests, 8 output tokens"


def test_show_step_has_each_digest(runs, capsys):
    code, out, _ = fstep(capsys, "trace", "show", runs / "3.jsonl", "--step", 2)
    step = json.loads((runs / "3.jsonl").read_text().splitlines()[5])
    assert (code, step["step"]) == (0, 2)
    assert f"  logits                   {step['digests']['forward']['logits']}\n" in out
    assert "  num_scheduled_tokens     [1, 1]\n" in out
    code, _, err = fstep(capsys, "trace", "show", runs / "3.jsonl", "--step", 4)
    assert (code, err) == (2, f"fstep: error: step: 4: {runs / '3.jsonl'} has 4 steps, counted from 0\n")


def test_replay_finds_all_the_same_or_the_first_that_isnt(runs, capsys, tmp_path):
    assert fstep(capsys, "trace", "replay", runs / "3.jsonl")[:2] == (0, "4 of 4 steps are the same, bit for bit\n")
    lines = (runs / "3.jsonl").read_text().splitlines()
    step = json.loads(lines[5])
    sound = step["digests"]["sample"]["token_ids"]
    step["digests"]["sample"]["token_ids"] = "planted"
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join([*lines[:5], json.dumps(step), *lines[6:], ""]))
    code, out, _ = fstep(capsys, "trace", "replay", changed)
    assert (code, out) == (1, f"step 2, sample, token_ids: 'planted' against '{sound}'\n")


def test_diff_says_where_two_runs_part(runs, capsys):
    code, out, _ = fstep(capsys, "trace", "diff", runs / "3.jsonl", runs / "4.jsonl")
    assert (code, out) == (1, "step 0, add, sampling.seed: 3 against 4\n")
    code, out, _ = fstep(capsys, "trace", "diff", runs / "3.jsonl", runs / "3.jsonl")
    assert (code, out) == (0, "4 steps are the same\n")


@pytest.mark.parametrize("command", ["show", "replay", "diff"])
def test_a_file_that_is_no_trace_is_an_error(command, capsys):
    files = [__file__] * (1 + (command == "diff"))
    code, out, err = fstep(capsys, "trace", command, *files)
    assert (code, out) == (2, "")
    assert err.startswith(f"fstep: error: {__file__}: line 1: is no line of a trace")


def test_a_trace_without_an_engine_or_of_a_model_that_is_gone(runs, capsys, tmp_path):
    lines = (runs / "3.jsonl").read_text().splitlines()
    header = json.loads(lines[0])
    (tmp_path / "by_hand").write_text(json.dumps({**header, "model": ""}) + "\n")
    code, _, err = fstep(capsys, "trace", "replay", tmp_path / "by_hand")
    assert (code, err.endswith("replay it with fstep.shell.replay\n")) == (2, True)
    code, _, err = fstep(capsys, "trace", "replay", runs / "3.jsonl", "--model", tmp_path / "gone")
    assert (code, f"{tmp_path / 'gone'}: no such file or folder" in err) == (2, True)
