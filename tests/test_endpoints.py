"""Coaches behind an API, as their servers behave: each is scripted here, made small from what is documented."""

import re
import time
from email.utils import formatdate

import pytest
from conftest import Status, api

import judge
import train
from agents import InputError
from judge import ApiModel, Failure, example_case


def judged(coach):
    """The verdict of a coach on the example, after its probe."""
    coach.probe()
    [verdict] = judge.judge_by(coach, [example_case()])
    return verdict


def said(message):
    """An error as OpenAI words it."""
    return Status(400, body={"error": {"message": message, "type": "invalid_request_error", "param": None}})


def like_o_series(request):
    """OpenAI's models that think: other names and no temperature."""
    if "max_tokens" in request.body:
        return said("Unsupported parameter: 'max_tokens' is not supported here. Use 'max_completion_tokens' instead.")
    if "temperature" in request.body:
        return said("Unsupported value: 'temperature' does not support 0 with this model. Only 1 is supported.")
    return "Sound.\nSCORE: 8"


def like_gemini(request):
    """Gemini's compatible endpoint: a path of its own, and errors in a list."""
    if request.path != "/v1beta/openai/chat/completions":
        return Status(404, body=[{"error": {"code": 404, "message": "Not found.", "status": "NOT_FOUND"}}])
    return "Sound.\nSCORE: 8"


def like_vllm(request):
    """vLLM: the error without a wrapper, and fields that the standard does not have."""
    if len(request.body["messages"][1]["content"]) > 20_000:
        return Status(400, body={"object": "error", "message": "This model's maximum context length is 4096 tokens."})
    message = {"role": "assistant", "reasoning_content": "hm", "content": "Sound.\nSCORE: 8", "tool_calls": []}
    return Status(200, body={"choices": [{"message": message, "finish_reason": "stop", "stop_reason": None}]})


def like_llama_cpp(request):
    """llama.cpp: is still loading for a while, and counts tokens by names of its own."""
    message = {"role": "assistant", "content": "Sound.\nSCORE: 8"}
    body = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": None, "timings": {"predicted_n": 4}}
    return Status(200, body=body)


def like_ollama(request):
    """Ollama: an error is a text."""
    if request.body["model"] != "m":
        return Status(404, body={"error": "model 'other' not found, try pulling it first"})
    return "Sound.\nSCORE: 8"


def like_mistral(request):
    """Servers of models that think give parts."""
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "SCORE: 1"}]}]
    parts += [{"type": "text", "text": "Sound.\n"}, {"type": "text", "text": "SCORE: 8"}]
    return Status(200, body={"choices": [{"message": {"content": parts}, "finish_reason": "stop"}]})


SERVERS = {
    "OpenAI's o-series": (like_o_series, "/v1"),
    "Gemini": (like_gemini, "/v1beta/openai/"),
    "vLLM": (like_vllm, "/v1"),
    "llama.cpp": (like_llama_cpp, ""),
    "Ollama": (like_ollama, "/v1/"),
    "Mistral": (like_mistral, "/v1/chat/completions"),
}


@pytest.mark.parametrize("server", SERVERS)
def test_each_server_judges(endpoint, server):
    """Symptom: a coach that answers others has no verdict here. Guard: the probe finds out what it wants, once."""
    endpoint.respond, path = SERVERS[server]
    coach = api(endpoint, path=path)
    verdict = judged(coach)
    assert (verdict.score, verdict.reason) == (8.0, "Sound.")
    tries = 3 if server == "OpenAI's o-series" else 1
    assert len(endpoint.seen) == tries + 1  # what the probe found out holds for all cases
    assert coach.take_usage().counts["failures"] == 0


PATHS = [
    ("", "/v1/chat/completions"),
    ("/", "/v1/chat/completions"),
    ("/v1", "/v1/chat/completions"),
    ("/v1beta/openai/", "/v1beta/openai/chat/completions"),
    ("/api/v3", "/api/v3/chat/completions"),
    ("/openai/deployments/m?api-version=2", "/openai/deployments/m/chat/completions?api-version=2"),
    ("/v1/chat/completions", "/v1/chat/completions"),
]


@pytest.mark.parametrize("path, asked", PATHS)
def test_an_address_is_used_as_it_is_given(endpoint, path, asked):
    """Symptom: 404, although the address is right. Cause: /v1 is put behind addresses that end otherwise."""
    api(endpoint, path=path).probe()
    assert [request.path for request in endpoint.seen] == [asked]


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://host/v1", "v1", "http://", "http://[::1/v1", "http://h/ü"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(InputError, match="is no address of a coach"):
        ApiModel(url, "m", "")


REFUSALS = [
    (Status(400, body={"error": {"message": "max_tokens is too large: 1024."}}), "max_tokens is too large: 1024."),
    (Status(401, body={"error": {"message": "Incorrect API key: sk-SECRET"}}), "Incorrect API key: (the key)"),
    (Status(404, body={"detail": "Not Found"}), "Not Found"),
    (Status(404, body={"error": "model 'm' not found"}), "model 'm' not found"),
    (Status(301, {"Location": "https://elsewhere/v1"}), "status 301"),
    (Status(200, body={"error": {"message": "overloaded"}}), "no chat completion: overloaded"),
    (Status(200, body={"choices": [{"message": {"content": None}, "finish_reason": "stop"}]}), "there is no text"),
    (
        Status(200, body={"choices": [{"message": {"content": "SC"}, "finish_reason": "length"}]}),
        "limit of 1024 tokens",
    ),
    ("I do not judge.", "no verdict line"),
]


@pytest.mark.parametrize("entry, words", REFUSALS)
def test_a_coach_that_cannot_judge_stops_a_run_at_its_start(endpoint, entry, words):
    """Symptom: a rollout is sampled and paid for, and then all its verdicts are Failures.

    Guard: the probe asks what cases will ask, and says the address that was asked and the server's own words.
    """
    endpoint.respond = lambda request: entry
    with pytest.raises(InputError, match=re.escape(words)) as error:
        api(endpoint, path="/api/v2").probe()
    assert f"(asked at http://127.0.0.1:{endpoint.server_port}/api/v2/chat/completions)" in str(error.value)
    assert "SECRET" not in str(error.value)


def test_what_is_around_a_coach_may_be_damaged(endpoint, tmp_path):
    """A key file that ends with a line end, a key that no header can hold, a cache that a crash left half written."""
    api(endpoint, key="sk-SECRET\n").probe()
    headers = {name.lower(): value for name, value in endpoint.seen[0].headers.items()}
    assert headers["authorization"] == "Bearer sk-SECRET"
    with pytest.raises(InputError, match="no header"):
        api(endpoint, key="sk-ü")
    question = [{"role": "user", "content": "?"}]
    assert api(endpoint, cache=str(tmp_path)).ask(question) == "SCORE: 7"
    [kept] = tmp_path.iterdir()
    for damaged in ("", "{", "[]", "{}"):
        kept.write_text(damaged)
        assert api(endpoint, cache=str(tmp_path)).ask(question) == "SCORE: 7"
    endpoint.script = [Status(200, body={"choices": [{"message": {"content": 7}, "finish_reason": "stop"}]})]
    assert api(endpoint).ask(question).kind == "reply"


def test_one_case_that_is_too_long_is_a_failure_of_that_case(endpoint):
    """The others have their verdicts, and the reason names the context length."""
    endpoint.respond = like_vllm
    case = example_case()
    long_case = judge.replace(case, reply="1" * 30_000)
    verdicts = judge.judge_by(api(endpoint), [case, long_case, case])
    assert [isinstance(verdict, Failure) for verdict in verdicts] == [False, True, False]
    assert "maximum context length is 4096 tokens" in verdicts[1].detail


def test_a_pause_can_be_asked_for_until_a_date(endpoint, monkeypatch):
    """Symptom: a server that says when to come back is asked again at once. Cause: Retry-After may be a date."""
    waits = []
    monkeypatch.setattr(judge.time, "sleep", waits.append)
    endpoint.script = [Status(429, {"Retry-After": formatdate(time.time() + 30, usegmt=True)})]
    assert api(endpoint).ask([{"role": "user", "content": "?"}]) == "SCORE: 7"
    assert len(waits) == 1 and 25 < waits[0] <= 30
    for past in (formatdate(time.time() - 30, usegmt=True), "soon", "-5", "", "Wed, 99 Foo 2026"):
        assert judge.retry_after({"retry-after": past}) == 0.0


def test_a_run_is_judged_by_an_api_where_the_hub_is_offline(endpoint, tmp_path, monkeypatch):
    """Symptom: on a cluster with HF_HUB_OFFLINE=1 every verdict fails. Cause: the hub's client asked the coach."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    options = ["--warm-steps", "2", "--steps", "1", "--problems", "2", "--train-batch", "4", "--eval-problems", "0"]
    options += ["--judge", "api", "--judge-model", "m", "--judge-url", f"http://127.0.0.1:{endpoint.server_port}/v1"]
    endpoint.answer = lambda messages: "SCORE: 7, CORRECT: no"
    assert train.main(["--out", str(tmp_path / "run"), *options]) == 0
    assert len(endpoint.seen) > 4
