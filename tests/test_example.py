"""The example as a person runs it: as a process, with no argument but where to write, and again in the same folder."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
EXAMPLE = str(ROOT / "examples" / "cil.py")


def run(*arguments, launcher=(sys.executable,)):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launcher, EXAMPLE, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def main(monkeypatch, *arguments):
    """The example in this process, which spares the imports."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", ["cil.py", *arguments])
    import cil

    return cil.main()


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demonstration")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    return folder, run("--output_dir", folder, launcher=launcher)


def test_it_learns_ten_digits_in_five_tasks(demonstration):
    folder, first = demonstration
    assert first.returncode == 0, first.stderr[-3000:]
    results = json.loads((folder / "results.json").read_text())
    assert [len(task["classes"]) for task in results["tasks"]] == [2] * 5
    assert sorted(results["classes"]) == list("0123456789")
    # The literature's order of the classes.
    assert results["classes"][:4] == ["4", "2", "7", "6"]
    assert results["last_accuracy"] > 0.93
    assert results["task_known_accuracy"] > 0.98
    assert results["task_known_forgetting"] == 0.0
    assert 0.93 < results["entropy_accuracy"] < results["task_known_accuracy"]


def test_the_table_says_what_the_results_file_says(demonstration):
    folder, first = demonstration
    results = json.loads((folder / "results.json").read_text())
    for label, name in (("Ā", "average_accuracy"), ("A_B", "last_accuracy"), ("forgetting", "forgetting")):
        luca, class_means = re.search(rf"{label} +(\d\.\d+) +(\d\.\d+)", first.stdout).groups()
        assert float(luca) == pytest.approx(results[name], abs=5e-4)
        assert 0.0 <= float(class_means) <= 1.0
    picture = re.search(r"A picture of it is (.+)\.\n", first.stdout)[1]
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
    assert first.stdout.splitlines()[-2:] == [
        f"  peft-luca show {folder}",
        f"  peft-luca predict {folder} photo.png --top_k 3",
    ]
    assert len(re.findall(r"^task \d/5 task_\d \(", first.stdout, re.M)) == 5


def test_only_json_safetensors_and_a_picture_are_written(demonstration):
    folder, _ = demonstration
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    own = ("adapter_config.json", "adapter_model.safetensors", "statistics.safetensors")
    adapters = [f"task_{t}/{name}" for t in range(5) for name in own]
    of_the_run = ["experts.json", "matrix.jsonl", "preprocessor_config.json", "results.json"]
    assert files == sorted([*adapters, *of_the_run, "plots/accuracy_over_stream.png"])


def test_running_it_again_goes_on_and_changes_nothing(demonstration, monkeypatch, capsys):
    folder, _ = demonstration
    before = {file: file.read_bytes() for file in folder.rglob("*.safetensors")}
    results = json.loads((folder / "results.json").read_text())
    main(monkeypatch, "--output_dir", str(folder))
    printed = capsys.readouterr().out
    assert "resuming after 5 of 5 tasks" in printed
    assert not re.search(r"^task \d/5", printed, re.M)
    assert {file: file.read_bytes() for file in folder.rglob("*.safetensors")} == before
    assert json.loads((folder / "results.json").read_text()) == results


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtype", "float33"], "argument --dtype: invalid choice: 'float33'"),
        (["--luca_config", "{bad"], "--luca_config must hold fields of LucaConfig as one JSON object, got {bad"),
        (["--luca_config", '{"arangement": "adapter"}'], "unexpected keyword argument 'arangement'"),
        (["--speed", "9"], "--speed"),
        (["broken.json"], "broken.json does not hold arguments as one JSON object"),
        (["list.json"], "list.json does not hold arguments as one JSON object"),
        (["wrong.json"], "dtype must be one of float32"),
        (["absent.json"], "absent.json cannot be read: No such file"),
        (["--model", "no-such-folder"], "cil.py: "),
        (["--dataset", "no-such-folder"], "cil.py: "),
        (["--increment", "11"], "cil.py: increment"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_said_without_a_traceback(arguments, said, tmp_path, monkeypatch, capsys):
    for name, content in (("broken", "{"), ("list", "[1]"), ("wrong", '{"dtype": "float33"}')):
        (tmp_path / f"{name}.json").write_text(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(monkeypatch, *arguments)
    message = f"{capsys.readouterr().err}\n{stopped.value}"
    assert said in message
    assert stopped.value.code not in (0, None)
    assert len(message.splitlines()) < 12
    assert not (tmp_path / "out").exists()


def test_arguments_from_a_file(tmp_path, monkeypatch):
    (tmp_path / "arguments.json").write_text('{"increment": 5, "num_train_epochs": 3, "luca_config": "{}"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", ["cil.py", "arguments.json"])
    import cil

    example, args, _ = cil.parse_arguments()
    assert (example.increment, args.num_train_epochs, args.output_dir) == (5, 3, "out/digits")


def test_a_first_run_shows_nothing_that_a_newcomer_must_puzzle_over(demonstration):
    """Everything beside the progress bars, without what libraries say of extras that only developers install."""
    _, first = demonstration
    noise = ("torchao", "register_constant", "accelerate", "--num_", "--mixed_precision", "--dynamo_backend", "%|")
    lines = [line.strip() for line in re.split(r"[\r\n]+", first.stderr)]
    assert [line for line in lines if line and not any(word in line for word in noise)] == []
