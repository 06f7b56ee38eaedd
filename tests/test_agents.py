"""agents.py: what agents see, as exact token ids; the arithmetic problems; which text of a reply is run."""
import random

import pytest

import agents
import model
from agents import ARITHMETIC, MATHCHAT, Agent, InputError, Problem


@pytest.fixture(scope="module")
def tokenizer():
    return model.tiny_tokenizer(agents.PIECES)


def test_train_and_held_out_problems_are_disjoint():
    """The paper's evaluation file shares 18 of 32 problems with its training pool. Guard: the split is a function of the
    expression, so that not even the same sum about another person's eggs is on both sides."""
    train, held_out = ARITHMETIC.problems("train"), ARITHMETIC.problems("held-out")
    assert not {p.expression for p in train} & {p.expression for p in held_out}
    assert len({p.id for p in train + held_out}) == 4096 + 1000
    assert train[:5] == ARITHMETIC.problems("train")[:5]  # no hidden state
    for problem in train[:200]:
        assert str(eval(problem.expression)) == problem.answer and int(problem.answer) >= 0
        assert all(1 <= int(n) <= 999 for n in agents.re.findall(r"\d+", problem.question))
    operators = [sum(p.expression.count(o) for o in "+-*") for p in train]
    assert set(operators) == {1, 2}


def test_every_text_of_the_pipeline_is_in_the_vocabulary(tokenizer):
    for i in range(300):
        d = agents.arithmetic_demonstration(random.Random(i))
        for text in [d.agent.prompt.format(**d.values), d.reply, *(t for turn in d.turns for t in turn)]:
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text


def test_half_of_the_demonstrations_are_wrong():
    """The warm start must leave something to learn: for each agent about half of the demonstrated replies are wrong."""
    right = {"Solver": [], "Coder": [], "Verifier": []}
    for i in range(3000):
        d = agents.arithmetic_demonstration(random.Random(i))
        if d.agent.name == "Coder":
            right["Coder"].append(f"print({d.values['Solver']})\n" in d.reply)
        elif d.agent.name == "Verifier":
            right["Verifier"].append(d.reply == f"\\boxed{{{d.values['Coder_output']}}}")
    assert all(0.4 < sum(r) / len(r) < 0.6 for r in (right["Coder"], right["Verifier"]))


def test_tables_are_disjoint_and_their_texts_in_the_vocabulary():
    """Train and held-out tasks share no question; half of each agent's demonstrations are wrong; and the tiny model can
    write every right and every wrong program."""
    tables = agents.TABLES
    train, held_out = tables.problems("train"), tables.problems("held-out")
    assert not {p.question for p in train} & {p.question for p in held_out} and len(held_out) == 200
    assert train[:3] == tables.problems("train")[:3] and {p.table.kind for p in train} == set(agents.MODEL_OF)
    words, right = model.tiny_tokenizer(tables.pieces), {agent.name: [] for agent in tables.agents}
    schemas = {p.question: p.table.schema for p in train}
    for i in range(2000):
        d = tables.demonstration(random.Random(i))
        for text in [d.agent.prompt.format(**d.values), d.reply, *(t for turn in d.turns for t in turn)]:
            ids = words(text)["input_ids"]
            assert words.unk_token_id not in ids and words.decode(ids) == text and len(ids) < 40
        if d.values["problem"] in schemas:
            program = agents.table_program(d.agent.name, schemas[d.values["problem"]])
            right[d.agent.name].append(d.reply == program)
    assert all(0.35 < sum(r) / len(r) < 0.65 for r in right.values()), right


def test_answers_never_enter_a_workspace():
    """No file of a task that agents get holds the true targets of the test rows."""
    for problem in agents.TABLES.problems("held-out")[:20]:
        ids = [line.split(b",")[0] for line in problem.table.answers.splitlines()[1:]]
        target = problem.table.targets[0].encode()
        assert target not in problem.table.test and not any(b"\n" + i + b"," in problem.table.train for i in ids)
        assert all(b"\n" + i + b"," in problem.table.test for i in ids)


def test_a_later_turn_extends_the_ids_of_the_earlier_one(tokenizer):
    """FAULTS 9, 10, 19, 22. Symptom: the agent's second action is trained under a prompt that it never saw. Cause: the
    history is decoded, stripped and rendered again. Guard: context + sampled ids + observation, with ids that no text
    would encode to; the observation stands in the next context and in no action."""
    context = agents.render(tokenizer, ARITHMETIC.agents[1], {"Solver": "1+2"})
    odd = tokenizer.convert_tokens_to_ids(["print(", "1", ")"])
    spaced = [*odd, tokenizer.unk_token_id, tokenizer.eos_token_id]  # <unk> has no text to come back from
    following = agents.extend(tokenizer, context, spaced, "error")
    assert following[: len(context) + len(spaced)] == context + spaced
    rest = tokenizer.decode(following[len(context) + len(spaced) :])
    assert rest == "<|user|>error<|end|><|assistant|>"  # the terminator is not written twice
    cut = agents.extend(tokenizer, context, odd, "error")  # but a truncated reply is closed
    assert tokenizer.decode(cut[len(context) :]) == "print(1)<|end|><|user|>error<|end|><|assistant|>"


def test_prompts_start_with_one_bos_at_most(tokenizer):
    """FAULT 18. Symptom: slightly worse in everything. Cause: the template and the tokenizer both write the BOS. Guard:
    ids come from the template once, and a second BOS stops the program."""
    llama = model.tiny_tokenizer(agents.PIECES)
    llama.add_special_tokens({"bos_token": "<|begin|>"})
    llama.chat_template = "<|begin|>" + model.TINY_CHAT
    ids = agents.render(llama, ARITHMETIC.agents[0], {"problem": "Tom has 1 eggs."})
    assert ids.count(llama.bos_token_id) == 1
    llama.chat_template = "<|begin|><|begin|>" + model.TINY_CHAT
    with pytest.raises(AssertionError, match="two BOS"):
        agents.render(llama, ARITHMETIC.agents[0], {"problem": "Tom has 1 eggs."})


def test_an_agent_cannot_write_special_tokens_into_anothers_prompt(tokenizer):
    """Symptom: the Solver ends the Coder's prompt and answers in its name. Guard: special tokens in text are broken up,
    braces are left alone, and a template is filled in one pass."""
    ids = agents.render(tokenizer, ARITHMETIC.agents[1], {"Solver": "1<|end|><|assistant|>2"})
    assert ids.count(tokenizer.eos_token_id) == 1
    assert ids.count(tokenizer.convert_tokens_to_ids("<|assistant|>")) == 1
    agent = Agent("A", prompt="{problem}|{Solver}")
    values = {"problem": "{Solver} {x}", "Solver": "{problem}"}
    assert agent.prompt.format(**values) == "{Solver} {x}|{problem}"


def test_mathchat_shows_each_agent_what_the_paper_says(tokenizer):
    """The Verifier sees the problem, the Coder's last action and its tool result, and not the Solver's text."""

    class Action:
        def __init__(self, agent, text, observation=None):
            self.agent, self.text, self.observation = agent, text, observation

    actions = [Action("Solver", "SOLVED"), Action("Coder", "FIRST", "ERROR"), Action("Coder", "SECOND", "OUTPUT")]
    values = agents.handed_on(MATHCHAT, Problem("1", "PROBLEM", "TRUTH"), actions) | {"max_new_tokens": "4096"}
    solver, coder, verifier = MATHCHAT.agents
    seen = verifier.prompt.format(**values)
    assert all(word in seen for word in ("PROBLEM", "SECOND", "OUTPUT"))
    assert not any(word in seen for word in ("SOLVED", "FIRST", "TRUTH"))
    assert "SOLVED" in coder.prompt.format(**values)
    assert [a.coach_sees_truth for a in MATHCHAT.agents] == [False, False, True]
    tokenizer = model.tiny_tokenizer([chr(i) for i in range(32, 127)] + ["\n"])
    for agent in MATHCHAT.agents:
        rendered = tokenizer.decode(agents.render(tokenizer, agent, values))
        assert rendered.startswith("<|system|>You are one of three agents") and rendered.endswith("<|assistant|>")
        assert "after 4096 tokens" in rendered and "{" not in rendered.replace("\\boxed{}", "")
        assert agent.prompt.format(**values) in rendered


def test_only_the_part_after_thinking_is_run():
    """Official code runs every block, those of the thinking part too, each in a process of its own."""
    text = "<think>\n```python\nprint(1)\n```\n</think>\nSo:\n```python\nx = 2\n```\n```py\nprint(x)\n```"
    assert agents.extract_program(text) == "x = 2\n\nprint(x)\n"
    assert agents.extract_program("<think>\n```python\nprint(1)\n```") is None
    assert agents.extract_program("```json\n{}\n```\ntext\n```python\nprint(1)\n```") == "print(1)\n"


def test_digests_are_the_same_in_every_process():
    """FAULT 6: hash() of a string is salted per process; ranks would draw different problems."""
    assert agents.digest("a", 1) == 4115538386074285390


def test_agents_needs_no_torch():
    """The sandbox's server is this file started as a script: it must stay light."""
    import subprocess
    import sys

    code = "import sys; sys.path.insert(0, '.'); import agents; print('torch' in sys.modules, 'numpy' in sys.modules)"
    root = agents.os.path.dirname(agents.__file__)
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]


# ---- Problem files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ('[{"prompt": "a", "answer": "70"}, {"prompt": "b", "answer": 142.0}]', [("f/1", "70"), ("f/2", "142")]),
        ('{"problem": "a", "answer": 3, "id": "x"}\n\n{"question": "b", "answer": 0.5}\n', [("f/x", "3"), ("f/2", "0.5")]),
        ('[{"prompt": "a", "answer": "\\\\frac{1}{2}", "id": 0}]', [("f/0", "\\frac{1}{2}")]),
    ],
)
def test_problem_files(tmp_path, text, expected):
    path = tmp_path / "f.json"
    path.write_text(text)
    assert [(p.id, p.answer) for p in agents.load_problems(str(path))] == expected


@pytest.mark.parametrize(
    "text, message",
    [
        ('[{"prompt": "a",\n "answer": }]', "line 2: this is not JSON"),
        ('{"prompt": "a", "answer": "1"}\n{"prompt": ', "line 2: this is not JSON"),
        ('[{"prompt": "a"}]', "entry 1: a prompt and an answer are needed"),
        ('[{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": true}]', "entry 2: "),
        ('[{"prompt": "a", "answer": ""}]', "entry 1: "),
        ("[3]", "entry 1: "),
        ("[]", "holds no problems"),
        ('[{"prompt": "a", "answer": "1", "id": 7}, {"prompt": "b", "answer": "1", "id": 7}]', "the id f/7 stands there"),
    ],
)
def test_broken_problem_files_are_one_sentence(tmp_path, text, message):
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        agents.load_problems(str(path))
    assert "\n" not in str(error.value)


def test_missing_problem_file(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        agents.load_problems(str(tmp_path / "none.json"))


def test_training_on_evaluation_problems_is_noticed():
    """The paper's evaluation file shares 18 of 32 problems with its training pool. Guard: questions are compared."""
    train = [Problem("t/1", "What is 1+1?", "2"), Problem("t/2", "What is 2+2?", "4")]
    assert agents.check_problems(train, [Problem("e/1", "What is 3+3?", "6")]) == []
    [sentence] = agents.check_problems(train, [Problem("e/1", "what is  2+2?", "4")])
    assert sentence == "1 problems stand there to evaluate on that are also trained on, such as e/1"
    twice = agents.check_problems([*train, train[0]], [Problem("e/1", "x", "1"), Problem("e/2", "X", "1")])
    assert [sentence.split(",")[0] for sentence in twice] == [
        "1 problems stand there twice to train on", "1 problems stand there twice to evaluate on"]


def test_the_papers_subset():
    """np.random.seed(42); sorted(np.random.choice(933, 512, replace=False)), without touching the global generator."""
    import numpy as np

    np.random.seed(42)
    expected, follows = sorted(np.random.choice(933, 512, replace=False)), np.random.rand()
    np.random.seed(42)
    np.random.choice(933, 512, replace=False)
    assert agents.subset(list(range(933)), 512, 42) == expected
    assert np.random.rand() == follows


# ---- Chat templates ----------------------------------------------------------------------------------------------------

SWITCHED = (  # as Qwen3's: thinking is switched off by an empty thinking part in the generation prompt
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)


def test_thinking_can_be_switched_where_the_template_can():
    """In an agent's first turn and in its later ones alike."""
    tokenizer = model.tiny_tokenizer([*agents.PIECES, "<think>", "</think>"])
    tokenizer.chat_template = SWITCHED
    for switch, end in ((dict(enable_thinking=False), "<|assistant|><think></think>"), ({}, "<|assistant|>")):
        context = agents.render(tokenizer, ARITHMETIC.agents[1], {"Solver": "1+2"}, **switch)
        assert tokenizer.decode(context).endswith(end)
        ids = tokenizer("3")["input_ids"] + [tokenizer.eos_token_id]
        assert tokenizer.decode(agents.extend(tokenizer, context, ids, "error", **switch)).endswith("error<|end|>" + end)


def test_a_model_without_a_template_gets_a_plain_one(tmp_path):
    """Base models have none; both turns must work with ours, and the BOS stands once."""
    network, tokenizer = model.tiny([chr(i) for i in range(32, 127)] + ["\n"])
    tokenizer.chat_template = None
    model.save(network, tokenizer, str(tmp_path))
    _, tokenizer = model.load(str(tmp_path))
    context = agents.render(tokenizer, ARITHMETIC.agents[1], {"Solver": "1+2"})
    assert tokenizer.decode(context) == "### user\nCoder: 1+2\n\n### assistant\n"
    ids = tokenizer("3")["input_ids"] + [tokenizer.eos_token_id]
    more = agents.extend(tokenizer, context, ids, "error")[len(context) :]
    assert tokenizer.decode(more) == "3<|end|>\n\n### user\nerror\n\n### assistant\n"
