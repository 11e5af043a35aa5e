# SPDX-License-Identifier: Apache-2.0
"""Measuring a server, by pages and streams as vLLM and SGLang give them, and asking one that fails."""

import json
import logging
import re
import threading
import time

import pytest
from engines import Engine, Handler, start_engine
from tiny import refused

from dflash_hf import serving
from dflash_hf.prompts import EvaluationPrompt
from dflash_hf.serving import (
    LONGEST_RETRY_AFTER,
    AnswerError,
    CompletionServer,
    Server,
    ServerError,
    Verifications,
    _retry_after,
    measure_server,
    own_verifications,
    request_body,
)


SECRET = "sk-very-secret"


@pytest.fixture
def start():
    with start_engine() as start:
        yield start


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(serving.time, "sleep", lambda seconds: None)


@pytest.fixture
def edit(monkeypatch):
    """Changes what an engine gives: its metrics page, its information, or each chunk of an answer."""

    def change(method, function):
        original = getattr(Engine, method)
        monkeypatch.setattr(Engine, method, lambda self, *args: function(original(self, *args)))

    return change


def prompts(*texts):
    return [
        EvaluationPrompt([{"role": "user", "content": text}], source=text.split()[0], language="en") for text in texts
    ]


def measure(url, *texts, timeout=20.0, **arguments):
    settings = {"max_tokens": 64, "temperature": 0.0}
    return measure_server(Server(url, timeout), prompts(*texts), settings, progress=False, **arguments)


@pytest.mark.parametrize("per_request", [False, True])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_acceptance_length_is_that_of_the_answers_alone(start, kind, per_request):
    """Whatever was served before: 100 verifications that accepted 40 drafts."""
    engine, url = start(kind, per_request=per_request)
    report = measure(url + "/v1/", "easy 1", "easy 2", "hard 3", concurrency=2)
    figures = report.summary()
    assert report.per_request == per_request and report.engine == kind
    assert figures["acceptance_length"] == pytest.approx(1 + 22 / 14)
    assert figures["forwards"] == pytest.approx(14)
    assert [(g["source"], g["language"]) for g in figures["groups"]] == [("easy", "en"), ("hard", "en")]
    assert [g["acceptance_length"] for g in figures["groups"]] == pytest.approx([3.0, 2.0])
    assert (figures["num_prompts"], figures["num_tokens"], figures["model"]) == (3, 39, "Qwen/Qwen3.6-27B")
    assert report.tokens_per_second == 39 / report.seconds > 0
    assert report.answers[0].text == ("Hm. Yes" if kind == "vllm" else "Yes")
    assert {body["model"] for body in engine.requests} == {"Qwen/Qwen3.6-27B"}
    assert all(body["max_tokens"] == 64 and body["temperature"] == 0.0 for body in engine.requests)
    json.dumps(figures)


def test_acceptance_per_slot_from_vllms_counters_and_from_answers(start):
    _, url = start("vllm")
    assert measure(url, "easy 1", "easy 2").summary()["slot_acceptance"] == [1.0, 6 / 8, 0.0]
    _, url = start("vllm", per_request=True)
    assert measure(url, "easy 1", "hard 2").summary()["slot_acceptance"] == [8 / 10, 6 / 10, 2 / 10]


def test_several_engines_behind_one_address_are_added_up(start):
    engine, url = start("vllm")
    original = engine.metrics
    engine.metrics = lambda: original() + original().replace('engine="0"', 'engine="1"')
    assert measure(url, "easy 1").summary()["forwards"] == 8


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_without_speculation_is_refused_before_it_is_asked(start, kind):
    engine, url = start(kind, plain=True)
    with refused(ServerError, "speculation", "--speculative-"):
        measure(url, "easy 1")
    assert not engine.requests


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_speculation_that_is_not_used_is_an_error(start, kind):
    _, url = start(kind, unused=True)
    with refused(ServerError, 13):
        measure(url, "easy 1")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_counters_that_go_back_are_an_error(start, kind):
    engine, url = start(kind, reset=True)
    with refused(ServerError, "went back", 100):
        if kind == "sglang":
            # The mean alone cannot show it; the number of tokens does.
            answer = engine.answer
            engine.answer = lambda body: [answer(body), setattr(engine, "tokens", 20)][0]
        measure(url, "easy 1")


@pytest.mark.parametrize("fault", ["accepted", "slot", "slots"])
def test_a_restart_shows_in_any_counter(start, fault):
    """A new server may have verified more than the old one by the time that it is asked."""
    engine, url = start("vllm")
    answer, metrics = engine.answer, engine.metrics

    def restarted(body):
        engine.drafts += 200
        engine.accepted += {"accepted": -20, "slot": 0, "slots": 0}[fault]
        engine.first -= {"accepted": 0, "slot": 10, "slots": 0}[fault]
        return answer(body)

    def fewer():
        lines = metrics().splitlines()
        return "\n".join(line for line in lines if not (engine.requests and 'position="2"' in line))

    engine.answer = restarted
    engine.metrics = fewer if fault == "slots" else metrics
    with refused(ServerError, "went back"):
        measure(url, "easy 1")


def test_a_group_without_verifications_is_json(start):
    engine, url = start("vllm")
    answer = engine.answer
    one = [{"choices": [], "usage": {"completion_tokens": 1}}]
    engine.answer = lambda body: one if "hard" in body["messages"][-1]["content"] else answer(body)
    groups = json.loads(json.dumps(measure(url, "easy 1", "hard 2").summary(), allow_nan=False))["groups"]
    assert [group["acceptance_length"] for group in groups] == [3.0, None]


def test_what_was_answered_before_an_error_is_kept(start):
    _, url = start("vllm", refuses="3")
    kept = []
    with refused(ServerError, "max_tokens is too large", "hard 3"):
        measure(url, "easy 1", "hard 2", "hard 3", "hard 4", keep=kept.append)
    assert [len(report.answers) for report in kept] == [1, 2]
    assert kept[-1].verifications.forwards == 10 and list(kept[-1].groups) == [("easy", "en"), ("hard", "en")]


def test_sglang_without_its_metrics_page(start):
    """Per answer it still tells; else only a server that has answered nothing yet can be measured at all."""
    _, url = start("sglang", metrics=False, per_request=True)
    assert measure(url, "easy 1").verifications == Verifications(4, 8, [])
    _, url = start("sglang", metrics=False)
    with refused(ServerError, "--enable-metrics"):
        measure(url, "easy 1")


@pytest.mark.parametrize("status", [302, 307])
def test_a_redirect_is_not_followed_and_the_key_stays(start, monkeypatch, status):
    _, other = start("vllm")
    _, url = start("vllm")
    asked = []
    monkeypatch.setenv("OPENAI_API_KEY", "abc")

    def redirect(self):
        if self.headers["Host"] in other:
            asked.append(self.headers["Authorization"])
        self.send_response(status)
        self.send_header("Location", other + self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    monkeypatch.setattr(Handler, "do_GET", redirect)
    with refused(ServerError, status, f"{other}/v1/models"):
        Server(url, timeout=5)

    def read_and_redirect(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        redirect(self)

    monkeypatch.setattr(Handler, "do_POST", read_and_redirect)
    with refused(AnswerError, status):
        CompletionServer(url + "/v1").answer({"messages": []})
    assert not asked


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("content", ["<html>Hello</html>", "data: <html>\n\n", "data: [1]\n\n", "[1]"])
def test_pages_and_answers_that_are_no_json_objects_are_errors(start, monkeypatch, kind, content):
    _, url = start(kind)
    server, get = Server(url, timeout=5), Handler.do_GET
    with monkeypatch.context() as patch:
        patch.setattr(Handler, "do_POST", lambda self: self.send(content))
        with refused(ServerError, url):
            measure_server(server, prompts("easy 1"), {}, progress=False)
    for path in ["/v1/models", "/metrics" if kind == "vllm" else "/server_info"]:
        monkeypatch.setattr(
            Handler, "do_GET", lambda self, p=path: self.send(content) if self.path == p else get(self)
        )
        with refused(ServerError, url):
            Server(url, timeout=5)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("start_of_answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"])
def test_a_connection_that_breaks_is_an_error(start, monkeypatch, kind, start_of_answer):
    def cut(self):
        self.wfile.write(start_of_answer)
        self.close_connection = True

    _, url = start(kind)
    server = Server(url, timeout=5)
    monkeypatch.setattr(Handler, "do_POST", cut)
    with refused(ServerError):
        measure_server(server, prompts("easy 1"), {}, progress=False)


def test_the_model_that_is_asked(start, monkeypatch):
    engine, url = start("vllm")
    get = Handler.do_GET
    models = {"data": [{"id": "base"}, {"id": "adapter"}]}
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.send(models) if "models" in self.path else get(self))
    assert Server(url, timeout=5).model == "base"
    server = Server(url, timeout=5, model="adapter")
    measure_server(server, prompts("easy 1"), {}, progress=False)
    assert engine.requests[0]["model"] == "adapter"
    with refused(ServerError, "base", "adapter", "other"):
        Server(url, timeout=5, model="other")


def test_something_else_than_an_engine_is_refused(start):
    _, url = start("gateway")
    with refused(ServerError, "/metrics", "/server_info"):
        Server(url, timeout=5)
    with refused(ServerError, "127.0.0.1:9"):
        Server("http://127.0.0.1:9", timeout=5)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_gives_nothing_times_out(start, kind):
    _, url = start(kind)
    server = Server(url, timeout=0.3)
    release = threading.Event()
    handler = Handler.do_POST
    try:
        Handler.do_POST = lambda self: release.wait(5)
        with refused(ServerError, "/v1/chat/completions", 0.3):
            measure_server(server, prompts("easy 1"), {}, progress=False)
    finally:
        release.set()
        Handler.do_POST = handler


def test_an_answer_that_breaks_off_and_an_error_are_errors(start):
    _, url = start("vllm", cut=True)
    with refused(ServerError, "usage"):
        measure(url, "easy 1")
    _, url = start("vllm", status=400)
    with refused(ServerError, 400, "max_tokens is too large"):
        measure(url, "easy 1")


def test_other_traffic_is_a_warning(start, caplog):
    engine, url = start("vllm")
    answer = engine.answer

    def with_others(body):
        engine.drafts, engine.accepted = engine.drafts + 500, engine.accepted + 1000
        return answer(body)

    engine.answer = with_others
    logger = logging.getLogger("dflash_hf.serving")
    logger.addHandler(caplog.handler)
    measure(url, "easy 1")
    logger.removeHandler(caplog.handler)
    assert "other requests were served meanwhile" in caplog.text


def test_counters_that_never_stand_still_are_an_error(start):
    engine, url = start("vllm")
    original = engine.metrics

    def rising():
        engine.drafts += 1
        return original()

    engine.metrics = rising
    with refused(ServerError, url):
        measure(url, "easy 1")


def test_an_answers_own_histogram_of_sglang():
    answer = {
        "choices": [{"meta_info": {"spec_verify_ct": 5, "spec_accept_histogram": [2, 0, 1, 2]}}],
        "usage": {"completion_tokens": 14},
    }
    assert own_verifications(answer) == Verifications(5, 8, [3, 3, 2])
    assert own_verifications({"choices": [{"delta": {}}], "usage": None}) is None


@pytest.mark.parametrize("value", ["NaN", "-5", "abc"])
@pytest.mark.parametrize("name", ["spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_per_pos_total"])
def test_a_counter_that_is_no_count_is_named(start, edit, name, value):
    edit("metrics", lambda page: page and re.sub(rf"({name}\{{[^}}]*\}}) \S+", rf"\1 {value}", page))
    with refused(ServerError, f"vllm:{name[:-6]}"):
        measure(start("vllm")[1], "easy 1")


@pytest.mark.parametrize(
    "page",
    [
        lambda page: page.replace("\n", "\r\n"),
        lambda page: page.replace("Qwen/Qwen3.6-27B", 'a}b\\" c{d'),
        lambda page: re.sub(r"(\} [\d.]+)\n", r"\1 1700000000000\n", page).replace("} ", "}\t"),
    ],
    ids=["other line ends", "braces in labels", "times and tabs"],
)
def test_odd_pages_are_read(start, edit, page):
    edit("metrics", lambda text: text and page(text))
    assert measure(start("vllm")[1], "easy 1").verifications.acceptance_length == 3.0


@pytest.mark.parametrize(
    "states", ["x", [{}, {}], [{"avg_spec_accept_length": "2.5"}], [{"avg_spec_accept_length": -3}]]
)
def test_information_that_cannot_be_counted_is_named(start, edit, states):
    """Of several data-parallel workers the means cannot be pooled."""
    edit("server_info", lambda info: info and info | {"internal_states": states})
    with refused(ServerError, "verified"):
        measure(start("sglang")[1], "easy 1")


def with_part(chunk, name, value):
    """A chunk with another part, wherever it has one of that name."""
    if isinstance(chunk, dict):
        return {k: value if k == name and v is not None else with_part(v, name, value) for k, v in chunk.items()}
    return [with_part(item, name, value) for item in chunk] if isinstance(chunk, list) else chunk


@pytest.mark.parametrize(
    ("kinds", "name", "values"),
    [
        (("vllm", "sglang"), "usage", [[1], "x"]),
        (("vllm", "sglang"), "completion_tokens", [None, "13", -3]),
        (("vllm", "sglang"), "choices", [[None], {"a": 1}]),
        (("vllm", "sglang"), "content", [3, {"text": "x"}]),
        (("vllm",), "delta", ["x"]),
        (("vllm",), "speculative_decoding", ["x", {"num_spec_steps": 1}]),
        (("vllm",), "num_spec_steps", [None, -4, float("nan")]),
        (("vllm",), "acceptance_histogram", [[1, 2], {"x": 1}, {"1": None}]),
        (("sglang",), "meta_info", [{"spec_verify_ct": 4, "spec_accept_histogram": "abc"}]),
        (("sglang",), "spec_verify_ct", [None, "4", 400]),
    ],
)
def test_answers_of_another_form_are_errors(start, edit, kinds, name, values):
    edit("answer", lambda chunks: [with_part(chunk, name, given[-1]) for chunk in chunks])
    for kind in kinds:
        _, url = start(kind, per_request=True)
        for value in values:
            given = [value]
            with refused(ServerError, "easy 1"):
                measure(url, "easy 1")


def respond(monkeypatch, path, function):
    """Lets the server answer one page in its own way."""
    get = Handler.do_GET

    def do_get(self):
        if self.path != path:
            return get(self)
        function(self)
        self.close_connection = True

    monkeypatch.setattr(Handler, "do_GET", do_get)


@pytest.mark.parametrize("hangs", [False, True])
def test_an_error_whose_text_does_not_come_is_still_the_error(start, monkeypatch, hangs):
    release = threading.Event()

    def fail(self):
        self.wfile.write(b"HTTP/1.1 500 Oops\r\nContent-Length: 100\r\n\r\noops")
        if hangs:
            release.wait(5)

    respond(monkeypatch, "/metrics", fail)
    with refused(ServerError, "/metrics", 500):
        Server(start("vllm")[1], timeout=0.2)
    release.set()


def dribble(self):
    self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(200):
        try:
            self.wfile.write(b"6\r\n: abc\n\r\n")
        except OSError:
            return
        threading.Event().wait(0.05)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_what_comes_to_no_end_is_not_waited_for(start, monkeypatch, kind):
    _, url = start(kind)
    server, begin = Server(url, timeout=0.5), time.monotonic()
    monkeypatch.setattr(
        Handler, "do_POST", lambda self: (self.rfile.read(int(self.headers["Content-Length"])), dribble(self))
    )
    with refused(ServerError, 0.5):
        server.ask(EvaluationPrompt([{"role": "user", "content": "easy 1"}]), {})
    with refused(AnswerError, 0.5):
        CompletionServer(url + "/v1", timeout=0.5, retries=0).answer({"messages": []})
    respond(monkeypatch, "/v1/models", dribble)
    with refused(ServerError, 0.5):
        Server(url, timeout=0.5)
    assert time.monotonic() - begin < 5


def test_a_key_is_sent_and_one_that_cannot_be_is_not_repeated(start, monkeypatch):
    _, url = start("vllm")
    seen = []
    monkeypatch.setattr(Handler, "log_request", lambda self, *args: seen.append(self.headers["Authorization"]))
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}\n")
    Server(url, timeout=5)
    assert set(seen) == {f"Bearer {SECRET}"}
    with monkeypatch.context() as patch:
        patch.setattr(Handler, "do_GET", lambda self: self.send({"error": f"Unauthorized {SECRET}"}, 401))
        with pytest.raises(ServerError) as error:
            Server(url, timeout=5)
        assert "401" in str(error.value) and "OPENAI_API_KEY" in str(error.value) and SECRET not in str(error.value)
    for key in f"{SECRET}\nx", f"{SECRET}\u20ac":
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(ServerError) as error:
            Server(url)
        assert "OPENAI_API_KEY" in str(error.value) and SECRET not in str(error.value)


@pytest.mark.parametrize(
    "address",
    ["localhost:8000", "", "ftp://x", "http://local host:80", "http://localhost:abc", "http://[::1", "http://"],
)
def test_an_address_of_a_wrong_form_is_refused_before_it_is_asked(address):
    for make in Server, CompletionServer:
        with refused((ServerError, ValueError), address):
            make(address)


@pytest.mark.parametrize("address", [f"http://u:{SECRET}@localhost:8000", f"http://localhost:8000/v1?key={SECRET}"])
def test_an_address_with_a_secret_is_refused_without_repeating_it(address):
    with pytest.raises(ServerError) as error:
        Server(address)
    assert SECRET not in str(error.value) and "OPENAI_API_KEY" in str(error.value)


@pytest.mark.parametrize(("value", "seconds"), [("2", 2.0), ("0.5", 0.5), ("-1", 0.0), ("soon", None), (None, None)])
def test_retry_after(value, seconds):
    """In seconds or as a date, and never for days."""
    assert _retry_after(value) == seconds
    assert _retry_after("Thu, 01 Jan 1970 00:00:00 GMT") == 0
    for long in ("inf", "1e9", "Fri, 31 Dec 9999 23:59:59 GMT"):
        assert _retry_after(long) == LONGEST_RETRY_AFTER
    assert _retry_after("nan") is None


@pytest.mark.parametrize("spelt", [{"arguments": ""}, {"arguments": None}, {}, {"arguments": {}}, {"arguments": "{}"}])
def test_r3_a_call_without_arguments_is_asked_as_one_of_none(spelt):
    """Servers take arguments as text; what the prompt says of thinking goes before what all are asked with."""
    call = {"type": "function", "function": {"name": "now", **spelt}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call], "train": False}]
    prompt = EvaluationPrompt(messages, tools=[{"a": 1}], template_kwargs={"enable_thinking": False})
    body = request_body(prompt, {"chat_template_kwargs": {"enable_thinking": True, "x": 1}})
    assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert body["tools"] == [{"a": 1}] and body["chat_template_kwargs"] == {"enable_thinking": False, "x": 1}
    assert "train" not in body["messages"][1] and prompt.messages[1]["tool_calls"] == [call]


def test_who_stops_asking_does_not_wait_for_the_answers(start, monkeypatch):
    release = threading.Event()
    post = Handler.do_POST

    def answer(self):
        if "slow" in json.loads(self.rfile.peek(1)[: int(self.headers["Content-Length"])])["messages"][0]["content"]:
            release.wait(10)
            self.close_connection = True
            return
        post(self)

    monkeypatch.setattr(Handler, "do_POST", answer)
    server, begin = CompletionServer(start("sglang")[1] + "/v1", retries=0), time.monotonic()
    bodies = [(k, {"messages": [{"role": "user", "content": text}]}) for k, text in enumerate(["slow", "easy"])]
    answers = server.answer_all(bodies, concurrency=2)
    assert next(answers)[0] == 1
    answers.close()
    assert time.monotonic() - begin < 5
    release.set()
