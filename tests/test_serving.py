# SPDX-License-Identifier: Apache-2.0
"""Measuring a server: pages and streams as vLLM and SGLang give them, replayed on the loopback."""

import json
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dflash_hf import serving as server_client
from dflash_hf.prompts import EvaluationPrompt
from dflash_hf.serving import (
    AnswerError,
    CompletionServer,
    Server,
    ServerError,
    Verifications,
    measure_server,
    own_verifications,
)


VLLM_PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="Qwen/Qwen3.6-27B"}} 0.0
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="Qwen/Qwen3.6-27B"}} 5123.0
"""
VLLM_SPECULATION = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="Qwen/Qwen3.6-27B"}} {drafts}
vllm:spec_decode_num_drafts_created{{engine="0",model_name="Qwen/Qwen3.6-27B"}} 1.76e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="Qwen/Qwen3.6-27B"}} {draft_tokens}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="Qwen/Qwen3.6-27B"}} {accepted}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="Qwen/Qwen3.6-27B",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="Qwen/Qwen3.6-27B",position="1"}} {second}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="Qwen/Qwen3.6-27B",position="2"}} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{{engine="0",model_name="Qwen/Qwen3.6-27B",position="2"}} 1.76e+09
"""
SGLANG_PAGE = """\
# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{model_name="Qwen/Qwen3.6-27B"}} {tokens}
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{{model_name="Qwen/Qwen3.6-27B"}} {served}
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{model_name="Qwen/Qwen3.6-27B"}} 9.9
"""


class Engine:
    """What a replayed server has counted, and how it behaves.

    An answer has 13 tokens: the prefill's, and 12 from four verifications that accept 8 drafts. Its source "hard" has
    as many from six verifications that accept 6.
    """

    def __init__(self, kind, **behaviour):
        self.kind, self.behaviour = kind, behaviour
        # What was served before.
        self.drafts, self.accepted, self.first, self.second, self.tokens, self.served = 100, 40, 30, 10, 150, 10
        self.requests = []
        self.lock = threading.Lock()

    def metrics(self):
        if self.kind == "vllm":
            page = VLLM_PAGE if self.behaviour.get("plain") else VLLM_PAGE + VLLM_SPECULATION
        elif self.kind == "sglang" and self.behaviour.get("metrics", True):
            page = SGLANG_PAGE
        else:
            return None
        names = ("drafts", "accepted", "first", "second", "tokens", "served")
        return page.format(**{n: float(vars(self)[n]) for n in names}, draft_tokens=3.0 * self.drafts)

    def server_info(self):
        if self.kind != "sglang":
            return None
        length = (self.drafts + self.accepted) / self.drafts if self.drafts else 0.0
        state = {"last_gen_throughput": 31.4, "avg_spec_accept_length": length}
        algorithm = None if self.behaviour.get("plain") else "DFLASH"
        return {"version": "0.5.23", "speculative_algorithm": algorithm, "internal_states": [state]}

    def answer(self, body):
        """Chunks of an answer, after counting it."""
        rounds, accepted = (6, 6) if "hard" in body["messages"][-1]["content"] else (4, 8)
        with self.lock:
            self.requests.append(body)
            if not self.behaviour.get("unused"):
                self.drafts, self.accepted = self.drafts + rounds, self.accepted + accepted
                self.first, self.second, self.tokens = self.first + 4, self.second + 3, self.tokens + 13
                self.served += 1
            if self.behaviour.get("reset"):
                self.drafts = self.accepted = self.first = self.second = 1
        usage = {"prompt_tokens": 9, "completion_tokens": 13, "total_tokens": 22}
        if self.kind == "vllm":
            last = {"choices": [], "usage": usage}
            if self.behaviour.get("per_request"):
                histogram = {"0": rounds - 4, "1": 1, "2": 2, "3": 1} if rounds == 6 else {"1": 1, "2": 2, "3": 1}
                last["metrics"] = {
                    "speculative_decoding": {
                        "num_spec_steps": rounds,
                        "num_accepted_draft_tokens": accepted,
                        "num_draft_tokens": 3 * rounds,
                        "acceptance_histogram": histogram,
                    }
                }
            texts = [{"role": "assistant", "content": ""}, {"reasoning_content": "Hm. "}, {"content": "Yes"}]
            return [{"choices": [{"index": 0, "delta": delta}], "usage": None} for delta in texts] + [last]
        choice = {"index": 0, "message": {"role": "assistant", "content": "Yes"}, "finish_reason": "stop"}
        if self.behaviour.get("per_request"):
            choice["meta_info"] = {
                "completion_tokens": 13,
                "spec_verify_ct": rounds,
                "spec_accept_length": 13 / rounds,
            }
        return [{"choices": [choice], "usage": usage}]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def send(self, content, status=200):
        if content is None:
            content, status = "Not Found", 404
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        engine = self.server.engine
        pages = {"/metrics": engine.metrics, "/server_info": engine.server_info}
        pages["/v1/models"] = lambda: {"object": "list", "data": [{"id": "Qwen/Qwen3.6-27B"}]}
        self.send(pages.get(self.path, lambda: None)())

    def do_POST(self):
        engine = self.server.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        refuses = engine.behaviour.get("refuses")
        if "status" in engine.behaviour or (refuses and refuses in body["messages"][-1]["content"]):
            self.send({"error": {"message": "max_tokens is too large"}}, engine.behaviour.get("status", 400))
            return
        chunks = engine.answer(body)
        if "sleep" in engine.behaviour:
            time.sleep(engine.behaviour["sleep"])
        if not body.get("stream"):
            self.send(chunks[0])
            return
        chunks = chunks[:-1] if engine.behaviour.get("cut") else chunks
        lines = ["data: " + json.dumps(chunk) for chunk in chunks] + ["data: [DONE]"]
        self.send(": keep-alive\n\n" + "\n\n".join(lines) + "\n\n")


@pytest.fixture
def start():
    """Starts a replayed engine; returns it and the address."""
    servers = []

    def run(kind, **behaviour):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.engine = Engine(kind, **behaviour)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server.engine, f"http://127.0.0.1:{server.server_port}"

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(server_client.time, "sleep", lambda seconds: None)


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
    with pytest.raises(ServerError, match=r"without speculation.*Start it with --speculative-(config|algorithm)"):
        measure(url, "easy 1")
    assert not engine.requests


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_speculation_that_is_not_used_is_an_error(start, kind):
    _, url = start(kind, unused=True)
    with pytest.raises(ServerError, match="wrote 13 tokens and verified no draft"):
        measure(url, "easy 1")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_counters_that_go_back_are_an_error(start, kind):
    engine, url = start(kind, reset=True)
    with pytest.raises(ServerError, match=r"went back, from 100 verifications to .*was restarted or its counters"):
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
    with pytest.raises(ServerError, match="went back"):
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
    with pytest.raises(ServerError, match=r"max_tokens is too large.* The prompt was 'hard 3'"):
        measure(url, "easy 1", "hard 2", "hard 3", "hard 4", keep=kept.append)
    assert [len(report.answers) for report in kept] == [1, 2]
    assert kept[-1].verifications.forwards == 10 and list(kept[-1].groups) == [("easy", "en"), ("hard", "en")]


def test_answers_before_an_error_that_cannot_be_counted_are_left_out(start, caplog):
    _, url = start("vllm", refuses="3", reset=True)
    kept = []
    with pytest.raises(ServerError, match="max_tokens is too large"):
        measure(url, "hard 2", "hard 3", keep=kept.append)
    assert not kept


def test_sglang_without_its_metrics_page(start):
    """Per answer it still tells; else only a server that has answered nothing yet can be measured at all."""
    _, url = start("sglang", metrics=False, per_request=True)
    assert measure(url, "easy 1").verifications == Verifications(4, 8, [])
    _, url = start("sglang", metrics=False)
    with pytest.raises(ServerError, match=r"no number of tokens.*--enable-metrics"):
        measure(url, "easy 1")


def test_a_key_is_taken_from_the_environment(start, monkeypatch):
    _, url = start("vllm")
    seen = []
    monkeypatch.setenv("OPENAI_API_KEY", "abc")
    monkeypatch.setattr(Handler, "log_request", lambda self, *args: seen.append(self.headers["Authorization"]))
    Server(url, timeout=5)
    assert set(seen) == {"Bearer abc"}


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
    with pytest.raises(ServerError, match=rf"status {status}: .*It redirects to {other}/v1/models"):
        Server(url, timeout=5)

    def read_and_redirect(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        redirect(self)

    monkeypatch.setattr(Handler, "do_POST", read_and_redirect)
    with pytest.raises(AnswerError, match=f"refused the request .status {status}"):
        CompletionServer(url + "/v1").answer({"messages": []})
    assert not asked


@pytest.mark.parametrize("address", ["localhost:8000", "", "ftp://x", "file:///etc"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ServerError, match=r"is no address of a server; give one such as http://"):
        Server(address)


def test_a_refused_key_says_where_keys_go(start, monkeypatch):
    _, url = start("vllm")
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.send({"error": "Unauthorized"}, 401))
    with pytest.raises(ServerError, match=r"status 401: .*Unauthorized.*environment variable OPENAI_API_KEY"):
        Server(url, timeout=5)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("content", ["<html>Hello</html>", "data: <html>\n\n", "data: [1]\n\n", "[1]", "Welcome here"])
def test_pages_and_answers_that_are_no_json_objects_are_errors(start, monkeypatch, kind, content):
    _, url = start(kind)
    server, get = Server(url, timeout=5), Handler.do_GET
    ask = lambda: measure_server(server, prompts("easy 1"), {}, progress=False)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(Handler, "do_POST", lambda self: self.send(content))
        with pytest.raises(ServerError, match=r"something else than the JSON|breaks off before its `usage`"):
            ask()
    paths = ["/v1/models", "/metrics"] if kind == "vllm" else ["/v1/models", "/server_info"]
    for path in paths:
        monkeypatch.setattr(
            Handler, "do_GET", lambda self, p=path: self.send(content) if self.path == p else get(self)
        )
        with pytest.raises(ServerError, match=r"something else than the JSON|neither vLLM's metrics"):
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
    with pytest.raises(ServerError, match=r"broke off|something else than the JSON|breaks off"):
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
    with pytest.raises(ServerError, match="serves base, adapter, not other"):
        Server(url, timeout=5, model="other")


def test_nothing_to_ask_is_refused(start):
    _, url = start("vllm")
    for texts, concurrency in ([], 1), (["easy 1"], 0):
        with pytest.raises(ValueError, match="expected at least 1"):
            measure(url, *texts, concurrency=concurrency)


def test_something_else_than_an_engine_is_refused(start):
    _, url = start("gateway")
    with pytest.raises(ServerError, match=r"neither vLLM's metrics .* nor SGLang's /server_info"):
        Server(url, timeout=5)
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9 cannot be reached .*Start the server"):
        Server("http://127.0.0.1:9", timeout=5)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_gives_nothing_times_out(start, kind):
    _, url = start(kind)
    server = Server(url, timeout=0.3)
    release = threading.Event()
    handler = Handler.do_POST
    try:
        Handler.do_POST = lambda self: release.wait(5)
        with pytest.raises(ServerError, match=r"/v1/chat/completions gave nothing for 0\.3 seconds"):
            measure_server(server, prompts("easy 1"), {}, progress=False)
    finally:
        release.set()
        Handler.do_POST = handler


def test_an_answer_that_breaks_off_and_an_error_are_errors(start):
    _, url = start("vllm", cut=True)
    with pytest.raises(ServerError, match="breaks off before its `usage`"):
        measure(url, "easy 1")
    _, url = start("vllm", status=400)
    with pytest.raises(ServerError, match=r"status 400: .*max_tokens is too large"):
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
    with pytest.raises(ServerError, match="still rise two seconds after"):
        measure(url, "easy 1")


def test_an_answers_own_histogram_of_sglang():
    answer = {
        "choices": [{"meta_info": {"spec_verify_ct": 5, "spec_accept_histogram": [2, 0, 1, 2]}}],
        "usage": {"completion_tokens": 14},
    }
    assert own_verifications(answer) == Verifications(5, 8, [3, 3, 2])
    assert own_verifications({"choices": [{"delta": {}}], "usage": None}) is None
