"""agents.py: what agents see, as exact token ids; the miniatures' problems; which text of a reply is run."""

import json
import random
import re
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from conftest import ROOT

import agents
import judge
from agents import ARITHMETIC, MATHCHAT, TABLES, Agent, InputError, Problem
from model import TINY_CHAT, load, save, tiny, tiny_tokenizer

PRINTABLE = [chr(i) for i in range(32, 127)] + ["\n"]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(agents.ARITHMETIC_PIECES)


def texts_of(demonstration):
    """All texts that a demonstration is made of."""
    prompt = demonstration.agent.prompt.format(**demonstration.values)
    earlier = [text for action in demonstration.earlier for text in (action.reply, action.observation)]
    return [prompt, demonstration.reply, *earlier]


# ---- The miniatures' problems ----------------------------------------------------------------------------------------


def test_train_and_held_out_problems_are_disjoint():
    """No problem to evaluate on is trained on.

    Symptom: an evaluation that praises memory; the paper's file shares 18 of its 32 problems with the training pool.
    Guard: the split is a function of the expression, so that not even the same sum about another person's eggs is on
    both sides.
    """
    train, held_out = ARITHMETIC.problems("train"), ARITHMETIC.problems("held-out")
    assert not {p.solution for p in train} & {p.solution for p in held_out}
    assert len({p.id for p in train + held_out}) == 4096 + 1000
    assert train[:5] == ARITHMETIC.problems("train")[:5]  # no hidden state
    for problem in train[:200]:
        assert str(eval(problem.solution)) == problem.answer
        assert int(problem.answer) >= 0
        assert all(1 <= int(number) <= 999 for number in re.findall(r"\d+", problem.question))
    operators = [sum(p.solution.count(operator) for operator in "+-*") for p in train]
    assert set(operators) == {1, 2}


def test_every_text_of_the_pipeline_is_in_the_vocabulary(tokenizer):
    """The tiny tokenizer writes every text of the demonstrations and reads it back unchanged."""
    for i in range(300):
        for text in texts_of(agents.arithmetic_demonstration(random.Random(i))):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text


def test_half_of_the_demonstrations_are_wrong():
    """The warm start leaves something to learn: for each agent about half of the demonstrated replies are wrong."""
    right = {"Solver": [], "Coder": [], "Verifier": []}
    for i in range(3000):
        d = agents.arithmetic_demonstration(random.Random(i))
        _, expression = agents.arithmetic_problem(random.Random(i), "train")  # the demonstration's first draws
        if d.agent.name == "Solver":
            right["Solver"].append(d.reply == expression)
        elif d.agent.name == "Coder":
            right["Coder"].append(d.reply == f"```python\nprint({d.values['Solver']})\n```")
        else:
            right["Verifier"].append(d.reply == f"\\boxed{{{d.values['Coder_output']}}}")
    for name, of_agent in right.items():
        assert len(of_agent) > 900, name
        assert 0.4 < sum(of_agent) / len(of_agent) < 0.6, name


def test_tables_are_disjoint_and_half_of_their_demonstrations_are_wrong():
    """Train and held-out tasks share no question, and the tiny model can write every right and every wrong program."""
    train, held_out = TABLES.problems("train"), TABLES.problems("held-out")
    assert not {p.question for p in train} & {p.question for p in held_out}
    assert (len(train), len(held_out)) == (1024, 200)
    assert len({p.id for p in train + held_out}) == 1024 + 200
    assert train[:3] == TABLES.problems("train")[:3]
    assert {p.kind for p in train} == set(agents.RIGHT_MODEL)
    assert all(p.solution.kind == p.kind for p in train)
    words = tiny_tokenizer(TABLES.pieces)
    right = {agent.name: [] for agent in TABLES.agents}
    for i in range(2000):
        d = TABLES.demonstration(random.Random(i))
        for text in texts_of(d):
            ids = words(text)["input_ids"]
            assert words.unk_token_id not in ids
            assert words.decode(ids) == text
            assert len(ids) < 40
        schema, question = agents.table_schema(random.Random(i), "train")  # the demonstration's first draws
        assert d.values["problem"] == question
        right[d.agent.name].append(d.reply == agents.table_program(d.agent.name, schema))
    for name, of_agent in right.items():
        assert len(of_agent) > 500, name
        assert 0.35 < sum(of_agent) / len(of_agent) < 0.65, name


def test_every_mistake_changes_the_program_that_it_is_made_in():
    """A step that is named wrongly would make "wrong" demonstrations right, and the coach blind to it."""
    schemas = [problem.solution for problem in TABLES.problems("held-out")[:20]]
    assert set(agents.MISTAKES) == set(agents.PROGRAMS) == {agent.name for agent in TABLES.agents}
    for name, mistakes in agents.MISTAKES.items():
        for mistake in mistakes:
            assert agents.PROGRAMS[name].count(mistake.old) == 1, mistake
            for schema in schemas:
                right = agents.table_program(name, schema)
                old = agents.fill_program(mistake.old, schema)
                for new in mistake.new:
                    assert right.replace(old, agents.fill_program(new, schema)) != right, mistake


def test_answers_never_enter_a_workspace():
    """No file of a task that agents get holds the true targets of the test rows."""
    for problem in TABLES.problems("held-out")[:20]:
        assert set(problem.files) == {"train.csv", "test.csv"}
        train, test = problem.files["train.csv"], problem.files["test.csv"]
        ids = [line.split(b",")[0] for line in problem.answer_key.csv.splitlines()[1:]]
        [target] = problem.answer_key.targets
        assert len(ids) == 40
        assert target.encode() not in test
        for row_id in ids:
            assert b"\n" + row_id + b"," not in train
            assert b"\n" + row_id + b"," in test
        assert problem.answer == ""


def test_each_pipeline_is_complete():
    """Results can be graded, files are shown where agents owe some, and the coach sees the last agent's truth alone."""
    for name, pipeline in agents.PIPELINES.items():
        assert pipeline.name == name
        assert pipeline.graded_by in judge.GRADERS
        assert (pipeline.show_files is not None) == any(agent.must_write for agent in pipeline.agents)
        assert [agent.coach_sees_truth for agent in pipeline.agents] == [False, False, True]
        assert bool(pipeline.pieces) == (pipeline.problems is not None) == (pipeline.demonstration is not None)


# ---- Prompts as token ids --------------------------------------------------------------------------------------------


def test_a_later_turn_extends_the_ids_of_the_earlier_one(tokenizer):
    """A second context is the first one, the sampled ids, and the observation.

    Symptom: the agent's second action is trained under a prompt that it never saw. Cause: the history is decoded,
    stripped and rendered again. Guard: ids are only ever added to. The sampled ids here are such as no text would
    encode to; the observation stands in the next context and in no action.
    """
    context = agents.render(tokenizer, ARITHMETIC.agents[1], {"Solver": "1+2"})
    odd = tokenizer.convert_tokens_to_ids(["print(", "1", ")"])
    spaced = [*odd, tokenizer.unk_token_id, tokenizer.eos_token_id]  # <unk> has no text to come back from
    following = agents.extend(tokenizer, context, spaced, "error")
    assert following[: len(context) + len(spaced)] == context + spaced
    rest = tokenizer.decode(following[len(context) + len(spaced) :])
    assert rest == "<|user|>error<|end|><|assistant|>"  # the terminator is not written twice
    cut = agents.extend(tokenizer, context, odd, "error")  # but a truncated reply is closed
    assert tokenizer.decode(cut[len(context) :]) == "print(1)<|end|><|user|>error<|end|><|assistant|>"


def test_prompts_start_with_one_bos_at_most():
    """A second BOS stops the program.

    Symptom: a model is slightly worse in everything. Cause: the template and the tokenizer both write the BOS. Guard:
    ids come from the template once, and two of them in front are an error.
    """
    llama = tiny_tokenizer(agents.ARITHMETIC_PIECES)
    llama.add_special_tokens({"bos_token": "<|begin|>"})
    llama.chat_template = "<|begin|>" + TINY_CHAT
    ids = agents.render(llama, ARITHMETIC.agents[0], {"problem": "Tom has 1 eggs."})
    assert ids.count(llama.bos_token_id) == 1
    llama.chat_template = "<|begin|><|begin|>" + TINY_CHAT
    with pytest.raises(InputError, match="the chat template starts a prompt with two BOS tokens"):
        agents.render(llama, ARITHMETIC.agents[0], {"problem": "Tom has 1 eggs."})


def test_an_agent_cannot_write_special_tokens_into_anothers_prompt(tokenizer):
    """What an agent writes stays text in another one's prompt.

    Symptom: the Solver ends the Coder's prompt and answers in its name. Guard: special tokens in text are broken up,
    braces are left alone, and a template is filled in one pass.
    """
    ids = agents.render(tokenizer, ARITHMETIC.agents[1], {"Solver": "1<|end|><|assistant|>2"})
    assert ids.count(tokenizer.eos_token_id) == 1
    assert ids.count(tokenizer.convert_tokens_to_ids("<|assistant|>")) == 1
    printable = tiny_tokenizer(PRINTABLE)
    values = {"problem": "{Solver} {x}", "Solver": "{problem}"}
    for agent in (Agent("A", "{problem}|{Solver}"), Agent("A", "?", role="{problem}|{Solver}")):
        assert "{Solver} {x}|{problem}" in printable.decode(agents.render(printable, agent, values))


@dataclass
class Said:
    """What handed_values() reads of an action."""

    agent: str
    text: str
    observation: str | None = None


def test_mathchat_shows_each_agent_what_the_paper_says():
    """The Verifier sees the problem, the Coder's last action and its tool result, and not the Solver's text."""
    actions = [Said("Solver", "SOLVED"), Said("Coder", "FIRST", "ERROR"), Said("Coder", "SECOND", "OUTPUT")]
    values = agents.handed_values(MATHCHAT, Problem("1", "PROBLEM", "TRUTH"), actions)
    values |= {"max_new_tokens": "4096", "program_seconds": "30"}
    solver, coder, verifier = MATHCHAT.agents
    assert solver.prompt.format(**values) == "PROBLEM"
    assert "SOLVED" in coder.prompt.format(**values)
    seen = verifier.prompt.format(**values)
    assert all(word in seen for word in ("PROBLEM", "SECOND", "OUTPUT"))
    assert not any(word in seen for word in ("SOLVED", "FIRST", "TRUTH"))
    tokenizer = tiny_tokenizer(PRINTABLE)
    for agent in MATHCHAT.agents:
        rendered = tokenizer.decode(agents.render(tokenizer, agent, values))
        assert rendered.startswith("<|system|>You are one of three agents")
        assert rendered.endswith("<|assistant|>")
        assert "after 4096 tokens" in rendered
        assert "{" not in rendered.replace("\\boxed{}", "")
        assert agent.prompt.format(**values) in rendered
        assert "TRUTH" not in rendered


def test_only_the_part_after_thinking_is_run():
    """Official code runs every block, also those of the thinking part, each in a process of its own."""
    text = "<think>\n```python\nprint(1)\n```\n</think>\nSo:\n```python\nx = 2\n```\n```py\nprint(x)\n```"
    assert agents.extract_program(text) == "x = 2\n\nprint(x)\n"
    assert agents.extract_program("<think>\n```python\nprint(1)\n```") is None
    assert agents.extract_program("```json\n{}\n```\ntext\n```python\nprint(1)\n```") == "print(1)\n"


PROGRAMS_IN_REPLIES = [
    ("1. Run this:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),  # indented like its fence
    ("````python\nx\n```\ny\n````", "x\n```\ny\n"),  # a longer fence holds a shorter one
    ("```{python}\nx\n```", "x\n"),
    ("```python title='a'\nx\n```", "x\n"),
    ("```c++\nx\n```\nand\n```python\ny\n```", "y\n"),
    ("```x``` is short\n```python\ny\n```", "y\n"),
    ("```python\r\nx\r\n```\r\n", "x\r\n"),
    ("```python\nx\n", None),
]


@pytest.mark.parametrize("reply, program", PROGRAMS_IN_REPLIES)
def test_programs_as_models_fence_them(reply, program):
    assert agents.extract_program(reply) == program


def test_digests_are_the_same_in_every_process():
    """hash() of a string is salted in each process: with it, ranks would draw different problems."""
    assert agents.digest("a", 1) == 4115538386074285390


def test_agents_needs_no_torch():
    """The sandbox's server is this file started as a script: it must stay light."""
    code = "import sys, agents; print([name in sys.modules for name in ('torch', 'numpy', 'transformers', 'pandas')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, False, False, False]"


# ---- Problem files ---------------------------------------------------------------------------------------------------

GOOD_FILES = [
    ('[{"prompt": "a", "answer": "70"}, {"prompt": "b", "answer": 142.0}]', [("f/1", "70"), ("f/2", "142")]),
    ('{"problem": "a", "answer": 3, "id": "x"}\n\n{"question": "b", "answer": 0.5}\n', [("f/x", "3"), ("f/2", "0.5")]),
    ('[{"prompt": "a", "answer": "\\\\frac{1}{2}", "id": 0}]', [("f/0", "\\frac{1}{2}")]),
    # as other tools write files: a byte-order mark, CRLF, line separators inside of texts
    ('\ufeff[{"prompt": "a", "answer": 7}]', [("f/1", "7")]),
    ('\ufeff{"prompt": "a", "answer": 7}\r\n{"prompt": "b", "answer": 8}\r\n', [("f/1", "7"), ("f/2", "8")]),
    ('{"prompt": "a", "answer": "7", "note": "\u2028, \u2029, \x85"}', None),
    # as other data sets write the truth: the final answer is meant
    ('{"question": "a", "answer": "Tom has 3 eggs.\\nThen he has 7.\\n#### 7"}', [("f/1", "7")]),
    ('{"question": "a", "answer": "#### 1,234"}', [("f/1", "1,234")]),
    ('{"question": "a", "answer": "So it is $\\\\boxed{7}$."}', [("f/1", "7")]),
    ('{"question": "a", "answer": "\\\\boxed{\\\\frac{1}{2}}"}', [("f/1", "\\frac{1}{2}")]),
    ('{"question": "a", "answer": " **7** "}', [("f/1", "7")]),
    ('{"question": "a", "answer": -0.0}', [("f/1", "0")]),
    ('{"question": "a", "answer": 0.00001}', [("f/1", "0.00001")]),  # not 1e-05
    ('{"question": "a", "answer": "The answer is 7."}', [("f/1", "7.")]),
    ('{"question": "a", "answer": "**Answer: 7**"}', [("f/1", "7")]),
    ('{"question": "a", "answer": "#### Answer\\n7"}', [("f/1", "7")]),
    ('{"question": "a", "answer": "`7`"}', [("f/1", "7")]),
]


@pytest.mark.parametrize("text, expected", GOOD_FILES)
def test_problem_files(tmp_path, text, expected):
    path = tmp_path / "f.json"
    path.write_text(text, encoding="utf-8", newline="")
    problems = agents.load_problems(str(path))
    assert [(p.id, p.answer) for p in problems] == (expected or [("f/1", "7")])
    assert [p.question for p in problems] == ["a", "b"][: len(problems)]
    assert all((p.kind, p.files, p.answer_key, p.solution) == ("", {}, None, None) for p in problems)


BROKEN_FILES = [
    ('[{"prompt": "a",\n "answer": }]', "line 2: this is not JSON"),
    ('{"prompt": "a", "answer": "1"}\n{"prompt": ', "line 2: this is not JSON"),
    ('[{"prompt": "a"}]', "entry 1: a prompt and an answer are needed"),
    ('[{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": true}]', "entry 2: "),
    ('[{"prompt": "a", "answer": ""}]', "entry 1: "),
    ('[{"prompt": "a", "answer": "  "}]', "entry 1: a prompt and an answer are needed"),
    ('[{"prompt": " \\n ", "answer": "7"}]', "entry 1: a prompt and an answer are needed"),
    ('[{"prompt": "a", "answer": NaN}]', "entry 1: a prompt and an answer are needed"),
    ('[{"prompt": "a", "answer": Infinity}]', "entry 1: a prompt and an answer are needed"),
    ('[{"prompt": "a", "answer": ["7"]}]', "entry 1: a prompt and an answer are needed"),
    ('[{"prompt": "a", "answer": "\\frac{1}{2}"}]', "entry 1: the answer .* holds a control character"),
    ('[{"prompt": "a \\ud83d", "answer": "7"}]', "entry 1: half of a character"),
    ('[{"prompt": "a", "answer": ' + 5000 * "7" + "}]", "line 1: this is not JSON"),
    # truths that no reply could match: accuracy would be 0 without a word
    ('[{"prompt": "a", "answer": "12 + \\\\frac{1"}]', "entry 1: no reply can box the answer"),
    ('[{"prompt": "a", "answer": "7}"}]', "entry 1: no reply can box the answer"),
    ('[{"prompt": "a", "answer": "\\\\boxed{7"}]', "entry 1: no reply can box the answer"),
    ('[{"prompt": "a", "answer": "#### "}]', "entry 1: no reply can box the answer"),
    ('[{"prompt": "a", "answer": "' + 99 * "Then. " + '"}]', "entry 1: no reply can box the answer"),
    ("[3]", "entry 1: "),
    ("[]", "holds no problems"),
    (
        '[{"prompt": "a", "answer": "1", "id": 7}, {"prompt": "b", "answer": "1", "id": 7}]',
        "the id f/7 is used more than once",
    ),
]


@pytest.mark.parametrize("text, message", BROKEN_FILES)
def test_broken_problem_files_are_one_sentence(tmp_path, text, message):
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        agents.load_problems(str(path))
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_data_set_means_the_same_with_its_explanations_and_without(tmp_path):
    """Symptom: 0% on GSM8K's own file. Cause: the truth is its whole explanation, which no reply boxes."""
    truths = {"plain": "7", "gsm8k": "3 + 4 = <<3+4=7>>7\n#### 7", "boxed": "Thus \\boxed{7}.", "bold": "**7**"}
    for name, answer in truths.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"question": "What is 3 + 4?", "answer": answer}))
        [problem] = agents.load_problems(str(path))
        assert judge.grade_answer(problem, "It is \\boxed{7}.", None).correct, name


def test_missing_problem_file(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        agents.load_problems(str(tmp_path / "none.json"))


def test_files_are_told_apart_by_their_names(tmp_path):
    """Ids start with the file's name: two files of one name would mix their problems."""
    (tmp_path / "other").mkdir()
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json"), str(tmp_path / "other" / "a.json")]
    for path in paths:
        with open(path, "w") as file:
            file.write('[{"prompt": "1 + 1", "answer": 2}]')
    files = agents.load_files(paths[:2], MATHCHAT)
    assert {name: [p.id for p in problems] for name, problems in files.items()} == {"a": ["a/1"], "b": ["b/1"]}
    with pytest.raises(InputError, match="two problem files are named a: rename one"):
        agents.load_files(paths, MATHCHAT)
    with pytest.raises(InputError, match="2 problems, such as a/1, are not of the tables pipeline's kind"):
        agents.load_files(paths[:2], TABLES)


def test_training_on_evaluation_problems_is_noticed():
    """Questions are compared, case and spacing aside.

    Symptom: the paper's evaluation file shares 18 of its 32 problems with its training pool, and nothing says so.
    """
    train = [Problem("t/1", "What is 1+1?", "2"), Problem("t/2", "What is 2+2?", "4")]
    assert agents.check_problems(train, [Problem("e/1", "What is 3+3?", "6")]) == []
    assert agents.check_problems(train, [Problem("e/1", "what is  2+2?", "4")]) == [
        "1 problems to evaluate on are also trained on, such as e/1"
    ]
    evaluation = [Problem("e/1", "x", "1"), Problem("e/2", "X", "1")]
    assert agents.check_problems([*train, train[0]], evaluation) == [
        "1 problems to train on repeat an earlier one, such as t/1",
        "1 problems to evaluate on repeat an earlier one, such as e/2",
    ]
    assert agents.repeated([*train, *train]) == train


def test_the_papers_subset():
    """The subset is sorted(np.random.choice(933, 512, replace=False)) after np.random.seed(42).

    The global generator is not touched.
    """
    np.random.seed(42)
    expected = sorted(np.random.choice(933, 512, replace=False))
    follows = np.random.rand()
    np.random.seed(42)
    np.random.choice(933, 512, replace=False)
    assert agents.subset(list(range(933)), 512, 42) == expected
    assert np.random.rand() == follows
    with pytest.raises(InputError, match="a subset must have 1 to 3 problems, not 4"):
        agents.subset(list(range(3)), 4, 42)


# ---- Chat templates --------------------------------------------------------------------------------------------------

# as Qwen3's: thinking is switched off by an empty thinking part in the generation prompt
SWITCHED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)


@pytest.mark.parametrize(
    "switches, end",
    [
        (dict(enable_thinking=False), "<|assistant|><think></think>"),
        (dict(enable_thinking=True), "<|assistant|>"),
        ({}, "<|assistant|>"),
    ],
)
def test_thinking_can_be_switched_where_the_template_can(switches, end):
    """The switch works in an agent's first turn and in its later ones alike."""
    tokenizer = tiny_tokenizer([*agents.ARITHMETIC_PIECES, "<think>", "</think>"])
    tokenizer.chat_template = SWITCHED
    context = agents.render(tokenizer, ARITHMETIC.agents[1], {"Solver": "1+2"}, **switches)
    assert tokenizer.decode(context) == "<|user|>Coder: 1+2<|end|>" + end
    ids = tokenizer("3")["input_ids"] + [tokenizer.eos_token_id]
    following = agents.extend(tokenizer, context, ids, "error", **switches)
    assert tokenizer.decode(following[len(context) :]) == "3<|end|><|user|>error<|end|>" + end


def test_a_model_without_a_template_gets_a_plain_one(tmp_path):
    """Base models have no template: first and later turns work with ours, and nothing is added to it."""
    model, tokenizer = tiny(PRINTABLE)
    tokenizer.chat_template = None
    save(model, tokenizer, str(tmp_path))
    _, tokenizer = load(str(tmp_path))
    context = agents.render(tokenizer, ARITHMETIC.agents[1], {"Solver": "1+2"})
    assert tokenizer.decode(context) == "### user\nCoder: 1+2\n\n### assistant\n"
    ids = tokenizer("3")["input_ids"] + [tokenizer.eos_token_id]
    more = agents.extend(tokenizer, context, ids, "error")[len(context) :]
    assert tokenizer.decode(more) == "3<|end|>\n\n### user\nerror\n\n### assistant\n"
