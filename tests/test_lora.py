"""LoRA: an adapter for each agent over one frozen model.

Silent failures of the field are guarded: adapters that never move, that move the base, or that leak into another agent;
a sampler without the adapter; files that other libraries read as something else.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from safetensors.torch import load_file, save_file

import eval
import model as model_file
import train
from agents import InputError, read_json
from model import LoraLinear, adapters, load, sample, save, save_adapter, tiny, token_logprobs, with_adapter

PIECES = [chr(code) for code in range(97, 123)]
CONTEXTS = [[6, 7, 8], [9, 10], [11]]
SMALL = ["--problems", "4", "--train-batch", "8", "--eval-problems", "2", "--eval-samples", "1", "--lora-rank", "4"]


@pytest.fixture
def base_model():
    return tiny(PIECES, seed=3)[0]


def moved(base, seed=0, rank=4):
    """An adapter over the base whose B is not zero."""
    model = with_adapter(base, rank, seed)
    generator = torch.Generator().manual_seed(seed)
    for module in adapters(model).values():
        module.lora_B.data = 0.1 * torch.randn(module.lora_B.shape, generator=generator)
    return model


def logprobs_of(model):
    with torch.no_grad():
        return token_logprobs(model, CONTEXTS, [[8, 9], [7], [6, 12, 13]])[0]


def test_an_adapter_starts_as_the_base_and_stays_apart(base_model):
    """At its start a policy IS its reference, exactly; what one agent learns is nowhere else; weights exist once."""
    before = logprobs_of(base_model)
    first, second = with_adapter(base_model, 4, seed=1), with_adapter(base_model, 4, seed=2)
    assert torch.equal(logprobs_of(first), before)
    assert len(adapters(first)) == 3 * 7  # all linear layers of the blocks
    changed = moved(base_model)
    assert not torch.allclose(logprobs_of(changed), before)
    assert torch.equal(logprobs_of(base_model), before) and torch.equal(logprobs_of(second), before)
    for own, theirs in zip(adapters(first).values(), adapters(second).values(), strict=True):
        assert own.weight.data_ptr() == theirs.weight.data_ptr()
        assert not torch.equal(own.lora_A, theirs.lora_A)
    assert not any(p.requires_grad for p in base_model.parameters())
    trained = {name.rpartition(".")[2] for name, p in first.named_parameters() if p.requires_grad}
    assert trained == {"lora_A", "lora_B"}


def test_gradients_are_those_of_the_merged_weight():
    """Autograd through W + (alpha / r) B A gives the same gradients for A and B."""
    torch.manual_seed(0)
    layer = LoraLinear(torch.nn.Linear(5, 3), 2, torch.Generator().manual_seed(1))
    layer.lora_B.data = torch.randn(3, 2)
    x, weights = torch.randn(4, 5), torch.randn(4, 3)
    (layer(x) * weights).sum().backward()
    A, B = layer.lora_A.detach().clone().requires_grad_(), layer.lora_B.detach().clone().requires_grad_()
    merged = layer.weight.detach() + model_file.LORA_ALPHA / 2 * B @ A
    assert torch.allclose(layer.merged(), merged)
    (F.linear(x, merged, layer.bias.detach()) * weights).sum().backward()
    assert torch.allclose(layer.lora_A.grad, A.grad, atol=1e-5) and torch.allclose(layer.lora_B.grad, B.grad, atol=1e-5)


def test_sampler_and_scorer_see_the_same_adapter(base_model):
    """Symptom: the sampler runs without the adapter, and every ratio is off. Guard: their numbers agree."""
    model = moved(base_model)
    uniforms = np.random.RandomState(0).random_sample((3, 9))
    completions = sample(model, CONTEXTS, uniforms, 9)
    with torch.no_grad():
        scored, _ = token_logprobs(model, CONTEXTS, [c.ids for c in completions])
    assert scored.tolist() == pytest.approx([x for c in completions for x in c.logprobs], abs=1e-4)
    plain = sample(base_model, CONTEXTS, uniforms, 9)
    assert [c.ids for c in plain] != [c.ids for c in completions]


def saved_adapter(tmp_path, seed=0):
    """(model, base folder, adapter folder)."""
    base, tokenizer = tiny(PIECES, seed=3)
    save(base, tokenizer, str(tmp_path / "base"))
    model = moved(base, seed)
    save_adapter(model, str(tmp_path / "base"), str(tmp_path / "adapter"))
    return model, tmp_path / "base", tmp_path / "adapter"


def test_an_adapter_is_saved_loaded_and_merged(tmp_path):
    """What is loaded again, and what is merged into whole folders, says the same, also to transformers."""
    model, base_folder, adapter_folder = saved_adapter(tmp_path)
    bases = {}
    again, _ = load(str(adapter_folder), bases=bases)
    other, _ = load(str(adapter_folder), bases=bases)
    assert torch.equal(logprobs_of(again), logprobs_of(model))
    assert again.embed_tokens.weight.data_ptr() == other.embed_tokens.weight.data_ptr()  # one base for both
    assert model_file.main(["merge", str(adapter_folder), str(tmp_path / "whole")]) == 0
    whole, _ = load(str(tmp_path / "whole"))
    assert adapters(whole) == {}
    assert torch.allclose(logprobs_of(whole), logprobs_of(model), atol=1e-5)

    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").float().eval()
    ids = torch.tensor([[6, 7, 8, 9]])
    with torch.no_grad():
        ours = model.logits(model(ids, torch.arange(4)[None])[0])
        assert torch.allclose(theirs(ids).logits[0][:, : model.n_tokens], ours[:, : model.n_tokens], atol=1e-4)
    assert model_file.main(["merge", str(base_folder / "none"), str(tmp_path / "x")]) == 2
    assert model_file.main([]) == 2


def test_peft_opens_an_adapter(tmp_path):
    """peft, over the base in transformers, gives the same logits: names, shapes and scale are as it has them."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model, base_folder, adapter_folder = saved_adapter(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base_folder).float()
    theirs = peft.PeftModel.from_pretrained(theirs, adapter_folder).eval()
    ids = torch.tensor([[6, 7, 8, 9]])
    with torch.no_grad():
        ours = model.logits(model(ids, torch.arange(4)[None])[0])
        assert torch.allclose(
            theirs(input_ids=ids).logits[0][:, : model.n_tokens], ours[:, : model.n_tokens], atol=1e-4
        )


@pytest.mark.parametrize("what", ["alpha", "tensor", "shape", "file", "base", "no base", "other scale"])
def test_a_broken_adapter_is_one_sentence(tmp_path, what):
    _, base_folder, adapter_folder = saved_adapter(tmp_path)
    settings = read_json(str(adapter_folder), "adapter_config.json")
    path = adapter_folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    if what == "alpha":
        settings["lora_alpha"] = 16
    elif what == "tensor":
        del tensors[name]
    elif what == "shape":
        tensors[name] = tensors[name][:1].contiguous()
    elif what == "no base":
        settings["base_model_name_or_path"] = None
    elif what == "other scale":
        settings["use_rslora"] = True
    elif what == "base":
        settings["base_model_name_or_path"] = str(tmp_path / "none")
    save_file(tensors, path)
    (adapter_folder / "adapter_config.json").write_text(json.dumps(settings))
    if what == "file":
        path.unlink()
    with pytest.raises(InputError) as error:
        load(str(adapter_folder))
    assert "\n" not in str(error.value)


def weights_of(out, step, agent="Coder"):
    return load_file(os.path.join(out, f"step_{step:06d}", agent, "adapter_model.safetensors"))


def test_a_run_trains_adapters_and_nothing_else(base, tmp_path, capfd):
    """After a step B has moved in every agent, each in its own way; the base's file is what it was; --resume is exact;
    eval.py loads the adapters over one base."""
    out, whole = str(tmp_path / "run"), str(tmp_path / "whole")
    options = ["--model", str(base), *SMALL, "--save-every", "1", "--lr", "1e-3"]
    before = load_file(base / "model.safetensors")
    assert train.main(["--out", whole, *options, "--steps", "2"]) == 0
    first = [weights_of(whole, 1, agent) for agent in ("Solver", "Coder", "Verifier")]
    for tensors in first:
        assert all(tensor.abs().max() > 0 for name, tensor in tensors.items() if "lora_B" in name)
    name = next(name for name in first[0] if "lora_B" in name)
    assert not torch.equal(first[0][name], first[1][name]) and not torch.equal(first[1][name], first[2][name])
    after = load_file(base / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())

    assert train.main(["--out", out, *options, "--steps", "2"]) == 0
    os.remove(os.path.join(out, "latest"))
    assert train.main(["--out", out, "--resume"]) == 0  # from the start: the same again
    assert all(torch.equal(weights_of(out, 2)[name], tensor) for name, tensor in weights_of(whole, 2).items())
    capfd.readouterr()
    assert eval.main(["--run", whole, "--problems", "2", "--samples", "1", "--json"]) == 0
    assert "difference" in json.loads(capfd.readouterr().out.splitlines()[-1])


def test_two_processes_train_the_same_adapters(base, tmp_path):
    """The adapters start alike and end alike, whatever the number of processes."""
    options = ["--model", str(base), *SMALL, "--steps", "1", "--eval-problems", "0", "--lr", "1e-3"]
    assert train.main(["--out", str(tmp_path / "one"), *options]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "train.py", "--out", str(tmp_path / "two"), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for agent in ("Solver", "Coder", "Verifier"):
        for name, tensor in weights_of(tmp_path / "one", 1, agent).items():
            assert torch.allclose(weights_of(tmp_path / "two", 1, agent)[name], tensor, atol=1e-5), (agent, name)
