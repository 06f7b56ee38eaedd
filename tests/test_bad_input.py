"""Whatever a user can get wrong ends in one sentence and exit code 2, before anything slow, and never in a traceback.

Each row goes through the real command. As a script, this file prints the command lines for an empty folder, one a
line, to be tried under torchrun as well:

    python tests/test_bad_input.py FOLDER | while read -r row; do torchrun --nproc_per_node=2 -- $row; done
"""

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import eval  # noqa: E402
import train  # noqa: E402
from model import save, tiny  # noqa: E402

TRAIN = [  # options of train.py, with {folder} for what prepare() makes; a part of the sentence
    ("--reward money", "invalid choice: 'money'"),
    ("--steps many", "invalid int value: 'many'"),
    ("--stepz 3", "unrecognized arguments: --stepz 3"),
    ("--steps 0", "--steps must be over 0, not 0"),
    ("--lr nan", "--lr must be over 0, not nan"),
    ("--max-failures 1.5", "--max-failures must be in 0 to 1, not 1.5"),
    ("--pipeline chess", "there is no preset or pipeline 'chess'"),
    ("--pipeline mathchat", "needs a model: give --model FOLDER_OR_ID"),
    ("--advantage grpo --samples 1", "compares samples of a problem: give --samples 2 or more"),
    ("--problems 5000", "--problems 5000: there are 4096 only"),
    ("--device cuda", "there is no usable GPU"),
    ("--out {folder}/notes", "holds what is not a run's, such as good.json: give another --out"),
    ("--out {folder}/run", "holds another run: give another --out, or --resume to go on with it"),
    ("--out {folder}/file/run", "cannot be written"),
    ("--resume --out {folder}/nothing", "is not a run folder: it has no config.json"),
    ("--resume --out {folder}/broken", "config.json cannot be read"),
    ("--resume --out {folder}/old", "was written by another version of train.py"),
    ("--model {folder}/nothing", "is neither a model folder nor a hub id"),
    ("--model {folder}/notes", "is not a model folder: it has no config.json"),
    ("--model {folder}/mamba", "model type 'mamba' is not supported"),
    ("--model {folder}/mute", "has no tokenizer"),
    ("--model {folder}/cut", "model.safetensors is damaged"),
    ("--model {folder}/bare", "has no model.safetensors"),
    ("--model {folder}/tiny --max-context-tokens 1020", "is made for 1024 positions"),
    ("{math} --train {folder}/nothing.json", "nothing.json cannot be read"),
    ("{math} --train {folder}/cut.json", "cut.json, line 2: this is not JSON"),
    ("{math} --train {folder}/mute.json", "mute.json, entry 1: a prompt and an answer are needed"),
    ("{math} --train {folder}/twice.json", "the id twice/7 is used more than once"),
    ("{math} --train {folder}/good.json --eval {folder}/same.json", "are also trained on, such as same/1"),
    ("{math} --train {folder}/good.json --judge api", "--judge api needs --judge-url and --judge-model"),
    ("{math} --train {folder}/good.json --judge rules", "the rules coach knows a miniature's own problems only"),
    ("{math} --train {folder}/good.json --judge-model {folder}/nothing", "is neither a model folder nor a hub id"),
    ("{api} --judge-key-env NO_SUCH_KEY", "NO_SUCH_KEY, which --judge-key-env names, is empty"),
    ("{api} --judge-deadline 0.1", "no coach at http://127.0.0.1:9/v1: the connection failed"),
]
EVAL = [
    ("", "give either --run or --model"),
    ("--run {folder}/run --model {folder}/tiny", "give either --run or --model"),
    ("--run {folder}/nothing", "is not a run folder: it has no config.json"),
    ("--run {folder}/broken", "config.json cannot be read"),
    ("--run {folder}/run", "has no complete checkpoint yet"),
    ("--model {folder}/nothing --pipeline arithmetic", "is neither a model folder nor a hub id"),
    ("--model {folder}/tiny", "the mathchat pipeline has no problems of its own: give --data FILE"),
    ("--model {folder}/tiny --pipeline chess", "invalid choice: 'chess'"),
    ("--model {folder}/tiny --samples 0", "--problems and --samples start at 1"),
    ("--model {folder}/tiny --temperature -1", "--temperature starts at 0"),
    ("--model {folder}/tiny --data {folder}/nothing.json", "nothing.json cannot be read"),
    ("--model {folder}/tiny --data {folder}/cut.json", "cut.json, line 2: this is not JSON"),
    ("--model {folder}/tiny --data {folder}/good.json", "is made for 1024 positions"),
    ("--model {folder}/tiny --data {folder}/good.json {folder}/notes/good.json", "two problem files are named good"),
    ("--model {folder}/tiny --pipeline dsbench --data {folder}/good.json", "are not of the dsbench pipeline's kind"),
]


def prepare(folder):
    """Make what the rows name: folders and files, most of them broken in one way."""
    for name in ("notes", "run", "broken", "old", "mamba"):
        (folder / name).mkdir()
    (folder / "file").write_text("a file")
    (folder / "notes" / "notes.txt").write_text("mine")
    (folder / "broken" / "config.json").write_text("{")
    (folder / "old" / "config.json").write_text('{"pipeline": "arithmetic"}')
    (folder / "run" / "config.json").write_text(json.dumps(train.asdict(train.Config(out=str(folder / "run")))))
    (folder / "mamba" / "config.json").write_text('{"model_type": "mamba"}')
    for name in ("tiny", "mute", "cut", "bare"):
        save(*tiny("ab"), str(folder / name))
    (folder / "mute" / "tokenizer.json").unlink()
    (folder / "bare" / "model.safetensors").unlink()
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    good = '{"prompt": "What is 1 + 1?", "answer": 2}\n'
    (folder / "good.json").write_text(good)
    (folder / "same.json").write_text(good)
    (folder / "notes" / "good.json").write_text(good)
    (folder / "cut.json").write_text(good + '{"prompt": "Wh')
    (folder / "mute.json").write_text('[{"prompt": "What is 1 + 1?"}]')
    (folder / "twice.json").write_text('[{"prompt": "a", "answer": 1, "id": 7}, {"prompt": "b", "answer": 1, "id": 7}]')


def fill(options, folder):
    """The options of a row as a list."""
    math = f"--pipeline mathchat --model {folder}/tiny --max-context-tokens 900 --max-new-tokens 8 --problems 1"
    math += f" --train-subset 0 --judge local --judge-model {folder}/tiny"
    api = f"{math} --train {folder}/good.json --judge api --judge-url http://127.0.0.1:9/v1"
    words = options.format(folder=folder, math=math, api=api).split()
    return words


def row_command(command, options, folder):
    """The command line of a row. What is refused must leave no run folder behind."""
    words = fill(options, folder)
    if command == "train.py" and "--out" not in words:
        words += ["--out", f"{folder}/new"]
    return [command, *words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    prepare(folder)
    return folder


ROWS = [("train.py", *row) for row in TRAIN] + [("eval.py", *row) for row in EVAL]


@pytest.mark.parametrize("command, options, sentence", ROWS, ids=[f"{row[0]} {row[1]}" for row in ROWS])
def test_bad_input_is_one_sentence(folder, capfd, command, options, sentence):
    """A stack trace after minutes of loading tells a user nothing. Guard: what, where, what to do, and exit code 2."""
    main = train.main if command == "train.py" else eval.main
    _, *words = row_command(command, options, folder)
    assert main(words) == 2
    printed = capfd.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1, printed.err
    assert printed.err.startswith(f"{command}: ") and "Traceback" not in printed.err
    assert "warm start" not in printed.out
    assert not (folder / "new").exists()


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    prepare(target)
    for row in ROWS:
        print(*row_command(row[0], row[1], target))
