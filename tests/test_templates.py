"""Chat templates as other models have them: written here from scratch, small, with the turns that matter.

Each family's template is told by what it does with a system message, how turns end, and what it refuses.
"""

import datetime

import pytest
import torch
from safetensors.torch import load_file, save_file

import agents
from agents import Agent, InputError
from model import PLAIN_CHAT, load, save, tiny, tiny_tokenizer
from rollout import Sampling

PRINTABLE = [chr(code) for code in range(32, 127)] + ["\n"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (  # Qwen2.5 and SmolLM2 put one in where the conversation has none
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
)
QWEN3 = CHATML.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|head|>system<|/head|>\n\nToday Date: ' + strftime_now('%d %b %Y') + '\n\n' + system + '<|eot|>' }}"
    "{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
R1_DISTILL = (  # drops thoughts from history, and opens the next ones itself
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate: user, assistant, user, ...') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('There is no system role') }}{% endif %}"
    + ALTERNATE
    + "{% for m in messages %}{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}"
    + ALTERNATE
    + "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
SILENT = CHATML.replace("{{ '<|im_start|>'", "{% if m.role != 'system' %}{{ '<|im_start|>'", 1).replace(
    "{% endfor %}", "{% endif %}{% endfor %}", 1
)

MARKS = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<|User|>", "<|Assistant|>", "<turn>"]
MARKS += ["<end_turn>", "[INST]", "[/INST]", "<think>", "</think>", "<s>"]
DAY = "2026-01-31"

# family -> template, the token that ends a turn, a first context with a role and without, what follows a reply
FAMILIES = {
    "Qwen2.5, SmolLM2": (
        DEFAULT_SYSTEM + CHATML,
        "<|im_end|>",
        "<|im_start|>system\nYou solve.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nerror<|im_end|>\n<|im_start|>assistant\n",
    ),
    "Qwen3": (
        QWEN3,
        "<|im_end|>",
        "<|im_start|>system\nYou solve.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nerror<|im_end|>\n<|im_start|>assistant\n",
    ),
    "Llama 3": (
        LLAMA3,
        "<|eot|>",
        "<s><|head|>system<|/head|>\n\nToday Date: 31 Jan 2026\n\nYou solve.<|eot|>"
        "<|head|>user<|/head|>\n\n1+1?<|eot|><|head|>assistant<|/head|>\n\n",
        "<s><|head|>system<|/head|>\n\nToday Date: 31 Jan 2026\n\n<|eot|>"
        "<|head|>user<|/head|>\n\n1+1?<|eot|><|head|>assistant<|/head|>\n\n",
        "<|head|>user<|/head|>\n\nerror<|eot|><|head|>assistant<|/head|>\n\n",
    ),
    "R1-Distill": (
        R1_DISTILL,
        "<|end|>",
        "<s>You solve.<|User|>1+1?<|Assistant|><think>\n",
        "<s><|User|>1+1?<|Assistant|><think>\n",
        "<|User|>error<|Assistant|><think>\n",
    ),
    "Gemma": (
        GEMMA,
        "<end_turn>",
        "<s><turn>user\nYou solve.\n\n1+1?<end_turn>\n<turn>model\n",
        "<s><turn>user\n1+1?<end_turn>\n<turn>model\n",
        "\n<turn>user\nerror<end_turn>\n<turn>model\n",
    ),
    "Mistral": (
        MISTRAL,
        "<|end|>",
        "<s>[INST] You solve.\n\n1+1? [/INST]",
        "<s>[INST] 1+1? [/INST]",
        "[INST] error [/INST]",
    ),
    "one that leaves the system message out": (
        SILENT,
        "<|im_end|>",
        "<|im_start|>user\nYou solve.\n\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nerror<|im_end|>\n<|im_start|>assistant\n",
    ),
    "none": (
        PLAIN_CHAT,
        "<|end|>",
        "<s>### system\nYou solve.\n\n### user\n1+1?\n\n### assistant\n",
        "<s>### user\n1+1?\n\n### assistant\n",
        "\n\n### user\nerror\n\n### assistant\n",
    ),
}


def tokenizer_with(template):
    """A tokenizer that knows all the marks above as tokens; <|end|> is its eos."""
    tokenizer = tiny_tokenizer(PRINTABLE)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS, "bos_token": "<s>"})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_the_templates_of_other_models(family):
    """First turns with a role and without, later turns, and how they end.

    Symptom: a traceback from inside of a template, or agents without their instructions. Cause: no system role, roles
    that must alternate, or a system message that is left out without a word. Guard: then the role goes into the user's
    message.
    """
    template, end, with_role, without_role, following = FAMILIES[family]
    tokenizer = tokenizer_with(template)
    switches = Sampling((), date=DAY).switches()
    values = {"problem": "1+1?"}
    first = agents.render(tokenizer, Agent("A", "{problem}", role="You solve."), values, **switches)
    assert tokenizer.decode(first) == with_role
    plain = agents.render(tokenizer, Agent("A", "{problem}"), values, **switches)
    assert tokenizer.decode(plain) == without_role

    assert agents.turn_end(tokenizer) == tokenizer.convert_tokens_to_ids(end)
    reply = tokenizer("2", add_special_tokens=False)["input_ids"]
    ended = [*reply, tokenizer.convert_tokens_to_ids(end)]
    second = agents.extend(tokenizer, first, ended, "error", **switches)
    assert tokenizer.decode(second) == with_role + "2" + end + following
    # a reply that the limit cut off is ended by the template
    assert tokenizer.decode(agents.extend(tokenizer, first, reply, "error", **switches)) == tokenizer.decode(second)


def test_a_template_that_refuses_every_conversation_is_one_sentence():
    tokenizer = tokenizer_with("{{ raise_exception('Only with tools') }}")
    with pytest.raises(InputError, match="the model's chat template refuses a conversation of user: Only with tools"):
        agents.render(tokenizer, Agent("A", "{problem}", role="You solve."), {"problem": "1+1?"})


@pytest.mark.parametrize(
    "template, message",
    [
        (
            "{% for m in messages %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}",
            "leaves messages out",
        ),
        ("{{ messages[-1].content }}", "leaves messages out"),
        ("{{ messages[0].content + 1 }}", "refuses a conversation"),
    ],
)
def test_a_template_that_cannot_hold_a_conversation_is_refused_when_loaded(tmp_path, template, message):
    """Symptom: every prompt is empty, without a word. Cause: the template reads contents as lists of parts."""
    with pytest.raises(InputError, match=message):
        load(str(saved(tmp_path, template)))


@pytest.mark.parametrize("between", ["", " ", "\n"])
def test_a_terminator_need_not_be_the_first_thing_after_a_reply(between):
    """Symptom: it is written twice. Cause: Llama 2 puts a space before it, DeepSeek-Coder a line end."""
    template = "{% for m in messages %}{{ m.role + ':' + m.content + 'BETWEEN<|eot|>' }}{% endfor %}"
    tokenizer = tokenizer_with(template.replace("BETWEEN", between))
    end = tokenizer.convert_tokens_to_ids("<|eot|>")
    assert agents.turn_end(tokenizer) == end
    following = agents.extend(tokenizer, [10], [11, end], "error")
    assert following.count(end) == 2 and following[:3] == [10, 11, end]


def test_a_template_that_writes_the_date_gets_the_runs(monkeypatch):
    """Symptom: a run that goes on tomorrow has other prompts. Guard: the day is fixed in config.json."""
    tokenizer = tokenizer_with(LLAMA3)
    agent, values = Agent("A", "{problem}"), {"problem": "1+1?"}
    on_its_day = tokenizer.decode(agents.render(tokenizer, agent, values, **Sampling((), date=DAY).switches()))
    assert "31 Jan 2026" in on_its_day
    today = tokenizer.decode(agents.render(tokenizer, agent, values))
    assert datetime.datetime.now().strftime("%d %b %Y") in today


def saved(tmp_path, template="", **changes):
    """The folder of a tiny model, with this template, and these fields of config.json changed (None: removed)."""
    model, _ = tiny([*PRINTABLE, *MARKS])
    tokenizer = tokenizer_with(template or CHATML)
    save(model, tokenizer, str(tmp_path))
    config = agents.read_json(str(tmp_path), "config.json") | changes
    config = {name: value for name, value in config.items() if value is not None}
    agents.write_atomically(tmp_path / "config.json", agents.json.dumps(config))
    return tmp_path


def test_a_turn_that_ends_otherwise_stops_too(tmp_path, capsys):
    """Symptom: every completion hits the limit. Cause: the folder's eos is <|end|>, but turns end with <|im_end|>."""
    model, tokenizer = load(str(saved(tmp_path)))
    assert {tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|im_end|>")} <= set(model.stop_ids)
    assert "replies end with <|im_end|>" in capsys.readouterr().err
    again = tmp_path / "again"
    save(model, tokenizer, str(again))
    load(str(again))
    assert capsys.readouterr().err == ""  # it is named there now


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [None, 0, "64"])
def test_a_size_that_is_missing_or_none_is_one_sentence(tmp_path, name, value):
    with pytest.raises(InputError, match=f"config.json: {name} must be a number over 0"):
        load(str(saved(tmp_path, **{name: value})))


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_rope_scaling_that_is_a_word_is_one_sentence(tmp_path, name):
    """Symptom: AttributeError. Cause: the check stood behind the first look into it."""
    changes = dict(rope_scaling=None, rope_parameters=None) | {name: "linear"}
    with pytest.raises(InputError, match="rope_scaling must be an object, not linear"):
        load(str(saved(tmp_path, **changes)))


def test_an_id_without_a_row_is_refused(tmp_path):
    """Symptom: IndexError in the first prompt. Cause: the template writes a token beyond the embedding's last row."""
    model, _ = tiny(PRINTABLE)
    save(model, tokenizer_with(CHATML), str(tmp_path))
    with pytest.raises(InputError, match=r"its tokenizer has ids up to \d+, its embedding has \d+ rows"):
        load(str(tmp_path))


def test_a_stored_head_that_is_another_one_is_refused(tmp_path):
    """Symptom: a model trained with its own head talks nonsense. Cause: the config ties it, so the head is dropped."""
    saved(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for change, fits in ((0.0, True), (0.1, False)):
        head = weights["model.embed_tokens.weight"] + change
        save_file(weights | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        if fits:
            load(str(tmp_path))
        else:
            with pytest.raises(InputError, match="ties the output head to the embedding, but the stored head"):
                load(str(tmp_path))


@pytest.mark.parametrize("what", ["stale", "both"])
def test_an_index_beside_one_file_is_left_over(tmp_path, what):
    """Symptom: other weights than transformers loads, or a file that is missing. Guard: model.safetensors counts."""
    saved(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    shard = "model-00001-of-00001.safetensors"
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, shard)}
    agents.write_atomically(tmp_path / "model.safetensors.index.json", agents.json.dumps(index))
    if what == "both":
        save_file({name: tensor + 1 for name, tensor in weights.items()}, tmp_path / shard, metadata={"format": "pt"})
    model, _ = load(str(tmp_path))
    assert torch.equal(model.embed_tokens.weight, weights["model.embed_tokens.weight"])
    (tmp_path / "model.safetensors").unlink()
    if what == "both":
        model, _ = load(str(tmp_path))
        assert torch.equal(model.embed_tokens.weight, weights["model.embed_tokens.weight"] + 1)
    else:
        with pytest.raises(InputError, match=f"has no {shard}"):
            load(str(tmp_path))
